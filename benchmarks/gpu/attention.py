"""Attention by itself, for `benchmarks.gpu`: whole, by blocks, and cuDNN's fused kernels through XLA. Host code.

`python -m benchmarks.gpu.attention` prints errors against the whole attention in float32, relative to its largest
value, of outputs and of the gradients of queries, keys and values; and milliseconds of a forward and a backward pass.

cuDNN's are FlashAttention (Dao et al. 2022, https://arxiv.org/abs/2205.14135), for 16 bits, head sizes of a multiple of
8 up to 128, and causal masks among others. XLA replaces custom calls of their names; their configuration is that of
`jax.nn.dot_product_attention(implementation="cudnn")`. Not tried yet on a GPU: it needs one to compile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from crankshaft.parts.sharding import attention as parallel

_REPEATS = 10


@tf.custom_gradient
def fused(queries: tf.Tensor, keys: tf.Tensor, values: tf.Tensor):
    """Computes causal attention by cuDNN, within XLA on a GPU; queries, keys and values are bfloat16 of one shape."""
    shape, dtype = queries.shape, queries.dtype
    operands = [queries, keys, values]
    outputs, logs, _ = gen_xla_ops.xla_custom_call_v2(  # logs of the softmax's sums, and cuDNN's workspace
        operands=operands,
        call_target_name="__cudnn$fmhaSoftmax",
        backend_config=backend_config(shape, is_backward=False),
        has_side_effect=False,
        result_dtypes=[dtype, tf.float32, tf.uint8],
        result_shapes=[shape, shape[:-1], [0]],
    )

    def gradient(upstream: tf.Tensor):
        *gradients, _ = gen_xla_ops.xla_custom_call_v2(
            operands=[*operands, logs, upstream, outputs],
            call_target_name="__cudnn$fmhaSoftmaxBackward",
            backend_config=backend_config(shape, is_backward=True),
            has_side_effect=False,
            result_dtypes=[dtype, dtype, dtype, tf.uint8],
            result_shapes=[shape, shape, shape, [0]],
        )
        return gradients

    return outputs, gradient


def backend_config(shape: tf.TensorShape, is_backward: bool) -> str:
    """Returns XLA's GpuBackendConfig of causal attention of [batch, heads, length, size], as JSON."""
    batch, heads, length, size = shape
    layout = {"minor_to_major": ["3", "2", "1", "0"], "element_size_in_bits": "0", "memory_space": "0"}
    scores = {"element_type": "BF16", "dimensions": [str(n) for n in (batch, heads, length, length)]}
    scores |= {"tuple_shapes": [], "layout": layout, "is_dynamic_dimension": [False] * 4}
    algorithm = {"algo_id": "0", "math_type": "TENSOR_OP_MATH", "tuning_knobs": {"17": "1", "24": "0"}}
    algorithm |= {"is_cudnn_frontend": True, "workspace_size": "0"}
    # Axes that the products sum over, of [batch, heads, length, size] and of scores [batch, heads, length, length].
    products = {"bmm1": (3, 3), "bmm2": (3, 2)}
    if is_backward:
        products = {"bmm1_grad_gemm1": (2, 2), "bmm1_grad_gemm2": (3, 2)}
        products |= {"bmm2_grad_gemm1": (2, 2), "bmm2_grad_gemm2": (3, 3)}
    dimensions = {
        f"{name}_dot_dimension_numbers": {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": ["0", "1"],
            "rhs_batch_dimensions": ["0", "1"],
        }
        for name, (left, right) in products.items()
    }
    attention = {"algorithm": algorithm, "fmha_scale": size**-0.5, "dropout_rate": 0.0, "seed": 42}
    attention |= {"intermediate_tensor_shape": scores, "is_flash_attention": True, "mask_type": "CAUSAL"}
    attention |= {"sliding_window_length": 0, **dimensions}
    queues = {"operation_queue_id": "0", "wait_on_operation_queues": []}
    return json.dumps({**queues, "cudnn_fmha_backend_config": attention})


def compare(tiny: bool = False) -> dict[str, Any]:
    """Compares ways to compute attention, for head sizes of 64 and 128: figures, or why it failed, by way and size."""
    shape, block = ((2, 2, 32), 8) if tiny else ((8, 12, 1024), 256)

    def whole(queries, *others):
        return parallel.attention(queries[:, :, tf.newaxis], *others)[:, :, 0]

    def by_blocks(queries, *others):
        return parallel.attention_by_blocks(queries[:, :, tf.newaxis], *others, block=block)[:, :, 0]

    compared: dict[str, Any] = {}
    for size in (64, 128):
        random = np.random.default_rng(size)
        inputs = [tf.constant(random.standard_normal((*shape, size)), tf.float32) for _ in range(4)]
        expected = _with_gradients(whole)(*inputs)
        narrow = [tf.cast(x, tf.bfloat16) for x in inputs]
        for name, way in {"whole": whole, "by blocks": by_blocks, "cuDNN": fused}.items():
            try:
                compared[f"{name}, head size {size}"] = _measured(_with_gradients(way), narrow, expected)
            except (tf.errors.OpError, ValueError) as error:
                compared[f"{name}, head size {size}"] = {"failed": str(error).splitlines()[0]}
    return {"ways": compared, "note": "; ".join(f"{name}: {_line(figures)}" for name, figures in compared.items())}


def _with_gradients(attend: Callable) -> Callable:
    @tf.function(jit_compile=True)
    def compute(queries, keys, values, upstream):
        inputs = [queries, keys, values]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = attend(*inputs)
        return [outputs, *tape.gradient(outputs, inputs, upstream)]

    return compute


def _measured(compute: Callable, inputs: list[tf.Tensor], expected: list[tf.Tensor]) -> dict[str, Any]:
    results = compute(*inputs)
    errors = [
        float(tf.reduce_max(tf.abs(tf.cast(result, tf.float32) - wanted)) / tf.reduce_max(tf.abs(wanted)))
        for result, wanted in zip(results, expected, strict=True)
    ]
    began = time.perf_counter()
    for _ in range(_REPEATS):
        results = compute(*inputs)
    results[0].numpy()  # waits for the device
    return {"errors": errors, "ms": 1e3 * (time.perf_counter() - began) / _REPEATS}


def _line(figures: dict[str, Any]) -> str:
    if "failed" in figures:
        return f"failed, {figures['failed']:.80}"
    return f"{figures['ms']:.2f} ms, errors up to {max(figures['errors']):.1e}"


if __name__ == "__main__":
    print(compare()["note"].replace("; ", "\n"))
