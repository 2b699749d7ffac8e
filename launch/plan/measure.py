"""Measures this machine for a plan: products by size, memory, network, files, and what a step itself takes. Host code.

Figures that can't be measured, how often a host fails and what the loss of one costs, are assumptions, and say so.
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
from collections.abc import Callable

import tensorflow as tf

from ...engine.errors import RunError
from ...engine.machine import files, memory
from ...engine.strategies import devices
from ..cluster import resources, tf_config
from . import hardware, machine

_SIZES = {"CPU": (64, 128, 256, 512, 1024, 2048), "GPU": (256, 512, 1024, 2048, 4096, 8192)}
_FILE_BYTES, _PIECE_BYTES = 256 << 20, 8 << 20
_LINK_SECONDS = 300
_CHAIN, _SMALL = 64, 4  # operations, one after another, of matrices of this size
_JITTER_SAMPLES = 50
_ASSUMED = ("hours_between_failures", "lost_host_share", "lost_host_seconds")


def measure() -> hardware.Hardware:
    """Measures this machine, in about half a minute. Nothing else should run meanwhile.

    Raises:
      RunError: the processes that time the network fail, or there is no room for a temporary file.
    """
    gpus = tf.config.list_logical_devices("GPU")
    kind, device = ("GPU", gpus[0].name) if gpus else ("CPU", "CPU:0")
    host_bytes = memory.usable_bytes()
    written, read = _file_gb_per_sec()
    probed = machine.probe(device)
    with tf.device(device):
        operation, step = _dispatch_seconds()
        rates = {dtype: _tflops(_SIZES[kind], dtype, operation) for dtype in ("float32", "bfloat16")}
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
    return hardware.of(json.loads(json.dumps(figures), parse_float=_rounded), "this machine")


def _rounded(text: str) -> float:
    return float(f"{float(text):.3g}")


def _seconds(function: Callable, *arguments) -> float:
    before = time.perf_counter()
    tf.nest.map_structure(lambda tensor: tensor.numpy(), function(*arguments))  # waits for the device
    return time.perf_counter() - before


def _per_turn(operations: int) -> float:
    """Returns the seconds of a turn of a loop with so many small products, one after another."""

    @tf.function(autograph=False)
    def loop(turns):
        def body(turn, x):
            for _ in range(operations):
                x = tf.linalg.matmul(x, x)
            return turn + 1, x

        return tf.while_loop(lambda turn, _: turn < turns, body, (0, tf.eye(_SMALL)), parallel_iterations=1)[1]

    _seconds(loop, tf.constant(10))
    return statistics.median(_seconds(loop, tf.constant(1000)) for _ in range(5)) / 1000


def _dispatch_seconds() -> tuple[float, float]:
    """Returns the seconds to start an operation, and of a step of a loop that does nothing."""
    few, many = _per_turn(1), _per_turn(1 + _CHAIN)
    return (many - few) / _CHAIN, few


def _tflops(sizes: tuple[int, ...], dtype: str, operation_seconds: float) -> dict[str, float]:
    """Returns the rates of products by their size, without the time to start them."""
    rates = {}
    for size in sizes:
        seconds = 2e-9 * size**3 / statistics.median(machine.matmul_rates(size, dtype))
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
    """Returns the rates of writing a file to the disk of the temporary folder, and of reading it, past the cache."""
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
    """Returns {bytes: seconds} of messages between two processes, or two devices of one."""
    words = [sys.executable, "-m", "crankshaft.launch.plan.links"]
    variables = {name: value for name, value in os.environ.items() if name != tf_config.NAME}
    tasks: list[dict[str, str]] = [{}]
    if between_hosts:
        workers = [f"{resources.LOOPBACK}:{port}" for port in resources.free_ports(2)]
        configs = ({"cluster": {"worker": workers}, "task": {"type": "worker", "index": each}} for each in (0, 1))
        tasks = [{tf_config.NAME: json.dumps(each)} for each in configs]
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
        for each in started:
            each.kill()
            each.wait()
    latency, *others = sorted((float(size), seconds) for size, seconds in rows.items())
    return {"0": latency[1], **{str(int(size)): seconds for size, seconds in others}}
