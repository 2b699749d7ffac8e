"""A run_dir that was damaged, tampered with, or taken away: one line that names the file and the cure, and nothing else
is touched. Damaged checkpoints: tests/engine/checkpoints/test_damaged.py."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import socket

import pytest
import tensorflow as tf
from keras.src.backend.common import global_state

from crankshaft import load_model
from crankshaft.engine.hooks import every_steps
from crankshaft.models import mlp
from crankshaft.runner.command_line import saved_config
from crankshaft.runner.failures import UsageError
from crankshaft.runner.host import locks
from crankshaft.runner.host.text_files import write_run_file
from crankshaft.runner.saved import model_file
from tests.launch.conftest import MLP
from tests.runner.command_line.test_config import asked, checked
from tests.runs import steps

pytestmark = pytest.mark.thorough

RUN = ("--model=mlp", "--model_arg=hidden_units=4", "--input=synthetic", "--input_arg=examples=200", "--train_steps=4")
QUIET = ("--jit=off", "--progress=plain")
TRAIN = (*RUN, *QUIET, "--mode=train")
OTHERS = [None, [], -1, 10**300, 1.5, True, "x", {"a": {"b": [1]}}, "NaN", [[[]]], "a\nerror: b\x1b[31m"]
# What another call does not take from the run's flags, whatever they say.
KINDS = ("tcp", "tcp6", "udp", "udp6")
UNREAD = set(saved_config.PER_CALL_FLAGS)


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A run's folder with its configuration and, by name alone, a checkpoint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "ckpt-4.manifest.json").touch()
    write_run_file(str(tmp_path / "run" / "config.json"), asked(*RUN).as_json())
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
        return error.message
    return None


def test_each_changed_value_of_a_configuration_is_one_line_or_harmless(run_dir):
    path = run_dir / "config.json"
    before = json.loads(path.read_text())
    refused = set()
    calls = [("--mode=eval", f"--run_dir={run_dir}"), (*RUN, f"--run_dir={run_dir}")]
    values = [(), *((other,) for other in OTHERS)]
    for index, place in enumerate(places(before)):
        for number, value in enumerate(values):
            if index % 2 != number % 2 and place[0] == "flags":
                continue  # each of some hundred flags meets half of the values, and each value half of the flags
            path.write_text(json.dumps(changed(before, place, *value)))
            line = problem(*calls[(index // 2 + number // 2) % 2])  # each kind of value is met by both
            if line is None:
                continue
            refused.add(place)
            assert "remove" not in line
            assert len(line.replace(str(run_dir), "")) < 360, line
            if place[0] == "flags" and value and value[0] in ([], {"a": {"b": [1]}}, [[[]]], -1) and len(place) > 1:
                assert line.startswith(f"{path}") or "allow_changed_config" in line, (place, value, line)
                assert place[1] in line
    of_flags = {place[1] for place in places(before) if place[0] == "flags" and len(place) == 2}
    assert of_flags - UNREAD <= {place[1] for place in refused if len(place) == 2}
    assert {place for place in places(before) if place[0] == "deciding"} <= refused


def put(path, content) -> None:
    """Writes bytes, or makes what is no file."""
    path.unlink(missing_ok=True)
    path.write_bytes(content) if isinstance(content, bytes) else content(path)


NO_FILES = [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)]


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
        *((make, "can't be read (it is not a regular file)") for make in NO_FILES),
    ],
)
def test_what_is_no_configuration_is_told_without_advice_that_loses_the_run(run_dir, content, found):
    put(run_dir / "config.json", content)
    for call in (("--mode=eval", f"--run_dir={run_dir}"), (*RUN, f"--run_dir={run_dir}")):
        line = problem(*call)
        assert line.startswith(f"{run_dir}/config.json {found}")
        assert line.endswith("or use another run_dir; the checkpoints are as they were") or content in NO_FILES
        assert "remove" not in line


@pytest.mark.parametrize("name", ["model.json", "events.jsonl", "result.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_stands_where_a_run_writes_its_files_is_named_before_it_trains(run_dir, name, make):
    make(run_dir / name)
    line = problem(*RUN, f"--run_dir={run_dir}")
    assert line.startswith(f"run_dir: {run_dir}/{name} is not a regular file, and the run is to write one")
    assert problem("--mode=eval", f"--run_dir={run_dir}") is None


@pytest.mark.parametrize("value", [3, "x", [1], True])
def test_a_model_that_is_no_configuration_is_told_in_one_line(tmp_path, value):
    described = {"keras": value, "features": {"shape": [1], "dtype": "float32"}, "num_classes": 2, "vocabulary": None}
    (tmp_path / "model.json").write_text(json.dumps(described))
    with pytest.raises(UsageError, match=r"model.json does not describe .* \(keras is .*, which is not an object\)"):
        model_file.read(str(tmp_path))


@pytest.mark.holds("`load_model` refuses layers")
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("TFSMLayer", {"filepath": "/srv/model", "call_endpoint": "serve"}),
        ("Custom>TFSMLayer", {"filepath": "/srv/model", "call_endpoint": "serve"}),
        ("StringLookup", {"vocabulary": "/srv/model"}),
        ("TimeDistributed", {"layer": {"class_name": "TextVectorization", "config": {"vocabulary": "/srv/model"}}}),
    ],
)
def test_a_configuration_of_a_model_has_keras_load_no_file_unless_the_program_says_so(finished, tmp_path, kind, config):
    shutil.copytree(finished(*TRAIN).folder, tmp_path / "run")
    described = json.loads((tmp_path / "run" / "model.json").read_text())
    described["model_is_forward"] = True
    described["keras"]["config"]["layers"].append({"module": "keras.layers", "class_name": kind, "config": config})
    (tmp_path / "run" / "model.json").write_text(json.dumps(described))
    line = r"has a layer \w+ that loads the file /srv/model, .*; look what it is, and call keras.config.enable_unsafe"
    with pytest.raises(UsageError, match=line):
        load_model(tmp_path / "run")
    global_state.set_global_attribute("safe_mode_saving", False)  # as `keras.config.enable_unsafe_deserialization` does
    try:
        with pytest.raises(Exception) as raised:  # noqa: PT011 - Keras's own, of any class: there is no such file
            load_model(tmp_path / "run")
        assert "look what it is" not in str(raised.value)
    finally:
        global_state.set_global_attribute("safe_mode_saving", None)
    load_model(tmp_path / "run", trainer_class=mlp.Model)


@pytest.mark.holds("Keras makes the model")
@pytest.mark.parametrize(
    ("module", "kind", "config"),
    [
        ("keras.layers", "Lambda", {"function": {"class_name": "__lambda__", "config": {"code": "4w=="}}}),
        (
            "keras.layers",
            "Dense",
            {"units": 2, "activation": {"module": "os", "class_name": "function", "config": "system"}},
        ),
        ("subprocess", "Popen", {"args": ["false"]}),
    ],
)
def test_a_configuration_of_a_model_has_keras_make_no_code_and_no_class_of_another(
    finished, tmp_path, module, kind, config
):
    shutil.copytree(finished(*TRAIN).folder, tmp_path / "run")
    described = json.loads((tmp_path / "run" / "model.json").read_text())
    described["model_is_forward"] = True
    described["keras"]["config"]["layers"].append({"module": module, "class_name": kind, "config": config})
    (tmp_path / "run" / "model.json").write_text(json.dumps(described))
    with pytest.raises(UsageError, match=r"^Keras can't make this run's model from its configuration"):
        load_model(tmp_path / "run")


@pytest.mark.holds("A run of one process opens no port")
def test_a_run_of_one_process_listens_nowhere(inside):
    def sockets() -> set[str]:
        links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        return {os.readlink(link) for link in links if os.path.lexists(link)}

    def ports() -> list[str]:
        """The addresses at which this process listens, or receives datagrams."""
        lines = [
            line.split() for kind in KINDS for line in pathlib.Path("/proc/net", kind).read_text().splitlines()[1:]
        ]
        return [line[1] for line in lines if line[3] in ("0A", "07") and f"socket:[{line[9]}]" in sockets()]

    before, during = ports(), []
    inside(*RUN, *QUIET, hooks=[every_steps(2, lambda status, means: during.append(ports()))]).ok()
    assert during == [before, before]
    with socket.create_server(("127.0.0.1", 0)):
        assert len(ports()) == len(before) + 1


def test_another_runs_checkpoint_is_not_gone_on_with(finished, inside, tmp_path, caplog):
    """Its manifest says which run it is of, as config.json does."""
    shutil.copytree(finished(*TRAIN).folder, tmp_path / "0")
    for path in (finished(*TRAIN, "--seed=5").folder / "checkpoints").glob("ckpt-4.*"):
        shutil.copy(path, tmp_path / "0" / "checkpoints")
    manifest, own = f"{tmp_path}/0/checkpoints/ckpt-4.manifest.json", ("--mode=eval", f"--run_dir={tmp_path}/0")
    for call in ((*TRAIN, own[1], "--train_steps=6"), own, ("--mode=export", own[1])):
        inside(*call).refused(f"{manifest} is a run of another configuration (seed: 5 -> 0);")
    inside(*own, "--allow_changed_config").ok()
    load_model(tmp_path / "0")
    assert f"{manifest} is of another configuration than the run (seed: 5 -> 0)" in caplog.text


def test_a_models_arguments_of_another_type_are_named(finished, inside, tmp_path):
    shutil.copytree(finished(*TRAIN).folder, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    before = json.loads(path.read_text())
    for value in ("x", ["x"], 1.5, [[4]]):
        path.write_text(json.dumps(changed(before, ("flags", "model_arg", "hidden_units"), value)))
        outcome = inside("--mode=eval", f"--run_dir={tmp_path}/run")
        assert outcome.mistake.startswith(f"{path}: model_arg hidden_units=")


@pytest.mark.parametrize(
    ("make", "why"), [(os.mkfifo, "it is not a regular file"), (lambda path: path.symlink_to("victim"), "it is a link")]
)
def test_a_lock_that_is_no_file_is_refused_at_once_and_its_target_stays(tmp_path, make, why):
    (tmp_path / "victim").write_text("dear")
    make(tmp_path / ".lock")
    with pytest.raises(UsageError, match=rf"\.lock can't be locked \({why}\)"), locks.lock(str(tmp_path)):
        pass
    assert (tmp_path / "victim").read_text() == "dear"


@pytest.mark.holds("Links at the paths")
def test_a_run_writes_its_files_in_the_place_of_links(inside, tmp_path):
    (tmp_path / "victim").write_text("dear")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name in ("config.json.tmp", "result.json", "result.json.tmp", "checkpoints/checkpoint.tmp"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "victim")
    for name in ("checkpoints/ckpt-4.manifest.json.tmp", "checkpoints/ckpt-4.manifest.json.writing"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "victim")
    inside(*RUN, f"--run_dir={tmp_path}/run", *QUIET).ok()
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
    for name in ("export", "tensorboard"):  # an export writes to the first alone
        shutil.rmtree(tmp_path / "run" / name, ignore_errors=True)
        (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    inside(*exported).ok()
    assert os.listdir(tmp_path / "elsewhere") == []
    assert (tmp_path / "run" / "export" / "4").is_dir()
    assert (tmp_path / "run" / "tensorboard").is_symlink()


@pytest.mark.holds("Links at the paths", "who made a folder that you got")
def test_a_run_goes_on_without_the_links_in_place_of_folders_that_it_writes_to(inside, finished, tmp_path):
    shutil.copytree(finished(*TRAIN).folder, run := tmp_path / "run", symlinks=True)
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(run, tmp_path / "elsewhere" / "backup")
    folders = ("tensorboard", "logs", "ask", "workers", "export", "checkpoints/incomplete")
    for name in folders:
        shutil.rmtree(run / name, ignore_errors=True)
        (run / name).symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (run / "latest").symlink_to("checkpoints")  # the user's own, which no run reads
    before = sorted((tmp_path / "elsewhere").rglob("*"))
    outcome = inside(*TRAIN, f"--run_dir={run}", "--train_steps=6").ok()
    assert outcome.err.count("no run writes through one in its folder") == len(folders)
    assert sorted((tmp_path / "elsewhere").rglob("*")) == before
    assert [*(run / "tensorboard").rglob("events*")]
    assert not (run / "tensorboard").is_symlink()
    assert (run / "latest").is_symlink()


# -- checkpoints that are lost

EACH_TWO = ("--eval_every_steps=2", "--steps_per_loop=1", "--progress=plain")


def test_a_run_whose_checkpoints_are_gone_goes_on_from_its_best_to_the_same_bits(inside, tmp_path):
    """As one that was killed before it saved another. A rate that falls counts each evaluation once."""
    run = (*MLP, *EACH_TWO, "--reduce_lr=patience=1", "--reduce_lr=min_delta=1")
    whole, killed = f"--run_dir={tmp_path}/whole", f"--run_dir={tmp_path}/killed"
    inside(*run, "--train_steps=10", whole).ok()
    inside(*run, "--train_steps=6", killed).ok()
    shutil.rmtree(tmp_path / "killed" / "checkpoints")
    assert "resumed at step 6: this run is complete" in inside(*run, "--train_steps=6", killed).ok().out
    assert "resumed at step 6 of 10" in inside(*run, "--train_steps=10", killed).ok().out
    data_files, events = [], []
    for name in ("whole", "killed"):
        manifest = json.loads((tmp_path / name / "checkpoints" / "ckpt-10.manifest.json").read_text())
        data_files.append({file: about["sha256"] for file, about in manifest["files"].items() if "data" in file})
        events.append([json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()])
    assert data_files[0] == data_files[1]
    rows, again = ([event["step"] for event in of if event["event"] == "evaluation"] for of in events)
    assert rows == again == [2, 4, 6, 8, 10]


@pytest.mark.slow
def test_a_run_killed_between_its_first_best_checkpoint_and_its_first_other_goes_on(crank, inside, tmp_path):
    run = (*MLP, *EACH_TWO, f"--run_dir={tmp_path}")
    program = crank.start(*run, "--train_steps=1000000")
    program.until(lambda: steps(tmp_path, "best"))
    program.process.kill()
    program.wait()
    best = steps(tmp_path, "best")[-1]
    assert not (tmp_path / "checkpoints").exists()
    assert f"resumed at step {best} " in inside(*run, f"--train_steps={best + 6}").ok().out
    assert steps(tmp_path) == [best + 6]


@pytest.mark.parametrize("folder", ["checkpoints", "best"])
def test_checkpoints_that_the_run_is_not_known_to_have_written_stay(inside, tmp_path, folder):
    run = (*MLP, "--progress=plain", f"--run_dir={tmp_path}")
    others = tf.train.CheckpointManager(tf.train.Checkpoint(v=tf.Variable(1.0)), tmp_path / folder, max_to_keep=None)
    for _ in range(3):
        others.save()
    before = sorted((tmp_path / folder).iterdir())
    outcome = inside(*run, "--train_steps=2")
    says = f"{tmp_path}/{folder} has checkpoint files that no manifest lists: ckpt-1.data-"
    outcome.refused(f"{says} ... move them elsewhere, or use another run_dir, with init_from to begin")
    assert sorted((tmp_path / folder).iterdir()) == before
    assert not (tmp_path / "config.json").exists()


# -- a run_dir that is taken away while its run goes on


def remove(run_dir):
    """Moves it away first: files of a save that is being written come and go while a tree is removed."""
    os.rename(run_dir, f"{run_dir}-taken")
    shutil.rmtree(f"{run_dir}-taken", ignore_errors=True)


def replace(run_dir):
    """As another run begins there."""
    os.rename(run_dir, f"{run_dir}-moved")
    run_dir.mkdir()
    (run_dir / "notes").write_text("another's")


@pytest.mark.parametrize("take_away", [pytest.param(remove, marks=pytest.mark.slow), replace])
def test_a_run_whose_run_dir_is_taken_away_ends_with_one_line(inside, tmp_path, take_away):
    run_dir = tmp_path / "run"
    seen = []

    def act(status, means):
        seen.append(status.step)
        if status.step == 30:
            take_away(run_dir)

    flags = (*RUN, *QUIET, "--train_steps=60", "--checkpoint_every_steps=20", "--summary_every_steps=5")
    outcome = inside(*flags, f"--run_dir={run_dir}", hooks=[every_steps(10, act)])
    assert outcome.mistake.startswith(f"run_dir={run_dir} was removed or replaced while its run went on")
    assert seen == [10, 20, 30]
    left = sorted(os.listdir(run_dir)) if run_dir.exists() else []
    assert not {"config.json", "result.json", ".lock", "checkpoints"} & set(left)


@pytest.mark.holds("who may write to `run_dir`")
@pytest.mark.parametrize(("mode", "is_named"), [(0o777, True), (0o1777, True), (0o775, False), (0o700, False)])
def test_a_run_dir_that_anybody_may_write_to_is_named(run_dir, caplog, mode, is_named):
    os.chmod(run_dir, mode)
    assert problem(*RUN, f"--run_dir={run_dir}") is None
    assert (f"may be written to by each user of this machine (mode {mode:o})" in caplog.text) == is_named


@pytest.mark.parametrize("is_new", [True, False])
def test_a_new_run_dir_that_a_group_may_write_to_is_named(run_dir, tmp_path, caplog, monkeypatch, is_new):
    (folder := tmp_path / "new" if is_new else run_dir).mkdir(exist_ok=True)
    os.chmod(folder, 0o2775)
    assert problem(*RUN, f"--run_dir={folder}") is None
    assert "may be written to" not in caplog.text  # by its user's own group
    group = os.stat(folder).st_gid
    monkeypatch.setattr(os, "getegid", lambda: group + 1)
    assert problem(*RUN, f"--run_dir={folder}") is None
    assert (f"may be written to by group {group} (mode 2775)" in caplog.text) == is_new


def test_a_lock_that_is_removed_is_made_again(tmp_path):
    with locks.lock(str(tmp_path)) as opened:
        os.remove(tmp_path / ".lock")
        opened.check()
        with pytest.raises(UsageError, match=f"is in use by process {os.getpid()}"), locks.lock(str(tmp_path)):
            pass


def test_a_lock_that_another_has_taken_meanwhile_ends_the_run(tmp_path):
    with locks.lock(str(tmp_path)) as opened:
        opened.check()
        os.remove(tmp_path / ".lock")
        with locks.lock(str(tmp_path)), pytest.raises(UsageError, match="is in use by process"):
            opened.check()
