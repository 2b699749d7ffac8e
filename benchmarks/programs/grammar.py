"""What a seed determines: a program as plain data, a dictionary of choices, and the relation that it must fulfil.

Each choice has a simplest value, which the shrinking of a failing program tries in its place. `valid` makes of any
choices ones that go together, so that every dictionary is a program.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from .relations import NORMS, RELATIONS
from .text import CALLBACKS, ENCODERS, ONE_STEP_OPTIMIZERS, OUTPUTS, TRUNK

PENALTIES, SAMPLING = {"penalty", "activity", "adds_loss"}, {"dropout", "noise"}


class _Choice(NamedTuple):
    """How a value is drawn, by a `random.Random`, and which value is the simplest."""

    simplest: Any
    draw: Any


def _one_of(*values: Any, simplest: Any = None) -> _Choice:
    """A choice between values, which may be written several times to be drawn more often."""
    return _Choice(values[0] if simplest is None else simplest, lambda rng: rng.choice(values))


def _some(values: tuple, least: int, most: int, simplest: tuple = ()) -> _Choice:
    return _Choice([*simplest], lambda rng: [rng.choice(values) for _ in range(rng.randint(least, most))])


CHOICES: dict[str, _Choice] = {
    "kind": _one_of("compiled", "compiled", "own_step", "trainer", "trainer", simplest="compiled"),
    "relation": _one_of(*(name for name, relation in RELATIONS.items() for _ in range(relation.weight))),
    "inputs": _some(tuple(ENCODERS), 1, 3, ("vector",)),
    "input_form": _one_of("tuple", "dict"),
    "x_dtype": _one_of("float32", "float32", "float32", "float64", "float16"),
    "trunk": _some(tuple(TRUNK), 0, 3),
    "model_form": _one_of("functional", "functional", "subclass"),
    "outputs": _some(tuple(OUTPUTS), 1, 2, ("values",)),
    "output_form": _one_of("tuple", "dict"),
    "loss_weights": _one_of(False, False, True),
    "metrics": _one_of(False, True),
    "step": _one_of("default", "default", "parts", "minimize", "two_optimizers"),
    "own_step": _one_of("guide", "trackers", "two_optimizers", "follower"),
    "loss_form": _one_of("mean", "means", "masked"),
    "examples": _Choice(8, lambda rng: rng.choice((1, rng.randint(2, 9), rng.randint(10, 70), rng.randint(10, 70)))),
    "batch": _Choice(8, lambda rng: rng.randint(1, 24)),
    "epochs": _Choice(1, lambda rng: rng.randint(1, 3)),
    "weights": _one_of("none", "none", "random", "zeros"),
    "class_weight": _one_of(False, False, False, True),
    "validation": _one_of("none", "none", "data", "split"),
    "data": _one_of("arrays", "arrays", "arrays", "dataset", "unknown_length", "generator", "source"),
    "shuffle": _one_of(False, True),
    "optimizer": _one_of("sgd", "sgd", "sgd", "momentum", "nesterov", *ONE_STEP_OPTIMIZERS[:3], "other"),
    "other": _one_of(*ONE_STEP_OPTIMIZERS),
    "clip": _one_of("none", "none", "clipnorm", "clipvalue", "global_clipnorm"),
    "weight_decay": _one_of(0.0, 0.0, 0.01),
    "average": _one_of(False, False, False, True),
    "schedule": _one_of("none", "none", "exponential", "cosine", "piecewise"),
    "callbacks": _some(tuple(CALLBACKS), 0, 2),
    "steps_per_execution": _one_of(1, 1, 1, 3),
    "again": _one_of(False, False, True),
    "stops": _Choice([0.5], lambda rng: sorted(round(rng.random(), 3) for _ in range(rng.randint(1, 3)))),
    "jit": _one_of("off", "off", "off", "off", "off", "off", "off", "auto"),
    "between": _some(("evaluate", "predict", "save", "other_data"), 0, 2),
}


def program_from_seed(seed: int, kinds: tuple[str, ...] = (), relations: tuple[str, ...] = ()) -> dict:
    """Draws the program of a seed, of one of these kinds and relations; of all if empty."""
    rng = random.Random(seed)
    drawn = {name: choice.draw(rng) for name, choice in CHOICES.items()}
    if kinds:
        drawn["kind"] = kinds[seed % len(kinds)]
    names = [name for name, each in RELATIONS.items() if drawn["kind"] in each.kinds and name in (relations or [name])]
    names = [name for name in names if relations or RELATIONS[name].weight]
    if drawn["relation"] not in names:
        drawn["relation"] = rng.choice(names)
    return valid({"seed": seed, **drawn})


def simplest() -> dict:
    """The choices of the simplest program."""
    return {name: choice.simplest for name, choice in CHOICES.items()}


def elements(program: dict) -> list[str]:
    """The program's choices that differ from the simplest, by name: what the table counts."""
    found = [f"kind {program['kind']}"]
    for name, choice in CHOICES.items():
        value = program[name]
        if name in ("kind", "relation", "examples", "batch", "epochs", "stops"):
            continue
        if isinstance(value, list):
            found += [f"{name} {each}" for each in dict.fromkeys(value)]
        elif value != choice.simplest:
            found.append(f"{name} {value}")
    if program["examples"] % program["batch"]:
        found.append("uneven last batch")
    return found + (["one example"] if program["examples"] == 1 else [])


