"""The list of a step's functions: BUILD.md names the main ones in the order in which a trace first calls them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.launch.local_tasks import ROOT
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def route() -> dict[str, list[tuple[int, str, str]]]:
    """The functions (depth, file, name) of a step, and those of its checks alone, by the title of their list."""
    command = [sys.executable, "-m", "benchmarks.route"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * PATIENCE, check=True)
    lists = re.split(r"^(.+): (\d+) functions in (\d+) files$", done.stdout, flags=re.M)
    found = {}
    for title, functions, files, text in zip(*(lists[n::4] for n in (1, 2, 3, 4)), strict=True):
        rows = re.findall(r"^ *(\d+) (\S+) (\S+) \(\d+\)$", text, re.M)
        found[title] = [(int(depth), file, name) for depth, file, name in rows]
        assert (len(found[title]), len({file for _, file, _ in found[title]})) == (int(functions), int(files))
    return found


@pytest.mark.thorough
def test_the_loss_and_the_all_reduce_are_near_the_step(route):
    step, checks = route.values()
    depths = {name: depth for depth, _, name in step}
    assert depths["Classifier.training_loss"] - depths["Trainer.train_step"] <= 5
    assert depths["all_reduce"] - depths["Reduction.sum"] <= 4
    assert {"check_saved", "check_losses", "check_options", "check_aggregated"} <= {name for _, _, name in checks}


@pytest.mark.thorough
def test_the_page_names_a_steps_functions_in_the_order_of_its_trace(route):
    step, _ = route.values()
    heart = (ROOT / "BUILD.md").read_text(encoding="utf-8").split("## The heart")[1].split("What they rely on")[0]
    functions, files = map(int, re.search(r"at most (\d+) functions in (\d+) files", heart).groups())
    assert 0.9 * functions < len(step) <= functions
    assert len({file for _, file, _ in step}) <= files
    order = {(file, name): number for number, (_, file, name) in enumerate(step)}
    items = re.findall(r"^\d+\. `(\S+)`(.*?)(?=^\d+\. |\Z)", heart, re.M | re.S)
    firsts = []
    for file, text in items:
        names = [(file, name) for name in re.findall(r"`((?:[A-Z]\w+\.)?_*[a-z]\w*)`", text)]
        numbers = [order[function] for function in names if function in order]
        if numbers and not file.startswith("engine/checks/"):
            assert numbers == sorted(numbers) or "back" in text, file
            firsts.append(numbers[0])
    assert len(firsts) >= 10
    assert firsts == sorted(firsts)
