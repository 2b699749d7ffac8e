"""`crankshaft train` in a process whose CPU counts as two devices, as a worker's two GPUs do.

Usage: pairs.py FLAGS, with TF_CONFIG.
"""

from __future__ import annotations

from unittest import mock

import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

import crankshaft

DEVICES = 2


def main() -> None:
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)

    def local_devices(self, resolver, worker):  # TensorFlow asks for GPUs alone, and takes one CPU where there are none
        return tuple(f"{worker}/device:CPU:{number}" for number in range(DEVICES)), "CPU"

    with mock.patch.object(CollectiveAllReduceExtended, "_initialize_local_devices", local_devices):
        crankshaft.main()


if __name__ == "__main__":
    main()
