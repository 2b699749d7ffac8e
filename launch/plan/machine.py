"""Measures this machine: its limits, and for a plan what messages, files and a step itself take. Host code.

Products and memory are measured with TensorFlow's own kernels, on a run's first device and the threads that the run
has. Figures that can't be measured, how often a host fails and what the loss of one costs, are assumptions, and say so.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import tensorflow as tf

from ...engine.errors import RunError
from ...engine.machine import cpus, files, memory
from ...engine.strategies import devices
from ..cluster import resources, tf_config
from . import hardware

_SAMPLES = 5
_SAMPLE_SECONDS = 0.08
_FLOAT32_BYTES = 4
_MEBIBYTE = 1 << 20
# STREAM's rule: an array at least four times as large as the last cache (https://www.cs.virginia.edu/stream/ref.html).
_ARRAY_CACHES = 4
_MOST_ARRAY_BYTES = 1 << 30
_DEFAULT_CACHE_BYTES = 32 << 20
_MATMUL_SIZE = {"CPU": 2048, "GPU": 8192}
_PLAN_SIZES = {"CPU": (64, 128, 256, 512, 1024, 2048), "GPU": (256, 512, 1024, 2048, 4096, 8192)}
_FILE_BYTES, _PIECE_BYTES = 256 << 20, 8 << 20
_LINK_SECONDS = 300
_CHAIN, _SMALL = 64, 4  # operations, one after another, of matrices of this size
_JITTER_SAMPLES = 50
_ASSUMED = ("hours_between_failures", "lost_host_share", "lost_host_seconds")


def probe(device: str, dtypes: Sequence[str] = ("float32", "bfloat16"), clock=time.perf_counter) -> dict:
    """Measures a device. Nothing else should run meanwhile.

    Args:
      device: TensorFlow's name of it, a CPU's or a GPU's. A CPU is measured as a whole, also where it is split.
      dtypes: of the matrix products.
      clock: returns seconds.

    Returns:
      matmul_gflops: {dtype: 1e9 operations a second} of products of two square matrices, 2 n^3 operations each; on
        GPUs float32 is as the run computes it, and where that is in TF32, `float32_without_tf32` is there too.
      memory_gb_per_sec: 1e9 bytes a second of v -= a d on float32 arrays that no cache holds: STREAM's triad (McCalpin
        1995) in place, two reads and a write, none of which moves bytes that are not counted.
      cache_gb_per_sec: the same on arrays that fill half of a CPU's last cache; None on other devices.
      cache_mb: that cache, in 2**20 bytes; None on other devices.
      samples: of which each figure is the median. seconds: that all of it took. device, matmul_size: as they were.
    """
    began = clock()
    kind = tf.DeviceSpec.from_string(device).device_type
    size = _MATMUL_SIZE.get(kind, 4096)
    cache_bytes = last_cache_bytes(cpus.usable_cpus([os.getpid()])) if kind == "CPU" else None
    samples = {}
    with tf.device(device):
        for dtype in dtypes:
            samples[dtype] = matmul_rates(size, dtype, clock)
        if kind == "GPU" and "float32" in dtypes and tf.config.experimental.tensor_float_32_execution_enabled():
            tf.config.experimental.enable_tensor_float_32_execution(False)
            try:
                samples["float32_without_tf32"] = matmul_rates(size, "float32", clock)
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


def matmul_rates(size: int, dtype: str, clock=time.perf_counter) -> list[float]:
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

    timed(1)
    repeats = max(1, round(_SAMPLE_SECONDS / timed(1)))
    return [repeats * work / timed(repeats) for _ in range(_SAMPLES)]


def measure() -> hardware.Hardware:
    """Measures this machine, in about half a minute. Nothing else should run meanwhile.

    Raises:
      RunError: the processes that time the network fail, or there is no room for a temporary file.
    """
    gpus = tf.config.list_logical_devices("GPU")
    kind, device = ("GPU", gpus[0].name) if gpus else ("CPU", "CPU:0")
    host_bytes = memory.usable_bytes()
    written, read = _file_gb_per_sec()
    probed = probe(device, dtypes=())
    with tf.device(device):
        step, long_step = _per_turn(1), _per_turn(1 + _CHAIN)
        operation = (long_step - step) / _CHAIN
        rates = {dtype: _tflops(_PLAN_SIZES[kind], dtype, operation) for dtype in ("float32", "bfloat16")}
        jitter, copied = _jitter(), _copy_gb_per_sec()
    device_bytes = devices.free_gpu_memory_mb() * 2**20 if gpus else host_bytes
    figures = {
        "name": f"{platform.node()}, measured {time.strftime('%Y-%m-%d')}",
        "sources": dict.fromkeys(_ASSUMED, "an assumption"),
        "kind": kind.lower(),
        "devices_per_host": max(1, len(gpus)),
        "device_memory_gb": device_bytes / 1e9,
        "host_memory_gb": host_bytes / 1e9,
        "matmul_tflops": rates,
        "memory_gb_per_sec": probed["memory_gb_per_sec"],
        **{name: probed[name] for name in ("cache_gb_per_sec", "cache_mb") if probed[name]},
        "step_seconds": step,
        "operation_seconds": operation,
        "network_seconds": _links(between_hosts=True),
        "link_seconds": _links(between_hosts=False),
        "network_overlap": 1 if gpus else 0,  # on CPUs the cores that compute also send
        "read_gb_per_sec": read,
        "write_gb_per_sec": written,
        "copy_gb_per_sec": copied if gpus else probed["memory_gb_per_sec"] / 2,
        "hours_between_failures": 6334,
        "step_jitter": jitter,
    }
    return hardware.from_figures(
        json.loads(json.dumps(figures), parse_float=lambda text: float(f"{float(text):.3g}")), "this machine"
    )


def _seconds(function: Callable, *arguments) -> float:
    before = time.perf_counter()
    tf.nest.map_structure(lambda tensor: tensor.numpy(), function(*arguments))  # waits for the device
    return time.perf_counter() - before


def _per_turn(operations: int) -> float:
    """Measures the seconds of a turn of a loop with so many small products, one after another."""

    @tf.function(autograph=False)
    def loop(turns):
        def body(turn, x):
            for _ in range(operations):
                x = tf.linalg.matmul(x, x)
            return turn + 1, x

        return tf.while_loop(lambda turn, _: turn < turns, body, (0, tf.eye(_SMALL)), parallel_iterations=1)[1]

    _seconds(loop, tf.constant(10))
    return statistics.median(_seconds(loop, tf.constant(1000)) for _ in range(5)) / 1000


def _tflops(sizes: tuple[int, ...], dtype: str, operation_seconds: float) -> dict[str, float]:
    """Measures the rates of products by their size, without the time to start them."""
    rates = {}
    for size in sizes:
        seconds = 2e-9 * size**3 / statistics.median(matmul_rates(size, dtype))
        rates[str(size)] = 2e-12 * size**3 / max(seconds - operation_seconds, seconds / 2)
    return rates


def _jitter() -> float:
    product = tf.function(lambda x: tf.linalg.matmul(x, x), autograph=False)
    x = tf.zeros([1024, 1024])
    _seconds(product, x)
    samples = [_seconds(product, x) for _ in range(_JITTER_SAMPLES)]
    return min(1.0, statistics.stdev(samples) / statistics.mean(samples))


def _copy_gb_per_sec() -> float:
    x = tf.identity(tf.zeros([_FILE_BYTES // 4]))
    return _FILE_BYTES / 1e9 / statistics.median(_seconds(tf.identity, x) for _ in range(3))


def _file_gb_per_sec() -> tuple[float, float]:
    """Measures the rates of writing a file to the disk of the temporary folder, and of reading it, past the cache."""
    piece = os.urandom(_PIECE_BYTES)
    folder = files.temporary_folder(_FILE_BYTES)
    with files.naming(folder), tempfile.NamedTemporaryFile(dir=folder) as file:
        before = time.perf_counter()
        for _ in range(_FILE_BYTES // _PIECE_BYTES):
            file.write(piece)
        file.flush()
        files.sync(file.name)
        written = time.perf_counter() - before
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        before = time.perf_counter()
        while file.read(_PIECE_BYTES):
            pass
        return _FILE_BYTES / 1e9 / written, _FILE_BYTES / 1e9 / (time.perf_counter() - before)


def _links(between_hosts: bool) -> dict[str, float]:
    """Measures {bytes: seconds} of messages between two processes, or two devices of one."""
    words = [sys.executable, "-m", "crankshaft.launch.plan.links"]
    variables = {name: value for name, value in os.environ.items() if name != tf_config.NAME}
    tasks: list[dict[str, str]] = [{}]
    if between_hosts:
        workers = [f"{resources.LOOPBACK}:{port}" for port in resources.free_ports(2)]
        configs = ({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}} for index in (0, 1))
        tasks = [{tf_config.NAME: json.dumps(config)} for config in configs]
    outputs: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(words, env={**variables, **task}, **outputs) for task in tasks]
    try:
        printed = started[0].communicate(timeout=_LINK_SECONDS)[0].strip().splitlines() or [""]
        rows = json.loads(printed[-1])
    except subprocess.TimeoutExpired:
        raise RunError(f"the time of messages was not measured in {_LINK_SECONDS} s") from None
    except ValueError:
        raise RunError(f"the time of messages was not measured: {printed[-1]}") from None
    finally:
        for process in started:
            process.kill()
            process.wait()
    latency, *others = sorted((float(size), seconds) for size, seconds in rows.items())
    return {"0": latency[1], **{str(int(size)): seconds for size, seconds in others}}
