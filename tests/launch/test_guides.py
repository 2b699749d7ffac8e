"""README and the guides run as they stand: their scripts, their Python and what they have one type.

A page's ```bash lines and ```python blocks run in their order in a folder of their own, the cookbook's recipe by
recipe; a block with a title is that file. `crankshaft train` and scripts run in this process, where starting costs
nothing. What can't run in a test stands in a ```console block, whose flags test_docs.py reads."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import types
from importlib.util import find_spec
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer
from crankshaft.runner.command_line.flags import Flags
from crankshaft.runner.host.tasks import SCHEDULERS
from tests.forked import PYTHON_PATH
from tests.logical_cpus import use_new_collective_keys
from tests.pages import GUIDES, ROOT, blocks, words
from tests.waiting import PATIENCE

COOKBOOK, FROM_KERAS = ROOT / "docs" / "cookbook.md", ROOT / "docs" / "from_keras.md"
RUNNING = {
    path.relative_to(ROOT).as_posix(): path
    for path in GUIDES
    if path != COOKBOOK and any(block.language in ("bash", "python") for block in blocks(path))
}
# What has to hold of a page's names once it has run, or a recipe's, beyond that it ran; a model that learns nothing
# fails it.
HOLDS = {
    "README.md": "open('runs/first/events.jsonl').read().count('\"row\"') == 10",  # an epoch each
    "docs/click_models.md": "np.array_equal(vectors, np.concatenate(trainer.embedding(ids, training=False)))"
    " and result_of('runs/clicks')['eval']['auc'] > 0.8 and result_of('runs/clicks')['tables']['embedding/rows_freed']",
    # Prices vary by 2.6, rows by 0.6.
    "docs/data.md": "done.result['eval']['loss'] < 1 and weighed.result['eval']['loss'] < 1"
    " and result_of('runs/rows')['eval']['loss'] < 0.1",
    # The noise's variance is 0.09; the two loops shuffle differently.
    "docs/from_keras.md": "all(abs(loss - before) < 0.02 and loss < 0.13 for loss in"
    " (after.result['eval']['loss'], ported.result['eval']['loss'])) and optimizer.iterations == 192",
    "docs/keras.md": "run.history.epoch == [0, 1, 2, 3]"
    " and first.history.history['val_loss'][1] < first.history.history['val_loss'][0]"
    " and halved.times == 4 and mine.optimizer.iterations == 125",
    "docs/language_models.md": "said.startswith('The Congress') and len(said) > 40",
    "docs/mesh.md": "abs(sharded.result['eval']['loss'] / one.result['eval']['loss'] - 1) < 1e-5"
    " and abs(mixed.result['eval']['loss'] / alone.result['eval']['loss'] - 1) < 1e-5",
    "docs/model.md": "done.result['eval']['loss'] < 0.01 and best.count_params() == 4"
    " and [result_of('runs/mine')[key] for key in ('strategy', 'stop')] == ['on_cpu', 'good enough']",
    "docs/monitoring.md": "len(history) >= 8 and done.result['stop'] == 'good enough'",
    "docs/resume.md": "model(tf.zeros([1, 28, 28, 1])).shape == (1, 10)",
    "docs/your_own_loop.md": "run.step == 5 and run.extra == {'labelled': 40} and known < 800",
    "Semi-supervised training": "matched.result['eval']['accuracy'] > 0.9",
    "A physics-informed network": "solved.result['eval']['loss'] < 1e-3",
    "A GAN": "np.allclose(made.predict(noise, 'generator'), serve(features=noise)['outputs'], atol=1e-6)",
    "WGAN-GP with several critic updates": "np.abs(made.mean(0) - 3).max() < 1.5",  # 3 at first
    "Train a part every k steps": "two.trainer.optimizer.iterations.numpy() == 30"
    " and two.trainer.body_optimizer.iterations.numpy() == 10 and same(one.model, two.model)",
    "MoCo": "same(one.model, two.model) and np.allclose(one.trainer.queue, two.trainer.queue, atol=1e-4)"
    " and two.result['eval']['loss'] < 3",
    "A diffusion model": "np.abs(np.linalg.norm(samples, axis=1) - 1).mean() < 0.25",
    "A forecaster": "max(done.result['eval'][f'error_{hours}'] for hours in HORIZONS) < 0.25",  # of 0.7
    "A graph network": "done.result['eval']['loss'] < 0.3 * strength.var()",
    # Sums in another order.
    "A mean teacher": "right.mean() > 0.85",
    "Several tasks, with labels that are missing": "all(np.isclose(value, on_two.result['eval'][name],"
    " rtol=1e-4) for name, value in done.result['eval'].items())",
    # Sums in another order; without noise the loss is some 0.2 after 80 steps.
    "DP-SGD": "all(np.isclose(private.result[s]['loss'], private_on_two.result[s]['loss'], rtol=1e-4)"
    " for s in ('train', 'eval')) and private.result['eval']['loss'] < 4",
    "A weight that changes during training": "all(np.isclose(annealed.result[s]['loss'],"
    " annealed_on_two.result[s]['loss'], rtol=1e-4) for s in ('train', 'eval'))",
    "A variable as the model": "styled.result['eval']['loss'] < 2e-4",  # 5e-3 at first
    "Speech (CTC)": "speech.result['eval']['loss'] < 1",
    "Detection with padded boxes": "detection.result['eval']['loss'] < 1",
    "Translation": "translation.result['eval']['loss'] < 2",
    "Return to a checkpoint, and go on with other data": "run.step == 12",
    "Ranking": "ranking.result['eval']['first'] > 0.8",
}
# Whole runs of minutes together, of several processes some of them.
SLOW = {"data", "files", "notebooks", "language_models", "keras", "parameter_servers", "mesh", "model", "workers"}
SLOW |= {"click_models", "monitoring", "resume", "benchmark", "from_keras", "plan"}
PAGES = [pytest.param(n, marks=pytest.mark.slow) if RUNNING[n].stem in SLOW else n for n in RUNNING]
ON_TWO = {"strategy": "mirrored", "num_virtual_devices": 2}
RECIPES = dict.fromkeys(block.section for block in blocks(COOKBOOK) if block.section and block.language == "python")


class Reader:
    """Types what a page has one type, in the current folder."""

    def __init__(self, inside, names: dict):
        self._inside, self._names = inside, names

    def follow(self, path, block) -> None:
        if block.title:
            with open(block.title, "w", encoding="utf-8") as file:
                file.write(block.text)
        elif block.language == "python":
            lines = "\n" * (block.line - 1) + block.text  # a traceback names the page's own line
            exec(compile(lines, path, "exec"), self._names)
        elif block.language == "bash":
            for command in block.commands():
                self._type(command)

    def _type(self, command: str) -> None:
        match words(command):
            case ["make", target, *_]:  # it has made the environment that this runs in
                assert f"\n{target}: " in (ROOT / "Makefile").read_text()
            case ["crankshaft", "train", *flags]:
                self._inside(*flags).ok()
            case ["python", script, *flags]:
                self._inside.script(script, *flags).ok()
            case _:
                path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
                environment = {**os.environ, "PATH": path, "PYTHONPATH": PYTHON_PATH}
                done = subprocess.run(
                    ["bash", "-ec", command], env=environment, capture_output=True, text=True, timeout=PATIENCE
                )
                assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


class Loader:
    """What PyTorch's DataLoader has for others, for a page that imports it where PyTorch is not installed."""

    collate_fn = None

    def __init__(self, dataset, batch_size: int, shuffle: bool = False):
        self.dataset, self.batch_size, self.shuffle = dataset, batch_size, shuffle

    def __iter__(self):
        order = np.arange(len(self.dataset))
        if self.shuffle:
            np.random.default_rng(0).shuffle(order)
        for at in range(0, len(order), self.batch_size):
            yield [*map(np.stack, zip(*(self.dataset[i] for i in order[at : at + self.batch_size]), strict=True))]


