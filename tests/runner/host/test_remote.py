"""A run whose folder is on another file system: TensorFlow's `ram://` in this process, `file://` in others."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import tempfile
import time

import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine.hooks import every_steps
from crankshaft.engine.machine import files
from crankshaft.parts.launchers.resources import free_ports
from crankshaft.runner.failures import RunError, UsageError
from crankshaft.runner.host import remote
from tests.runs import assert_equal_bits, newest
from tests.waiting import wait_until

pytestmark = pytest.mark.thorough

RUN = ("--model=mlp", "--model_arg=hidden_units=8", "--input=digits", "--jit=off")


@pytest.fixture
def url(request):
    return f"ram://{request.node.name}/run"


def names(url: str) -> set[str]:
    """Every file below a folder, by its path within."""
    walked = tf.io.gfile.walk(url)
    return {os.path.join(folder[len(url) :].strip("/"), name) for folder, _, found in walked for name in found}


def test_a_run_elsewhere_resumes_and_ends_on_the_bits_of_one_here(inside, url, tmp_path):
    inside(*RUN, f"--run_dir={url}", "--train_steps=20").ok()
    after = inside(*RUN, f"--run_dir={url}", "--train_steps=40").ok()
    assert f"resumed at step 20 of 40 from {url}" in after.out
    assert f"The run's files: {url}\n" in after.out
    inside(*RUN, f"--run_dir={tmp_path / 'here'}", "--train_steps=40").ok()
    copy = remote.RemoteFolder(url)
    assert_equal_bits(pathlib.Path(copy.folder), tmp_path / "here")
    assert {"config.json", "events.jsonl", "result.json"} <= names(url)
    assert not [name for name in names(url) if name.endswith(".tmp") or ".lock" in name]
    assert sum(name.startswith("tensorboard/train/") for name in names(url)) == 2  # of each process


@pytest.mark.parametrize(
    ("folder", "name"),
    [("", "../../evil"), ("", "/tmp/evil"), ("/a/..", "evil"), ("/..", "evil"), ("/x", "../../evil")],
)
def test_a_name_that_leads_out_of_a_bucket_is_refused_before_anything_is_copied(url, monkeypatch, folder, name):
    tf.io.gfile.makedirs(url)
    monkeypatch.setattr(tf.io.gfile, "walk", lambda top: iter([(top, [], []), (top + folder, [], [name])]))
    monkeypatch.setattr(tf.io.gfile, "copy", lambda *_, **__: pytest.fail("it is copied"))
    with pytest.raises(UsageError, match="whose copy would not be below that of the folder; remove it"):
        remote.RemoteFolder(url)


def test_what_a_run_removes_or_sets_aside_here_goes_there(inside, url):
    flags = (f"--run_dir={url}", "--checkpoint_every_steps=10", "--keep_checkpoints=2")
    inside(*RUN, *flags, "--train_steps=30").ok()
    tf.io.gfile.GFile(f"{url}/checkpoints/ckpt-90.index", "w").write("x")  # of another copy, in part
    inside(*RUN, *flags, "--train_steps=50").ok()
    found = {name for name in names(url) if re.fullmatch(r"checkpoints/.*ckpt-\d+\.(index|manifest\.json)", name)}
    whole = {f"checkpoints/ckpt-{step}.{end}" for step in (40, 50) for end in ("index", "manifest.json")}
    assert found == whole | {"checkpoints/incomplete/ckpt-90.index"}


def test_files_of_a_checkpoint_are_copied_only_when_it_is_whole(url):
    folder = remote.RemoteFolder(url)
    checkpoints = pathlib.Path(folder.folder, "checkpoints")
    checkpoints.mkdir()
    for name in ("ckpt-5.index", "ckpt-5.data-00000-of-00001", "ckpt-5.abcd.tmp", "checkpoint"):
        (checkpoints / name).write_text("x")
    folder.push()
    assert names(url) == {"checkpoints/checkpoint"}
    (checkpoints / "ckpt-5.manifest.json").write_text("{}")
    folder.push()
    assert {"checkpoints/ckpt-5.manifest.json", "checkpoints/ckpt-5.index"} < names(url)
    assert not [name for name in names(url) if name.endswith(".writing")]
    (checkpoints / "incomplete").mkdir()
    for path in checkpoints.glob("ckpt-5.*[!p]"):
        folder.removing(path)
        path.rename(checkpoints / "incomplete" / path.name) if path.suffix == ".index" else path.unlink()
    folder.push()
    assert names(url) == {"checkpoints/checkpoint", "checkpoints/incomplete/ckpt-5.index"}  # set aside, not removed


def test_files_are_copied_as_they_are_written_and_a_failure_is_told_once_and_tried_again(url, monkeypatch, caplog):
    def refused(*_, **__):
        failed.append(0)
        raise OSError("it is away")

    monkeypatch.setattr(remote, "_PUSH_SECONDS", 0.05)
    folder, failed = remote.RemoteFolder(f"{url}/"), []
    assert folder.url == url
    here = pathlib.Path(folder.folder)
    with folder.pushing():
        assert tf.io.gfile.isdir(url)
        for text in ("one", "other"):  # of another size, or else of another time
            (here / "file").write_text(text)
            wait_until(lambda text=text: "file" in names(url) and tf.io.gfile.GFile(f"{url}/file").read() == text)
            with monkeypatch.context() as patch:
                patch.setattr(tf.io.gfile, "copy", refused)
                (here / text).write_text("later")
                failed.clear()
                wait_until(lambda: len(failed) > 3)
            wait_until(lambda text=text: text in names(url))
        warning = f"run_dir={url} can't be written now (it is away); tried again"
        assert [record.getMessage() for record in caplog.records] == [warning] * 2
        monkeypatch.setattr(remote, "_PUSH_SECONDS", 60.0)
        time.sleep(0.1)
        (here / "last").write_text("x")
        (here / "file").unlink()  # not by the run, which does not need it
    assert names(url) == {"one", "other", "last", "file"}
    monkeypatch.setattr(tf.io.gfile, "copy", refused)
    with pytest.raises(RunError, match=rf"can't be copied to run_dir={url} .*; its files are in {here}.kept$"):
        write_more(folder)
    assert (pathlib.Path(f"{here}.kept") / "more").read_text() == "x"
    shutil.rmtree(f"{here}.kept")


def write_more(folder):
    with folder.pushing():
        pathlib.Path(folder.folder, "more").write_text("x")


def test_a_folder_of_a_run_may_be_copied_elsewhere_and_what_goes_meanwhile_is_none(url, monkeypatch):
    board = f"{os.path.dirname(url)}/board"
    folder = remote.RemoteFolder(url, {"tensorboard": f"{board}/", "logs": "/here", "export": None})
    here = pathlib.Path(folder.folder)
    for name in ("tensorboard/train/events", "logs/0", "checkpoints/ckpt-1.index", "checkpoints/ckpt-1.manifest.json"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(name)
    copy = tf.io.gfile.copy

    def goes(path, to, overwrite):
        if path.endswith("index"):
            folder.removing(path)  # the run, which keeps newer ones
            os.remove(path)
        copy(path, to, overwrite)

    monkeypatch.setattr(tf.io.gfile, "copy", goes)
    folder.push()
    assert names(board) == {"train/events"}
    assert names(url) == {"logs/0", "checkpoints/ckpt-1.manifest.json"}
    folder.removing(manifest := here / "checkpoints/ckpt-1.manifest.json")
    folder.push()
    assert names(url) == {"logs/0", "checkpoints/ckpt-1.manifest.json"}  # it is here still
    manifest.unlink()
    folder.push()
    assert names(url) == {"logs/0"}
    folder.push()
    monkeypatch.setattr(tf.io.gfile, "copy", lambda *_, **__: pytest.fail("it is copied again"))
    folder.push()
    monkeypatch.setattr(tf.io.gfile, "copy", copy)
    again = remote.RemoteFolder(url)
    assert os.listdir(again.folder) == ["checkpoints"]  # what no run reads again is not copied here


def test_what_another_program_removes_here_ends_the_run_and_stays_there(url, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    whole = {"checkpoints/ckpt-20.manifest.json", "checkpoints/ckpt-40.manifest.json"}

    def clean(status, _):
        if status.step == 60:
            wait_until(lambda: whole <= names(url))
            (found,) = tmp_path.glob("crankshaft-run-*/checkpoints/ckpt-40.index")
            found.unlink()
            wait_until(lambda: caplog.records)

    flags = {"model": "mlp", "input": "digits", "jit": "off", "run_dir": url, "train_steps": 80, "eval_every_steps": 0}
    line = f"^run_dir={url}: another program has removed checkpoints/ckpt-40.index from its copy, {tmp_path}/.*TMPDIR"
    with pytest.raises(RunError, match=line):
        crankshaft.run(**flags, checkpoint_every_steps=20, hooks=[every_steps(20, clean)])
    assert {name for name in names(url) if name.endswith(".manifest.json")} == whole
    assert crankshaft.run(**flags).result["resumed_from"] == 40


@pytest.mark.parametrize("is_again", [False, True])
def test_only_the_removals_of_the_run_are_repeated(url, is_again):
    folder = remote.RemoteFolder(url)
    path = pathlib.Path(folder.folder, "best", "ckpt-1.manifest.json")
    path.parent.mkdir()
    path.write_text("{}")
    folder.push()
    if is_again:  # removed by the run, and written again, before a copy
        folder.removing(path)
        path.unlink()
        path.write_text("{...}")
        folder.push()
    path.unlink()
    path.with_name("ckpt-2.manifest.json").write_text("{}")
    with pytest.raises(RunError, match=r"another program has removed best/ckpt-1\.manifest\.json from"):
        folder.push()
    assert names(url) == {"best/ckpt-1.manifest.json"}


def test_what_a_killed_process_left_of_a_copy_goes_with_the_next_one(url):
    tf.io.gfile.makedirs(f"{url}/checkpoints")
    for name in ("config.json", "checkpoints/ckpt-5.index.tmp", "checkpoints/ckpt-5.manifest.json.writing.tmp"):
        tf.io.gfile.GFile(f"{url}/{name}", "w").write("x")
    remote.RemoteFolder(url).push()
    assert names(url) == {"config.json"}


def test_the_copy_goes_with_the_object(url):
    opened = len(os.listdir("/proc/self/fd"))
    folder = remote.RemoteFolder(url)
    path = folder.folder
    assert os.path.isdir(path)
    del folder
    assert len(os.listdir("/proc/self/fd")) == opened
    assert not os.path.exists(path)


def test_what_a_killed_process_has_left_goes_with_the_next_start_of_its_run(url, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    name = os.path.basename(remote.RemoteFolder(url).folder).split(".")[0]
    if not (child := os.fork()):
        files.locked_folder(name)
        time.sleep(60)
        os._exit(0)
    try:
        wait_until(lambda: os.listdir(tmp_path))
        (left,) = os.listdir(tmp_path)
        first = remote.RemoteFolder(url)
        assert left in os.listdir(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    other = remote.RemoteFolder(f"{url}/other")
    assert left in os.listdir(tmp_path)
    second = remote.RemoteFolder(url)
    assert {*os.listdir(tmp_path)} == {os.path.basename(folder.folder) for folder in (first, second, other)}


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_from_what_was_copied(crank, tmp_path):
    there = tmp_path / "bucket" / "run"
    flags = (*RUN, f"--run_dir=file://{there}", "--progress=plain")
    program = crank.start(*flags, "--train_steps=1000000", "--checkpoint_every_steps=200", "--keep_checkpoints=3")
    program.until(lambda: there.exists() and newest(there) > 0)
    program.process.kill()
    program.wait()
    step = newest(there)
    end = step + 5
    again = crank(*flags, f"--train_steps={end}").ok()
    assert f"resumed at step {step:,} of {end:,}" in again.out
    assert newest(there) == end


def test_a_folder_that_cannot_be_is_one_line(inside, tmp_path):
    (tmp_path / "file").write_text("")
    found = inside(*RUN, f"--run_dir=file://{tmp_path}/file/run", "--train_steps=2")
    assert found.code == 2
    assert found.error.startswith(f"run_dir=file://{tmp_path}/file/run can't be ")


def test_workers_that_write_parts_of_a_checkpoint_need_a_folder_that_all_see(inside, tmp_path, monkeypatch):
    workers = [f"localhost:{port}" for port in free_ports(2)]
    task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    flags = ("--strategy=multi_worker", "--mesh=model:2", f"--run_dir=file://{tmp_path}/run", "--train_steps=2")
    found = inside(*RUN, *flags)
    assert found.code == 2
    assert found.error.startswith("mesh=model:2: workers write parts of one checkpoint")


def test_a_file_system_that_is_unknown_is_one_line():
    with pytest.raises(UsageError, match=r"^nowhere://x: TensorFlow has no file system for nowhere://; mount"):
        remote.remote_folder("nowhere://x")
