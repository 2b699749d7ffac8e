"""One of two workers that hold halves of a state: saves it whole, then where it can't write, then is killed writing.

Usage: sharded_writer.py FOLDER, with TF_CONFIG. Prints what it finds.
"""

from __future__ import annotations

import os
import pathlib
import resource
import signal
import sys
import time

import numpy as np
import tensorflow as tf

from crankshaft.engine.checkpoints import Checkpoints, WritingProcess
from crankshaft.engine.errors import SaveError
from crankshaft.engine.mesh import sharded
from crankshaft.engine.mesh.sharded import Sharding
from crankshaft.engine.strategies import WorkerTask
from crankshaft.parts.clusters import tf_config
from crankshaft.parts.sharding import Mesh
from crankshaft.parts.workers.multi_worker import connect

ROWS, WIDTH = 99_999, 128  # 51 MB, which do not divide by 2
TIMEOUT_SECONDS = 10.0


def whole(box: sharded.Box) -> tf.Tensor:
    """Each value is its position: exact in float32."""
    (row, column), (rows, columns) = box
    positions = WIDTH * tf.range(row, row + rows)[:, tf.newaxis] + tf.range(column, column + columns)
    return tf.cast(positions, tf.float32)


def saved(checkpoints: Checkpoints, step: int) -> str:
    try:
        checkpoints.save(step, {}, wait=True)
    except SaveError as error:
        return str(error)
    return "saved"


def main(folder: str) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write past the limit is then an error
    cluster = tf_config.from_environment(os.environ)
    task = WorkerTask(cluster.index, *zip(*cluster.addresses, strict=True))
    strategy = connect(task)
    sharding = Sharding.over(Mesh(strategy, 2), (ROWS, WIDTH), {0: "model"})
    with strategy.scope():
        table, copy = tf.Variable(tf.zeros(sharding.local_shape)), tf.Variable(5.0)
    sharded.mark(table, sharding)
    sharded.fill(table, whole)
    state = tf.train.Checkpoint(table=table, copy=copy)
    writer = WritingProcess(task.worker, "attempt", TIMEOUT_SECONDS)
    checkpoints = Checkpoints(folder, state, keep=None, about={}, writer=writer)
    print("step 1:", saved(checkpoints, 1), flush=True)
    ((_, shard),) = sharded.local_shards(table)
    before = shard.numpy()
    while (manifest := checkpoints.latest()) is None:  # worker 1 is not told when the chief has sealed it
        time.sleep(0.05)
    shard.assign(tf.zeros_like(shard))
    checkpoints.restore(manifest)
    print("bits:", np.array_equal(shard.numpy(), before) and float(copy.numpy()) == 5.0, flush=True)
    if task.worker == 1:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    print("step 2:", saved(checkpoints, 2), flush=True)
    if task.worker == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        checkpoints.save(3, {})
        while not list(pathlib.Path(folder).glob("ckpt-3_temp_*/share-1*")):
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    print("step 3:", saved(checkpoints, 3), flush=True)
    print("newest:", checkpoints.latest().step, "left:", sorted(os.listdir(folder)), flush=True)
    os._exit(0)  # TensorFlow takes seconds to shut down beside a server that is gone


if __name__ == "__main__":
    main(sys.argv[1])
