"""Rounds in turn, their statistics and tables. Peers are stand-ins; `test_scripts.py` has the real ones."""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from benchmarks import compare, rounds
from benchmarks.processes import MeasurementFailed, Process, run_together
from benchmarks.rounds import Measured
from crankshaft.parts.launchers.restarts import TaskExit
from tests.launch.local_tasks import ROOT
from tests.waiting import wait_until


def results(*rates: float) -> list[dict]:
    return [{"steps_per_sec": rate, "examples_per_sec": 64 * rate} for rate in rates]


def cells(text: str, peer: str) -> list[str]:
    [line] = [line for line in text.splitlines() if f"| {peer} |" in line and "against" not in line]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("count", [6, 7, 10, 20, 40, 41, 100])
def test_an_interval_holds_the_median_in_95_percent_of_cases(count):
    low, high = rounds.interval([*range(count)])
    assert low + high == count - 1
    missed = 2 * sum(math.comb(count, k) for k in range(low + 1)) / 2**count  # a binomial's two tails
    assert 0.94 <= 1 - missed < 0.985


def test_a_ratio_is_the_median_of_the_rounds_ratios_and_has_an_interval_from_six_on():
    ours, theirs = [2.0, 30.0, 4.0, 6.0, 8.0, 10.0], [1.0, 10.0, 2.0, 3.0, 4.0, 5.0]
    assert rounds.ratio(ours, theirs) == "2.00x (2.00–3.00)"
    assert rounds.ratio(ours[:5], theirs[:5]) == "2.00x"


def test_every_other_round_goes_backwards_and_a_peer_that_fails_is_named():
    order = []

    def peer(name: str):
        def measure():
            order.append(name)
            if name == "b" and len(order) > 3:
                raise MeasurementFailed("exit code 1: no memory")
            return results(10.0)[0]

        return measure

    measured = rounds.measure("mlp", {name: peer(name) for name in "abc"}, 3)
    assert "".join(order) == "abc" + "cba" + "ac"
    assert measured.failed == {"b": "exit code 1: no memory"}
    assert [len(measured.results[name]) for name in "abc"] == [3, 0, 3]
    text = rounds.speed_table([(measured, [("a", {"b": "b", "its best": "c"})])])
    assert text.splitlines()[0] == "|  | a, steps/s | b | its best | against b (95 %) | against its best (95 %) |"
    assert cells(text, "mlp") == ["mlp", "10 (10–10)", "failed", "10 (10–10) c", "–", "1.00x"]


def test_ratios_are_of_examples_since_steps_may_differ():
    measured = Measured(
        "mlp", results={"a": results(100.0), "b": [{"steps_per_sec": 50.0, "examples_per_sec": 6400.0}]}
    )
    text = rounds.speed_table([(measured, [("a", {}), ("b", {"a": "a"})])])
    assert cells(text, "a")[2:] == ["100", "–", "–"]
    assert cells(text, "b")[2:] == ["50", "100", "1.00x"]


def test_ours_is_compared_with_a_peer_as_people_write_it_and_in_its_fastest_setting():
    measured = Measured("mlp", results={"fit": results(1), "50": results(3), "xla": results(2), "torch": results(4)})
    beside = {"fit": "fit", "fit at its best": "50", "torch": "torch"}
    assert compare.table_rows(measured, ["ours"], [["fit", "50", "xla"], ["torch"]]) == [("ours", beside)]
    against_first = [("ours", {}), ("jit=on", {"ours": "ours"})]
    assert compare.table_rows(measured, ["ours", "jit=on"], []) == against_first


def test_points_are_all_combinations_and_a_backslash_keeps_a_comma():
    assert compare.combinations(r"model_arg=hidden_units=8\,8,dropout=0.5;precision=float32,bfloat16") == [
        ["--model_arg=hidden_units=8,8", "--precision=float32"],
        ["--model_arg=hidden_units=8,8", "--precision=bfloat16"],
        ["--model_arg=dropout=0.5", "--precision=float32"],
        ["--model_arg=dropout=0.5", "--precision=bfloat16"],
    ]
    with pytest.raises(argparse.ArgumentTypeError, match="has no values; write NAME=VALUE,VALUE"):
        compare.combinations("seed=1,,2")


STAYS = """
import sys
from benchmarks.peer import take_turns
def rate(steps):
    print(steps, file=open(sys.argv[1], "a"))
    return float(sys.argv[2])
take_turns(rate, quality={"loss": 0.5})
"""


def test_programs_that_stay_are_stopped_between_pieces_of_the_time_that_is_meant(tmp_path):
    paths = {name: tmp_path / name for name in ("fast", "slow")}
    rates = {"fast": 1000.0, "slow": 10.0}
    programs = {name: Process([sys.executable, "-c", STAYS, str(paths[name]), str(rates[name])]) for name in paths}
    with rounds.residents(programs, {"fast": 64, "slow": 32}, seconds=0.5, folder=ROOT) as peers:
        measured = rounds.measure("mlp", peers, 2)
        stats = [Path(f"/proc/{peer.child.pid}/stat") for peer in peers.values()]
        wait_until(lambda: all(stat.read_text().split()[2] == "T" for stat in stats))
    assert measured.results["fast"][1] == {"steps_per_sec": 1000.0, "examples_per_sec": 64_000.0, "loss": 0.5}
    assert measured.results["slow"][1]["examples_per_sec"] == 320.0
    assert measured.quality == {"fast": {"loss": 0.5}, "slow": {"loss": 0.5}}
    assert {name: path.read_text().split()[-2:] for name, path in paths.items()} == {
        "fast": ["500", "500"],
        "slow": ["5", "5"],
    }


def test_a_program_that_ends_instead_of_answering_fails_with_its_last_lines(capsys):
    program = Process([sys.executable, "-c", "import sys; print('ready', flush=True); sys.exit('no such model')"])
    with rounds.residents({"peer": program}, {"peer": 64}) as peers:
        measured = rounds.measure("mlp", peers, 1)
    assert measured.failed == {"peer": "it did not answer with steps per second"}
    assert "no such model" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 1, "signal 35")])
def test_what_kills_a_measurement_is_named_whether_it_has_a_name_or_not(number, name):
    process = Process([sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(number)})"])
    with pytest.raises(MeasurementFailed, match=f"^killed by {name}$"):
        run_together([process])
    assert str(TaskExit("worker 1", -number)) == f"worker 1 was killed by {name}"


def test_the_reason_of_a_failed_measurement_is_its_error_line():
    process = Process([sys.executable, "-c", "import sys; sys.exit('[worker 0] error: no such commit; fetch it')"])
    with pytest.raises(MeasurementFailed, match=re.escape("exit code 1: no such commit; fetch it")):
        run_together([process])


def test_peers_run_without_variables_that_tune(monkeypatch, tmp_path):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    path = tmp_path / "variables"
    run_together([Process([sys.executable, "-c", f"import os; open({str(path)!r}, 'w').write(str(dict(os.environ)))"])])
    assert "TF_ENABLE_ONEDNN_OPTS" not in path.read_text()
    assert "TF_ENABLE_ONEDNN_OPTS" in os.environ
