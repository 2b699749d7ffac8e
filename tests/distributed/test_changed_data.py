"""Two workers whose data has changed, or differs by rounding: the chief's decides, and all do the same."""

from __future__ import annotations

import numpy as np
import pytest

import crankshaft

# Two workers, each of which gives its half and says so, with an end or without.
HALVES = """
import json, os, sys
import numpy as np
import tensorflow as tf
import crankshaft
from tests.runner.saved.test_changed_data import Count

def half():
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    ids = np.arange(64, dtype=np.int32)
    task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    return tf.data.Dataset.from_tensor_slices((ids, ids)).shard(2, task).with_options(options)

data = {"given": lambda: (half().batch(4), None), "endless": lambda: (half().repeat(), None)}[sys.argv[2]]
crankshaft.run(
    Count, data=data, train_steps=8, global_batch_size=8, optimizer="sgd", learning_rate=1.0, jit="off",
    shuffle_buffer=0, strategy="multi_worker", progress="plain", run_dir=sys.argv[1],
)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("form", "counts"), [("given", ", 32, 32"), ("endless", "")])
def test_parts_that_workers_give_are_not_divided_again(start_workers, tmp_path, form, counts):
    (tmp_path / "halves.py").write_text(HALVES)
    output = start_workers(2, tmp_path / "halves.py", tmp_path / "run", form).ok().output(0)
    assert f", 2 workers: divided as it was given to each{counts}\n" in output
    seen = crankshaft.load_model(str(tmp_path / "run")).weights[0].numpy()[:, 0]
    np.testing.assert_allclose(seen[:64], -1 / 8)
