"""Recipes and the plain loops that they replace train alike, and a recipe is not the longer one.

Both begin with the weights of one seed and take examples in one order, so that some steps give the same weights within
rounding. What is random in a step is edited to be the same in both.
"""

from __future__ import annotations

import importlib.util
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.launch.command_line.flags import Flags
from tests.recipes.kinds import KINDS, LOOPS

# The texts of both are edited: two epochs are enough, and games of four rounds.
_EPOCHS = [(r"train_epochs=\d+", "train_epochs=2"), (r"for _ in range\(\d+\):(?=\n        for)", "for _ in range(2):")]
_EPOCHS += [(r"len\(lasted\) < 80", "len(lasted) < 4")]
_EDITS = {
    "diffusion": [(r"step_context\(\).seed\(\)|generator.make_seeds\(\)\[:, 0\]", "[1, 2]")],
    "mean teacher": [(r"Dropout\(0.2\)", "Dropout(0.0)")],
    "speech": [(r', bucket_by="[^"]*"', "")],  # buckets' batches have an order of their own
    "translation": [(r', bucket_by="[^"]*"', "")],
}
ONE_RUN = {**dict.fromkeys(("forecasting", "diffusion", "mean teacher", "graph network", "multi-task"), "done")}
ONE_RUN |= {"physics": "solved", **{name: name for name in ("detection", "translation", "ranking", "speech")}}


@pytest.fixture(autouse=True)
def _in_one_order(monkeypatch, tmp_path):
    for name, value in {"jit": "off", "shuffle_buffer": 0, "progress": "off"}.items():
        monkeypatch.setitem(Flags.__init__.__kwdefaults__, name, value)
    monkeypatch.chdir(tmp_path)


def _edited(name: str, text: str) -> str:
    for pattern, new in (*_EPOCHS, *_EDITS.get(name, ())):
        text = re.sub(pattern, new, text)
    return text


def _recipe(name: str) -> dict:
    """Runs a recipe; returns its names."""
    kind, names = KINDS[name], {"np": np, "tf": tf, "rng": np.random.default_rng(0), "__name__": "recipe"}
    names |= {each: getattr(crankshaft, each) for each in ("Source", "Spec", "Trainer", "mean", "run")}
    if kind.page == "docs/cookbook.md":
        exec(kind.block("def plane():"), names)
    exec(_edited(name, kind.recipe()), names)
    return names


def _loop(name: str, names: dict) -> tuple[dict[str, float], list[np.ndarray]]:
    """Runs the loop that a recipe replaces, on the recipe's data; returns its metrics and weights."""
    with open("loops.py", "w", encoding="utf-8") as file:  # autograph reads a function's text
        file.write(_edited(name, LOOPS.read_text(encoding="utf-8")))
    spec = importlib.util.spec_from_file_location("loops", "loops.py")
    spec.loader.exec_module(loops := importlib.util.module_from_spec(spec))
    loop = getattr(loops, KINDS[name].loop)
    keras.utils.set_random_seed(0)
    code = loop.__code__
    return loop(*(names[each] for each in code.co_varnames[: code.co_argcount]))


def _are_close(mine: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    # Rounding by 1e-7 in some 50 steps of 0.001 and more; Adam divides gradients of rounding alone by their own size.
    return all(np.allclose(a, b, rtol=0, atol=1e-4) for a, b in zip(mine, theirs, strict=True))


def test_a_recipe_is_at_most_as_long_as_the_loop_that_it_replaces():
    assert len(KINDS) == 14
    for name, kind in KINDS.items():
        loop, recipe = kind.lines()
        assert 0 < recipe <= loop, name


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_RUN)
def test_a_recipe_trains_what_its_loop_trains(name):
    names = _recipe(name)
    done = names[ONE_RUN[name]]
    metrics, weights = _loop(name, names)
    assert metrics == pytest.approx({key: done.result["eval"][key] for key in metrics}, rel=1e-4)
    assert _are_close([w for model in done.models.values() for w in model.get_weights()], weights)


@pytest.mark.slow
def test_a_scheduler_chooses_what_its_loop_chooses():
    names = _recipe("a scheduler")
    metrics, _ = _loop("a scheduler", names)
    assert [metrics["rate"]] == names["rates"]
    assert metrics["loss"] == pytest.approx(names["loss_at"](names["step"], *names["rates"]), abs=1e-6)


@pytest.mark.slow
def test_games_that_ppo_learns_from_are_those_of_its_loop():
    pytest.importorskip("gymnasium")
    names = _recipe("PPO")
    metrics, _ = _loop("PPO", names)
    assert metrics["lasted"] == pytest.approx(names["learn"](most=4), rel=1e-12)  # counts of steps that weights decide


@pytest.mark.slow
def test_clicks_of_three_days_are_predicted_as_by_their_loop():
    names = _recipe("click logs")
    metrics, _ = _loop("click logs", names)
    assert min(metrics["auc"], names["today"].result["eval"]["auc"]) > 0.95  # other initial weights and ids


@pytest.mark.slow
def test_a_recipe_trains_what_the_loop_beside_it_trains():
    kind, names = KINDS["tutorial"], {"__name__": "recipe", "crankshaft": crankshaft}
    exec(kind.block("points = rng.normal"), names)
    exec(kind.block(kind.loop).replace(".shuffle(800)", ""), names)
    exec(kind.recipe(), names)
    assert _are_close(names["after"].model.get_weights(), names["model"].get_weights())
