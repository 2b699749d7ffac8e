"""The workloads that are compared: what is trained, on which data, as flags of `crankshaft train`. Host code.

TensorFlow is not imported here, so that every library's peer can load the very same examples.
"""

from __future__ import annotations

import dataclasses

from crankshaft.engine.data.run_data import Data
from crankshaft.input import synthetic, synthetic_clicks

BATCH_SIZE = 64
EVAL_EXAMPLES = 4_096


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and its data: images by default, ids of clicks (`shape` is None), or text (`decoder`).

    Attributes:
      title: for tables.
      model_flags: of `crankshaft train`.
      units: widths of hidden dense layers, where there is nothing else.
      shape: of an example.
      examples: of the training data.
      batch: examples of a worker's step.
      precision: of the layers.
      metric: the measure of quality that is shown beside the loss.
      convolutional: XLA takes minutes for a few of its steps on a CPU, so Keras is not measured with XLA.
      decoder: vocabulary, context, layers, width and heads.
      clicks: arguments of `synthetic_clicks`.
      own_step: the kind of a Keras model with a step of its own.
      module: that is run instead of `crankshaft train`, where the model comes with the benchmarks.
    """

    title: str
    model_flags: tuple[str, ...] = ()
    units: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = (28, 28, 1)
    examples: int = 60_032  # as many as MNIST has, made a multiple of the batch
    batch: int = BATCH_SIZE
    precision: str = "float32"
    metric: str = "accuracy"
    convolutional: bool = False
    decoder: dict[str, int] | None = None
    clicks: dict | None = None
    own_step: str | None = None
    module: str | None = None

    @property
    def input_flags(self) -> tuple[str, ...]:
        if self.decoder:
            return ("--input=text", f"--input_arg=context={self.decoder['context']}")
        if self.shape is None:
            return ("--input=synthetic_clicks", *_arguments("input_arg", self.clicks or {}))
        shape = ",".join(map(str, self.shape))
        values = {"shape": shape, "examples": self.examples, "eval_examples": EVAL_EXAMPLES}
        return ("--input=synthetic", *_arguments("input_arg", values))

    @property
    def flags(self) -> tuple[str, ...]:
        return (*self.model_flags, *self.input_flags, f"--precision={self.precision}")

    def load(self) -> Data:
        """Loads the very examples that `input_flags` ask for."""
        if self.decoder:
            from crankshaft.input import text

            return text.load(None, 0, context=self.decoder["context"])
        if self.shape is None:
            return synthetic_clicks.load(None, 0, **(self.clicks or {}))
        return synthetic.load(None, 0, shape=self.shape, examples=self.examples, eval_examples=EVAL_EXAMPLES)


def _arguments(flag: str, values: dict) -> tuple[str, ...]:
    return tuple(f"--{flag}={name}={value}" for name, value in values.items())


def _decoder(title: str, batch: int, *more: str, **sizes: int) -> Workload:
    """Makes a decoder with layer norms and learned positions, on the bundled text, byte by byte.

    An epoch's last batch is smaller: 0.6 % fewer examples than by batches that are whole, for all peers.
    """
    arguments = {name: sizes[name] for name in ("layers", "width", "heads")} | {"positions": "learned", "norm": "layer"}
    flags = ("--model=transformer_lm", *_arguments("model_arg", arguments), *more)
    return Workload(title, flags, batch=batch, decoder={"vocabulary": 257, **sizes})


def _table(millions: int) -> Workload:
    """Makes a table of 16 numbers a row and nothing else, whose rows are asked for evenly, 8 in an example."""
    clicks = {"fields": 8, "rows": millions * 125_000, "exponent": 0.0, "examples": 1_000_000, "eval_examples": 1}
    more = {"shape": None, "clicks": clicks, "batch": 1024, "module": "benchmarks.peers.table"}
    return Workload(f"table of {millions}M x 16", ("--optimizer=sgd",), **more)


def _with_own_step(title: str, kind: str) -> Workload:
    """Makes a Keras model with a `train_step` of its own, of a kind in `benchmarks.keras_steps`."""
    flags = ("--model=benchmarks/keras_steps.py", f"--model_arg=kind={kind}", "--mode=train")
    return Workload(title, flags, own_step=kind)


_CNN = Workload("reference CNN", ("--model=cnn",), convolutional=True)
_LANGUAGE_MODEL = _decoder("language model, 6 x 384", 12, "--clip_norm=1", context=256, layers=6, width=384, heads=6)
WORKLOADS = {
    "mlp": Workload("mlp 784-128-10", ("--model=mlp", "--model_arg=hidden_units=128"), (128,)),
    "wide": Workload("mlp 784-2048-2048-10", ("--model=mlp", "--model_arg=hidden_units=2048,2048"), (2048, 2048)),
    "cnn": _CNN,
    "cnn_bfloat16": dataclasses.replace(_CNN, title="reference CNN, bfloat16", precision="bfloat16"),
    "resnet20": Workload(
        "resnet20, 32x32",
        ("--model=resnet", "--model_arg=depth=20"),
        shape=(32, 32, 3),
        examples=12_800,
        convolutional=True,
    ),
    "wide_deep": Workload("wide_deep, 8 ids", ("--model=wide_deep",), shape=None, metric="auc"),
    "gan": _with_own_step("GAN, 128 hidden units", "gan"),
    "vae": _with_own_step("VAE, 128 hidden units", "vae"),
    "distiller": _with_own_step("distiller, 128 hidden units", "distiller"),
    "language_model": _LANGUAGE_MODEL,
    "language_model_bfloat16": dataclasses.replace(
        _LANGUAGE_MODEL, title="language model, 6 x 384, bfloat16", precision="bfloat16"
    ),
    # Of several workers: much to compute and little to send; a model that is sharded; tables by size.
    "small_cnn": Workload("CNN, 12x12", ("--model=cnn",), shape=(12, 12, 1), examples=8_192, batch=256),
    "decoder": _decoder("decoder, 4 x 256", 8, context=128, layers=4, width=256, heads=4),
    "table_1m": _table(1),
    "table_10m": _table(10),
    "table_50m": _table(50),
}
