"""Models, one file a family, found by its module's name: each has a class `Model`, a `Trainer`."""

if __name__ == "models":
    raise ImportError("models is a part of crankshaft; write `import crankshaft.models` in place of `import models`")
