"""The rows of `benchmarks.gpu`, the most important first: what is trained, and for how long. Host code.

`TensorFlow` is not imported here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

DETERMINISTIC, FASTEST = "deterministic", "fastest"  # kernels: the default, and those of TF_DETERMINISTIC_OPS=0


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
      name: of the workload.
      seconds: its time limit, compilation included, on a GPU.
      process: rows in a row with the same word share a process, in which TensorFlow starts once.
      measure: a function of `measures`.
      flags: keywords of `crankshaft.run`.
      batches: global batch sizes; the first one that fits into memory is measured.
      context: of a language model: the data is random tokens in windows of this length.
      jpegs: number of JPEG files to train from.
      kernels: of TensorFlow; XLA's are deterministic by themselves, but for those of libraries.
      unit: of the rate that is shown: tokens, examples or steps.
    """

    name: str
    seconds: float
    process: str
    measure: str = "train"
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    batches: tuple[int, ...] = ()
    context: int = 0
    jpegs: int = 0
    kernels: str = DETERMINISTIC
    unit: str = "examples"

    @property
    def jit(self) -> str:
        return self.flags.get("jit", "")

    @property
    def precision(self) -> str:
        return self.flags.get("precision", "float32" if self.flags else "")

    @property
    def title(self) -> str:
        """Names the row; no two have the same."""
        settings = [self.precision, self.jit and f"jit={self.jit}", self.kernels if self.flags else ""]
        batch = f"batch {self.batches[0]}" if len(self.batches) == 1 else ""
        return ", ".join(filter(None, [self.name, *settings, batch]))


def rows(tiny: bool = False) -> list[Row]:
    """Returns all rows in the order in which they are measured; `tiny` ones suit a CPU."""
    shape = {"layers": 2, "width": 64, "heads": 2} if tiny else {"layers": 12, "width": 768, "heads": 12}
    vocabulary, context, long = (512, 64, 256) if tiny else (50_304, 1024, 4096)
    batches = (4, 2) if tiny else (32, 16, 8)

    def model(
        precision: str,
        jit: str,
        kernels: str,
        batches=batches,
        context=context,
        name="language model",
        seconds=90.0,
        **flags,
    ) -> Row:
        arguments = {**shape, "vocabulary": vocabulary}
        flags = {"model": "transformer_lm", "model_arg": arguments, "precision": precision, "jit": jit, **flags}
        return Row(
            name,
            seconds,
            "language model",
            flags=flags,
            batches=batches,
            context=context,
            kernels=kernels,
            unit="tokens",
        )

    def images(jit: str, kernels: str, jpegs: int = 0) -> Row:
        size, depth = (32, 20) if tiny else (224, 50)
        # On a CPU, XLA takes minutes for a few steps with convolutions.
        flags = {
            "model": "resnet",
            "model_arg": {"depth": depth},
            "precision": "bfloat16",
            "jit": "off" if tiny else jit,
        }
        if jpegs:
            flags |= {"input": "images", "input_arg": {"size": size}}
        else:
            examples = {"examples": 16 if tiny else 1024, "eval_examples": 1}
            flags |= {"input": "synthetic", "input_arg": {"shape": f"{size},{size},3", "classes": 1000, **examples}}
        name = "ResNet-50 from JPEG files" if jpegs else "ResNet-50"
        batches = (4,) if tiny else (256,)
        return Row(name, 75.0, name, flags=flags, batches=batches, jpegs=jpegs, kernels=kernels)

    def dense(name: str, units: str, jit: str) -> Row:
        examples = {"examples": 640 if tiny else 60_032, "eval_examples": 1}
        flags = {"model": "mlp", "model_arg": {"hidden_units": units}, "input": "synthetic", "input_arg": examples}
        return Row(name, 30.0, "mlp", flags={**flags, "jit": jit}, batches=(64,), unit="steps")

    def tables(name: str, kernels: str) -> Row:
        ids = {"rows": 1_000 if tiny else 125_000, "fields": 8}
        ids |= {"examples": 1_024 if tiny else 409_600, "eval_examples": 1}
        flags = {"model": name, "input": "synthetic_clicks", "input_arg": ids, "jit": "off"}
        return Row(name, 45.0, "tables", flags=flags, batches=(256 if tiny else 4096,), kernels=kernels)

    remade = {"name": "language model, activation checkpointing", "jit": "on", "recompute": True}
    longer = {"context": long, "batches": (1,) if tiny else (8, 4, 2)}
    largest = {"batches": (8,) if tiny else (64,)}
    return [
        Row("attention by itself", 60.0, "attention", "attention"),
        model("bfloat16", "on", FASTEST),
        model("bfloat16", "on", DETERMINISTIC),
        model("bfloat16", "on", FASTEST, **largest),
        model("bfloat16", "off", FASTEST),
        model("float32", "on", FASTEST),
        *(dense("mlp 784-128-10", "128", jit) for jit in ("off", "on", "auto")),
        images("on", FASTEST),
        images("off", DETERMINISTIC),
        model("bfloat16", "on", FASTEST, name="language model, long context", **longer),
        model("bfloat16", kernels=FASTEST, **remade),
        Row("stopped and resumed", 60.0, "resumed", "resume"),
        tables("dlrm", DETERMINISTIC),
        tables("wide_deep", DETERMINISTIC),
        images("off", DETERMINISTIC, jpegs=16 if tiny else 2048),
        *(dense("mlp 784-2048-2048-10", "2048,2048", jit) for jit in ("off", "on", "auto")),
        model("bfloat16", "auto", FASTEST),
        model("bfloat16", "off", DETERMINISTIC),
        model("float32", "off", FASTEST),
        model("float32", "on", DETERMINISTIC),
        model("float32", "off", DETERMINISTIC),
        model("bfloat16", kernels=FASTEST, **(remade | longer | {"name": "language model, both"})),
        tables("dlrm", FASTEST),
        tables("wide_deep", FASTEST),
    ]
