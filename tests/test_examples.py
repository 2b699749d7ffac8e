"""The examples run as they stand: the notebooks in a Jupyter kernel, those that take long in processes of their own."""

import contextlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys

import nbformat
import numpy as np
import pytest
import tensorflow as tf
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from crankshaft.engine.data.order import Order
from tests.pages import ROOT, blocks
from tests.waiting import PATIENCE, wait_until

EXAMPLES = ROOT / "examples"


def execute(notebook, folder) -> list:
    """Runs a notebook in a folder, in a kernel of this Python; returns its cells of code."""
    os.environ["JUPYTER_PLATFORM_DIRS"] = "1"
    notebook.metadata.pop("kernelspec", None)
    client = NotebookClient(notebook, timeout=PATIENCE, resources={"metadata": {"path": str(folder)}})
    manager = client.create_kernel_manager()
    manager.kernel_cmd = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    client.execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(cell) -> str:
    """What a cell has printed or shown, as text."""
    found = [output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "\n".join(found)


def shown(cells) -> list[dict]:
    """What cells have displayed, by media type; nothing has a terminal's codes, which a page shows as they are."""
    outputs = [output for cell in cells for output in cell.outputs]
    assert "\\u001b" not in json.dumps(outputs)
    return [output["data"] for output in outputs if output["output_type"] == "display_data"]


@pytest.mark.slow
def test_the_notebook_runs_and_draws_one_bar(tmp_path):
    code = execute(nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4), tmp_path)
    (bar,) = shown(code)  # and no empty element before the summary
    assert bar["text/html"].startswith('<progress value="260" max="260"></progress> <code>step 260/260  loss')
    assert "Run(step=260, loss=" in texts(code[1])
    assert "eval_loss" in texts(code[2])
    assert "True 260" in texts(code[4])
    assert (tmp_path / "runs" / "plane" / "events.jsonl").exists()


def cell_of(block) -> str:
    """A block of the guide as one types it into a cell."""
    if block.language == "bash":
        return f"!{block.text}"
    return f"%%writefile {block.title}\n{block.text}" if block.title else block.text


@pytest.mark.slow
def test_the_guide_runs_in_a_notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    guide = [block for block in blocks(ROOT / "docs" / "notebooks.md") if block.language != "console"]
    cells = [nbformat.v4.new_code_cell(cell_of(block)) for block in guide]
    code = execute(nbformat.v4.new_notebook(cells=cells), tmp_path)
    *in_python, _ = code  # the last one's command has a terminal
    assert [bar["text/html"].count("<progress") for bar in shown(in_python)] == [1, 1]  # the run, and it again
    (page,) = [
        output
        for cell in in_python
        for output in cell.outputs
        if "<iframe" in output.get("data", {}).get("text/html", "")
    ]
    assert "step" in page["data"]["text/html"]
    assert "resumed at step 65 of 130" in texts(code[2])
    result = json.loads((tmp_path / "runs" / "two" / "result.json").read_text())
    assert (result["step"], result["strategy"]) == (46, "multi_worker")


@pytest.mark.slow
def test_a_notebook_holds_a_run_from_cell_to_cell(tmp_path):
    code = execute(nbformat.read(EXAMPLES / "held.ipynb", as_version=4), tmp_path)
    assert shown(code) == []
    assert re.findall(r"^\d+", texts(code[1]), re.M) == ["20", "40", "60", "80", "100"]
    assert "100 a good start True" in texts(code[3])
    assert "eval_loss" in texts(code[4])


SLOW_STEPS = """
import hashlib, time
import numpy as np
import tensorflow as tf
from crankshaft import Trainer, mean, run
from crankshaft.engine.hooks import every_steps

points = np.random.default_rng(0).normal(size=(500, 3)).astype("float32")


class Plane(Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(8), tf.keras.layers.Dropout(0.5), tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        return mean(tf.square(outputs - batch[1]))


def trained(run_dir, seconds=0.0):
    wait = every_steps(1, lambda *_: time.sleep(seconds))
    flags = {"train_steps": 1000, "checkpoint_every_steps": 100, "jit": "off", "progress": "off", "run_dir": run_dir}
    done = run(Plane, data=((points, points[:, :1]), None), hooks=[wait], **flags)
    return done.step, hashlib.sha256(b"".join(array.tobytes() for array in done.model.get_weights())).hexdigest()
"""


@contextlib.contextmanager
def kernel(folder):
    """A kernel of this Python in a folder, and a client of it."""
    manager = KernelManager()
    manager.kernel_cmd = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager.start_kernel(cwd=str(folder))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=PATIENCE)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.slow
