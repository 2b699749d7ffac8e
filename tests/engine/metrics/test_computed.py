"""What `Trainer.compute_metrics` may return: numbers, texts and images by name, of names that are free."""

import types

import numpy as np
import pytest

from crankshaft.engine.errors import UsageError
from crankshaft.engine.metrics.computed import Computed, compute
from crankshaft.engine.strategies.base import Processes


class Odd:
    """Returns what it was made with, of no predictions."""

    def __init__(self, returned):
        self.returned = returned

    def compute_metrics(self, predictions):
        assert predictions == "predictions"
        return self.returned


def computed(returned):
    return compute(Odd(returned), Processes(), lambda: "predictions", ["loss"])


def test_numbers_texts_and_images_are_told_apart():
    gray, colours = np.ones([2, 3, 1]), np.ones([5, 2, 3, 4], np.uint8)
    found = computed({"a": 1, "b": np.float32(2.5), "c": np.True_, "said": "3", "one": gray, "several": colours})
    assert found.metrics == {"a": 1.0, "b": 2.5, "c": 1.0}
    assert {*map(type, found.metrics.values())} == {float}
    assert found.texts == {"said": "3"}
    assert [each.shape for each in found.images.values()] == [(1, 2, 3, 1), (5, 2, 3, 4)]
    assert computed({}) == ({}, {}, {})


@pytest.mark.parametrize(
    ("returned", "line"),
    [
        ([1.0], "a list; return numbers by name"),
        ({"loss": 1.0}, "'loss', which is another metric"),
        ({"": 1.0}, "'', which is no name"),
        ({3: 1.0}, "3, which is no name"),
        ({"a": [[1], [1, 2]]}, "list as 'a'; return a number, a str, or images"),
        ({"a": None}, "NoneType as 'a'; return"),
        ({"a": 1j}, "complex as 'a'; return"),
        ({"a": [1.0]}, r"float64\[1\] as 'a'; return"),
        ({"a": np.zeros([2, 3])}, r"float64\[2, 3\] as 'a'; return"),
        ({"a": np.zeros([2, 3, 2])}, r"float64\[2, 3, 2\] as 'a'; .* of 1, 3, 4 channels"),
        ({"a": np.zeros([1, 1, 2, 3, 1])}, r"float64\[1, 1, 2, 3, 1\] as 'a'; return"),
        ({"a": np.zeros([0, 3, 1])}, r"float64\[0, 3, 1\] as 'a'; return"),
        ({"a": np.full([2, 3, 1], "x")}, r"str32\[2, 3, 1\] as 'a'; return"),
    ],
)
def test_anything_else_is_named(returned, line):
    with pytest.raises(UsageError, match=rf"^Odd\.compute_metrics returned {line}"):
        computed(returned)


def of_process(host, chiefs):
    """A process of two, to which the chief gives what it has computed."""
    exchange = (lambda value: [value, None]) if chiefs is None else (lambda value: [chiefs, value])
    return types.SimpleNamespace(is_chief=host == 0, num_hosts=2, host_names=("first", "second"), exchange=exchange)


def test_all_processes_have_the_chiefs_numbers_and_its_error():
    trainer = Odd({"a": 1.5, "said": "x"})
    assert compute(trainer, of_process(0, None), lambda: "predictions", []) == ({"a": 1.5}, {"said": "x"}, {})
    second = of_process(1, (None, {"a": 1.5}))
    assert compute(trainer, second, lambda: pytest.fail("the chief alone has them"), []) == Computed({"a": 1.5})
    with pytest.raises(UsageError, match=r"^Odd.compute_metrics has failed at first: KeyError: 3"):
        compute(trainer, of_process(1, ("KeyError: 3", {})), lambda: "predictions", [])
    error, said = KeyError("a"), []
    trainer.compute_metrics = lambda predictions: (_ for _ in ()).throw(error)
    first = of_process(0, None)
    first.exchange = lambda value: said.append(value) or [value, None]
    with pytest.raises(KeyError) as caught:
        compute(trainer, first, lambda: "predictions", [])
    assert caught.value is error
    assert said[0][0].startswith("KeyError: ")