def _result_of(run_dir: str) -> dict:
    with open(os.path.join(run_dir, "result.json"), encoding="utf-8") as file:
        return json.load(file)


def _same_weights(one, two) -> bool:
    """Whether two models have the same weights but for rounding: sums over replicas are in another order."""
    return all(np.allclose(*pair, atol=1e-4) for pair in zip(one.get_weights(), two.get_weights(), strict=True))


@pytest.fixture
def reader(inside, tmp_path, monkeypatch):
    """A `Reader` in a folder of its own, whose scripts can be imported there; and the names of its Python.

    XLA is left out where a page does not ask for it: compiling takes longer than all else that a page does."""
    monkeypatch.setitem(Flags.__init__.__kwdefaults__, "jit", "off")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if find_spec("torch") is None:
        monkeypatch.setitem(sys.modules, "torch.utils.data", types.SimpleNamespace(DataLoader=Loader, Dataset=object))
    before, names = set(sys.modules), {"__name__": "guide", "result_of": _result_of, "same": _same_weights}
    with mock.patch.dict(SCHEDULERS):  # to which a page adds one
        yield Reader(inside, names), names
    for name, module in list(sys.modules.items()):
        if name not in before and str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("name", PAGES)
def test_page_runs(name, reader):
    person, names = reader
    for block in blocks(RUNNING[name]):
        person.follow(RUNNING[name], block)
    assert eval(HOLDS.get(name, "True"), names)


