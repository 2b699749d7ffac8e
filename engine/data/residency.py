"""Arrays in the memory of the devices that compute. Host code, but `take`."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from . import host_arrays


def is_on_gpus(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether replicas compute on GPUs, to which the host's data is copied."""
    return tf.DeviceSpec.from_string(strategy.extended.worker_devices[0]).device_type == "GPU"


def on_each_device(strategy: tf.distribute.Strategy, arrays):
    """Puts the nest's arrays once on each device, as per-replica values. CPU devices of one process share one copy."""
    with tf.device("CPU:0"):
        on_host = tf.nest.map_structure(host_arrays.as_tensor, arrays)
    copies = []
    for device in strategy.extended.worker_devices:
        with tf.device(device):
            copies.append(tf.nest.map_structure(tf.identity, on_host))
    if len(copies) == 1:
        return copies[0]

    def per_replica(*copies):
        in_order = iter(copies)  # this host's replicas are asked for in the order of its devices
        return strategy.experimental_distribute_values_from_function(lambda _: next(in_order))

    return tf.nest.map_structure(per_replica, *copies)


def as_kept(array, on_gpus: bool):
    """Returns the form of `array` that a device keeps, for `take`.

    That is, on GPUs, int32 as the float32 of the same bits, since TensorFlow keeps int32 in the host's memory there.
    """
    is_int32 = isinstance(array, np.ndarray) and _is_int32(array)
    return np.ascontiguousarray(array).view(np.float32) if on_gpus and is_int32 else array


def take(kept: tf.Tensor, indices: tf.Tensor, array) -> tf.Tensor:
    """Gathers the examples of `array`, whose `as_kept` is on this device, at these indices. Replica code."""
    found = tf.gather(kept, indices)
    # Last, since TensorFlow's GPU kernels move int32 on the host only.
    return tf.bitcast(found, tf.int32) if kept.dtype == tf.float32 and _is_int32(array) else found


def _is_int32(array) -> bool:
    return getattr(array, "dtype", None) == np.int32 and array.dtype.isnative
