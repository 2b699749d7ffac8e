"""Real coordinators, workers and parameter servers on loopback, killed for real: what is counted, and what goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import version
from crankshaft.engine.checkpoints import RunDir
from crankshaft.engine.record.events import read
from crankshaft.parts.ask.requests import ask
from tests import runs
from tests.distributed.jobs import STEPS_PER_EPOCH, check_updates, variable
from tests.forked import PYTHON_PATH
from tests.parts.tensorboard.boards import raw_events
from tests.processes import ROOT, Job
from tests.waiting import PATIENCE

LAYERED = ROOT / "tests" / "distributed" / "layered.py"


def test_each_example_is_seen_once_an_epoch_and_each_checkpoint_by_an_evaluator(start):
    steps = 10 * STEPS_PER_EPOCH
    flags = (f"--train_steps={steps}", "--checkpoint_every_steps=50", "--eval_batch_size=50", "--eval_batches=1")
    job = start("run", *flags, "--histogram_every_steps=100", local=("--evaluator",)).ok()
    seen = check_updates(job, steps)
    assert (seen == 10).all()
    assert variable(job.run_dir, "optimizer/iterations") == steps
    assert variable(job.run_dir, "/steps/") == steps
    assert variable(job.run_dir, "/examples/") == 10 * 1000
    # Each step moves it once, from its present value, in float32.
    assert variable(job.run_dir, "/average/") == pytest.approx(1 - 0.998**steps, rel=1e-5)
    leases = job.result["leases"]
    assert leases["scheduled"] == leases["done"] > 0
    assert leases["retried"] == leases["steps_unseen"] == 0
    assert job.result["staleness"]["mean"] < 10
    assert {each["server"] for each in job.result["placement"]} == {0, 1}
    partial = f"evaluation of the first 1 of 4 batches at step {steps}: example 24.5"  # the mean of 0 to 49
    assert f"[evaluator] {partial}" in job.output
    assert list((job.run_dir / "best").glob("ckpt-*.manifest.json"))
    assert list((job.run_dir / "tensorboard" / "eval").glob("*tfevents*"))
    assert job.output.count("=100 writes histograms of weights, and with parameter servers none of gradients") == 1
    events = raw_events(job.run_dir / "tensorboard" / "train")
    kinds = {value.tag.split("/")[0] for event in events for value in event.summary.value}
    assert "weights" in kinds
    assert not {"gradients", "inputs"} & kinds
    servers_files = runs.manifests(job.run_dir)[-1]["files"]
    assert len(servers_files) > 2  # the index, and a file each for the two servers at least
    assert job.left == []
    windows = [line.event for line in read(job.run_dir / "events.jsonl") if line.kind == "window"]
    workers = [row for window in windows for row in window["workers"]]
    assert {row["name"] for row in workers} == {"worker 0", "worker 1"}
    assert sum(row["steps"] for row in workers) == steps
    assert all(row["step_ms"] > 0 for row in workers if row["steps"])
    assert sum(sum(window["staleness"].values()) for window in windows) == steps
    servers = windows[-1]["servers"]
    assert [server["bytes"] for server in servers] == job.result["server_bytes"]
    assert [server["name"] for server in servers] == ["ps 0", "ps 1"]
    assert servers[0]["seconds"] > 0


OTHER_BUILDS = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
import numpy as np
import tensorflow as tf
from crankshaft.engine import version
from crankshaft.launch import train
from crankshaft.parts.parameter_servers import sources
from tests.launch.line import Line

task = json.loads(os.environ["TF_CONFIG"])["task"]
if task["type"] == "evaluator" or (task["type"], task["index"]) == ("worker", 1):
    other = version.described().replace(version.build(), "0123456789ab")
    version.described = lambda: other
if (task["type"], task["index"]) == ("worker", 0):  # as before versions were asked for
    answer_to = sources.answer_to
    sources.answer_to = lambda name, function: name.endswith("versions") or answer_to(name, function)
if task["type"] == "ps":
    tf.__version__ = "2.99.0"
x = np.arange(12, dtype=np.float32).reshape(4, 3)
train.main(Line, data=((x, x[:, 0]), (x, x[:, 0])))
"""