@pytest.mark.slow
@pytest.mark.parametrize("title", RECIPES)
def test_recipe_runs(title, tmp_path):
    """As its reader runs it: a file, in a process of its own; without XLA, whose compiling takes longest."""
    found = blocks(COOKBOOK)
    recipe = [block.text for block in found if block.section == title and block.language == "python"]
    if "keras_hub" in recipe[0]:
        pytest.importorskip("keras_hub")
    begin = "from crankshaft.runner.command_line.flags import Flags\nFlags.__init__.__kwdefaults__['jit'] = 'off'\n"
    check = f"{inspect.getsource(_same_weights)}\nsame = _same_weights\nassert {HOLDS.get(title, 'True')}\n"
    (tmp_path / "recipe.py").write_text("\n".join([begin, found[0].text, *recipe, check]))
    done = subprocess.run([sys.executable, "recipe.py"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "evaluation at step" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "trainer", "data"),
    [("Sharpness-aware minimization (SAM)", "Sam", "plane"), ("WGAN-GP with several critic updates", "Wgan", "far")],
)
def test_recipe_trains_on_two_replicas_what_it_trains_on_one_device(title, trainer, data, reader):
    """Rounding of 1e-7 in 8 steps. What is sampled is made a function of the examples: replicas sample differently."""
    person, names = reader
    names["__name__"] = "recipe"
    found = blocks(COOKBOOK)
    (recipe,) = [block for block in found if block.section == title and block.language == "python"]
    assert len(recipe.text.splitlines()) <= 40
    definitions = recipe.text[: re.search(r"^.*\brun\(", recipe.text, re.M).start()]
    for block in (found[0], dataclasses.replace(recipe, text=definitions)):
        person.follow(COOKBOOK, block)
    if hasattr(names[trainer], "sample"):
        names[trainer].sample = lambda self, real, columns: tf.sin(real[:, :1] * tf.range(1.0, columns + 1)) ** 2
    settings = {"data": names[data], "train_epochs": 1, "learning_rate": 0.05, "progress": "off"}
    one, two = (names["run"](names[trainer], **settings, **more) for more in ({}, ON_TWO))
    for name, model in one.models.items():
        for mine, theirs in zip(model.get_weights(), two.models[name].get_weights(), strict=True):
            np.testing.assert_allclose(theirs, mine, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_trainer_trains_what_the_tape_loop_before_it_trains(reader, monkeypatch):
    """On examples in one order; rounding of 1e-7 in 160 steps of Adam at 0.02 and less."""
    monkeypatch.setitem(Flags.__init__.__kwdefaults__, "shuffle_buffer", 0)
    use_new_collective_keys()  # for the loop's MirroredStrategy: runs of this process have others of another size
    person, names = reader
    arrays, loop, trainer = [block for block in blocks(FROM_KERAS) if block.section == "From a tape loop"][:3]
    for block in (arrays, dataclasses.replace(loop, text=loop.text.replace(".shuffle(800)", "")), trainer):
        person.follow(FROM_KERAS, block)
    for mine, expected in zip(names["after"].model.get_weights(), names["model"].get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-4)


def test_a_program_that_comes_from_elsewhere_is_at_most_as_long_as_before():
    found = blocks(FROM_KERAS)
    for title in ("From a tape loop", "From PyTorch"):
        *_, before, after = (len(each.text.splitlines()) for each in found if each.section == title)
        assert after <= before / 2, title


def test_every_check_is_of_a_page_or_a_recipe():
    assert set(HOLDS) <= {*RUNNING, *RECIPES}


def test_methods_that_the_guide_has_one_override_exist():
    section = (ROOT / "docs" / "model.md").read_text(encoding="utf-8").split("## Override more")[1].split("## ")[0]
    named = [name for line in re.findall(r"^- (`[^:]*):", section, re.M) for name in re.findall(r"`(\w+)`", line)]
    assert len(named) >= 10
    assert [name for name in named if name not in vars(Trainer)] == []
