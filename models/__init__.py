"""Models, one file per family, each with a class `Model`, a `Trainer`: built on the host, computed on replicas."""

if __name__ == "models":
    raise ImportError("models is a part of crankshaft; write `import crankshaft.models` instead of `import models`")

from ..engine.arguments import COUNT, DECAY

# Of the modules that are models; the others have shared code.
NAMES = ("cnn", "dlrm", "logistic", "mlp", "resnet", "transformer_lm", "wide_deep")
# The intervals of their arguments.
ARGUMENTS = {
    **dict.fromkeys(("dropout", "batch_norm_momentum"), DECAY),  # dropping everything would leave nothing to train on
    **dict.fromkeys(("hidden_units", "bottom_units", "top_units"), COUNT),
}
