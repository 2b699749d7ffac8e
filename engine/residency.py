"""Arrays in the memory of the devices that compute, in the form that these read fastest. Host code, but `take_rows`."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from crankshaft.engine import host_arrays


def is_on_gpus(strategy: tf.distribute.Strategy) -> bool:
    """Whether replicas compute on GPUs: what the host has is copied there, and what they have is waited for here."""
    return tf.DeviceSpec.from_string(strategy.extended.worker_devices[0]).device_type == "GPU"


def on_each_device(strategy: tf.distribute.Strategy, arrays):
    """The nest's arrays, once on each device, as per-replica values. CPU devices of one process share large ones."""
    on_host = tf.nest.map_structure(host_arrays.on_host, arrays)
    copies = []
    for device in strategy.extended.worker_devices:
        with tf.device(device):
            copies.append(tf.nest.map_structure(_here, on_host))
    if len(copies) == 1:
        return copies[0]

    def per_replica(*copies):
        in_order = iter(copies)  # this host's replicas are asked for in the order of its devices
        return strategy.experimental_distribute_values_from_function(lambda _: next(in_order))

    return tf.nest.map_structure(per_replica, *copies)


def as_rows(array, on_gpus: bool = False):
    """`host_arrays.as_rows`, for `take_rows`. For GPUs int32 stands as the float32 of the same bits: TensorFlow keeps
    int32 in the host's memory there."""
    rows = host_arrays.as_rows(array)
    return rows.view(np.float32) if on_gpus and isinstance(rows, np.ndarray) and _is_int32(rows) else rows


def take_rows(rows: tf.Tensor, indices: tf.Tensor, array) -> tf.Tensor:
    """The examples of `array`, whose `as_rows` are on this device, at these indices. Replica code."""
    found = tf.reshape(tf.gather(rows, indices), [*indices.shape, *array.shape[1:]])
    # Last: of int32 TensorFlow's GPU kernels move no byte but on the host.
    return tf.bitcast(found, tf.int32) if rows.dtype == tf.float32 and _is_int32(array) else found


def _is_int32(array) -> bool:
    return getattr(array, "dtype", None) == np.int32 and array.dtype.isnative


def _here(array):
    """On the device of the scope, where TensorFlow puts a constant of that kind."""
    return tf.identity(array) if tf.is_tensor(array) else tf.constant(array)
