"""A run_dir that somebody has changed: one line that names the file and what is wrong, and nothing else is touched."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from crankshaft import load_model
from crankshaft.engine.errors import with_flags
from crankshaft.launch.command_line import config
from crankshaft.launch.errors import UsageError
from crankshaft.launch.host import process
from crankshaft.launch.host.files import write_of_run
from crankshaft.launch.run import model_file, results
from tests.launch.command_line.test_config import asked, checked

RUN = ("--model=mlp", "--model_arg=hidden_units=4", "--input=synthetic", "--input_arg=examples=200", "--train_steps=4")
OTHERS = [None, [], -1, 10**300, 1.5, True, "x", {"a": {"b": [1]}}, "NaN", [[[]]], "a\nerror: b\x1b[31m"]
# What another call does not take from the run's flags, whatever they say.
UNREAD = set(config.OF_THIS_CALL)


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A run's folder with its configuration and, by name alone, a checkpoint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "ckpt-4.manifest.json").touch()
    write_of_run(str(tmp_path / "run" / "config.json"), asked(*RUN).as_json())
    return tmp_path / "run"


def places(value: dict, path=()):
    """The path of every value in nested objects."""
    for key, inner in value.items():
        yield (*path, key)
        if isinstance(inner, dict):
            yield from places(inner, (*path, key))


def changed(record: dict, path: tuple, *value) -> dict:
    """A copy in which one value is another, or missing."""
    copy = json.loads(json.dumps(record))
    place = copy
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    if value:
        place[path[-1]] = value[0]
    return copy


def problem(*flags) -> str | None:
    """The one line that a call ends with before anything is made; None if it would go on."""
    try:
        checked(*flags)
    except UsageError as error:
        return with_flags(error.message)
    return None


def test_each_changed_value_of_a_configuration_is_one_line_or_harmless(run_dir):
    path = run_dir / "config.json"
    before = json.loads(path.read_text())
    refused = set()
    for place in places(before):
        for value in [(), *((other,) for other in OTHERS)]:
            path.write_text(json.dumps(changed(before, place, *value)))
            for call in (("--mode=eval", f"--run_dir={run_dir}"), (*RUN, f"--run_dir={run_dir}")):
                line = problem(*call)
                if line is None:
                    continue
                refused.add(place)
                assert "remove" not in line
                assert len(line.replace(str(run_dir), "")) < 360, line
                if place[0] == "flags" and value and value[0] in ([], {"a": {"b": [1]}}, [[[]]], -1) and len(place) > 1:
                    assert line.startswith(f"{path}") or "--allow_changed_config" in line, (place, value, line)
                    assert place[1] in line
    of_flags = {place[1] for place in places(before) if place[0] == "flags" and len(place) == 2}
    assert of_flags - UNREAD <= {place[1] for place in refused if len(place) == 2}
    assert {place for place in places(before) if place[0] == "deciding"} <= refused


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON (its brackets are nested too deep)"),
        (b'{"flags": {}, "deciding"', "is not JSON"),
        (b"3", "holds 3, which is not an object"),
        (b'{"flags": []}', "has flags=[], which is not an object"),
        (b'{"flags": {}}', "has no deciding"),
        (b'{"flags": {}, "deciding": {"model_arg": [3]}}', "has model_arg=[3], which is not an object"),
    ],
)
def test_what_is_no_configuration_is_told_without_advice_that_loses_the_run(run_dir, content, found):
    (run_dir / "config.json").write_bytes(content)
    for call in (("--mode=eval", f"--run_dir={run_dir}"), (*RUN, f"--run_dir={run_dir}")):
        line = problem(*call)
        assert line.startswith(f"{run_dir}/{'config.json'} {found}")
        assert line.endswith("or use another --run_dir; the checkpoints are as they were")
        assert "remove" not in line


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_regular_file_is_not_waited_for(run_dir, make):
    (run_dir / "config.json").unlink()
    make(run_dir / "config.json")
    make(run_dir / "result.json")
    assert f"{run_dir}/{'config.json'} can't be read (it is not a regular file)" in problem(
        *RUN, f"--run_dir={run_dir}"
    )
    assert results.step_of(run_dir / "result.json") == 0


@pytest.mark.parametrize("name", ["model.json", "events.jsonl", "result.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_stands_where_a_run_writes_its_files_is_named_before_it_trains(run_dir, name, make):
    make(run_dir / name)
    line = problem(*RUN, f"--run_dir={run_dir}")
    assert line.startswith(f"--run_dir: {run_dir}/{name} is not a regular file, and the run is to write one")
    assert problem("--mode=eval", f"--run_dir={run_dir}") is None


@pytest.mark.parametrize("value", [3, "x", [1], True])
def test_a_model_that_is_no_configuration_is_told_in_one_line(tmp_path, value):
    described = {"keras": value, "features": {"shape": [1], "dtype": "float32"}, "num_classes": 2, "vocabulary": None}
    (tmp_path / "model.json").write_text(json.dumps(described))
    with pytest.raises(UsageError, match=r"model.json does not say .* \(keras is .*, which is not an object\)"):
        model_file.read(str(tmp_path))


def test_another_runs_checkpoint_is_not_gone_on_with(inside, tmp_path, caplog):
    """Its manifest says which run it is of, as config.json does."""
    run = (*RUN, "--jit=off", "--progress=plain", "--mode=train")
    for seed in ("0", "5"):
        inside(*run, f"--seed={seed}", f"--run_dir={tmp_path}/{seed}").ok()
    for path in (tmp_path / "5" / "checkpoints").glob("ckpt-4.*"):
        shutil.copy(path, tmp_path / "0" / "checkpoints")
    own = ("--mode=eval", f"--run_dir={tmp_path}/0")
    for call in ((*run, f"--run_dir={tmp_path}/0", "--train_steps=6"), own, ("--mode=export", *own[1:])):
        outcome = inside(*call)
        assert f"{tmp_path}/0/checkpoints/ckpt-4.manifest.json is a run of another configuration (seed: 5 -> 0);" in (
            outcome.mistake
        )
    inside(*own, "--allow_changed_config").ok()
    load_model(tmp_path / "0")
    assert f"{tmp_path}/0/checkpoints/ckpt-4.manifest.json is of another configuration than the run (seed: 5 -> 0)" in (
        caplog.text
    )


@pytest.mark.parametrize(
    "content", [b"[1]", b'{"step": []}', b'{"step": 1e999}', b'{"step": "x"}', b"[" * 100_000, b"3"]
)
def test_a_result_that_is_none_counts_for_nothing(tmp_path, content):
    (tmp_path / "result.json").write_bytes(content)
    assert results.step_of(tmp_path / "result.json") == 0


def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(tmp_path):
    (tmp_path / "victim").write_text("dear")
    (tmp_path / ".lock").symlink_to("victim")
    with pytest.raises(UsageError, match=r"\.lock can't be locked \(it is a link\)"), process.lock(str(tmp_path)):
        pass
    assert (tmp_path / "victim").read_text() == "dear"


def test_a_lock_that_is_another_files_name_too_leaves_its_content(tmp_path):
    (tmp_path / "victim").write_text("dear")
    os.link(tmp_path / "victim", tmp_path / ".lock")
    with process.lock(str(tmp_path)):
        pass
    assert (tmp_path / "victim").read_text() == "dear"


def test_a_lock_that_is_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    refusal = pytest.raises(UsageError, match=r"\.lock can't be locked \(it is not a regular file\)")
    with refusal, process.lock(str(tmp_path)):
        pass


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("../victim", path)])
def test_a_log_is_written_through_no_link_and_waits_for_no_reader(local, tmp_path, make):
    (tmp_path / "victim").write_text("dear")
    (tmp_path / "logs").mkdir()
    make(tmp_path / "logs" / "worker-0.log")
    outcome = local("print('done')", "--workers=1", own=(f"--run_dir={tmp_path}",)).wait().ok()
    assert f"[local] no logs of worker 0: {tmp_path}/logs/worker-0.log: it is " in outcome.err
    assert "[worker 0] done\n" in outcome.out
    assert (tmp_path / "victim").read_text() == "dear"


def test_a_run_writes_its_files_in_the_place_of_links(inside, tmp_path):
    (tmp_path / "victim").write_text("dear")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name in ("config.json.tmp", "result.json", "result.json.tmp", "checkpoints/checkpoint.tmp"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "victim")
    for name in ("checkpoints/ckpt-4.manifest.json.tmp", "checkpoints/ckpt-4.manifest.json.writing"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "victim")
    inside(*RUN, f"--run_dir={tmp_path}/run", "--jit=off", "--progress=plain").ok()
    assert (tmp_path / "victim").read_text() == "dear"
    assert json.loads((tmp_path / "run" / "result.json").read_text())["step"] == 4
    exported = ("--mode=export", f"--run_dir={tmp_path}/run")
    os.mkdir(tmp_path / "run" / "export")
    (tmp_path / "run" / "export" / "4.tmp").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    inside(*exported).ok()
    assert os.listdir(tmp_path / "elsewhere") == []
    assert sorted(os.listdir(tmp_path / "run" / "export")) == ["4", "4.tmp"]
    assert oct((tmp_path / "run" / "export" / "4").stat().st_mode & 0o777) == "0o755"


def test_a_models_arguments_of_another_type_are_named(inside, tmp_path):
    run = (*RUN, f"--run_dir={tmp_path}", "--jit=off", "--progress=plain")
    inside(*run).ok()
    path = tmp_path / "config.json"
    before = json.loads(path.read_text())
    for value in ("x", ["x"], 1.5, [[4]]):
        path.write_text(json.dumps(changed(before, ("flags", "model_arg", "hidden_units"), value)))
        outcome = inside("--mode=eval", f"--run_dir={tmp_path}")
        assert outcome.mistake.startswith(f"{path}: --model_arg hidden_units=")
