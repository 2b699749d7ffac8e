"""Parameter servers' clusters as TF_CONFIG has them, who is restarted when, and the messages about mistakes."""

from __future__ import annotations

import json
import signal

import pytest

from crankshaft.parts.clusters import tf_config
from crankshaft.parts.launchers.resources import free_ports
from crankshaft.parts.launchers.restarts import EndTimeouts, Servers, Synchronous, TaskExit
from crankshaft.runner.failures import UsageError
from crankshaft.runner.host.tasks import Cluster
from tests import runs

pytestmark = pytest.mark.thorough

JOBS = {"chief": ["h:1"], "worker": ["h:2", "h:3"], "ps": ["h:4", "h:5"], "evaluator": ["h:6"]}


def cluster_of(jobs: dict, kind: str, index: int) -> Cluster:
    text = json.dumps({"cluster": jobs, "task": {"type": kind, "index": index}})
    return tf_config.from_environment({"TF_CONFIG": text}, "parameter_server")


@pytest.mark.parametrize(
    ("kind", "index", "task", "is_chief"),
    [
        ("chief", 0, "chief", True),
        ("worker", 1, "worker 1", False),
        ("ps", 1, "ps 1", False),
        ("evaluator", 0, "evaluator", False),
    ],
)
def test_each_task_knows_its_part_and_only_the_coordinator_is_chief(kind, index, task, is_chief):
    found = cluster_of(JOBS, kind, index)
    assert (found.task, found.kind, found.task_id, found.is_chief) == (task, kind, index, is_chief)
    assert found.job("ps") == ("h:4", "h:5")


def test_nobody_waits_for_an_evaluator():
    assert {name for name, _ in cluster_of(JOBS, "chief", 0).peers} == {"worker 0", "worker 1", "ps 0", "ps 1"}


@pytest.mark.parametrize("missing", ["chief", "worker", "ps"])
def test_a_cluster_without_one_of_its_parts_is_a_mistake_that_names_it(missing):
    jobs = {kind: addresses for kind, addresses in JOBS.items() if kind != missing}
    with pytest.raises(UsageError, match=f"has no {missing}"):
        cluster_of(jobs, next(iter(jobs)), 0)


