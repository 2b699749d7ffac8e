"""Words for people: an exception in one line, a number and its noun; frees what an exception holds. Host code."""

from __future__ import annotations

import contextlib
import itertools
import re
import traceback

_OPERANDS_ARE_IN = ("tensorflow.", "crankshaft.engine.")  # modules

# Lines that TensorFlow and Keras put around the cause: where an operation was made, and how many have failed.
_AROUND = (
    *("Graph execution error", "Detected at node", "Exception enc", "File ", "From /job", "in user code", "<stack"),
    "Could not automatically infer",
)
_NAMES = r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:\w+\](?: name:)?"  # of nodes
_WRAPPED = r"(?<=[\w,;])\n[ \t]*(?=[a-z])"  # the end of a line within a sentence
_BOLD = r"\x1b\[[0-9;]*m"
_NUMBER = r"^\(\d+\) [A-Z_]+: +"  # of several errors
_OF_PIPELINE = r"^Error in user-defined function passed to \S+ transformation with iterator: \S+: +"
# Characters that a terminal obeys, or hides: C0 and C1 but for tab and line feed, and marks that turn the direction of
# text; C1 too where it came as bytes that are not UTF-8.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\udc80-\udc9f]")
_LONGEST_WORD = 300  # characters


def visible(text: str) -> str:
    r"""Escapes everything in a text that would act on a terminal: \\x1b for the beginning of a terminal's command."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def counted(number: int, noun: str) -> str:
    """Returns "1 step", "2,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def one_line(text: str) -> str:
    """Returns a text for one line of a terminal: `visible`, with newlines escaped.

    Of a word that would fill several lines only the beginning is kept.
    """
    text = re.sub(rf"(\S{{{_LONGEST_WORD}}})\S+", r"\1...", text)
    return visible(text).replace("\n", r"\n").replace("\t", r"\t")


def reason(error: BaseException) -> str:
    """Returns the line of an error's message that says what is wrong, or the name of its class if it has none.

    A line that ends within a sentence, as in Python's own longer messages, goes on in the next one.
    """
    lines = [line.strip() for line in re.sub(_WRAPPED, " ", re.sub(_BOLD, "", str(error))).splitlines()]
    lines = [line for line in lines if line and not line.startswith(_AROUND) and "root error(s) found" not in line]
    text = re.sub(_NAMES, "", lines[0]).strip() if lines else ""
    return re.sub(_OF_PIPELINE, "", re.sub(_NUMBER, "", text)) or type(error).__name__


def free_frames(error: BaseException) -> None:
    """Frees what the functions of TensorFlow and the engine held that an error has ended; a user's own keep theirs.

    A traceback keeps each function's variables, such as an iterator that a step was given.
    """
    errors: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in errors:  # one may be its own cause
        errors.append(following)
        following = following.__cause__ or following.__context__
    for frame, _ in itertools.chain.from_iterable(traceback.walk_tb(each.__traceback__) for each in errors):
        if frame.f_globals.get("__name__", "").startswith(_OPERANDS_ARE_IN):
            with contextlib.suppress(RuntimeError):  # it has not ended
                frame.clear()
