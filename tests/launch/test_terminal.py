"""What is printed goes where the program's streams go, whatever these are by then."""

import os
import sys

from crankshaft.launch import terminal


def test_a_stream_that_escapes_may_be_redirected_from_a_file_into_a_pipe(tmp_path, monkeypatch):
    """As the lines of TensorFlow's start are, while standard output is a file."""
    with open(tmp_path / "out", "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        terminal.escape_unprintable()
        stream.write("\u732b")
        stream.flush()
        reads, writes = os.pipe()
        try:
            before = os.dup(stream.fileno())
            os.dup2(writes, stream.fileno())
            with terminal.escaping():
                pass
            os.dup2(before, stream.fileno())
        finally:
            for each in (reads, writes, before):
                os.close(each)
        assert stream.errors == "backslashreplace"
    assert (tmp_path / "out").read_text(encoding="ascii") == "\\u732b"
