"""Four logical CPU devices in this process, so that mirrored runs anywhere."""

import functools

import tensorflow as tf


@functools.cache
def make_four() -> None:
    """Splits the CPU into four and starts them, before anything touches the devices; once a process.

    Runs of this process then share their threads, whichever comes first.
    """
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
    )
    tf.config.list_logical_devices()


def use_new_collective_keys() -> None:
    """Gives the program's next `MirroredStrategy` new collective keys: TensorFlow begins each with the same key."""
    tf.distribute.MirroredStrategy._collective_key_base += 1 << 16
