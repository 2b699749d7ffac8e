"""How workers are joined. In this process."""

import pytest
import tensorflow as tf

from crankshaft.engine.errors import UsageError
from crankshaft.engine.strategies import WorkerTask
from crankshaft.parts.launchers.resources import free_ports
from crankshaft.parts.workers.multi_worker import connect

pytestmark = pytest.mark.thorough


def test_a_process_that_has_used_tensorflow_cannot_join_workers():
    tf.zeros([1]).numpy()
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(2))
    with pytest.raises(
        UsageError, match=r"has used TensorFlow before .*; make tensors and datasets in the data function"
    ):
        connect(WorkerTask(0, ("worker 0", "worker 1"), addresses))
