"""Generates text with a language model that is `Generates`. Replica code; `generate` is the host's loop around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import tensorflow as tf


@runtime_checkable
class Generates(Protocol):
    """A Keras model that predicts a sequence's next token, and caches what it computed for the tokens before.

    Attributes:
      context: the largest number of tokens to which it attends.
    """

    context: int

    def empty_cache(self, batch: int | tf.Tensor) -> Any:
        """Returns an empty cache: a nest of tensors with room for `context` tokens, such as their keys and values.

        Args:
          batch: number of sequences, the first axis of each tensor. The other axes are static.
        """

    def next_logits(self, tokens: tf.Tensor, cache: Any, position: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Computes the logits of the token that follows `tokens`, and adds `tokens` to the cache.

        Args:
          tokens: int32 [batch, n], n from 1 to context - position, unknown when traced.
          cache: the cache of the `position` tokens before these. Its values beyond them are ignored.
          position: scalar int32, the position of the first of these tokens.

        Returns:
          Logits [batch, vocabulary], the same on all replicas that share the model, and the cache including these
          tokens, of the same shapes.
        """


class GenerationState(NamedTuple):
    """How far a sequence of tokens has been read: the cache is of the tokens [start, end)."""

    cache: Any
    start: tf.Tensor
    end: tf.Tensor


def begin_reading(model: Generates, sequence: tf.Tensor) -> GenerationState:
    """Returns the state from which `read` reads the last `context` tokens of a sequence, int32 [batch, n]."""
    start = tf.maximum(tf.shape(sequence)[1] - model.context, 0)
    return GenerationState(model.empty_cache(sequence.shape[0] or tf.shape(sequence)[0]), start, start)


def read(model: Generates, sequence: tf.Tensor, reading: GenerationState) -> tuple[tf.Tensor, GenerationState]:
    """Reads the rest of a sequence.

    Positions are counted from `start`. A sequence that has grown beyond the context is therefore read again from its
    last context / 2 tokens on: the older half is dropped at once, and the cache lasts for as many new tokens.

    Args:
      sequence: int32 [batch, n], with tokens that are not yet read.

    Returns:
      Logits, float32 [batch, vocabulary], of the token that follows the sequence, and the state at the sequence's end.
    """
    count = tf.shape(sequence)[1]
    is_full = count - reading.start > model.context
    start = tf.where(is_full, count - max(model.context // 2, 1), reading.start)
    first = tf.where(is_full, start, reading.end)
    logits, cache = model.next_logits(sequence[:, first:], reading.cache, first - start)
    return tf.cast(logits, tf.float32), GenerationState(cache, start, count)


def choose(logits, temperature, top_k, seed) -> tf.Tensor:
    """Chooses a token for each sequence, int32 [batch]: the same for the same seed, on any device.

    Args:
      logits: float32 [batch, vocabulary].
      temperature: scalar float32, by which logits are divided; 0 chooses the most likely token.
      top_k: scalar int32: samples among this many most likely tokens, including ties with the last; 0 is all.
      seed: int64 [2].
    """
    count = tf.shape(logits)[1]

    def top_k_only():
        least = tf.math.top_k(logits, tf.minimum(top_k, count)).values[:, -1:]
        return tf.where(logits < least, tf.float32.min, logits / temperature)  # not -inf, which is checked for

    def sample():
        scaled = tf.cond(top_k > 0, top_k_only, lambda: logits / temperature)
        return tf.random.stateless_categorical(scaled, 1, seed, tf.int32)[:, 0]

    return tf.cond(temperature > 0, sample, lambda: tf.argmax(logits, 1, tf.int32))


def generate(
    distribution: tf.distribute.Strategy,
    model: Generates,
    sequence: Sequence[int],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[int]:
    """Yields the tokens that follow a sequence, without end.

    Every replica computes each token, because a model sharded over replicas sums across them. Such sums may not be in a
    loop within replica code, so the loop is here, on the host. All processes have to take the same number of tokens.

    Args:
      sequence: the prompt: one token or more.
      temperature: see `choose`.
      top_k: see `choose`.
      seed: with the number of tokens so far, it decides which token is sampled.
    """
    scalars = tf.constant(temperature, tf.float32), tf.constant(top_k, tf.int32), tf.constant(seed, tf.int64)

    @tf.function(autograph=False)
    def begin(sequence):
        return distribution.run(lambda sequence: begin_reading(model, sequence), args=(sequence,))

    @tf.function(autograph=False)
    def step(sequence, reading, *scalars):
        tokens, reading = distribution.run(lambda *args: _next_tokens(model, *args), args=(sequence, reading, *scalars))
        return distribution.experimental_local_results(tokens)[0][0], reading

    sequence, spec = list(sequence), tf.TensorSpec([1, None], tf.int32)
    reading = begin.get_concrete_function(spec)(tf.constant([sequence], tf.int32))
    next_token = step.get_concrete_function(spec, reading, *scalars)  # one for any length
    while True:
        token, reading = next_token(tf.constant([sequence], tf.int32), reading, *scalars)
        sequence.append(int(token))
        yield sequence[-1]


def _next_tokens(
    model: Generates, sequence, reading: GenerationState, temperature, top_k, seed
) -> tuple[tf.Tensor, GenerationState]:
    """Returns the token that follows each sequence, int32 [batch], and the state at the sequences' end."""
    logits, reading = read(model, sequence, reading)
    position = tf.cast(reading.end, tf.int64)
    return choose(logits, temperature, top_k, tf.stack([seed, position])), reading


def signatures(model: Generates) -> dict[str, Callable]:
    """Returns a SavedModel's serving functions by name, for a model's `export_signatures`.

    `next_token_logits` takes tokens, int32 [batch, n] with n >= 1, and returns `logits`, float32 [batch, vocabulary].
    `generate` takes tokens, the number of new ones and the scalars of `choose`; it returns `tokens` with the new ones
    appended, int32 [batch, n + num_tokens].
    """
    sequences = tf.TensorSpec([None, None], tf.int32, "tokens")

    @tf.function(input_signature=[sequences], autograph=False)
    def next_token_logits(tokens):
        return {"logits": read(model, _check_tokens(tokens), begin_reading(model, tokens))[0]}

    @tf.function(
        input_signature=[
            sequences,
            tf.TensorSpec([], tf.int32, "num_tokens"),
            tf.TensorSpec([], tf.float32, "temperature"),
            tf.TensorSpec([], tf.int32, "top_k"),
            tf.TensorSpec([], tf.int64, "seed"),
        ],
        autograph=False,
    )
    def generated(tokens, num_tokens, temperature, top_k, seed):
        def body(sequence, reading):
            token, reading = _next_tokens(model, sequence, reading, temperature, top_k, seed)
            return tf.concat([sequence, token[:, tf.newaxis]], 1), reading

        tokens = _check_tokens(tokens)
        reading = begin_reading(model, tokens)
        shapes = tf.nest.map_structure(lambda x: tf.TensorShape([None, *x.shape[1:]] if x.shape.rank else []), reading)
        sequence, _ = tf.while_loop(
            lambda *_: True,
            body,
            (tokens, reading),
            shape_invariants=(tf.TensorShape([None, None]), shapes),
            maximum_iterations=num_tokens,
        )
        return {"tokens": sequence}

    return {"next_token_logits": next_token_logits, "generate": generated}


def _check_tokens(tokens: tf.Tensor) -> tf.Tensor:
    message = "tokens has no column; pass at least one token, e.g. the separator of documents to begin with"
    with tf.control_dependencies([tf.debugging.assert_positive(tf.shape(tokens)[1], message)]):
        return tf.identity(tokens)