def test_a_second_evaluator_is_a_mistake():
    with pytest.raises(UsageError, match="2 evaluators"):
        cluster_of({**JOBS, "evaluator": ["h:6", "h:7"]}, "chief", 0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def rule(max_restarts: int = 3) -> Servers:
    return Servers(max_restarts, 600.0, 30.0, clock=Clock())


KILLED = -signal.SIGKILL


def test_a_dead_worker_starts_again_until_restarts_are_used_up():
    servers = rule(max_restarts=3)
    pauses = [servers.restart_alone(TaskExit("worker 0", KILLED)).pause_seconds for _ in range(3)]
    assert pauses == [0, 1, 2]
    assert servers.restart_alone(TaskExit("worker 1", KILLED)).pause_seconds == 0
    assert servers.restart_alone(TaskExit("worker 0", KILLED)) is None


@pytest.mark.parametrize("task", ["chief", "ps 0"])
def test_with_a_server_or_the_coordinator_all_start_again(task):
    servers = rule()
    assert servers.restart_alone(TaskExit(task, KILLED)) is None
    assert servers.end_timeouts(TaskExit(task, KILLED)) is not None
    endings = [TaskExit(task, KILLED), TaskExit("worker 0", 143), TaskExit("evaluator", 143)]
    assert servers.decide(endings).exit_code is None


@pytest.mark.parametrize("code", [143, -signal.SIGTERM, KILLED])
def test_a_server_that_ends_is_a_failure_whatever_its_code(code):
    servers = rule(max_restarts=1)
    ending = TaskExit("ps 0", code)
    assert servers.end_timeouts(ending) == servers.end_timeouts(TaskExit("ps 0", 1))
    endings = [ending, TaskExit("chief", 143), TaskExit("worker 0", 143)]
    assert "(restart 1 of 1 within" in servers.decide(endings).message
    assert servers.decide(endings).exit_code == 1


def test_a_preempted_coordinator_has_saved_so_all_end_and_start_again_at_once():
    servers = rule(max_restarts=0)
    ending = TaskExit("chief", 143)
    assert servers.end_timeouts(ending) == EndTimeouts(0.0, 30.0)
    settled = servers.decide([ending, TaskExit("ps 0", 143), TaskExit("worker 0", 143)])
    assert settled.message == "chief ended with exit code 143, preempted; all tasks start again at once"


def test_a_mistake_is_not_tried_again_whoever_finds_it():
    assert rule().restart_alone(TaskExit("worker 0", 2)) is None
    assert rule().decide([TaskExit("worker 0", 143), TaskExit("chief", 2)]).exit_code == 2


def test_the_coordinators_end_is_the_runs_whatever_became_of_the_others():
    assert rule().decide([TaskExit("chief", 0), TaskExit("worker 0", 143), TaskExit("evaluator", 1)]).exit_code == 0


def test_an_evaluators_failure_stops_nobody_and_its_end_is_no_failure():
    assert rule().end_timeouts(TaskExit("evaluator", 1)) is None
    assert rule().restart_alone(TaskExit("evaluator", 1)).pause_seconds == 0
    assert rule().restart_alone(TaskExit("evaluator", 0)) is None


def test_a_run_that_ends_before_its_evaluator_is_back_says_what_is_missing():
    servers = rule()
    assert servers.decide([TaskExit("chief", 0), TaskExit("worker 0", 143)]).message == ""
    servers.restart_alone(TaskExit("evaluator", KILLED))
    assert "the last checkpoint is not evaluated" in servers.decide([TaskExit("chief", 0)]).message
    assert servers.decide([TaskExit("chief", 0), TaskExit("evaluator", 143)]).message == ""


def test_workers_that_are_in_step_are_never_restarted_alone():
    assert Synchronous(3, 600.0, 30.0).restart_alone(TaskExit("worker 0", KILLED)) is None


# What is given, and what the line has to say.
MISTAKES = {
    "a place that is not there": (
        ["--variable_placement=table=ps:1"],
        ["table=ps:1 is not of the form REGEX=ps:N", "0 to 0"],
    ),
    "too few bits": (["--reduce_dtype=float16"], ["reduce_dtype=float16", "use bfloat16"]),
    "replicas that meet": (["--sync_every_steps=4"], ["sync_every_steps=4 has no use", "parameter_server", "leave"]),
}


@pytest.fixture(scope="module")
def ended(crank_each):
    """How the coordinator ends, by mistake."""
    jobs = dict(zip(["chief", "worker", "ps"], ([f"127.0.0.1:{port}"] for port in free_ports(3)), strict=True))
    run = ("--model=mlp", "--input=digits", "--mode=train", "--strategy=parameter_server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": {"type": "chief", "index": 0}}))
        outcomes = crank_each([[*run, *arguments] for arguments, _ in MISTAKES.values()])
    return dict(zip(MISTAKES, outcomes, strict=True))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_servers_cannot_do_is_one_line_before_tensorflow_starts(ended, mistake):
    outcome = ended[mistake]
    for words in MISTAKES[mistake][1]:
        assert words in outcome.mistake


@pytest.mark.slow
@pytest.mark.parametrize("evaluator", [True, False])
def test_the_coordinator_leaves_the_best_checkpoint_to_an_evaluator(crank, monkeypatch, tmp_path, evaluator):
    """What a killed writer leaves is, to another process, the same as what a live one has half written."""
    half_written = tmp_path / "best" / "ckpt-9_temp_0_1"
    half_written.mkdir(parents=True)
    (half_written / ".crankshaft").touch()
    (half_written / "part-0").write_bytes(b"half")
    kinds = ["chief", "worker", "ps", *(["evaluator"] if evaluator else [])]  # which nobody waits for, nor starts here
    jobs = {kind: [f"127.0.0.1:{port}"] for kind, port in zip(kinds, free_ports(len(kinds)), strict=True)}
    flags = ("--model=logistic", "--input=digits", "--mode=train", "--train_steps=3", f"--run_dir={tmp_path}")
    for kind in ("ps", "worker", "chief"):
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": {"type": kind, "index": 0}}))
        program = crank.start(*flags, "--strategy=parameter_server")
    program.wait().ok()
    assert runs.steps(tmp_path) == [3]
    assert half_written.exists() == evaluator
