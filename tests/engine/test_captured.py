"""What changes of a program's objects after a step was traced is named, refused, or part of the run."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
import tensorflow as tf
from IPython.extensions.autoreload import superreload

from crankshaft import make_optimizer, mean
from crankshaft.engine.errors import UsageError
from tests.engine.trainers import Squares

DATA = np.ones((8, 3), np.float32), np.zeros(8, np.float32)
layers = tf.keras.layers


def dense():
    return tf.keras.Sequential([tf.keras.Input([3]), layers.Dense(1)])


class Held(tf.Module):
    def __init__(self):
        super().__init__()
        self.scale = tf.Variable(1.0, trainable=False)


class Objects(Squares):
    """Reads one thing of each kind, some of them in collections."""

    power, factor = 1.0, 1.0

    @property
    def doubled(self):  # no attribute, and no constant
        return 2.0 * self.traced

    def build(self):
        super().build()
        self.gone = "here"
        self.beta, self.traced, self.nothing = 0.0, 0, None
        self.mask, self.masks, self.by_name = np.ones(3, "f"), [np.ones(3, "f"), 1.0], {"a": {"b": np.ones(3, "f")}}
        self.nets, self.held = {"teacher": [dense()]}, Held()

    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([3]), layers.Dropout(0.5, name="drop"), layers.Dense(1, name="out")])

    def loss(self, outputs, batch):
        self.traced += 1
        numbers = self.mask, self.masks[0], self.by_name["a"]["b"], self.masks[1], self.power, self.factor
        scale = sum(map(np.sum, numbers)) + (self.gone == "here") + (self.nothing is not None)
        return mean(scale * (1 + self.beta) * tf.square(outputs[:, 0] - batch[1]))


def another(x):
    return x


def in_place(trainer):
    trainer.masks[0][1] = 0.0


CHANGES = {
    "Objects.mask": lambda trainer: setattr(trainer, "mask", np.zeros(3, "f")),
    "Objects.masks.0": in_place,
    "Objects.masks.1": lambda trainer: trainer.masks.__setitem__(1, 2.0),
    "Objects.by_name.a.b": lambda trainer: trainer.by_name["a"].__setitem__("b", np.zeros(3, "f")),
    "Objects.power": lambda trainer: setattr(trainer, "power", 2.0),
    "Objects.factor": lambda trainer: setattr(type(trainer), "factor", 2.0),
    "Objects.gone": lambda trainer: delattr(trainer, "gone"),
    "Objects.nothing": lambda trainer: setattr(trainer, "nothing", 1.0),
    "Objects.loss": lambda trainer: setattr(trainer, "loss", another),
    "drop.rate": lambda trainer: setattr(trainer.model.get_layer("drop"), "rate", 0.1),
    "out.activation": lambda trainer: setattr(trainer.model.get_layer("out"), "activation", another),
    "out.call": lambda trainer: setattr(trainer.model.get_layer("out"), "call", another),
}


@pytest.fixture(scope="module")
def made(bench):
    made = bench(Objects(), DATA, 4, eval_source=DATA, optimizer="sgd", learning_rate=0.0)
    made.run(1)
    made.strategy.evaluate()
    return made


def test_what_a_step_has_read_is_named_once_by_its_place_as_it_changes(made, caplog):
    trainer = made.trainer
    trainer.mask = np.ones(3, "f")  # equal, though another array
    trainer.loss = trainer.loss  # the same function
    made.run(1)
    assert "as it was traced" not in caplog.text
    for change in CHANGES.values():
        change(trainer)
        for _ in range(2):
            made.run(1)
    lines = [record.getMessage() for record in caplog.records if "as it was traced" in record.getMessage()]
    assert [line.split(":")[0] for line in lines] == [*CHANGES]


REPLACED = {
    "Objects.model": lambda trainer: setattr(trainer, "model", dense()),
    "Objects.optimizer": lambda trainer: setattr(trainer, "optimizer", make_optimizer(trainer, [])),
    "Objects.nets.teacher.0": lambda trainer: trainer.nets["teacher"].__setitem__(0, dense()),
    "Objects.held.scale": lambda trainer: setattr(trainer.held, "scale", tf.Variable(1.0, trainable=False)),
}


@pytest.mark.parametrize("path", REPLACED)
def test_an_object_that_is_replaced_is_refused_before_a_call_and_before_a_save(made, path):
    trainer = made.trainer
    before = trainer.model, trainer.optimizer, trainer.nets["teacher"][0], trainer.held.scale
    with made.strategy.scope():
        REPLACED[path](trainer)
    for check in (lambda: made.run(1), made.strategy.evaluate, trainer.inventory.captured.check_save):
        with pytest.raises(UsageError, match=f"{path} has been replaced"):
            check()
    trainer.model, trainer.optimizer, trainer.nets["teacher"][0], trainer.held.scale = before
    made.run(1)


class Caching(Squares):
    """Holds objects that are many, or whose tensors each call sets again, as distributions do."""

    def build(self):
        super().build()
        self.cache = tf.Module()
        self.cache.sample = None
        part = tf.Module()
        part.numbers = {number: number for number in range(900)}
        self.shared, self.many = [part] * 9, [{**part.numbers} for _ in range(9)]

    def loss(self, outputs, batch):
        self.cache.sample = tf.square(outputs[:, 0] - batch[1])
        return mean(self.cache.sample * self.shared[0].numbers[1])


def test_a_tensor_that_each_call_sets_again_is_no_change_and_too_many_values_are_left_out_by_a_line(bench, caplog):
    with caplog.at_level("INFO", "crankshaft"):
        made = bench(Caching(), DATA, 4)
        made.run(1)
    trainer, lines = made.trainer, [x.getMessage() for x in caplog.records if "too many to compare" in x.getMessage()]
    assert [line.split(",")[0] for line in lines] == ["Caching.many has more than 1"]
    trainer.loss(tf.ones([2, 1]), (None, tf.ones([2])))  # between two calls, in the program
    trainer.cache.other = tf.constant(1.0)
    trainer.many[0][0] = 2
    made.run(1)
    assert "as it was traced" not in caplog.text
    trainer.shared[8].numbers[1] = 2
    made.run(1)
    assert "Caching.shared.0.numbers.1: a step that reads it keeps 1, as it was traced, and it is 2 now" in caplog.text


OUTSIDE: dict[str, tf.Variable] = {}


class Reads(Squares):
    def training_loss(self, outputs, batch):
        return mean(OUTSIDE["scale"] * tf.square(outputs[:, 0] - batch[1]))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_variable_that_a_step_reads_and_no_checkpoint_has_may_not_change(bench, distribution, replicas):
    with distribution(replicas).scope():
        OUTSIDE["scale"] = tf.Variable(1.0, trainable=False, name="scale")
    made = bench(Reads(), DATA, 4, replicas, optimizer="sgd", learning_rate=0.1)
    check = made.trainer.inventory.captured.check_save
    for _ in range(2):
        made.run(1)
        check()
    OUTSIDE["scale"].assign(2.0)
    made.run(1)
    with pytest.raises(UsageError, match=r"Reads: its step reads scale \[\], which has changed since .* the trainer"):
        check()


SCALE, WEIGHTS, SIZE = 1.0, np.ones(3, np.float32), 3


class Cell(Squares):
    """Reads what a notebook's cells set."""

    def build_model(self):
        return dense()

    def loss(self, outputs, batch):
        def scaled(x):
            return SCALE * x

        sizes = outputs.shape.rank  # an attribute named as a global, SIZE, is not that
        return mean(scaled(tf.square(outputs[:, 0] - batch[1])) * tf.reduce_sum(WEIGHTS) * sizes)


