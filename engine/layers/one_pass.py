"""Elementwise functions, each in one pass over memory forward and one backward. Replica code.

TensorFlow computes such functions op by op, and each op reads and writes all values, which for wide layers takes as
long as a matrix product. XLA compiles a single loop, whether or not the step itself is compiled (`jit`). It compiles
again for each shape, so `compiled=False` uses plain ops if shapes change between calls, or if each op's output is
checked (`check_numerics`), by an op that XLA lacks.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

# gelu(x) = x sigmoid(_LINEAR x + _CUBIC x^3), Hendrycks & Gimpel 2016, https://arxiv.org/abs/1606.08415, section 2: the
# form by tanh, since tanh(u) = 2 sigmoid(2u) - 1.
_LINEAR = 2 * 0.7978845608028654
_CUBIC = 0.044715 * _LINEAR


def gelu(x: tf.Tensor, compiled: bool = True) -> tf.Tensor:
    """Computes GELU by its approximation with tanh, as GPT-2 does."""
    return _gelu(x) if compiled else tf.nn.gelu(x, approximate=True)


def swiglu(gate: tf.Tensor, x: tf.Tensor, compiled: bool = True) -> tf.Tensor:
    """Computes silu(gate) x, Shazeer 2020, https://arxiv.org/abs/2002.05202."""
    return _swiglu(gate, x) if compiled else tf.nn.silu(gate) * x


def _loop(function: Callable) -> Callable:
    compiled = tf.function(function, jit_compile=True, autograph=False)
    # TensorFlow counts, and warns of, the traces of calls alone.
    return lambda *tensors: compiled.get_concrete_function(*tensors)(*tensors)


@_loop
def _gelu_forward(x):
    return x * tf.sigmoid(x * (_LINEAR + _CUBIC * x * x))


@_loop
def _gelu_backward(x, dy):
    gate = tf.sigmoid(x * (_LINEAR + _CUBIC * x * x))
    return dy * gate * (1 + x * (_LINEAR + 3 * _CUBIC * x * x) * (1 - gate))


@tf.custom_gradient
def _gelu(x):
    return _gelu_forward(x), lambda dy: _gelu_backward(x, dy)


@_loop
def _swiglu_forward(gate, x):
    return gate * tf.sigmoid(gate) * x


@_loop
def _swiglu_backward(gate, x, dy):
    sigmoid = tf.sigmoid(gate)
    return dy * x * sigmoid * (1 + gate * (1 - sigmoid)), dy * gate * sigmoid


@tf.custom_gradient
def _swiglu(gate, x):
    return _swiglu_forward(gate, x), lambda dy: _swiglu_backward(gate, x, dy)
