"""Every script of benchmarks/ starts and ends well, with the smallest arguments that it has."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys

import pytest

import benchmarks.__main__
from benchmarks import compare, workers
from benchmarks.browser import program
from tests.launch.local_tasks import ROOT
from tests.waiting import PATIENCE

BY_OTHERS = {"bare", "forms", "links"}  # which start them
ELSEWHERE = {"gpu", "keras_suite", "mutants"}  # test_gpu.py and so on
MLP = "--model=mlp --input=digits"
SHORT = "--rounds=1 --seconds=0.2"
SMALLEST = {
    "bits": ["--only=mlp_dropout/one_device --out={tmp}/bits.json"],
    "compare": [
        f"mlp wide_deep --with=keras,fit {SHORT} --quality_steps=50",
        f"own --vary=jit=on,off {SHORT} --json={{tmp}}/compare.json -- {MLP}",
        f"mlp --before={ROOT} {SHORT}",
    ],
    "embedding_rows": ["--rows=1000 --calls=1 --steps=2"],
    "endurance": ["--share=0.01 steps record calls", "--share=0.001 generator pictures traces saves"],
    "faults": ["--strategy=one_device --faults=1"],
    "leases": ["--workers=2 --leases=10", "--workers=2 --step_ms=1 --join_steps=50"],
    "lengths": ["--turns=1"],
    "living_tables": ["--days=2 --rows=10000"],
    "mesh_memory": ["--mebibytes=48"],
    "message_times": [""],
    "monitor_page": ["--workers=3 --windows=10"],
    "open_run_calls": ["--calls=5 --opens=1"],
    "moved": ["word2vec"],
    "overhead": ["--rounds=1 --measuring"],
    "parts": [f"--part=all {MLP}"],
    "plan_simulation": ["--workers=1,2"],
    "plan_validation": ["--cases=mlp:one_device,mlp:two_workers"],
    "programs": ["--seeds=0:2 --relations=oracle,replicas"],
    "reading": ["--rows=records,text,mlp --turns=1"],
    "recovery": ["--rounds=1 --kills=1", "--starts=1"],
    "route": [f"--start=InnerLoop.__call__ --number=2 train {MLP} --train_steps=2 --steps_per_loop=1"],
    "screenshots": ["--out={tmp}/pictures"],
    "short_fit": ["--turns=1 --processes=1"],
    "workers": [
        f"mlp --ours=workers,bfloat16,local_sgd --with=tutorial,apart {SHORT}",
        f"mlp wide_deep --ours=servers,one_server --with=servers_tutorial {SHORT} --quality_steps=50",
        f"decoder --ours=mesh --with=alone {SHORT}",
        f"small_cnn table_1m --ours=servers_ahead,servers_in_rounds --stopped=0.5 {SHORT}",
    ],
}
IN_A_BROWSER = {"monitor_page", "screenshots"}


@pytest.mark.slow
def test_every_script_that_is_listed_is_tried():
    listed = {line.split()[0] for line in benchmarks.__main__.lines()}
    assert listed == {*SMALLEST, *BY_OTHERS, *ELSEWHERE}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments"), [(script, arguments) for script, lines in SMALLEST.items() for arguments in lines]
)
def test_a_script_runs_with_its_smallest_arguments(script, arguments, tmp_path):
    if script in IN_A_BROWSER and not (program() and importlib.util.find_spec("playwright")):
        pytest.skip("there is no Chromium")
    words = shlex.split(arguments.format(tmp=tmp_path))
    command = [sys.executable, "-m", f"benchmarks.{script}", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stdout
    assert done.stdout.strip() or script == "bits"


@pytest.mark.slow
def test_what_is_shown_to_be_slower_ends_with_3():
    words = ["mlp", f"--before={ROOT}", "--rounds=6", "--seconds=0.1", "--fail_below=1000"]
    command = [sys.executable, "-m", "benchmarks.compare", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 3
    assert re.search(r"^fail_below=1000: crankshaft \d\.\d\dx \(.*\) beside checkout$", done.stderr, re.M)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("compare mpl", "WORKLOAD=mpl is unknown; use some of own, mlp, wide"),
        ("compare mlp --with=kears", "--with=kears is unknown; use some of keras"),
        ("compare mlp --rounds=0", "0 measures nothing; use 1 or more"),
        ("compare mlp --with=checkout", "--with=checkout needs its folder; add --before=PATH"),
        ("compare mlp --with=keras --fail_below=1 --rounds=3", "--fail_below=1 needs an interval; use --rounds=6"),
        ("compare own", "own has no flags; write -- and the flags of crankshaft train"),
        ("workers mlp --ours=worker", "--ours=worker is unknown; use some of workers"),
    ],
)
def test_mistakes_name_what_there_is(words, says):
    script, *rest = words.split()
    command = [sys.executable, "-m", f"benchmarks.{script}", *rest]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2
    assert says in done.stderr.splitlines()[-1]


PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_name_scripts_and_arguments_that_there_are(page, monkeypatch):
    text = page.read_text(encoding="utf-8")
    commands = re.findall(r"`(python\s+-m\s+benchmarks\.[^`]*)`", text)
    commands += re.findall(r"^(?:\$ )?(python -m benchmarks\.[^`\n]*)$", text, re.M)
    for _, _, script, *words in map(shlex.split, commands):
        name = script.removeprefix("benchmarks.")
        assert name in {*SMALLEST, *ELSEWHERE}
        if words and (parse := {"compare": compare.parse_arguments, "workers": workers.parse_arguments}.get(name)):
            monkeypatch.setattr(sys, "argv", [name, *words])
            parse()
