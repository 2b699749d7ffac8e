"""Measures this machine's limits: products and memory, by TensorFlow's own kernels.

On a run's first device, with the threads that the run has.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import tensorflow as tf

from ...engine.machine import cpus

_SAMPLES = 5
_SAMPLE_SECONDS = 0.08
_FLOAT32_BYTES = 4
_MEBIBYTE = 1 << 20
# STREAM's rule: an array at least four times as large as the last cache (https://www.cs.virginia.edu/stream/ref.html).
_ARRAY_CACHES = 4
_MOST_ARRAY_BYTES = 1 << 30
_DEFAULT_CACHE_BYTES = 32 << 20
_MATMUL_SIZE = {"CPU": 2048, "GPU": 8192}


def probe(device: str, dtypes: Sequence[str] = ("float32", "bfloat16"), clock=time.perf_counter) -> dict:
    """Measures a device. Nothing else should run meanwhile.

    Args:
      device: TensorFlow's name of a CPU or a GPU. A CPU is measured as a whole, also where it is split.
      dtypes: dtypes of the matrix products.

    Returns:
      matmul_gflops: {dtype: 1e9 operations a second} of products of two square matrices, 2 n^3 operations each; on
        GPUs float32 is as the run computes it, and where that is in TF32, `float32_without_tf32` is there too.
      memory_gb_per_sec: 1e9 bytes a second of v -= a d on float32 arrays that no cache holds: STREAM's triad (McCalpin
        1995) in place, two reads and a write, none of which moves bytes that are not counted.
      cache_gb_per_sec: 1e9 bytes a second of this triad on arrays that fill half of a CPU's last cache; None on other
        devices.
      cache_mb: size of that cache in 2**20 bytes; None on other devices.
      samples: measurements of which each figure is the median. seconds: duration of all measurements. device,
        matmul_size: the device, and the width of the matrices.
    """
    began = clock()
    kind = tf.DeviceSpec.from_string(device).device_type
    size = _MATMUL_SIZE.get(kind, 4096)
    cache_bytes = last_cache_bytes(cpus.usable_cpus([os.getpid()])) if kind == "CPU" else None
    samples = {}
    with tf.device(device):
        for dtype in dtypes:
            samples[dtype] = _matmul_rates(size, dtype, clock)
        if kind == "GPU" and "float32" in dtypes and tf.config.experimental.tensor_float_32_execution_enabled():
            tf.config.experimental.enable_tensor_float_32_execution(False)
            try:
                samples["float32_without_tf32"] = _matmul_rates(size, "float32", clock)
            finally:
                tf.config.experimental.enable_tensor_float_32_execution(True)
        array_bytes = min(_ARRAY_CACHES * (cache_bytes or 64 << 20), _MOST_ARRAY_BYTES)
        memory = _triad_rates(array_bytes, clock)
        cache = _triad_rates(cache_bytes // 4, clock) if cache_bytes else None
    return {
        "matmul_gflops": {name: statistics.median(rates) for name, rates in samples.items()},
        "memory_gb_per_sec": statistics.median(memory),
        "cache_gb_per_sec": cache and statistics.median(cache),
        "cache_mb": cache_bytes and cache_bytes / _MEBIBYTE,
        "samples": {"matmul_gflops": samples, "memory_gb_per_sec": memory, "cache_gb_per_sec": cache},
        "device": device,
        "matmul_size": size,
        "seconds": clock() - began,
    }


def last_cache_bytes(numbers: set[int], folder: Path = Path("/sys/devices/system/cpu")) -> int:
    """Sums the bytes of the largest caches that these CPUs have; 32 MiB where unknown."""
    caches: dict[int, dict[str, int]] = {}
    for index in (index for cpu in numbers for index in (folder / f"cpu{cpu}").glob("cache/index[0-9]*")):
        try:
            size = (index / "size").read_text(encoding="ascii").strip()
            shared = (index / "shared_cpu_list").read_text(encoding="ascii").strip()
            level = int((index / "level").read_text(encoding="ascii"))
        except (OSError, ValueError):  # another system, which has no such file
            continue
        if size.endswith("K"):
            caches.setdefault(level, {})[shared] = int(size[:-1]) << 10
    return sum(caches[max(caches)].values()) if caches else _DEFAULT_CACHE_BYTES


def _matmul_rates(size: int, dtype: str, clock) -> list[float]:
    """Samples 1e9 operations a second in products of two square matrices, on the current device."""
    # Divided so that products of products stay about as large.
    left, right = (tf.cast(tf.random.stateless_normal([size, size], [seed, 0]) / size**0.5, dtype) for seed in (0, 1))

    lanes = _lanes()
    rows = [left[lane::lanes] for lane in range(lanes)]

    def body(i, *products):
        return i + 1, *(tf.matmul(product, right) for product in products)

    @tf.function(autograph=False)
    def multiply(repeats):
        return tf.while_loop(lambda i, *_: i < repeats, body, (tf.constant(0), *rows), parallel_iterations=1)[1][0, 0]

    return _rates(multiply, 2e-9 * size**3, clock)


def _triad_rates(array_bytes: int, clock) -> list[float]:
    lanes = _lanes()
    values = array_bytes // _FLOAT32_BYTES // lanes
    variables = [tf.Variable(tf.zeros([values]), trainable=False) for _ in range(lanes)]
    addends = [tf.ones([values]) for _ in variables]

    def body(i):
        with tf.control_dependencies([i]):
            for variable, addend in zip(variables, addends, strict=True):
                tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=1e-9, delta=addend)
        return i + 1

    @tf.function(autograph=False)
    def subtract(repeats):
        return tf.while_loop(lambda i: i < repeats, body, [tf.constant(0)], parallel_iterations=1)[0]

    return _rates(subtract, 3e-9 * _FLOAT32_BYTES * values * lanes, clock)


def _lanes() -> int:
    """Counts the operations that use all threads: one for each where operations share none, else one."""
    threads = tf.config.threading
    alone = threads.get_intra_op_parallelism_threads() == 1
    return max(1, threads.get_inter_op_parallelism_threads()) if alone else 1


def _rates(operation: Callable, work: float, clock) -> list[float]:
    """Samples the work a second of `operation(repeats)`, each doing `work`, after compilation."""

    def timed(repeats: int) -> float:
        before = clock()
        operation(tf.constant(repeats)).numpy()  # waits for the device
        return clock() - before

    timed(1)  # compiles
    repeats = max(1, round(_SAMPLE_SECONDS / timed(1)))
    return [repeats * work / timed(repeats) for _ in range(_SAMPLES)]
