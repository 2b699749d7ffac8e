"""Models, one file a family, found by its module's name: each has a class `Model`, a `Trainer`."""

if __name__ == "models":
    raise ImportError("models is a part of crankshaft; write `import crankshaft.models` in place of `import models`")

# Of the modules that are models; the others hold what these share.
NAMES = ("cnn", "dlrm", "logistic", "mlp", "resnet", "transformer_lm", "wide_deep")
