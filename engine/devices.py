"""Finds and splits devices, and sets their threads, before anything else uses a device."""

from __future__ import annotations

import math
import socket
import subprocess
from collections.abc import Sequence

import tensorflow as tf

from . import logging
from .errors import UsageError, reason
from .machine import cpus

_CONNECT_SECONDS = 5
_FREE_MEMORY = ("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits")


def set_threads_per_micro_batch(micro_batches: int) -> int:
    """Sets TensorFlow's threads, one per micro-batch that the CPU computes in parallel.

    Returns:
      The number of micro-batches to compute in parallel: 1 with a GPU, or if TensorFlow's threads have started.
    """
    if micro_batches == 1 or tf.config.get_visible_devices("GPU"):
        return 1
    if not _set_single_threaded_ops(micro_batches):
        logging.info("no parallel micro-batches: this script used TensorFlow's devices before train.main")
        return 1
    return micro_batches


def _set_single_threaded_ops(at_once: int) -> bool:
    """Runs each operation in one thread, `at_once` in parallel. Returns False if TensorFlow's threads have started."""
    try:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(at_once)
    except RuntimeError:
        return False
    return True


def mirror(num_virtual_devices: int, sets_threads: bool) -> tf.distribute.Strategy:
    """Mirrors variables on this machine's GPUs, or on so many virtual devices of one GPU or the CPU."""
    kind = "GPU" if tf.config.get_visible_devices("GPU") else "CPU"
    if num_virtual_devices:
        split(kind, num_virtual_devices)
        if sets_threads and kind == "CPU" and num_virtual_devices >= (cores := math.ceil(cpus.usable_cores())):
            _set_single_threaded_ops(cores)  # replicas fill the cores; several threads per operation would wait
    devices = [device.name for device in tf.config.list_logical_devices(kind)]
    if num_virtual_devices:  # an earlier run of the process may have split it into more
        devices = devices[:num_virtual_devices]
    elif kind == "CPU":
        raise UsageError(
            "strategy=mirrored found no GPU; use num_virtual_devices=N for N replicas on the CPU, or "
            "strategy=one_device"
        )
    return tf.distribute.MirroredStrategy(devices)


def split(kind: str, count: int) -> None:
    """Splits the machine's only physical device of a kind into equal logical ones."""
    physical = tf.config.get_visible_devices(kind)
    if len(physical) > 1:
        raise UsageError(f"num_virtual_devices={count} splits one {kind}, and there are {len(physical)}; omit it")
    existing = tf.config.get_logical_device_configuration(physical[0])
    if existing and len(existing) >= count:
        return
    if kind == "GPU":
        # Leaves a tenth of the free memory for libraries' workspace.
        logical = tf.config.LogicalDeviceConfiguration(memory_limit=int(0.9 * free_gpu_memory_mb() / count))
    else:
        logical = tf.config.LogicalDeviceConfiguration()
    try:
        tf.config.set_logical_device_configuration(physical[0], [logical] * count)
    except RuntimeError:
        raise UsageError(
            f"num_virtual_devices={count} came too late: models and tensors that exist have started TensorFlow, after "
            f"which the {kind} can't be split. Make them in functions (give fit one that makes and compiles the model; "
            "a Trainer has build_model; data may be a function too), or request the devices in the process's first run"
        ) from None


def free_gpu_memory_mb(command: Sequence[str] = _FREE_MEMORY) -> int:
    """Returns the free MiB of the machine's GPU (of several, the fullest), from the driver's program.

    TensorFlow reports it only after starting the device, which then can't be split.

    Args:
      command: prints a whole number of MiB per line, one line per GPU.

    Raises:
      UsageError: the program is missing, fails, or prints something else.
    """
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return min(int(line) for line in printed.split("\n") if line.strip())
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        message = (getattr(error, "stderr", None) or "").strip().split("\n")[0] or reason(error)
        raise UsageError(
            f"num_virtual_devices: {command[0]} did not report the GPU's free memory ({message}); install it, or leave "
            "num_virtual_devices out"
        ) from None


def find_tpu(address: str) -> tf.distribute.Strategy:
    """Connects to a TPU and initializes it. Raises `UsageError` if none is found."""
    try:
        if address.startswith("grpc://"):
            # TensorFlow would wait for a dead address for ever.
            host, _, port = address.removeprefix("grpc://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=address or "local")
        if address not in ("", "local"):
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except (ValueError, RuntimeError, tf.errors.OpError, OSError) as error:
        why = reason(error).split(". ")[0]
        raise UsageError(
            f"strategy=tpu found no TPU at {address or 'this host'} ({why}); run on a TPU host, set TPU_NAME to its "
            "name or address, or use strategy=one_device or mirrored"
        ) from None
