"""Programs from a seed: what a seed determines, and that programs fulfil their relations."""

import collections
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.programs.__main__ import judge
from benchmarks.programs.children import Outcome
from benchmarks.programs.grammar import CHOICES, program_from_seed, simplest, valid
from benchmarks.programs.relations import RELATIONS
from benchmarks.programs.text import script

ROOT = Path(__file__).resolve().parents[2]


def test_a_seed_determines_a_program_whose_text_is_python():
    programs = [program_from_seed(seed) for seed in range(200)]
    assert programs == [program_from_seed(seed) for seed in range(200)]
    met = collections.Counter(program["relation"] for program in programs)
    assert met.keys() == {name for name, relation in RELATIONS.items() if relation.weight}
    for program in programs:
        compile(script(program, RELATIONS[program["relation"]].sides(program)), "program.py", "exec")


def test_choices_that_are_simplified_stay_a_program():
    for seed in range(50):
        program = program_from_seed(seed)
        for name, value in simplest().items():
            simpler = valid({**program, name: value})
            assert simpler == valid(simpler)
            assert simpler.keys() == {"seed", *CHOICES}


class Given:
    """Children that return given values by side."""

    def __init__(self, *sides):
        self._sides = iter(sides)

    def run(self, script, how):
        return Outcome("values", "", {name: np.array(value) for name, value in next(self._sides).items()})


def test_a_documented_difference_is_counted_and_any_other_is_wrong():
    program = valid({**program_from_seed(2), "outputs": ["huber", "values"], "callbacks": [], "optimizer": "sgd"})
    values = {"history/huber_0_loss": [1.0], "weights/0": [1.0]}
    for other, outcome in (
        ({}, "right"),
        ({"history/huber_0_loss": [2.0]}, "documented"),
        ({"weights/0": [2.0]}, "wrong"),
    ):
        assert judge(program, Given(values, {**values, **other}))["outcome"] == outcome
    one = valid({**program, "outputs": ["huber"]})
    assert judge(one, Given(values, {**values, "history/huber_0_loss": [2.0]})).is_wrong


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param("31,48,83,186,261,377", marks=pytest.mark.thorough),
        pytest.param("0:22", marks=pytest.mark.thorough),
        pytest.param("22:60", marks=pytest.mark.slow),
        pytest.param("3,9 --relations=workers", marks=pytest.mark.slow),
        pytest.param("3,7 --relations=servers", marks=pytest.mark.slow),
    ],
)
def test_programs_fulfil_their_relations(seeds):
    command = [sys.executable, "-m", "benchmarks.programs", *f"--seeds={seeds}".split(), "--no-shrink", "--jobs=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
