"""Goes on with a row of tokens by a language model: what a model offers for that, and how a token is chosen.

`Generates` is the contract. Replica code, but for `generate`, which is the host's loop around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import tensorflow as tf


@runtime_checkable
class Generates(Protocol):
    """A Keras model that tells what may follow a row of tokens, and keeps what it has computed of those before.

    Attributes:
      context: the most tokens that it looks at.
    """

    context: int

    def empty_cache(self, batch: int | tf.Tensor) -> Any:
        """Returns a nest of tensors with room for what `context` tokens leave behind, such as keys and values.

        Args:
          batch: how many rows, the first axis of each tensor. The other axes are static.
        """

    def next_logits(self, tokens: tf.Tensor, cache: Any, place: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Reads tokens, and tells what may follow the last of them.

        Args:
          tokens: int32 [batch, n], n from 1 to context - place, unknown when it is traced.
          cache: what the `place` tokens before have left. What it holds from there on counts for nothing.
          place: scalar int32, the position of the first of these tokens.

        Returns:
          Logits [batch, vocabulary], the same on all replicas that hold the model together, and the cache with what
          these tokens leave, of the same shapes.
        """


class Reading(NamedTuple):
    """How far a row of tokens has been read: the cache holds what those from `start` to `end` have left."""

    cache: Any
    start: tf.Tensor
    end: tf.Tensor


def begun(model: Generates, row: tf.Tensor) -> Reading:
    """Returns that nothing is read yet of a row, int32 [batch, n], of which the last `context` tokens will be."""
    start = tf.maximum(tf.shape(row)[1] - model.context, 0)
    return Reading(model.empty_cache(row.shape[0] or tf.shape(row)[0]), start, start)


def read(model: Generates, row: tf.Tensor, reading: Reading) -> tuple[tf.Tensor, Reading]:
    """Reads the rest of a row.

    Positions are counted from where reading has started, so a row that has grown beyond the context is read anew, from
    its last context / 2 tokens on: the older half is forgotten at once, and the rest is cached again for as long.

    Args:
      model: reads.
      row: int32 [batch, n], longer than what is read.
      reading: how far it is read.

    Returns:
      Logits float32 [batch, vocabulary] of what may follow the row, and how far it is read then: to its end.
    """
    count = tf.shape(row)[1]
    is_full = count - reading.start > model.context
    start = tf.where(is_full, count - max(model.context // 2, 1), reading.start)
    first = tf.where(is_full, start, reading.end)
    logits, cache = model.next_logits(row[:, first:], reading.cache, first - start)
    return tf.cast(logits, tf.float32), Reading(cache, start, count)


def choose(logits, temperature, top_k, seed) -> tf.Tensor:
    """Returns a token for each row, int32 [batch]: the same for the same seed, on any device.

    Args:
      logits: float32 [batch, vocabulary].
      temperature: scalar float32 that logits are divided by; 0 takes the likeliest token.
      top_k: scalar int32, how many of the likeliest tokens may be drawn (and those as likely as the last of them); 0 is
        all.
      seed: int64 [2].
    """
    count = tf.shape(logits)[1]

    def among_likeliest():
        least = tf.math.top_k(logits, tf.minimum(top_k, count)).values[:, -1:]
        return tf.where(logits < least, -float("inf"), logits)

    def drawn():
        kept = tf.cond(top_k > 0, among_likeliest, lambda: logits)
        return tf.random.stateless_categorical(kept / temperature, 1, seed, tf.int32)[:, 0]

    return tf.cond(temperature > 0, drawn, lambda: tf.argmax(logits, 1, tf.int32))


def generate(
    distribution: tf.distribute.Strategy,
    model: Generates,
    row: Sequence[int],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[int]:
    """Yields the tokens that follow a row, one after the other, without end. Host code.

    Every replica computes each step, and takes part in the sums of a model that is cut over them; a loop of sums may
    not be compiled within replica code, so this one is around it. In a process of several, the others have to ask for
    as many tokens.

    Args:
      distribution: the strategy whose replicas hold the model.
      model: goes on.
      row: one token or more.
      temperature: see `choose`.
      top_k: see `choose`.
      seed: with the number of tokens before it, decides which token is drawn.
    """
    scalars = tf.constant(temperature, tf.float32), tf.constant(top_k, tf.int32), tf.constant(seed, tf.int64)

    @tf.function(autograph=False)
    def begin(row):
        return distribution.run(lambda row: begun(model, row), args=(row,))

    @tf.function(autograph=False)
    def step(row, reading, *scalars):
        tokens, reading = distribution.run(lambda *args: _next(model, *args), args=(row, reading, *scalars))
        return distribution.experimental_local_results(tokens)[0][0], reading

    row, spec = list(row), tf.TensorSpec([1, None], tf.int32)
    reading = begin.get_concrete_function(spec)(tf.constant([row], tf.int32))
    next_of = step.get_concrete_function(spec, reading, *scalars)  # one for any length
    while True:
        token, reading = next_of(tf.constant([row], tf.int32), reading, *scalars)
        row.append(int(token))
        yield row[-1]


def _next(model: Generates, row, reading: Reading, temperature, top_k, seed) -> tuple[tf.Tensor, Reading]:
    """Returns the token that follows each row, int32 [batch], and that the row is read."""
    logits, reading = read(model, row, reading)
    place = tf.cast(reading.end, tf.int64)
    return choose(logits, temperature, top_k, tf.stack([seed, place])), reading


def signatures(model: Generates) -> dict[str, Callable]:
    """Returns what a SavedModel of the model serves beside its outputs, as `export_signatures` of a model does.

    `next_token_logits` takes tokens, int32 [batch, n], n from 1 on, and returns `logits`, float32 [batch, vocabulary].
    `generate` takes tokens, how many shall follow, and the scalars of `choose`; it returns `tokens` with them, int32
    [batch, n + num_tokens].
    """
    rows = tf.TensorSpec([None, None], tf.int32, "tokens")

    @tf.function(input_signature=[rows], autograph=False)
    def next_token_logits(tokens):
        return {"logits": read(model, _checked(tokens), begun(model, tokens))[0]}

    @tf.function(
        input_signature=[
            rows,
            tf.TensorSpec([], tf.int32, "num_tokens"),
            tf.TensorSpec([], tf.float32, "temperature"),
            tf.TensorSpec([], tf.int32, "top_k"),
            tf.TensorSpec([], tf.int64, "seed"),
        ],
        autograph=False,
    )
    def generated(tokens, num_tokens, temperature, top_k, seed):
        def body(row, reading):
            token, reading = _next(model, row, reading, temperature, top_k, seed)
            return tf.concat([row, token[:, tf.newaxis]], 1), reading

        tokens = _checked(tokens)
        reading = begun(model, tokens)
        shapes = tf.nest.map_structure(lambda x: tf.TensorShape([None, *x.shape[1:]] if x.shape.rank else []), reading)
        row, _ = tf.while_loop(
            lambda *_: True,
            body,
            (tokens, reading),
            shape_invariants=(tf.TensorShape([None, None]), shapes),
            maximum_iterations=num_tokens,
        )
        return {"tokens": row}

    return {"next_token_logits": next_token_logits, "generate": generated}


def _checked(tokens: tf.Tensor) -> tf.Tensor:
    message = "tokens has no column: give one token or more, the separator of documents for a beginning"
    with tf.control_dependencies([tf.debugging.assert_positive(tf.shape(tokens)[1], message)]):
        return tf.identity(tokens)
