"""Models, one file per family, each with a class `Model`, a `Trainer`: built on the host, computed on replicas."""

if __name__ == "models":
    raise ImportError("models is a part of crankshaft; write `import crankshaft.models` instead of `import models`")
