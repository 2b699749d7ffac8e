"""A run on features in a file, of so many MiB of float64, that is mapped; prints the most memory that it took, in MiB.

Usage: mapped_run.py MIB FILE [FLAGS]. It is evaluated on the first 128 examples.
"""

import pathlib
import re
import sys

import numpy as np
import tensorflow as tf

import crankshaft
from crankshaft.launch import train

WIDTH = 1024
mib, path = (word for word in sys.argv[1:] if not word.startswith("-"))
mib = int(mib)
sys.argv = [sys.argv[0], *(word for word in sys.argv if word.startswith("-"))]


class Linear(crankshaft.Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([WIDTH]), tf.keras.layers.Dense(2)])

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], outputs))


def data():
    rows = mib * 2**20 // (8 * WIDTH)
    features = np.memmap(path, np.float64, "r", shape=(rows, WIDTH))
    labels = (np.arange(rows) % 2).astype(np.int32)
    return (features, labels), (features[:128], labels[:128]), 2


try:
    train.main(Linear, data=data)
finally:
    print("peak", int(re.search(r"VmHWM:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) // 1024)
