"""A decoder-only transformer for text, GPT-2's or LLaMA's by its arguments; its weights may be sharded over a mesh.

Radford et al. 2019, "Language models are unsupervised multitask learners"; Touvron et al. 2023,
https://arxiv.org/abs/2302.13971. Pre-norm: each block adds attention, then a feed-forward layer, to its input.

How weights are sharded over the axis `model` of a mesh data x model, and the sums over it (values per token, in the
forward pass, and as many in the backward pass):

| weights | sharded by | what is sent over `model` |
|---|---|---|
| embedding [vocabulary, width] | vocabulary | width, of the look-up; backward width, of the logits |
| positions (if learned), norms, biases of the products that join | copies | |
| queries, keys, values [width, heads + 2 kv_heads] | columns, by heads | backward width |
| joining the heads [width, width] | rows, by heads | width |
| up, gate [width, hidden] | columns | backward width; with a gate once more |
| down [hidden, width] | rows | width |
| the loss's logits [vocabulary] | vocabulary | 3 (largest, sum, the label's), once |

Over `data`, gradients are summed as for any model.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from ..engine import generation
from ..engine.data import form
from ..engine.errors import UsageError
from ..engine.layers import recomputed
from ..engine.layers.one_pass import gelu, swiglu
from ..engine.metrics.means import exp_mean, mean
from ..engine.metrics.pairs import Mean
from ..engine.trainer import Trainer
from ..parts.sharding import Attention, Dense, Embedding, RMSNorm, cross_entropy, current_mesh
from ..parts.sharding.layers import shard_size

_STDDEV = 0.02  # GPT-2's
_EPSILON = 1e-5
_BYTES = 257  # tokens of text as bytes: these, and the separator of documents
_CHOICES = {"positions": ("rotary", "learned"), "norm": ("rms", "layer"), "activation": ("gelu", "swiglu")}


class Model(Trainer):
    """Predicts each token from the preceding ones.

    Features are tokens, int [batch, context]; labels are the tokens that follow, where -1 does not count. Metrics:
    `perplexity`, e to the loss, and for text as bytes `bits_per_byte`, where a document's end counts as a byte.

    Args:
      layers: number of blocks.
      width: width of the activations between blocks.
      heads: number of attention heads; divides the width, and is a multiple of the mesh's `model`.
      kv_heads: heads of keys and values, each shared by heads / kv_heads query heads; 0 is as many as heads.
      hidden: width of the feed-forward layer; 0 is 4 widths, with swiglu 8/3 widths rounded up to a multiple of 64.
      context: the largest number of attended tokens; 0 is the data's.
      vocabulary: number of tokens; 0 is the data's. More pad it, e.g. to a multiple of 64, and are never generated.
      positions: rotary, or learned.
      norm: rms, or layer.
      activation: gelu, or swiglu.
      tied: whether logits use the embedding's table, or a table of their own.
      bias: whether dense layers and layer norms have biases.
      dropout: rate of dropout of the embedding, of the attention's weights and of each block's output.
    """

    def __init__(
        self,
        layers: int = 6,
        width: int = 384,
        heads: int = 6,
        kv_heads: int = 0,
        hidden: int = 0,
        context: int = 0,
        vocabulary: int = 0,
        positions: str = "rotary",
        norm: str = "rms",
        activation: str = "gelu",
        tied: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        for name, choice in (("positions", positions), ("norm", norm), ("activation", activation)):
            if choice not in _CHOICES[name]:
                raise UsageError(f"{name}={choice} is unknown; use {' or '.join(_CHOICES[name])}")
        for name, number in (("layers", layers), ("width", width), ("heads", heads)):
            if number < 1:
                raise UsageError(f"{name}={number} is too small; use 1 or more")
        others = {"kv_heads": kv_heads, "hidden": hidden, "context": context, "vocabulary": vocabulary}
        for name, number in others.items():
            if number < 0:
                raise UsageError(f"{name}={number} is too small; use 1 or more, or leave it out")
        if not 0 <= dropout < 1:
            raise UsageError(f"dropout={dropout} is not a share; use 0 up to, not including, 1")
        self.context, self.vocabulary = context, vocabulary
        self.shape: dict[str, Any] = {
            "layers": layers,
            "width": width,
            "heads": heads,
            "kv_heads": kv_heads,
            "hidden": hidden or (4 * width if activation == "gelu" else -(-8 * width // 3 // 64) * 64),
            "positions": positions,
            "norm": norm,
            "activation": activation,
            "tied": tied,
            "bias": bias,
            "dropout": dropout,
        }

    def build_model(self) -> tf.keras.Model:
        features, tokens = form.features(self.run_context.example), self.run_context.num_classes
        if getattr(features, "ndim", 0) != 2 or not np.issubdtype(features.dtype, np.integer):
            raise UsageError(
                "features are not sequences of tokens, whole numbers [batch, context], which a language model reads; "
                "use input=text, or data in that form"
            )
        context, vocabulary = self.context or features.shape[1], self.vocabulary or tokens or 0
        if not vocabulary:
            raise UsageError("the data does not say how many tokens there are; give model_arg=vocabulary=NUMBER")
        if context < features.shape[1]:
            raise UsageError(f"context={context} is less than the data's {features.shape[1]} tokens; use as many or 0")
        if tokens and vocabulary < tokens:
            raise UsageError(f"vocabulary={vocabulary} is less than the data's {tokens} tokens; use as many or 0")
        shard_size(self.shape["hidden"], current_mesh(), "hidden")  # its error names valid sizes
        options = self.run_context.options
        ways = {"recompute": options.recompute, "one_pass": not options.check_numerics}
        return Decoder(context, vocabulary, tokens or vocabulary, **self.shape, **ways, name="decoder")

    def losses(self, outputs, batch) -> tf.Tensor:
        """Returns each token's loss in nats, float32 [batch, context]; where the label is -1, any finite number."""
        return cross_entropy(outputs, batch[1], self.model.vocabulary, self.model.mesh)

    def loss(self, outputs, batch) -> Mean:
        return mean(self.losses(outputs, batch), weights=batch[1] >= 0)

    def metrics(self, outputs, batch) -> dict[str, Mean]:
        losses, counted = self.losses(outputs, batch), batch[1] >= 0
        figures: dict[str, Mean] = {"perplexity": exp_mean(losses, weights=counted)}
        if self.run_context.num_classes == _BYTES:
            figures["bits_per_byte"] = mean(losses / math.log(2), weights=counted, direction="min")
        return figures


