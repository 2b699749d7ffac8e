"""Loops of tutorials, moved to a `Trainer`: the same weights, in fewer lines."""

from __future__ import annotations

import re

import pytest

from benchmarks.moved import PROGRAMS, difference
from tests.pages import ROOT


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", ["pix2pix", "bert", "word2vec"])
def test_it_trains_the_loops_weights(name, replicas):
    """Rounding of some 1e-7, which LAMB multiplies."""
    several = {"strategy": "mirrored", "num_virtual_devices": replicas} if replicas > 1 else {}
    assert difference(PROGRAMS[name], **several) < 1e-6


@pytest.mark.fast
def test_the_guides_figures_are_those_counted():
    page = (ROOT / "docs" / "from_keras.md").read_text()
    listed = re.findall(r"^\| ([^|]*) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert {(source, int(before), int(after)) for source, before, after in listed} == {
        (moved.source, *moved.lines) for moved in PROGRAMS.values()
    }
