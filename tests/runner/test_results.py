"""What is written where a run ends, by a result or an error: in its folder, where the caller asked, in its record."""

from __future__ import annotations

import json
import types

import pytest

from crankshaft.engine.checkpoints.run_dir import RunDir
from crankshaft.runner.failures import RunError, UsageError
from crankshaft.runner.results import RunOutcomeWriter, warn_of_full_tables


class Ending:
    """The writer of a run of such a configuration, and what its record is told; `steps` of the newest call."""

    def __init__(self, tmp_path, steps=0, has_lock=True, has_record=True, has_loop=True, **config):
        self.path, self.asked, self.recorded = tmp_path / "run", tmp_path / "asked.json", []
        self.path.mkdir(exist_ok=True)
        record = types.SimpleNamespace(finish=lambda *ended, is_fault: self.recorded.append((*ended, is_fault)))
        status = types.SimpleNamespace(segment=types.SimpleNamespace(steps=steps), step=7, stop=None)
        self.run = types.SimpleNamespace(record=record if has_record else None)
        if has_loop:
            self.run.loop = types.SimpleNamespace(status=status)
        self.config = types.SimpleNamespace(
            remote=None,
            **{
                "mode": "train",
                "is_chief": True,
                "result_json": str(self.asked),
                "model": "mlp",
                "program_trainer": None,
            }
            | config,
            configured_run_dir="run",
            files=RunDir(str(self.path)),
        )
        self.writer = RunOutcomeWriter(self.config, 0.0)
        self.writer.run, self.in_place = self.run, True
        if has_lock:
            self.writer.lock = types.SimpleNamespace(check=lambda: None, is_in_place=True)

    def ends(self, error):
        self.writer.end(type(error), error, None)

    @property
    def written(self):
        """What is written: in the run's folder, and where the caller asked."""
        paths = self.path / "result.json", self.asked
        return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def test_a_result_is_written_once_it_is_known_and_is_the_runs(tmp_path):
    run = Ending(tmp_path)
    run.writer.set({"step": 7, "loss": float("nan")}, 3)
    assert run.writer.result.pop("wall_seconds") > 0
    assert (run.writer.result, run.writer.code) == ({"step": 7, "loss": None}, 3)
    for each in run.written:
        assert each.pop("wall_seconds") > 0
        assert each == {"step": 7, "loss": None}
    run.ends(RunError("it can't be printed"))
    assert [each["step"] for each in run.written] == [7, 7]
    assert run.recorded == [("it can't be printed", 1, True)]
    run.ends(None)
    assert len(run.recorded) == 1


@pytest.mark.parametrize(
    ("how", "is_in_run", "is_asked"),
    [({"has_lock": False}, False, True), ({"is_chief": False}, True, False), ({"result_json": None}, True, False)],
)
def test_a_result_is_written_in_a_folder_that_is_held_and_where_the_chief_is_asked(tmp_path, how, is_in_run, is_asked):
    run = Ending(tmp_path, **how)
    run.writer.set({"step": 7}, 0)
    assert [each is not None for each in run.written] == [is_in_run, is_asked]
    if run.writer.lock:
        run.writer.lock.is_in_place = False
        run.writer.set({"step": 8}, 0)
        assert run.written[0]["step"] == 7
    generated = Ending(tmp_path, mode="generate")
    generated.writer.set({"text": "a"}, 0)
    assert generated.writer.result == {"text": "a"}  # the same for the same seed


@pytest.mark.parametrize(
    ("error", "steps", "had_result", "is_in_run"),
    [
        (UsageError("no"), 0, False, False),
        (RunError("no"), 0, False, True),
        (RunError("no"), 0, True, False),
        (UsageError("no"), 3, True, True),
    ],
)
def test_a_mistake_before_the_first_step_leaves_a_runs_result(tmp_path, error, steps, had_result, is_in_run):
    run = Ending(tmp_path, steps=steps)
    before = {"step": 5}
    if had_result:
        (run.path / "result.json").write_text(json.dumps(before))
    run.ends(error)
    code = error.exit_code
    in_run, asked = run.written
    assert asked.items() >= {"mode": "train", "model": "mlp", "run_dir": "run", "step": 7, "error": "no"}.items()
    assert asked["exit_code"] == run.writer.code == code
    assert in_run == (asked if is_in_run else before if had_result else None)
    assert run.recorded == [("no", code, True)]


class Mine:
    pass


@pytest.mark.parametrize("how", [{"has_record": False}, {"has_loop": False}])
def test_a_run_that_has_not_begun_has_no_end_in_a_record(tmp_path, how):
    run = Ending(tmp_path, program_trainer=Mine, **how)
    run.ends(RunError("no"))
    assert run.recorded == []
    assert (run.written[1]["model"], run.written[1]["step"]) == ("Mine", None if "has_loop" in how else 7)


def test_ctrl_c_and_a_hook_that_stops_a_run_are_no_faults_and_a_stuck_process_is(tmp_path, caplog):
    for error, stop, ended in (
        (KeyboardInterrupt(), None, ("KeyboardInterrupt", 130, False)),
        (None, None, ("done", 0, False)),
        (None, "it is enough", ("it is enough", 0, False)),
    ):
        run = Ending(tmp_path)
        run.run.loop.status.stop = stop
        run.ends(error)
        assert run.recorded == [ended]
    run = Ending(tmp_path, result_json=str(tmp_path / "gone" / "result.json"))
    run.writer.end_stuck("worker 1 is lost")
    assert run.recorded == [("worker 1 is lost", 1, True)]
    assert "the result is not written: " in caplog.text
    assert "No such file or directory" in caplog.text


def test_a_table_that_turned_ids_away_is_named(caplog):
    warn_of_full_tables(
        {"a/b/rows_given": 1000, "a/b/turned_away": 12345, "c/rows_given": 3, "c/turned_away": 0, "c/rows_freed": 1}
    )
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "table a/b: 1,000 rows are in use, and 12,345 times an id got no row of its own and shared row 0; give the"
    )