class Decoder(tf.keras.Model):
    """Maps tokens, int [batch, positions], to logits [batch, positions, vocabulary], sharded on a mesh.

    Args:
      context: the largest number of positions.
      tokens: number of tokens in text, the first ones; the rest pad the vocabulary, and are never generated.
      recompute: recompute blocks in the backward pass.
      one_pass: compute training's activations in one pass (`engine.layers.one_pass`).
      **shape: other arguments of `Model`.
    """

    def __init__(
        self,
        context: int,
        vocabulary: int,
        tokens: int,
        *,
        recompute: bool = False,
        one_pass: bool = True,
        name: str | None = None,
        **shape: Any,
    ):
        super().__init__(name=name)
        self.recompute = recompute
        self.mesh = current_mesh()
        self.context, self.vocabulary, self.tokens = context, vocabulary, tokens
        width = shape["width"]
        self.embedding = Embedding(vocabulary, width, split="vocabulary", stddev=_STDDEV, name="embedding")
        learned = shape["positions"] == "learned"
        self.positions = Embedding(context, width, stddev=_STDDEV, name="positions") if learned else None
        self.drop = tf.keras.layers.Dropout(shape["dropout"], name="dropout")
        self.blocks = [Block(shape, one_pass, name=f"block_{i}") for i in range(shape["layers"])]
        self.norm = _norm(shape, "norm")
        split = "vocabulary"
        self.logits = self.embedding if shape["tied"] else Embedding(vocabulary, width, split, _STDDEV, name="logits")

    def build(self, input_shape):
        inner = (*input_shape, self.embedding.size)
        # A tied table is the embedding and the logits at once, and is built once.
        for layer in {id(x): x for x in (self.embedding, self.positions, self.logits) if x is not None}.values():
            layer.build(input_shape)
        for layer in (*self.blocks, self.norm):
            layer.build(inner)

    def call(self, tokens, training=None):
        x = self._embedded(tokens, 0, training)
        for block in self.blocks:
            x = recomputed(block, x, training=training) if self.recompute else block(x, training=training)
        return self.logits.logits(self.norm(x))

    def empty_cache(self, batch: int | tf.Tensor) -> list:
        return [block.attention.empty_cache(batch, self.context) for block in self.blocks]

    def next_logits(self, tokens: tf.Tensor, cache: list, position: tf.Tensor) -> tuple[tf.Tensor, list]:
        x, caches = self._embedded(tokens, position, training=False), []
        for block, block_cache in zip(self.blocks, cache, strict=True):
            x, block_cache = block(x, cache=block_cache, position=position, training=False)
            caches.append(block_cache)
        logits = self.logits.logits(self.norm(x[:, -1:]))[:, 0]
        if self.mesh.is_sharded:
            logits = tf.concat(tf.unstack(self.mesh.model.all_gather(logits)), -1)
        return logits[:, : self.tokens], caches

    def export_signatures(self) -> dict:
        """Returns a SavedModel's signatures besides the outputs: the next token's logits, and generated tokens."""
        return generation.signatures(self)

    def _embedded(self, tokens, position, training):
        x = self.embedding(tokens)
        if self.positions:
            x += self.positions(position + tf.range(tf.shape(tokens)[1]))
        return self.drop(x, training=training)