@pytest.mark.slow
def test_tasks_of_other_builds_and_versions_are_named_in_a_line_and_train(start, tmp_path):
    (tmp_path / "script.py").write_text(OTHER_BUILDS)
    flags = ("--train_steps=4", "--global_batch_size=2")
    job = start("run", *flags, local=("--ps=1", "--evaluator"), script=tmp_path / "script.py").ok()
    ours = version.described()
    other = ours.replace(version.build(), "0123456789ab")
    lines = [line.partition("tasks run different code: ")[2] for line in job.output.splitlines()]
    upgrade = "; install the same everywhere, unless it is an upgrade"
    assert sorted(filter(None, lines)) == [
        f"crankshaft {ours} at chief and ps 0, {other} at worker 1; "
        f"tensorflow {tf.__version__} at chief and worker 1, 2.99.0 at ps 0; an earlier build at worker 0{upgrade}",
        f"crankshaft {ours} at ckpt-4, {other} at evaluator{upgrade}",
    ]


@pytest.mark.slow
def test_a_slow_worker_is_named(start):
    """Three of four tenths of a second it is stopped. Before, each task returns its stacks."""
    job = start("run", "--mode=train", "--train_steps=10000000", "--checkpoint_every_steps=0", local=("--ps=1",))
    job.until(lambda: "step " in job.output)
    for task in ("worker 1", "ps 0", "chief"):
        assert "thread MainThread:" in (ask(RunDir(job.run_dir).requests, "stacks", task, 60.0) or "no answer"), task

    def slowed() -> bool:
        job.send_to("worker 1", signal.SIGSTOP)
        time.sleep(0.3)
        job.send_to("worker 1", signal.SIGCONT)
        time.sleep(0.1)
        return "worker 1 is slow: " in job.output

    job.until(slowed)
    assert "worker 0 is slow: " not in job.output
    job.send(signal.SIGTERM)
    assert job.wait().code == 143
    warned = [line.event for line in read(job.run_dir / "events.jsonl") if line.kind == "warning"]
    assert "worker 1" in {event["task"] for event in warned}


@pytest.mark.slow
def test_a_hook_that_is_never_due_ends_a_run_in_which_nothing_is_due(start, monkeypatch):
    """What is handed out by then is done, and no more is.

    On one core TensorFlow's servers take so many threads: one would wait for the lease, which waits for the other.
    """
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "1")
    never = ("--checkpoint_every_steps=0", "--summary_every_steps=0", "--steps_per_loop=4")
    flags = ("--mode=train", "--train_steps=1000000", "--enough=100", *never)
    job = start("run", *flags, local=("--workers=1", "--ps=1")).ok()
    assert 100 <= job.result["step"] < 10_000  # a second of steps, at most, is under way when a tenth of one is read
    assert "it is enough" in job.output
    check_updates(job, job.result["step"])


@pytest.mark.slow
@pytest.mark.parametrize("task", ["ps 1", "chief"])
def test_after_a_server_or_the_coordinator_is_killed_the_newest_snapshot_goes_on(start, task):
    """Also from one that is taken beside other updates: it waits for those in progress, and no others begin."""
    steps = 100 * STEPS_PER_EPOCH
    flags = ("--mode=train", f"--train_steps={steps}", "--checkpoint_every_steps=0", "--snapshot_seconds=0.01")
    job = start("run", *flags)
    job.until(lambda: job.snapshot(1) >= 100)
    job.kill(task)
    job.ok()
    seen = check_updates(job, steps)
    assert (seen == 100).all()  # what was lost with the task is lost in the counts, too
    assert task == "chief" or re.search(r"\[chief\] error: ps 1 \(127.0.0.1:\d+\) is lost", job.output)
    assert int(re.search(r"resumed at step (\d+) of", job.output.replace(",", ""))[1]) >= 100
    assert "is taken from memory" in job.output


