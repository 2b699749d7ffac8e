"""Command lines and processes: the only code that reads flags and the environment. Runs on the host."""

if __name__ == "launch":
    raise ImportError("launch is a part of crankshaft; write `import crankshaft.launch` instead of `import launch`")
