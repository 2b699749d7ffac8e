"""Files that change, vanish or turn out to be something else while they are read: each one line, and no hang."""

import ctypes
import mmap
import os
import pathlib
import re
import resource
import threading
import time

import pytest

from crankshaft.engine.errors import SourceError, UnavailableError, UsageError
from crankshaft.input.checks import InputError
from crankshaft.input.files import listing, storage
from crankshaft.runner import explanations, failures
from crankshaft.runner.host.remote import RemoteFolder

CONTENT = bytes(range(256)) * 4


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "shard"
    path.write_bytes(CONTENT)
    return path


def become_other_file(path):
    os.rename(path, f"{path}.old")
    path.write_bytes(CONTENT)  # as long as it was


def become_fifo(path):
    os.remove(path)
    os.mkfifo(path)


def become_folder(path):
    os.remove(path)
    os.mkdir(path)


def overwrite_in_place(path):
    with open(path, "r+b") as file:
        file.write(b"other")


CHANGES = {
    "vanishes": (os.remove, "can't be read (No such file or directory); see that it is there (it was there as"),
    "shrinks": (lambda path: os.truncate(path, 700), "has 700 bytes, and had 1,024 as the run began; let files be"),
    "grows": (lambda path: os.truncate(path, 2000), "has 2,000 bytes, and had 1,024 as the run began; let files be"),
    "is overwritten": (overwrite_in_place, "was written to or replaced since the run began; let files be"),
    "is replaced": (become_other_file, "was written to or replaced since the run began; let files be"),
    "becomes a FIFO": (become_fifo, "is not a regular file"),
    "becomes a folder": (become_folder, "is not a regular file"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_is_not_read_on(path, change, monkeypatch):
    monkeypatch.setattr(storage, "_CHECK_EVERY_SECONDS", 0.1)
    closed, opened = (storage.Files([str(path)]) for _ in range(2))
    assert opened.pread(0, 0, 512) == CONTENT[:512]
    do, said = CHANGES[change]
    do(path)

    def go_on():  # an open file may be given until it is looked at again
        while True:
            opened.pread(0, 0, 512)
            time.sleep(0.01)

    for read in (lambda: closed.pread(0, 0, 512), lambda: closed.read(0), go_on):
        with pytest.raises(SourceError, match=re.escape(f"{path} {said}")):
            read()


def test_what_a_file_lacks_is_noticed_at_once(path):
    files = storage.Files([str(path)])
    files.pread(0, 0, 512)
    files.pread(0, 0, 512)
    os.truncate(path, 700)
    with pytest.raises(SourceError, match=r"shard has 700 bytes, and had 1,024 as the run began"):
        files.pread(0, 512, 512)


def test_a_read_past_the_end_names_its_bytes(path):
    files = storage.Files([str(path)])
    with pytest.raises(SourceError, match=r"shard ends at byte 1,024, and bytes 1,000 to 1,100 were to be read"):
        files.pread(0, 1000, 100)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_file_that_may_not_be_read_is_one_line(path):
    os.chmod(path, 0)
    with pytest.raises(InputError, match=r"shard can't be read \(permission denied\)"):
        storage.Files([str(path)])


@pytest.mark.parametrize("become", [become_fifo, become_folder])
def test_what_is_no_file_is_refused_without_being_opened(path, become):
    become(path)
    with pytest.raises(InputError, match="shard is not a regular file; give files"):
        storage.Files([str(path)])


def test_files_beyond_those_kept_open_are_read_and_watched_too(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_OPEN_FILES", 2)
    paths = [tmp_path / str(number) for number in range(5)]
    for number, each in enumerate(paths):
        each.write_bytes(b"%d" % number)
    files = storage.Files([str(each) for each in paths])
    for _ in range(3):
        assert [files.pread(number, 0, 1) for number in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
    become_folder(paths[0])
    with pytest.raises(SourceError, match=r"0 is not a regular file"):
        files.pread(0, 0, 1)


def test_as_many_files_are_kept_open_as_the_limit_allows(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.open(os.devnull, os.O_RDONLY))
    most = 2 * (free + 10)
    paths = [str(tmp_path / str(number)) for number in range(most)]
    for each in paths:
        pathlib.Path(each).write_text("x")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        files = storage.Files(paths)
        assert all(files.pread(number, 0, 1) == b"x" for number in range(most))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Page:
    """A page of this process's memory, which the system can't read, as a disk that fails, until it is mapped."""

    def __init__(self):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.at = self.map(None)
        self.unmap()

    def map(self, at=None) -> int:
        fixed = 0x10 if at else 0  # Linux's MAP_FIXED
        return self._libc.mmap(at, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed, -1, 0)

    def unmap(self) -> None:
        self._libc.munmap(self.at, mmap.PAGESIZE)


def test_a_read_that_fails_for_a_moment_is_tried_again_with_a_line(monkeypatch, caplog):
    page = Page()
    monkeypatch.setattr(storage, "_TRY_AGAIN_SECONDS", (0.01,) * 1000)
    files = storage.Files(["/proc/self/mem"])
    later = threading.Timer(0.05, page.map, [page.at])
    later.start()
    assert files.pread(0, page.at, 16) == bytes(16)
    assert "/proc/self/mem can't be read (Input/output error); trying again in 0.01 s" in caplog.messages
    later.join()
    page.unmap()


def test_a_read_that_goes_on_failing_is_not_the_users_mistake(monkeypatch):
    monkeypatch.setattr(storage, "_TRY_AGAIN_SECONDS", (0.0, 0.0))
    page = Page()
    with pytest.raises(
        UnavailableError, match=r"mem can't be read \(Input/output error\), nor could it be 3 times"
    ) as end:
        storage.Files(["/proc/self/mem"]).pread(0, page.at, 16)
    assert explanations.explain(end.value)[0] == failures.EXIT_FAILED  # on which supervisors start it again


class TestElsewhere:
    """The same on a file system that TensorFlow reads."""

    @pytest.fixture
    def remote(self):
        import tensorflow as tf

        path = "ram://faults/shard"
        tf.io.gfile.makedirs("ram://faults")
        self.write(path, CONTENT)
        yield path
        tf.io.gfile.rmtree("ram://faults")

    def write(self, path, content):
        import tensorflow as tf

        if tf.io.gfile.exists(path):
            tf.io.gfile.remove(path)  # ram:// would append
        with tf.io.gfile.GFile(path, "wb") as file:
            file.write(content)

    def test_pieces_and_whole_files_are_what_was_written(self, remote, monkeypatch):
        monkeypatch.setattr(storage, "_REMOTE_BLOCK_BYTES", 100)
        files = storage.Files([remote])
        assert files.read(0) == CONTENT
        assert [files.pread(0, at, 300) for at in (0, 99, 350, 724)] == [
            CONTENT[at : at + 300] for at in (0, 99, 350, 724)
        ]

    @pytest.mark.parametrize("content", [CONTENT[:700], CONTENT * 2])
    def test_another_length_is_one_line(self, remote, content):
        files = storage.Files([remote])
        self.write(remote, content)
        for read in (lambda: files.pread(0, 0, 512), lambda: files.read(0)):
            with pytest.raises(SourceError, match=f"{remote} has {len(content):,} bytes, and had 1,024 as the run"):
                read()

    def test_what_vanishes_is_one_line(self, remote):
        import tensorflow as tf

        files = storage.Files([remote])
        tf.io.gfile.remove(remote)
        with pytest.raises(SourceError, match=f"{remote} can't be read .*as the run began"):
            files.pread(0, 0, 512)

    def test_a_folder_is_no_file(self, remote):
        with pytest.raises(InputError, match="ram://faults is a folder; give files"):
            storage.Files([remote.rpartition("/")[0]])

    @pytest.mark.parametrize("function", [storage.file_state, listing.exists, listing.is_folder, RemoteFolder])
    def test_a_scheme_that_tensorflow_lacks_is_one_line_with_the_cure(self, function):
        with pytest.raises(UsageError, match=r"^s3://bucket/x: TensorFlow has no file system for s3://; mount the"):
            function("s3://bucket/x")

    @pytest.mark.parametrize("function", [listing.exists, listing.describe_path, storage.file_state, RemoteFolder])
    def test_a_host_whose_name_is_not_known_yet_is_asked_again(self, function, remote, monkeypatch):
        import tensorflow as tf

        monkeypatch.setattr(storage, "_TRY_AGAIN_SECONDS", (0.0, 0.0))
        calls = []

        def fail(path):  # as Google's file system does, in libcurl's words
            calls.append(path)
            raise tf.errors.FailedPreconditionError(
                None, None, "Error executing an HTTP request: Could not resolve host"
            )

        for name in ("exists", "stat"):
            monkeypatch.setattr(tf.io.gfile, name, fail)
        with pytest.raises(UnavailableError, match=rf"^{remote} can't be read .*, nor could it be 3 times; see to"):
            function(remote)
        assert calls == [remote] * 3