@pytest.mark.slow
def test_an_example_that_always_fails_is_named_and_not_tried_for_ever(start):
    flags = ("--mode=train", "--train_steps=50", "--poison")
    job = start("run", *flags, local=("--workers=1", "--ps=1"))
    assert job.wait().code == 2
    (line,) = re.findall(r"\[chief\] error: (.*)", job.output)
    assert re.match(
        r"worker 0 failed 4 times on steps \d+ to \d+, at step \d+ \(batch \d+ of epoch 0\) or the next", line
    ), line
    assert re.search(r"a feature is over 50.*, at \S+\.py:\d+ in train_step; correct", line)


@pytest.mark.slow
def test_a_join_that_a_stopped_worker_holds_up_names_it_and_its_steps(start):
    flags = ("--mode=train", "--train_steps=100000", "--checkpoint_every_steps=5000", "--step_timeout_seconds=3")
    job = start("run", *flags, local=("--max_restarts=0",))
    job.until(lambda: runs.newest(job.run_dir) >= 5000)
    time.sleep(1.5)  # until all of the writing is over: see the next test
    job.send_to("worker 1", signal.SIGSTOP)  # the other goes on up to the next checkpoint, for which all are joined
    assert job.wait().code == 1
    (line,) = re.findall(r"\[chief\] error: (.*)", job.output)
    # Which of the two depends on whether it had begun what it was sent.
    found = r"worker 1 \(127\.0\.0\.1:\d+\) (holds steps \d+ to \d+|does not answer)"
    assert re.match(f"no update for step_timeout_seconds=3: {found}", line), line
    assert "worker 0" not in line
    assert job.left == []


@pytest.mark.slow
def test_a_worker_stopped_while_a_checkpoint_is_written_ends_the_run(start):
    """There TensorFlow may wait for it with Python's lock held, so that nobody is left to name it."""
    flags = ("--mode=train", "--train_steps=100000", "--checkpoint_every_steps=20", "--step_timeout_seconds=3")
    job = start("run", *flags, local=("--max_restarts=0",))
    job.until(lambda: runs.newest(job.run_dir) >= 20)
    job.send_to("worker 1", signal.SIGSTOP)
    assert job.wait().code == 1
    assert re.search(r"no update for step_timeout_seconds=3: worker 1|Timeout \(0:00:30\)!", job.output)
    assert job.left == []


@pytest.mark.slow
def test_variables_pulled_in_buckets_give_the_bits_of_those_read_one_by_one(start):
    """One worker; layers with statistics, counters, penalties, a table, constraints, frozen weights."""

    def run(name: str, *flags: str) -> Job:
        flags = ("--train_steps=60", "--eval_every_steps=30", "--checkpoint_every_steps=30", *flags)
        return start(name, *flags, local=("--workers=1",), script=LAYERED).ok()

    buckets = run("buckets", "--bucket_bytes=300")  # several, most of them with several variables
    runs.assert_equal_bits(buckets.run_dir, run("one_by_one", "--one_by_one").run_dir, "eval")
    places = {each["path"]: each["server"] for each in buckets.result["placement"]}
    assert places["embedding/embeddings"] == 1  # by tf.device in build_model
    small, large = sorted(buckets.result["server_bytes"])
    assert large < 1.1 * small  # the biggest first; in the order in which they are made it is 1.5
    rounded = run("rounded", "--reduce_dtype=bfloat16", "--variable_placement=kernel$=ps:0")
    places = {each["path"]: each["server"] for each in rounded.result["placement"] if not each["beside"]}
    assert {server for path, server in places.items() if path.endswith("kernel")} == {0}
    # 8 bits of each weight and gradient: a run that is near, and not the same.
    losses = [job.result["train"]["loss"] for job in (buckets, rounded)]
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.slow
def test_one_worker_resumed_gives_the_bits_of_one_that_was_not_interrupted(start):
    def run(name: str, *more: str) -> Job:
        flags = ("--eval_every_steps=100", "--train_steps=400", "--checkpoint_every_steps=100")
        return start(name, *flags, "--learning_rate_schedule=cosine", *more, local=("--workers=1",)).ok()

    assert run("halves", "--stop_at_step=150").result["step"] == 150
    halves, whole = run("halves"), run("whole")
    runs.assert_equal_bits(halves.run_dir, whole.run_dir, "eval")


