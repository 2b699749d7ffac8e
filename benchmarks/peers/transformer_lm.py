"""Crankshaft's language model on batches that another peer gets too; it writes the weights that both begin with.

`python -m benchmarks.peers.transformer_lm --data=FILE --quality_json=FILE`, see `benchmarks/language_model.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from crankshaft import run

import numpy as np  # isort: skip
import tensorflow as tf  # isort: skip

from crankshaft.models.transformer_lm import Model  # isort: skip


class Begun(Model):
    """Keeps its initial weights."""

    weights: dict[str, np.ndarray]

    def build(self) -> None:
        super().build()
        Begun.weights = {variable.path: variable.numpy() for variable in self.model.trainable_variables}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="windows; the weights are added to them")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--quality_json", required=True, help="where the loss is written")
    arguments = parser.parse_args()
    with np.load(arguments.data) as data:
        kept = {name: data[name] for name in data if not name.startswith("weights/")}
    shape, batches = json.loads(str(kept["shape"])), kept["train"]

    def data():
        train, evaluation = (kept[name].reshape(-1, kept[name].shape[-1]) for name in ("train", "eval"))
        ordered = tf.data.Dataset.from_tensor_slices((train[:, :-1], train[:, 1:]))
        return ordered, (evaluation[:, :-1], evaluation[:, 1:]), shape["vocabulary"]

    kinds = {"positions": "learned", "norm": "layer"}
    model = {name: shape[name] for name in ("layers", "width", "heads")}
    finished = run(
        Begun,
        data=data,
        model_arg={**model, **kinds},
        train_steps=len(batches),
        global_batch_size=batches.shape[1],
        learning_rate=float(kept["rate"]),
        clip_norm=1.0,
        shuffle_buffer=1,  # a tf.data.Dataset is then read in its own order
        optimizer_arg={"epsilon": 1e-10},  # so small that it matters not where in the formula it stands
        precision=arguments.precision,
        jit="off",
    )
    np.savez(arguments.data, **kept, **{f"weights/{path}": value for path, value in Begun.weights.items()})
    Path(arguments.quality_json).write_text(json.dumps({"loss": finished.result["eval"]["loss"]}), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
