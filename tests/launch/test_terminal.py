"""What is printed goes where the program's streams go, whatever these are by then."""

import os
import sys

from crankshaft.launch import terminal as terminals


def test_what_is_printed_acts_on_no_terminal(tmp_path, terminal):
    """A class's name, for example, which is from a file."""
    file, read = terminal
    with open(tmp_path / "out", "w") as out:
        for to in (file, out):
            print(terminals.fitted("cat\x1b]52;c;ZXZpbA==\x07 0.5\r\n\tdog \x9b2J 0.25", to), file=to)
    for text in (read(), (tmp_path / "out").read_text()):
        assert "0.5" in text
        assert "dog" in text
        assert not set("\x1b\x07\x9b") & set(text)


def test_a_stream_that_escapes_may_be_redirected_from_a_file_into_a_pipe(tmp_path, monkeypatch):
    """As the lines of TensorFlow's start are, while standard output is a file."""
    with open(tmp_path / "out", "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        terminals.escape_unprintable()
        stream.write("\u732b")
        stream.flush()
        reads, writes = os.pipe()
        try:
            before = os.dup(stream.fileno())
            os.dup2(writes, stream.fileno())
            with terminals.escaping():
                pass
            os.dup2(before, stream.fileno())
        finally:
            for each in (reads, writes, before):
                os.close(each)
        assert stream.errors == "backslashreplace"
    assert (tmp_path / "out").read_text(encoding="ascii") == "\\u732b"