def test_what_a_loss_has_read_of_its_module_is_named_once_as_it_changes(bench, caplog, monkeypatch):
    run = bench(Cell(), DATA, 4)
    run.run(1)
    monkeypatch.setitem(globals(), "SIZE", 4)
    monkeypatch.setitem(globals(), "SCALE", 10.0)
    monkeypatch.setitem(globals(), "WEIGHTS", np.zeros(3, np.float32))
    run.run(1)
    run.run(1)
    said = [line.partition(":")[2] for line in caplog.messages if line.startswith("Cell.loss:")]
    assert [line.partition(":")[0].strip() for line in sorted(said)] == ["SCALE", "WEIGHTS"]
    assert "keeps 1.0, as it was traced, and it is 10.0 now" in caplog.text


EDITED = """
import tensorflow as tf

from crankshaft import mean
from tests.engine.trainers import Squares

FACTOR = 2.0

def distance(a, b, scale=1.0):
    return scale * scaled(a - b)

def scaled(difference):
    return FACTOR * tf.square(difference)

class Edited(Squares):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        return mean(distance(outputs[:, 0], batch[1]))
"""


def test_a_loss_and_its_helpers_are_named_once_autoreload_has_changed_what_they_compute(
    bench, caplog, monkeypatch, tmp_path
):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "edited.py").write_text(EDITED)
    module = importlib.import_module("edited")
    monkeypatch.setitem(sys.modules, "edited", module)
    run, text, old_objects = bench(module.Edited(), DATA, 4), EDITED, {}
    run.run(1)

    def lines_after(before: str, after: str) -> list[str]:
        nonlocal text
        assert before in text
        text = text.replace(before, after, 1)
        (tmp_path / "edited.py").write_text(text)
        caplog.clear()
        superreload(module, old_objects=old_objects)
        run.run(1)
        return sorted(line.partition(": steps")[0] for line in caplog.messages)

    for place in ("FACTOR", "def scaled", "    def loss"):
        assert not lines_after(place, f"# As {place.split()[-1]} was.\n{place}")
    assert not lines_after("return FACTOR", '"""Scales it."""\n    return FACTOR')
    reached = "Edited.loss: distance"
    assert lines_after("FACTOR * tf.square", "tf.abs") == [f"{reached}: scaled"]  # and not that FACTOR is another
    assert lines_after("scale=1.0", "scale=2.0") == [reached]
    assert lines_after("return mean(distance", "return 2.0 * mean(distance") == ["Edited.loss"]
