"""The named set of benchmarks: what is trained, on which data, as flags of launch.train. Host code, no TensorFlow."""

from __future__ import annotations

import dataclasses

from crankshaft.engine.data.data import Data
from crankshaft.input import synthetic, synthetic_clicks

BATCH_SIZE = 64  # a replica's; with parameter servers an update's
EVAL_EXAMPLES = 4_096


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and its data.

    Attributes:
      title: for tables.
      model_flags: of launch.train.
      units: widths of hidden dense layers, where there is nothing else.
      shape: of an example; None: ids (`synthetic_clicks`).
      examples: of the training data.
      metric: the measure of quality that is shown beside the loss.
      precisions: that it is measured in.
      convolutional: XLA takes minutes for a few of its steps on a CPU, so fit is not measured with XLA there.
    """

    title: str
    model_flags: tuple[str, ...]
    units: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = (28, 28, 1)
    examples: int = 60_032  # as many as MNIST has, made a multiple of the batch
    metric: str = "accuracy"
    precisions: tuple[str, ...] = ("float32",)
    convolutional: bool = False

    @property
    def input_flags(self) -> tuple[str, ...]:
        if self.shape is None:
            return ("--input=synthetic_clicks",)
        shape = ",".join(map(str, self.shape))
        values = {"shape": shape, "examples": self.examples, "eval_examples": EVAL_EXAMPLES}
        return ("--input=synthetic", *(f"--input_arg={name}={value}" for name, value in values.items()))

    @property
    def flags(self) -> tuple[str, ...]:
        return (*self.model_flags, *self.input_flags)

    def load(self) -> Data:
        """Loads the very examples that `input_flags` ask for."""
        if self.shape is None:
            return synthetic_clicks.load(None, 0)
        return synthetic.load(None, 0, shape=self.shape, examples=self.examples, eval_examples=EVAL_EXAMPLES)


WORKLOADS = {
    "mlp": Workload("mlp 784-128-10", ("--model=mlp", "--model_arg=hidden_units=128"), (128,)),
    "wide": Workload("mlp 784-2048-2048-10", ("--model=mlp", "--model_arg=hidden_units=2048,2048"), (2048, 2048)),
    "cnn": Workload("reference CNN", ("--model=cnn",), precisions=("float32", "bfloat16"), convolutional=True),
    "resnet20": Workload(
        "resnet20, 32x32",
        ("--model=resnet", "--model_arg=depth=20"),
        shape=(32, 32, 3),
        examples=12_800,
        convolutional=True,
    ),
    "wide_deep": Workload("wide_deep, 8 ids", ("--model=wide_deep",), shape=None, metric="auc"),
}