def valid(program: dict) -> dict:
    """Returns choices that go together: what this kind and relation do not have becomes the simplest."""
    p, plain = {name: program[name] for name in ("seed", *CHOICES)}, simplest()
    relation = RELATIONS[p["relation"]]

    def drop(*names: str) -> None:
        p.update({name: plain[name] for name in names})

    if p["kind"] != "trainer":
        drop("step", "loss_form", "between")
    else:
        drop("class_weight", "callbacks", "own_step", "average", "steps_per_execution", "again", "loss_weights")
    if p["kind"] == "own_step":  # its step is written for arrays of one input and one output
        p["inputs"], p["outputs"] = p["inputs"][:1], p["outputs"][:1]
        drop("class_weight", "loss_weights", "output_form")
        misfits = {"freezes"}  # of the whole model
        if p["own_step"] in ("two_optimizers", "follower"):
            drop("average", "schedule")
            misfits |= {"rates", "plateau"}
        p["callbacks"] = [each for each in p["callbacks"] if each not in misfits]
    else:
        drop("own_step")
    # What is compared to the bit may sample, but not measure what is faster; with other replicas it may not sample.
    misfits = {*relation.forbids, *NORMS, *(() if relation.tolerance else ("jit",))} - {*relation.norms}
    misfits |= set() if relation.may_sample else {*SAMPLING, "shuffle"}
    p["trunk"], p["callbacks"] = ([each for each in p[name] if each not in misfits] for name in ("trunk", "callbacks"))
    drop(*(misfits & plain.keys()))
    if relation.one_batch or p["relation"] == "accumulated":
        p["batch"] = max(p["batch"], 3, p["examples"] * relation.one_batch)
    if p["data"] != "arrays":
        drop("shuffle", "class_weight")
    if p["data"] in ("generator", "unknown_length") and p["kind"] == "trainer":
        p["data"] = "dataset"
    if p["data"] == "source" and "text" in p["inputs"]:
        p["data"] = "arrays"
    if p["class_weight"] and (p["outputs"] != ["classes"] or p["weights"] != "none"):
        drop("class_weight")
    if p["validation"] == "split" and (p["kind"] == "trainer" or p["data"] != "arrays" or p["examples"] < 5):
        drop("validation")
    p["optimizer"] = p["other"] if p["optimizer"] == "other" else p["optimizer"]
    if p["optimizer"] in relation.forbids:
        p["optimizer"] = "adam"
    drop("other")
    if p["optimizer"] in ONE_STEP_OPTIMIZERS and (relation.tolerance or p["kind"] == "trainer"):
        p["epochs"], p["batch"] = 1, max(p["batch"], p["examples"])
        drop("again", "callbacks", "schedule", "average")
        if p["kind"] == "trainer" or p["optimizer"] in ("lion", "adafactor"):
            p["optimizer"] = "sgd"
    if p["step"] in ("minimize", "two_optimizers"):  # which minimize what they are given, and no penalties
        p["trunk"] = [each for each in p["trunk"] if each not in PENALTIES]
    if p["kind"] == "trainer":
        p["optimizer"] = {"nesterov": "momentum"}.get(p["optimizer"], p["optimizer"])
        p["clip"] = {"none": "none"}.get(p["clip"], "global_clipnorm")
    if p["callbacks"] and {"rates", "plateau"} & {*p["callbacks"]}:
        drop("schedule")
    if "early" in p["callbacks"]:
        drop("again")
    if p["relation"] in ("replicas", "workers"):  # which refuse others, by a line
        if p["data"] == "generator":
            drop("steps_per_execution")
        p["batch"] += -p["batch"] % 6
        p["examples"] = max(p["examples"], p["batch"] if p["data"] != "arrays" else 1)
        p["trunk"] = [each for each in p["trunk"] if each not in PENALTIES or "synced_norm" not in p["trunk"]]
    return p
