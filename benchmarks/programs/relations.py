"""The relations that a program must fulfil: which sides of it are run, and how closely their values agree."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

_ALL = ("compiled", "own_step", "trainer")
# Sums in another order, after some dozen updates by SGD, relative to the largest value of an array: most programs
# agree within 1e-6; a wrong count or order is off by 1e-3 and more.
ROUNDING = 5e-5


class Relation(NamedTuple):
    """What a program must fulfil.

    Attributes:
      weight: how often it is drawn.
      sides: for a program, what is run, by name: the keywords of its script's `values`. The first is compared with.
      kinds: the kinds of programs that have it.
      tolerance: the largest difference, relative to an array's largest value; 0 is none, in any bit.
      may_sample: whether the program may sample and shuffle.
      norms: the batch normalizations that the program may have.
      one_batch: whether all examples are one batch.
      forbids: choices, parts of a model, optimizers and callbacks that it does not have.
      ignores: beginnings of names of values that are not compared.
    """

    weight: int
    sides: Callable[[dict], dict[str, dict]]
    kinds: tuple[str, ...] = _ALL
    tolerance: float = ROUNDING
    may_sample: bool = False
    norms: tuple[str, ...] = ()
    one_batch: bool = False
    forbids: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()


def _replicas(program: dict) -> dict[str, dict]:
    flags = {"strategy": "mirrored", "num_virtual_devices": 2 + program["seed"] % 2}
    return {"one device": {}, "replicas": {"flags": flags}}


def _stopped(program: dict) -> dict[str, dict]:
    steps = -(-program["examples"] // program["batch"]) * program["epochs"]
    stops = sorted({max(1, min(steps - 1, round(each * steps))) for each in program["stops"]}) if steps > 1 else []
    if program["kind"] == "trainer" and program["seed"] % 2:
        return {"whole": {}, "in parts": {"parts": stops, "between": program["between"]}}
    return {"whole": {}, "resumed": {"stops": stops}}


def _forms(program: dict) -> dict[str, dict]:
    form = "mapped" if program["seed"] % 2 or "text" in program["inputs"] else "source"
    return {"arrays": {"data": "arrays"}, form: {"data": form}}


def _saved(program: dict) -> dict[str, dict]:
    # A file of Keras does not have classes of a script's own.
    has_own = program["kind"] == "own_step" or program["model_form"] == "subclass"
    has_own = has_own or {"adds_loss", "counter"} & {*program["trunk"]}
    kinds = ("loaded by class",) if has_own else ("loaded", "exported")
    return {"run": {}, **{kind: {"predicts": kind} for kind in kinds}}


NORMS = ("batch_norm", "synced_norm")
_ONE_FORM = ("data", "validation", "class_weight", "again")
_NO_WEIGHTS = ("weights", "class_weight", "validation", "data")
RELATIONS: dict[str, Relation] = {
    "oracle": Relation(5, lambda _: {"oracle": {"oracle": True}, "crankshaft": {}}, norms=NORMS),
    "replicas": Relation(3, _replicas, norms=("synced_norm",), forbids=("again",), ignores=("optimizer/",)),
    "parts": Relation(
        3, _stopped, tolerance=0.0, may_sample=True, norms=NORMS, forbids=("again",), ignores=("history/", "calls"),
    ),
    "forms": Relation(1, _forms, tolerance=0.0, norms=NORMS, forbids=_ONE_FORM),
    "dataset": Relation(  # whose batches' unknown size rounds otherwise
        1, lambda _: {form: {"data": form} for form in ("arrays", "dataset")}, norms=NORMS, forbids=_ONE_FORM,
    ),
    "left out": Relation(
        1, lambda _: {"left out": {"kind": "left_out"}, "of weight 0": {"kind": "zero"}}, ("trainer",),
        one_batch=True, forbids=_NO_WEIGHTS,
    ),
    "halves": Relation(
        1, lambda _: {"one": {"kind": "one"}, "two halves": {"kind": "halves"}}, ("trainer",), one_batch=True,
        forbids=_NO_WEIGHTS,
    ),
    "accumulated": Relation(
        1, lambda _: {"whole": {}, "in micro-batches": {"flags": {"accumulate_steps": 3}}}, ("trainer",),
        forbids=("data", "counter"),  # of a layer's calls
    ),
    "frozen": Relation(
        1, lambda program: {"flag": {"flags": {"freeze": [f"{program['outputs'][0]}_0"]}}, "multiplier 0":
        {"multiplier": True}}, ("trainer",), forbids=("data", "step"),
    ),
    "names": Relation(
        1, lambda _: {"names": {}, "others": {"renamed": True}}, norms=NORMS, forbids=("data",),
        ignores=("history/", "metrics/"),
    ),
    "two runs": Relation(
        1, lambda _: {"alone": {}, "after another": {"before": True}}, tolerance=0.0, may_sample=True, norms=NORMS,
    ),
    "saved": Relation(1, _saved, norms=NORMS, forbids=("data", "again", "early")),  # checkpoints have the last weights
    "workers": Relation(
        0, lambda _: {"one device": {}, "two workers": {"processes": ["--workers=2"], "flags":
        {"strategy": "multi_worker"}}}, norms=("synced_norm",), forbids=("data", "again"), ignores=("optimizer/",),
    ),
    "servers": Relation(
        0, lambda _: {"one device": {}, "around a server": {"processes": ["--workers=1", "--ps=1"], "flags":
        {"strategy": "parameter_server"}}}, forbids=("data", "again", "step", "average", "nadam"),
        ignores=("optimizer/",),
    ),
}  # fmt: skip


def difference(relation: Relation, expected: dict, found: dict, ignores: Sequence[str] = ()) -> str:
    """Returns how the values of two sides differ, in words; empty if they agree but for names that are ignored."""
    ignored = [*relation.ignores, *ignores]
    kept = [
        {name: value for name, value in values.items() if not any(re.match(x, name) for x in ignored)}
        for values in (expected, found)
    ]
    if missing := kept[0].keys() ^ kept[1].keys():
        return f"values of one side alone: {', '.join(sorted(missing)[:4])}"
    worst, where = 0.0, ""
    for name, value in kept[0].items():
        other = kept[1][name]
        if value.shape != other.shape:
            return f"{name} is {list(value.shape)} and {list(other.shape)}"
        off = _distance(value, other, bits=not relation.tolerance)
        if off > worst:
            worst, where = off, name
    return f"{where} differs by {worst:.2g}" if worst > relation.tolerance else ""


def _distance(value: np.ndarray, other: np.ndarray, bits: bool) -> float:
    """The largest difference relative to the largest value; with `bits` 1 where any bit differs."""
    if bits:
        return 0.0 if value.tobytes() == other.tobytes() else max(_distance(value, other, bits=False), 1e-12)
    value, other = value.astype("float64"), other.astype("float64")
    if not np.array_equal(np.isnan(value), np.isnan(other)):
        return np.inf
    value, other = np.nan_to_num(value), np.nan_to_num(other)
    return float(np.max(np.abs(value - other), initial=0.0) / max(np.max(np.abs(value), initial=0.0), 0.1))
