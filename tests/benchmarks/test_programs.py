"""Programs from a seed: what a seed determines, and that programs fulfil their relations."""

import collections
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("seeds", ["31,48,83,186,261,377", pytest.param("0:60", marks=pytest.mark.thorough)])
def test_programs_fulfil_their_relations(seeds):
    command = [sys.executable, "-m", "benchmarks.programs", f"--seeds={seeds}", "--no-shrink", "--jobs=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