class Block(tf.keras.layers.Layer):
    """Adds attention, then a feed-forward layer (up, activation, down), each of the normalised input."""

    def __init__(self, shape: dict[str, Any], one_pass: bool, **arguments):
        super().__init__(**arguments)
        self.one_pass = one_pass
        width, bias, rate = shape["width"], shape["bias"], shape["dropout"]
        # Weights of layers that add to the residual stream are scaled by the number of blocks (GPT-2, section 2.3).
        added = _STDDEV / (2 * shape["layers"]) ** 0.5
        self.norm_1, self.norm_2 = _norm(shape, "norm_1"), _norm(shape, "norm_2")
        self.attention = Attention(
            shape["heads"],
            shape["kv_heads"] or None,
            rotary=shape["positions"] == "rotary",
            dropout=rate,
            use_bias=bias,
            stddev=_STDDEV,
            output_stddev=added,
            name="attention",
        )
        gated, columns = shape["activation"] == "swiglu", {"split": "columns", "use_bias": bias, "stddev": _STDDEV}
        self.up = Dense(shape["hidden"], name="up", **columns)
        self.gate = Dense(shape["hidden"], name="gate", **columns) if gated else None
        self.down = Dense(width, "rows", use_bias=bias, stddev=added, name="down")
        self.drop_1, self.drop_2 = (tf.keras.layers.Dropout(rate, name=f"dropout_{i}") for i in (1, 2))

    def build(self, input_shape):
        for layer in (self.norm_1, self.attention, self.norm_2, self.up, self.gate):
            if layer:
                layer.build(input_shape)
        self.down.build((*input_shape[:-1], self.up.own_units))

    def call(self, x, cache=None, position=0, training=None):
        attended = self.attention(self.norm_1(x), cache=cache, position=position, training=training)
        if cache is not None:
            attended, cache = attended
        x += self.drop_1(attended, training=training)
        y = self.norm_2(x)
        # Otherwise shapes change: an epoch's last batch, one token after a prompt.
        compiled = bool(training) and self.one_pass
        y = swiglu(self.gate(y), self.up(y), compiled) if self.gate else gelu(self.up(y), compiled)
        x += self.drop_2(self.down(y), training=training)
        return x if cache is None else (x, cache)


def _norm(shape: dict[str, Any], name: str) -> tf.keras.layers.Layer:
    if shape["norm"] == "rms":
        return RMSNorm(_EPSILON, name=name)
    return tf.keras.layers.LayerNormalization(epsilon=_EPSILON, center=shape["bias"], name=name)
