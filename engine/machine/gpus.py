"""Selects this process's GPUs, and how much of their memory. Call it before any use of a device."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from .. import logging
from ..errors import UsageError
from ..internals.tensorflow import session_config


def use_only(numbers: Sequence[int] | None, most: int | None = None) -> None:
    """Makes only these GPUs visible to TensorFlow; it allocates no memory on others.

    Args:
      numbers: the numbers of the GPUs, as TensorFlow counts the machine's; None takes all.
      most: the largest number of GPUs; the first ones are taken.

    Raises:
      UsageError: the machine has GPUs, but not all of these.
    """
    devices = tf.config.list_physical_devices("GPU")
    if numbers and not devices:
        logging.warning(
            "GPU %s is requested, but TensorFlow finds no GPU and uses the CPU; if there is one, TensorFlow may "
            "lack CUDA's libraries (pip install 'tensorflow[and-cuda]')",
            ",".join(map(str, numbers)),
        )
    chosen = choose(devices, numbers)[:most]
    if not devices:
        return
    try:
        tf.config.set_visible_devices(chosen, "GPU")
        for gpu in chosen:
            if not tf.config.get_logical_device_configuration(gpu):  # a script's own, with limits
                tf.config.experimental.set_memory_growth(gpu, True)  # TF_FORCE_GPU_ALLOW_GROWTH=false wins
    except RuntimeError:
        logging.warning("GPUs stay as they are: this process used TensorFlow's devices before this run")


def make_deterministic() -> None:
    """Makes the GPUs of this process compute the same bits each time; does nothing without a GPU.

    Otherwise many of TensorFlow's kernels add in the order in which their threads finish: replicas would drift apart,
    and a resumed run would differ from one that was never stopped. Sampling without a seed then raises an error, so
    this sets a global seed until the run sets its own.
    """
    if tf.config.get_visible_devices("GPU"):
        tf.random.set_seed(0)
        tf.config.experimental.enable_op_determinism()


def choose(devices: Sequence, numbers: Sequence[int] | None) -> list:
    """Returns the requested GPUs of a machine, in order; all for None. Raises `UsageError`."""
    if numbers is None or not devices:
        return list(devices)
    if missing := [number for number in numbers if number >= len(devices)]:
        raise UsageError(
            f"gpus={','.join(map(str, numbers))}: there is no GPU {missing[0]}; TensorFlow finds {len(devices)}, "
            f"{'number 0' if len(devices) == 1 else f'numbers 0 to {len(devices) - 1}'}; use those, or none"
        )
    return [gpu for number, gpu in enumerate(devices) if number in numbers]


def server_options() -> tf.compat.v1.ConfigProto:
    """Returns options that make a `tf.distribute.Server` of this process use the same GPUs."""
    here, options = session_config(), tf.compat.v1.ConfigProto()
    options.gpu_options.CopyFrom(here.gpu_options)
    options.device_count["GPU"] = here.device_count["GPU"]
    return options