@pytest.mark.slow
def test_under_a_bound_of_staleness_workers_go_in_rounds_and_wait_for_one(start):
    bound = 3
    steps = 60 * STEPS_PER_EPOCH
    flags = ("--mode=train", f"--train_steps={steps}", "--checkpoint_every_steps=200")
    job = start("run", *flags, f"--max_staleness_steps={bound}")
    job.until(lambda: runs.newest(job.run_dir) >= 200)
    job.send_to("worker 1", signal.SIGSTOP)
    time.sleep(1.0)  # in which the other one alone would do all steps up to the next checkpoint
    job.send_to("worker 1", signal.SIGCONT)
    assert (check_updates(job.ok(), steps) == 60).all()
    # While one is at a step, the other does at most the lease of its round.
    assert 0 < job.result["staleness"]["max"] <= bound + 1


TWICE = """
import numpy as np
import tensorflow as tf
from crankshaft import Trainer, main, make_optimizer, mean, minimize


class Counted(tf.keras.layers.Layer):
    def build(self, shape):
        self.count = self.add_weight(shape=[], initializer="zeros", trainable=False, name="count", aggregation="sum")

    def call(self, x, training=False):
        if training:
            self.count.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return x


class Twice(Trainer):
    def build(self):
        self.model = tf.keras.Sequential([tf.keras.Input([2]), Counted(), tf.keras.layers.Dense(1)])
        self.optimizer = make_optimizer(self, self.model.trainable_variables)

    def losses(self, batch):
        return {"loss": mean(tf.square(self.model(batch, training=True))[:, 0])}

    def train_step(self, batch):
        minimize(self, batch, self.losses, {"loss": self.optimizer})
        return minimize(self, batch, self.losses, {"loss": self.optimizer})


main(Twice, data=lambda: ((np.ones([80, 2], np.float32),), None))
"""


@pytest.mark.slow
def test_two_updates_of_one_step_add_to_a_count_on_its_server(start, tmp_path):
    (tmp_path / "twice.py").write_text(TWICE)
    flags = ("--mode=train", "--train_steps=10", "--global_batch_size=8")
    job = start("run", *flags, script=tmp_path / "twice.py", local=("--ps=1",)).ok()
    assert variable(job.run_dir, "/count/") == 2 * 8 * 10


ROWS = """
import numpy as np
import tensorflow as tf
from crankshaft import Trainer, main, mean


class Rows(Trainer):
    def build_model(self):
        layers = tf.keras.layers
        pooled = [layers.Embedding(50, 8), layers.GlobalAveragePooling1D()]
        return tf.keras.Sequential([tf.keras.Input([3], dtype="int64"), *pooled, layers.Dense(1)])

    def loss(self, outputs, batch):
        return mean(tf.square(outputs[:, 0] - batch[1]))


rng = np.random.default_rng(0)
main(Rows, data=lambda: ((rng.integers(0, 50, [64, 3]), rng.normal(size=64).astype(np.float32)), None))
"""


@pytest.mark.slow
def test_all_rows_of_a_layer_move_as_on_one_device(start, tmp_path):
    """By adam, which moves those that no example has; one worker, so that updates have one device's order."""
    script = tmp_path / "rows.py"
    script.write_text(ROWS)
    flags = ("--mode=train", "--train_steps=16", "--global_batch_size=8", "--learning_rate=0.05", "--jit=off")
    job = start("run", *flags, script=script, local=("--workers=1",)).ok()
    here = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    command = [sys.executable, script, *flags, f"--run_dir={tmp_path}/one"]
    subprocess.run(command, check=True, env=here, capture_output=True, timeout=PATIENCE)
    ours, theirs = runs.tensors(tmp_path / "one"), runs.tensors(job.run_dir)
    compared = [name for name in ours if "/slots/" in name or "/model/" in name]
    assert len(compared) >= 9  # three weights with two slots each
    for name in compared:
        np.testing.assert_allclose(theirs[name], ours[name], rtol=1e-6, atol=1e-7, err_msg=name)
