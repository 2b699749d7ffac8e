"""What a run is made of besides the engine: its flags, its process, its data, saved runs, modes. Runs on the host."""

if __name__ == "runner":
    raise ImportError("runner is a part of crankshaft; write `import crankshaft.runner` instead of `import runner`")
