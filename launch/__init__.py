"""Who starts a run, and what makes it: command lines, calls in Python, its composition. Runs on the host."""

if __name__ == "launch":
    raise ImportError("launch is a part of crankshaft; write `import crankshaft.launch` instead of `import launch`")
