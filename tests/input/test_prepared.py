"""Files that are prepared once: whole or not at all, never stale, made by one process while others wait."""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

import pytest

from crankshaft.engine.errors import SourceError
from crankshaft.engine.machine import files
from crankshaft.input.checks import InputError
from crankshaft.input.files.prepared import Prepared, prepared
from crankshaft.input.files.storage import Files
from tests.waiting import PATIENCE


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "data.txt"
    path.write_bytes(b"0123456789")
    return path


def doubled(files):
    def write(writer):
        writer.write(2 * files.read(0))
        writer.metadata["made"] = time.time_ns()

    return write


def make(path, **arguments):
    files = Files([str(path)])
    return prepared(files, "doubled", arguments, doubled(files))


def kept(path):
    return sorted(os.listdir(path.parent / ".crankshaft"))


def test_is_made_once_and_read_by_index(source):
    first, again = make(source), make(source)
    assert (first.path, first.metadata) == (again.path, again.metadata)
    assert again.read(5, 10) == b"5678901234"
    assert kept(source) == [os.path.basename(first.path)]


def test_digest_is_of_its_bytes_alone(source):
    metadata = make(source).metadata
    os.utime(source, (1, 1))
    assert make(source).metadata["digest"] == metadata["digest"]
    assert make(source).metadata["made"] != metadata["made"]


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"01234567890"),
        lambda path: os.utime(path, (1, 1)),
        lambda path: (when := os.stat(path).st_mtime_ns, path.write_bytes(b"0123x56789"), os.utime(path, ns=(0, when))),
    ],
    ids=["longer", "newer", "other bytes of the same time"],
)
def test_what_was_made_of_other_files_is_not_read(source, change):
    before = make(source)
    change(source)
    after = make(source)
    assert after.path != before.path
    assert after.read(0, 20) == (2 * source.read_bytes())[:20]


def test_other_arguments_are_another_file(source):
    assert make(source, rate=1).path != make(source, rate=2).path


@pytest.mark.parametrize("end", [0, 5, 20, 30, -1])
def test_one_that_is_not_whole_is_made_again(source, end):
    first = make(source)
    whole = pathlib.Path(first.path).read_bytes()
    with open(first.path, "wb") as file:
        file.write(whole[:end])
    with pytest.raises(SourceError, match=r"doubled-\w+ is not whole; remove it: it is rebuilt"):
        Prepared(first.path)
    assert make(source).read(0, 20) == 2 * source.read_bytes()


def test_an_error_leaves_nothing(source):
    def write(writer):
        writer.write(b"half")
        raise InputError("a bad line")

    with pytest.raises(InputError, match="a bad line"):
        prepared(Files([str(source)]), "half", {}, write)
    assert kept(source) == []


def test_files_that_grow_while_they_are_read_are_refused(source):
    files = Files([str(source)])

    def write(writer):
        writer.write(files.read(0))
        source.write_bytes(b"0123456789 and more")

    with pytest.raises(SourceError, match="had 10 as the run began"):
        prepared(files, "grown", {}, write)
    assert kept(source) == []


def test_a_folder_that_cannot_be_written_is_one_line(source, tmp_path):
    (tmp_path / ".crankshaft").write_text("in the way")
    with pytest.raises(InputError, match=r"can't be written \(.*\); name a folder for it by input_arg=prepared_dir=F"):
        make(source)
    files = Files([str(source)])
    found = prepared(files, "doubled", {}, doubled(files), str(tmp_path / "there" / "deep"))
    assert found.read(0, 1) == b"0"


PREPARING = """
import sys, time
from crankshaft.input.files.prepared import prepared
from crankshaft.input.files.storage import Files

def write(writer):
    print("writing", flush=True)
    time.sleep(float(sys.argv[2]))
    writer.write(b"abc")

prepared(Files([sys.argv[1]]), "slow", {}, write)
print("done", flush=True)
"""


def start(source, seconds):
    return subprocess.Popen([sys.executable, "-c", PREPARING, str(source), str(seconds)], stdout=subprocess.PIPE)


def test_a_second_process_waits_and_makes_nothing(source):
    first = start(source, 1)
    assert first.stdout.readline() == b"writing\n"
    second = start(source, 1)
    assert second.communicate(timeout=PATIENCE)[0] == b"done\n"
    assert first.communicate(timeout=PATIENCE)[0] == b"done\n"
    assert len(kept(source)) == 1


def test_what_a_killed_process_has_left_is_in_nobodys_way(source):
    first = start(source, 1000)
    assert first.stdout.readline() == b"writing\n"
    first.kill()
    first.communicate(timeout=PATIENCE)
    assert kept(source)[0].endswith(".tmp")
    second = start(source, 0)
    assert second.communicate(timeout=PATIENCE)[0] == b"writing\ndone\n"
    assert len(kept(source)) == 1


