"""Describes the machine and the software of a measurement."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf

from .. import version
from . import cpus, memory

# Prefixes of variables that change TensorFlow's speed.
_TUNING_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "DNNL_",
    "GLIBC_TUNABLES",
    "KMP_",
    "LD_PRELOAD",
    "MALLOC_",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_",
    "ONEDNN_",
    "TF_CUDNN_",
    "TF_DETERMINISTIC_OPS",
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_GPU_",
    "TF_NUM_",
    "TF_XLA_FLAGS",
    "XLA_FLAGS",
)
_MEBIBYTE = 2**20


def describe(variables: Mapping[str, str]) -> dict:
    """Returns the environment of a measurement, for its readers. Plain JSON.

    Returns:
      cpu: the model's name. usable_cores: see `cpus.usable_cores`. memory_mb: see `memory.usable_bytes`, in MiB.
      gpus: the GPUs' names. load_average: runnable processes over the last 1, 5 and 15 minutes.
      platform: the system and its version.
      versions: the versions of python, tensorflow, keras, numpy, crankshaft (with its build).
      threads: inter_op and intra_op; 0 leaves the number to TensorFlow. flags: the variables that are set for XLA,
      oneDNN, the allocator and the like.
    """
    return {
        "cpu": cpu_model(),
        "usable_cores": cpus.usable_cores(),
        "memory_mb": memory.usable_bytes() // _MEBIBYTE,
        "gpus": gpu_names(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "platform": platform.platform(),
        "versions": versions(),
        "threads": {
            "inter_op": tf.config.threading.get_inter_op_parallelism_threads(),
            "intra_op": tf.config.threading.get_intra_op_parallelism_threads(),
        },
        "flags": {name: variables[name] for name in sorted(variables) if name.startswith(_TUNING_VARIABLES)},
    }


def versions() -> dict[str, str]:
    """Returns versions by name; that of crankshaft names the code, too (`version.described`)."""
    return {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": tf.keras.__version__,
        "numpy": np.__version__,
        "crankshaft": version.described(),
    }


def gpu_names() -> list[str]:
    """Returns the driver's names of the GPUs that this process uses."""
    gpus = tf.config.get_visible_devices("GPU")
    return [tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name) for gpu in gpus]


def cpu_model() -> str:
    """Returns the kernel's name of the processor, else its kind."""
    return cpus.value(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()


def peak_rss_mb() -> float:
    """Returns the peak resident memory of this process, in 2**20 bytes."""
    # Preferred to getrusage, which keeps the parent's peak across exec; gVisor has none.
    return _own_memory_mb("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MEBIBYTE


def rss_mb() -> float:
    """Returns the resident memory of this process, in 2**20 bytes."""
    return _own_memory_mb("VmRSS")


def _own_memory_mb(name: str) -> float:
    return int(cpus.value(Path("/proc/self/status"), name).removesuffix("kB") or 0) / 1024


def device_peak_mb() -> float | None:
    """Returns the largest peak memory on one of this process's GPUs, in 2**20 bytes; None without a GPU."""
    peaks = []
    for device in tf.config.list_logical_devices("GPU"):
        with contextlib.suppress(ValueError):  # in a cluster, another host's
            peaks.append(tf.config.experimental.get_memory_info(device.name)["peak"] / _MEBIBYTE)
    return max(peaks, default=None)