def test_a_cell_that_is_interrupted_and_a_kernel_that_is_killed_resume_to_the_bit(tmp_path):
    saved = tmp_path / "run" / "checkpoints"

    def has_saved(step: int) -> bool:
        return any(int(path.name[5:].split(".")[0]) >= step for path in saved.glob("ckpt-*.manifest.json"))

    with kernel(tmp_path) as (manager, client):
        client.execute_interactive(SLOW_STEPS, timeout=PATIENCE, output_hook=lambda _: None)
        cell = client.execute("trained('run', 0.005)")
        wait_until(lambda: has_saved(200))
        manager.interrupt_kernel()  # the stop button
        while client.get_shell_msg(timeout=PATIENCE)["parent_header"].get("msg_id") != cell:
            pass
        client.execute("trained('run', 0.005)")
        wait_until(lambda: has_saved(600))
    with kernel(tmp_path) as (_, client):
        printed = []
        code = f"{SLOW_STEPS}\nprint(trained('run') == trained('undisturbed'), trained('run')[0])"
        client.execute_interactive(code, timeout=PATIENCE, output_hook=printed.append)
    texts = [message["content"].get("text", "") for message in printed]
    assert "True 1000\n" in texts, texts


@pytest.mark.slow
def test_a_mistake_in_a_notebook_is_the_programs_line(tmp_path):
    cell = nbformat.v4.new_code_cell("import crankshaft\ncrankshaft.run(model='mpl', input='digits')")
    cell.metadata["tags"] = ["raises-exception"]  # is shown, and ends nothing
    (cell,) = execute(nbformat.v4.new_notebook(cells=[cell]), tmp_path)
    (error,) = cell.outputs
    assert (error["output_type"], error["ename"]) == ("error", "UsageError")
    assert error["evalue"].startswith("model=mpl is unknown; did you mean mlp?")


def ran_as_a_script(name: str, folder) -> str:
    """What an example prints, run in a process and a folder of its own."""
    shutil.copy(EXAMPLES / name, folder)
    done = subprocess.run([sys.executable, name], cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["minimal.py", "own_step.py"])
def test_a_loop_and_a_step_that_are_written_out_train_two_replicas_as_one_device(name, tmp_path):
    assert "the weights agree: they differ by at most" in ran_as_a_script(name, tmp_path)


@pytest.mark.parametrize(("replicas", "tolerance"), [(1, 1e-6), pytest.param(2, 1e-5, marks=pytest.mark.thorough)])
def test_the_loop_of_tensorflow_alone_trains_the_engines_weights(replicas, tolerance):
    """An operation in another order rounds otherwise, by 1e-7 of an update, which is 0.01 at most: after 160 updates
    2e-7, beside weights of up to 1.6, which float32 has in steps of 1.2e-7. Replicas' sums have further orders. (A mean
    of replicas' means differs by 2e-3, Adam's betas that are not rounded to float32 by 7e-6.)
    """
    alone, by_the_engine = (runpy.run_path(str(EXAMPLES / name))["train"] for name in ("minimal.py", "own_step.py"))
    if replicas == 1:
        weights = alone(tf.distribute.OneDeviceStrategy("CPU:0"))
        expected, _ = by_the_engine()
    else:
        weights = alone(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
        expected, _ = by_the_engine(strategy="mirrored", num_virtual_devices=2)
    for ours, engines in zip(weights, expected, strict=True):
        np.testing.assert_allclose(ours, engines, rtol=0, atol=tolerance)


def test_the_loop_of_tensorflow_alone_has_the_engines_order():
    loop = runpy.run_path(str(EXAMPLES / "minimal.py"))
    order = Order(loop["EXAMPLES"], loop["BATCH_SIZE"], block_steps=1, seed=loop["SEED"])
    for step in (0, 1, order.steps_per_epoch - 1, 3 * order.steps_per_epoch):
        shares = [loop["examples_of"](*tf.constant([step, replica, 2], tf.int64)).numpy() for replica in range(2)]
        block, offset, _ = order.block_at(step)
        np.testing.assert_array_equal(np.concatenate(shares), order.examples(tf.constant(block, tf.int64))[offset])


@pytest.mark.slow
def test_the_search_finds_and_prunes(tmp_path):
    out = ran_as_a_script("search.py", tmp_path)
    found = re.search(r"best of 10 trials, (\d+) of them pruned: (0\.\d+) by", out)
    assert found, out[-2000:]
    assert int(found[1]) >= 1
    assert float(found[2]) > 0.9  # a guess is right once in ten


@pytest.mark.slow
def test_active_learning_runs_to_its_end(tmp_path):
    accuracies = re.findall(r"^(\d+) labels: accuracy (0\.\d+)$", ran_as_a_script("active_learning.py", tmp_path), re.M)
    assert [int(labels) for labels, _ in accuracies] == [*range(20, 180, 20)]
    assert float(accuracies[-1][1]) > 0.85  # of 160 labels


@pytest.mark.slow
def test_a_gan_is_seen_to_make_the_ring(capsys):
    _, distance = runpy.run_path(str(EXAMPLES / "gan.py"))["train"](pictures=3, steps=500)
    assert capsys.readouterr().out.count("step ") == 3
    assert distance < 0.35  # noise is 1 away


@pytest.mark.slow
@pytest.mark.parametrize("name", ["policy_gradient", "ppo"])
def test_policy_gradients_balance_the_pole(name, tmp_path):
    pytest.importorskip("gymnasium")
    out = ran_as_a_script(f"{name}.py", tmp_path)
    assert float(re.search(r"games last (\d+) steps$", out.strip())[1]) >= 475  # the most is 500
