"""The strategies by name, and the devices that they are made of. Host code, before anything else touches a device."""

from __future__ import annotations

import math
import socket
import subprocess
from collections.abc import Sequence

import tensorflow as tf
from absl import logging

from crankshaft.engine.internals.errors import reason
from crankshaft.engine.machine import cpus
from crankshaft.engine.machine import gpus as graphics
from crankshaft.engine.machine.gpus import DeviceError
from crankshaft.engine.strategies.multi_worker import MultiWorker, Place, connect
from crankshaft.engine.strategies.parameter_server import strategy as parameter_server
from crankshaft.engine.strategies.parameter_server.strategy import ParameterServer, ServerOptions
from crankshaft.engine.strategies.replicated import FeedOptions, Replicated

_CONNECT_SECONDS = 5
_FREE_MEMORY = ("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits")


def create(
    name: str,
    *,
    num_virtual_devices: int = 0,
    tpu_address: str = "",
    place: Place | None = None,
    servers: ServerOptions | None = None,
    communication: str = "auto",
    step_timeout_seconds: float = 0.0,
    steps_per_loop: int = 0,
    feed_options: FeedOptions | None = None,
    batch_parts: int = 1,
    gpus: Sequence[int] | None = None,
    gpu_memory_growth: bool = True,
    owns_process: bool = True,
) -> Replicated | ParameterServer:
    """Makes a strategy.

    Args:
      name: one_device, mirrored, multi_worker, parameter_server or tpu.
      num_virtual_devices: split the CPU, or the one GPU, into so many logical devices first; 0 leaves it whole.
      tpu_address: the TPU's name or grpc:// address; empty for the local one.
      place: of this process among the workers of multi_worker.
      servers: of parameter_server, where its tasks are and what is peculiar to it.
      communication: how workers' sums travel, see `multi_worker.connect`.
      step_timeout_seconds: how long a worker may wait for others, see `MultiWorker`.
      steps_per_loop: steps in one compiled call; 0 fits them.
      feed_options: how data reaches the devices.
      batch_parts: that one_device is to compute side by side, see `a_thread_each`.
      gpus, gpu_memory_growth: which GPUs, and how much of their memory, see `gpus.take`. Of all, one_device takes the
        first, and the coordinator of parameter_server none, since others compute.
      owns_process: whether threads may be set for the whole process, and GPUs that this run does not use be hidden from
        it; else they stay what they are.
    """
    if gpus is None and name == "parameter_server":
        gpus = ()
    graphics.take(gpus, 1 if name == "one_device" and owns_process else None, gpu_memory_growth)
    feed_options = feed_options or FeedOptions()
    if name == "multi_worker":
        return MultiWorker(connect(place, communication), place, feed_options, steps_per_loop, step_timeout_seconds)
    if name == "parameter_server":
        distribution = parameter_server.connect(servers.cluster)
        return ParameterServer(distribution, servers, feed_options, steps_per_loop, step_timeout_seconds)
    makers = {
        "one_device": lambda: _one_device(),
        "mirrored": lambda: _mirrored(num_virtual_devices, owns_process),
        "tpu": lambda: _tpu(tpu_address),
    }
    parts = a_thread_each(batch_parts) if name == "one_device" and owns_process else 1
    return Replicated(name, makers[name](), feed_options, steps_per_loop, parts)


def a_thread_each(parts: int) -> int:
    """One thread for each of so many parts of a batch, which the CPU computes side by side: operations share none.

    Returns:
      How many parts there are to be: 1 where there is a GPU, or where TensorFlow's threads were there already.
    """
    if parts == 1 or tf.config.get_visible_devices("GPU"):
        return 1
    if not _one_thread_an_operation(parts):
        logging.info("batches stay whole: this script used TensorFlow's devices before train.main")
        return 1
    return parts


def _one_thread_an_operation(at_once: int) -> bool:
    """Operations share no threads, and so many run at once. False where TensorFlow's threads were there already."""
    try:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(at_once)
    except RuntimeError:
        return False
    return True


def _one_device() -> tf.distribute.Strategy:
    return tf.distribute.OneDeviceStrategy("GPU:0" if tf.config.get_visible_devices("GPU") else "CPU:0")


def _mirrored(num_virtual_devices: int, sets_threads: bool) -> tf.distribute.Strategy:
    kind = "GPU" if tf.config.get_visible_devices("GPU") else "CPU"
    if num_virtual_devices:
        split(kind, num_virtual_devices)
        if sets_threads and kind == "CPU" and num_virtual_devices >= (cores := math.ceil(cpus.usable_cores())):
            _one_thread_an_operation(cores)  # replicas fill the cores; two that share an operation wait for each other
    devices = [device.name for device in tf.config.list_logical_devices(kind)]
    if num_virtual_devices and len(devices) > num_virtual_devices:
        devices = devices[:num_virtual_devices]
    if kind == "CPU" and not num_virtual_devices:
        raise DeviceError(
            "--strategy=mirrored found no GPU; use --num_virtual_devices=N for N replicas on the CPU, "
            "or --strategy=one_device"
        )
    return tf.distribute.MirroredStrategy(devices)


def split(kind: str, parts: int) -> None:
    """Splits the machine's one physical device of a kind into equal logical ones."""
    physical = tf.config.get_visible_devices(kind)
    if len(physical) > 1:
        raise DeviceError(f"--num_virtual_devices={parts} splits one {kind}, and there are {len(physical)}; omit it")
    existing = tf.config.get_logical_device_configuration(physical[0])
    if existing and len(existing) >= parts:
        return
    if kind == "GPU":
        # Of what is free, leave a tenth for libraries' own workspace.
        each = tf.config.LogicalDeviceConfiguration(memory_limit=int(0.9 * free_gpu_memory_mb() / parts))
    else:
        each = tf.config.LogicalDeviceConfiguration()
    try:
        tf.config.set_logical_device_configuration(physical[0], [each] * parts)
    except RuntimeError:
        raise DeviceError(
            f"--num_virtual_devices={parts} came too late: this process has used TensorFlow's devices by now; ask for "
            "as many in its first run, or move what uses them into build_model or the data function"
        ) from None


def free_gpu_memory_mb(command: Sequence[str] = _FREE_MEMORY) -> int:
    """MiB that are free on the machine's GPU, of several the fullest, by the driver's own program.

    TensorFlow tells only once its context is there, and then a device can't be split any more.

    Args:
      command: prints one whole number of MiB a line, a line for each GPU.

    Raises:
      DeviceError: the program is not there, fails, or prints something else.
    """
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return min(int(line) for line in printed.split("\n") if line.strip())
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = (getattr(error, "stderr", None) or "").strip().split("\n")[0] or reason(error)
        raise DeviceError(
            f"--num_virtual_devices: {command[0]} did not say how much memory the GPU has free ({said}); "
            "install it, or leave --num_virtual_devices out"
        ) from None


def _tpu(address: str) -> tf.distribute.Strategy:
    try:
        if address.startswith("grpc://"):
            # TensorFlow waits for a dead address for ever.
            host, _, port = address.removeprefix("grpc://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=address or "local")
        if address not in ("", "local"):
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except (ValueError, RuntimeError, tf.errors.OpError, OSError) as error:
        found = reason(error).split(". ")[0]
        raise DeviceError(
            f"--strategy=tpu found no TPU at {address or 'this host'} ({found}); "
            "run on a TPU host, give its --tpu_address, or use --strategy=one_device or mirrored"
        ) from None
