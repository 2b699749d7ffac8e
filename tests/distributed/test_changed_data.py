"""Two workers whose data has changed, or differs by rounding: the chief's decides, and all do the same."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest

import crankshaft
from tests.runs import manifests

# The second worker's arrays differ in their last bits, as another CPU's may. How many there are stands in a file, since
# a flag of the script's own would be refused as a changed configuration before.
SCRIPT = """
import json, os, pathlib
import numpy as np
from crankshaft.launch import train
from tests.launch.line import Line

def data():
    examples = int(pathlib.Path(__file__).with_name("examples").read_text())
    x = np.random.default_rng(0).random((examples, 3), np.float32)
    x += x * 2e-7 * json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    return (x, x[:, 0]), (x[:16], x[:16, 0])

train.main(Line, data=data)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "line.py"
    path.write_text(textwrap.dedent(SCRIPT))
    path.with_name("examples").write_text("40")
    return path


@pytest.mark.slow
def test_the_chiefs_data_decides_for_all(start, script):
    def run(*flags):
        flags = ("--global_batch_size=8", "--step_timeout_seconds=20", *flags)
        return start("run", *flags, local=("--ps=0",), script=script)

    first = run("--train_steps=4").ok()
    assert manifests(first.run_dir)[-1]["about"]["data"]["train"]["examples"] == 40
    # A worker that evaluated alone would wait for the other in vain.
    again = run("--train_steps=4").ok()
    assert "evaluation at step 4" in again.output
    assert "data is not that of" not in again.output
    script.with_name("examples").write_text("48")
    more = run("--train_steps=8")
    assert more.wait().code == 2
    assert more.output.count("is a run of other training data (examples: 40 -> 48)") >= 1
    assert more.starts() == 1
    allowed = run("--train_steps=8", "--allow_changed_config").ok()
    assert allowed.output.count("the training data is not that of ckpt-4 (examples: 40 -> 48)") == 1


# Two workers, each of which gives its half and says so, with an end or without.
HALVES = """
import json, os, sys
import numpy as np
import tensorflow as tf
import crankshaft
from tests.launch.saved.test_changed_data import Count

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
