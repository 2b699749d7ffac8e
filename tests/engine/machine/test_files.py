"""What is written takes the place of whatever is there, whole; what is read is a regular file."""

import errno
import fcntl
import os
import pathlib
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest

from crankshaft.engine.machine import files

pytestmark = pytest.mark.thorough


def test_a_link_is_replaced_and_its_target_stays(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("dear")
    for name in ("result.json", "result.json.tmp"):
        (tmp_path / name).symlink_to(victim)
    files.write_text(tmp_path / "result.json", "{}")
    assert victim.read_text() == "dear"
    assert (tmp_path / "result.json").read_text() == "{}"
    assert not (tmp_path / "result.json").is_symlink()


def test_a_pipe_is_replaced_without_a_wait(tmp_path):
    os.mkfifo(tmp_path / "result.json")
    files.write_text(tmp_path / "result.json", "{}")
    assert (tmp_path / "result.json").read_text() == "{}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
@pytest.mark.parametrize(("kind", "number"), [(stat.S_IFCHR, (1, 3)), (stat.S_IFBLK, (7, 0))])
def test_a_device_is_not_replaced(tmp_path, kind, number):
    try:
        os.mknod(tmp_path / "null", kind | 0o666, os.makedev(*number))
    except PermissionError:
        pytest.skip("this container makes no devices")
    with pytest.raises(OSError, match="it is a device"):
        files.write_text(tmp_path / "null", "{}")
    assert stat.S_IFMT(os.stat(tmp_path / "null").st_mode) == kind
    assert os.listdir(tmp_path) == ["null"]


def test_what_can_not_be_put_in_place_leaves_nothing(tmp_path):
    (tmp_path / "result.json" / "full").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        files.write_text(tmp_path / "result.json", "{}")
    assert os.listdir(tmp_path) == ["result.json"]


def test_what_a_killed_writer_left_is_swept_and_what_a_live_one_has_stays(tmp_path):
    path = tmp_path / "result.json"
    program = (
        "import os, sys\nfrom crankshaft.engine.machine import files\n"
        "with files.replacing(sys.argv[1], files.make_file):\n    print('writing', flush=True)\n    sys.stdin.read()\n"
    )
    others = {"result.json.tmp", "result.json.0123.tmp", "other.json.0123456789abcdef.tmp"}
    for name in others:
        (tmp_path / name).touch()
    writer = subprocess.Popen([sys.executable, "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert writer.stdout.readline() == b"writing\n"
        files.write_text(path, "1")
        (left,) = set(os.listdir(tmp_path)) - others - {"result.json"}
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert left in os.listdir(tmp_path)
        files.write_text(path, "2")
    finally:
        writer.kill()
        writer.communicate()
    assert set(os.listdir(tmp_path)) == others | {"result.json"}


def test_what_was_swept_before_it_was_locked_is_made_again(tmp_path):
    """Between a file's making and its lock another writer may take it for one that was left."""
    made = []

    def make(path):
        opened = files.make_file(path)
        made.append(path)
        if len(made) == 1:
            swept.append(os.open(path, os.O_RDONLY))
            fcntl.flock(swept[0], fcntl.LOCK_EX)
            os.remove(path)
        return opened

    swept = []
    with files.replacing(tmp_path / "a", make) as temporary:
        assert temporary == made[1] != made[0]
    os.close(swept[0])
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.holds("A user who may only read the folder")
def test_a_new_file_that_somebody_has_locked_first_is_not_waited_for(tmp_path):
    """Whoever may only read the folder can."""
    made = []

    def make(path):
        opened = files.make_file(path)
        made.append(path)
        if len(made) < 3:
            held.append(os.open(path, os.O_RDONLY))
            fcntl.flock(held[-1], fcntl.LOCK_EX)
        return opened

    held = []
    with files.replacing(tmp_path / "a", make) as temporary:
        assert temporary == made[2]
    for descriptor in held:
        os.close(descriptor)
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.holds("A user who may only read the folder")
@pytest.mark.parametrize(("folder", "expected"), [(0o755, 0o600), (0o775, 0o660), (0o777, 0o666), (0o1777, 0o666)])
def test_a_lock_can_be_opened_only_by_who_may_write_to_its_folder(tmp_path, monkeypatch, folder, expected):
    before = os.umask(0)
    try:
        os.chmod(tmp_path, folder)
        (tmp_path / "old").touch(0o664)
        for name, mode in (("new", expected), ("old", expected & 0o664)):
            os.close(files.open_lock(tmp_path / name))
            assert stat.S_IMODE(os.stat(tmp_path / name).st_mode) == mode
        os.umask(0o027)
        os.close(files.open_lock(tmp_path / "masked"))
        assert stat.S_IMODE(os.stat(tmp_path / "masked").st_mode) == expected & ~0o027
        os.umask(0)
        (tmp_path / "elsewhere").touch(0o664)
        os.link(tmp_path / "elsewhere", tmp_path / "linked")  # which would be opened less to others elsewhere
        monkeypatch.chdir(tmp_path)
        os.close(files.open_lock("linked"))
        assert stat.S_IMODE(os.stat("linked").st_mode) == 0o664
    finally:
        os.umask(before)


def test_a_new_file_is_written_where_it_was_made_whatever_takes_its_place(tmp_path):
    """Whoever may write to the folder could exchange it for a link meanwhile."""
    (tmp_path / "victim").write_text("dear")
    with files.new_file(tmp_path / "a") as file:
        (temporary,) = (name for name in os.listdir(tmp_path) if name.startswith("a."))
        os.rename(tmp_path / temporary, tmp_path / "moved")
        (tmp_path / temporary).symlink_to("victim")
        file.write(b"text")
    assert (tmp_path / "victim").read_text() == "dear"
    assert (tmp_path / "moved").read_text() == "text"


def test_a_folder_is_opened_below_another_through_no_link(tmp_path, monkeypatch):
    (tmp_path / "given" / "run" / "logs").mkdir(parents=True)
    (tmp_path / "link").symlink_to("given")
    (tmp_path / "given" / "other").symlink_to("run")
    for name in ("", "run", "run/logs", "./run"):
        with files.folder_below(tmp_path / "link", name) as opened:
            assert os.path.samestat(os.fstat(opened), os.stat(tmp_path / "given" / name))
    for name in ("other", "other/logs"):
        with pytest.raises(OSError, match="it is a link"), files.folder_below(tmp_path / "link", name):
            pass
    with pytest.raises(FileNotFoundError), files.folder_below(tmp_path / "link", "none"):
        pass
    (tmp_path / "given" / "file").touch()
    with pytest.raises(NotADirectoryError), files.folder_below(tmp_path / "link", "file"):
        pass
    monkeypatch.chdir(tmp_path / "given")
    with files.folder_below("", "run/logs") as opened:
        assert os.path.samestat(os.fstat(opened), os.stat("run/logs"))


def test_a_file_system_that_can_not_rename_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="its file system can't rename; use a folder of another,"):
        files.write_text(tmp_path / "a", "text")
    assert os.listdir(tmp_path) == []


def test_many_writers_of_one_file_leave_one_whole(tmp_path):
    texts = [str(number) * 100_000 for number in range(8)]
    failed = []

    def write(text):
        try:
            for _ in range(20):
                files.write_text(tmp_path / "a", text)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert (tmp_path / "a").read_text() in texts
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("how", [os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_APPEND | os.O_CREAT])
def test_a_pipe_and_a_folder_are_no_regular_files(tmp_path, how):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is not a regular file"):
        files.open_regular(tmp_path / "pipe", how)
    with pytest.raises(OSError, match=r"it is not a regular file|Is a directory"):
        files.open_regular(tmp_path, how)


def test_a_link_is_read_and_not_written_through(tmp_path):
    (tmp_path / "victim").write_text("{}")
    (tmp_path / "link").symlink_to("victim")
    (tmp_path / "broken").symlink_to("nothing")
    assert files.read_json(tmp_path / "link") == {}
    for name in ("link", "broken"):
        with pytest.raises(OSError, match="it is a link"):
            files.open_regular(tmp_path / name, os.O_RDWR | os.O_CREAT)
    assert not (tmp_path / "nothing").exists()


def test_json_is_of_utf_8_and_may_be_of_another_folder_with_any_constants(tmp_path):
    (tmp_path / "a").write_bytes('["é", NaN, -Infinity]'.encode())
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        assert files.read_json("a", str, folder=folder) == ["é", "NaN", "-Infinity"]
    finally:
        os.close(folder)
    (tmp_path / "a").write_bytes(b'"\xe9"')
    with pytest.raises(UnicodeDecodeError):
        files.read_json(tmp_path / "a")


def test_an_error_without_a_files_name_gets_it_and_one_that_is_no_systems_stays():
    raised = {
        "[Errno 28] No space left on device: 'a'": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        "[Errno 2] No such file or directory: 'b'": OSError(errno.ENOENT, os.strerror(errno.ENOENT), "b"),
        "mine": OSError("mine"),
    }
    for text, error in raised.items():
        with pytest.raises(OSError) as found, files.naming(pathlib.Path("a")):  # noqa: PT011 (its text is compared)
            raise error
        assert str(found.value) == text


def test_a_file_that_another_host_has_made_is_waited_for_but_not_for_ever(tmp_path, monkeypatch):
    making = threading.Timer(0.3, (tmp_path / "late").touch)
    making.start()
    assert files.appears(str(tmp_path / "late"))
    making.join()
    monkeypatch.setattr(files, "_SHARED_SECONDS", 0.3)
    began = time.monotonic()
    assert not files.appears(str(tmp_path / "gone" / "never"))
    assert time.monotonic() - began >= 0.3


@pytest.mark.holds("this host's other users")
def test_a_users_own_cache_is_no_other_users(tmp_path, monkeypatch):
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    for _ in range(2):
        made = files.private_cache()
    assert (os.path.dirname(made), stat.S_IMODE(os.stat(made).st_mode)) == (str(tmp_path), 0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match=r"it is another user's: .*crankshaft-prepared-12345"):
        files.private_cache()


def test_json_is_read_to_a_size(tmp_path):
    with open(tmp_path / "a", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="it has more than 256 MiB"):
        files.read_json(tmp_path / "a")
    (tmp_path / "a").write_text("[1, 2]")
    with pytest.raises(ValueError, match="it has more than 0 MiB"):
        files.read_json(tmp_path / "a", most_bytes=5)
    assert files.read_json(tmp_path / "a", most_bytes=6) == [1, 2]


def test_json_that_is_nested_too_deep_is_a_value_error(tmp_path):
    (tmp_path / "a").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deep"):
        files.read_json(tmp_path / "a")


def test_a_file_system_without_fsync_loses_no_write_and_is_named_once_for_files(caplog):
    with caplog.at_level("WARNING", logger="absl"):
        files.sync("/proc")  # as CIFS, vboxsf and some FUSE file systems, it has no fsync: EINVAL
        assert caplog.records == []
        files.sync("/proc/self/status")
        files.sync("/proc/self/stat")
    (record,) = caplog.records
    assert "the file system at /proc can't wait until a file is on its disk" in record.getMessage()


def test_a_path_may_be_relative_and_its_folder_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"a.{'0' * 16}.tmp").touch()
    files.write_text("a", "text")
    assert os.listdir() == ["a"]
    assert (tmp_path / "a").read_text() == "text"
    files.make_empty("b")
    with pytest.raises(FileExistsError):
        files.make_empty("b")
    with pytest.raises(FileNotFoundError):
        files.write_text(str(tmp_path / "gone" / "file"), "text")