@pytest.fixture
def shared():
    """A folder in which any user may write, and a file in it; pytest's own folders are one user's."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "data.txt")
        path.write_bytes(b"0123456789")
        (path.parent / ".crankshaft").mkdir()
        for each in (path.parent, path.parent / ".crankshaft"):
            each.chmod(0o777)
        yield path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is another user too")
@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_a_lock_that_another_user_has_left_is_taken_or_named(shared, mode):
    name = os.path.basename(make(shared).path)
    lock = shared.parent / ".crankshaft" / f"{name}.lock"
    os.rename(shared.parent / ".crankshaft" / name, lock)
    lock.chmod(mode)
    os.seteuid(2002)
    try:
        if mode == 0o644:
            assert make(shared).read(0, 1) == b"0"
            assert kept(shared) == [name]
        else:
            with pytest.raises(InputError, match=rf"{lock}, .*can't be written \(Permission denied\); name a folder"):
                make(shared)
    finally:
        os.seteuid(0)


@pytest.mark.holds("A user who may only read the folder")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root is another user too")
def test_users_of_a_folder_that_one_alone_may_write_to_do_not_wait_for_one_another(shared, monkeypatch):
    """Else whoever may read it could hold the lock for ever."""
    for folder in (shared.parent, shared.parent / ".crankshaft"):
        folder.chmod(0o755)
    with tempfile.TemporaryDirectory() as temporary, start(shared, 1000) as owner:
        try:
            assert owner.stdout.readline() == b"writing\n"
            (lock,) = (name for name in kept(shared) if name.endswith(".lock"))
            os.chmod(temporary, 0o777)
            monkeypatch.setattr(tempfile, "tempdir", temporary)
            os.seteuid(2002)
            with pytest.raises(PermissionError):
                os.open(shared.parent / ".crankshaft" / lock, os.O_RDONLY)
            files = Files([str(shared)])
            assert prepared(files, "slow", {}, doubled(files)).path.startswith(temporary)
        finally:
            os.seteuid(0)
            owner.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is another user too")
def test_files_in_a_read_only_folder_are_prepared_in_a_temporary_one_of_this_user(shared, monkeypatch, caplog):
    (temporary := shared.parent / "tmp").mkdir()
    temporary.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (shared.parent / ".crankshaft").rmdir()
    shared.parent.chmod(0o755)
    os.seteuid(2002)
    try:
        first, again = make(shared), make(shared)
        assert (first.path, first.metadata) == (again.path, again.metadata)
        mine = temporary / "crankshaft-prepared-2002"
        assert os.path.dirname(first.path) == str(mine)
        assert mine.stat().st_mode & 0o777 == 0o700
        assert f"{shared.parent}/.crankshaft can't be written (Permission denied), so {mine} is used" in caplog.text
        os.seteuid(0)
        os.chown(mine, 0, 0)  # another user has been there first
        os.seteuid(2002)
        with pytest.raises(InputError, match="name a folder for it by input_arg=prepared_dir=FOLDER"):
            make(shared)
    finally:
        os.seteuid(0)


@pytest.mark.holds("In a sticky folder")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root is another user too")
@pytest.mark.parametrize(
    ("mode", "owner", "is_read"), [(0o1777, 2002, False), (0o1777, 3003, True), (0o777, 2002, True)]
)
def test_in_a_sticky_folder_a_cache_is_the_users_or_the_files_owners(shared, monkeypatch, caplog, mode, owner, is_read):
    """Anybody may make one there, with other contents; elsewhere who may write there could change the file too."""

    def become(user):
        os.seteuid(0)
        os.seteuid(user)

    (shared.parent / ".crankshaft").rmdir()
    shared.parent.chmod(mode)
    os.chown(shared, owner, owner)
    with tempfile.TemporaryDirectory() as temporary:
        os.chmod(temporary, 0o777)
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        try:
            become(3003)
            first = make(shared)
            assert first.path.startswith(f"{shared.parent}/.crankshaft/")
            (shared.parent / "link").symlink_to(temporary)
            become(2002)
            second = make(shared)
            assert (second.metadata == first.metadata) == (second.path == first.path) == is_read
            line = f"{shared.parent}/.crankshaft can't be used (another user's, in a folder in which anybody may"
            assert (line in caplog.text) != is_read
            assert make(shared).metadata == second.metadata
            assert files.make_cache(f"{shared.parent}/link", str(shared)) == bool(mode == 0o777)
        finally:
            os.seteuid(0)


def test_remote_files_are_prepared_beside_them():
    import tensorflow as tf

    with tf.io.gfile.GFile("ram://prepared/data.txt", "wb") as file:
        file.write(b"0123456789")
    files = Files(["ram://prepared/data.txt"])
    found = [prepared(files, "doubled", {}, doubled(files)) for _ in range(2)]
    assert found[0].metadata == found[1].metadata
    assert found[1].read(5, 10) == b"5678901234"
    assert len(tf.io.gfile.listdir("ram://prepared/.crankshaft")) == 1


def test_each_of_many_files_counts(tmp_path):
    paths = [str(tmp_path / f"{number}.txt") for number in range(600)]
    for path in paths:
        pathlib.Path(path).write_bytes(b"abc")
    found = set()
    for change in (None, 0, 1, 599):
        if change is not None:
            pathlib.Path(paths[change]).write_bytes(b"abd")
        files = Files(paths)
        found.add(prepared(files, "many", {}, doubled(Files(paths[:1]))).path)
    assert len(found) == 4
