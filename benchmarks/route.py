"""Follows one call through the code: which functions of crankshaft it enters, in which order, how deep and how often.

What is followed is what Python runs, so for a compiled step it is its trace. For example

    python -m benchmarks.route

follows the trace of one step of mlp on two replicas, `--start=InnerLoop.__call__ --number=2 train
--model=cnn --input=synthetic --train_steps=2` the second call of that name. Everything after the flags is the command
line of `crankshaft`. Functions that only the checks of a step reach, `CHECKS`, are listed after the others.
"""

import argparse
import collections
import pathlib
import sys
import threading
from typing import NamedTuple

import crankshaft

ROOT = pathlib.Path(crankshaft.__file__).parent  # as frames name it, which may be a link
FOLDERS = tuple(f"{ROOT / folder}/" for folder in ("engine", "launch", "models", "input", "parts", "runner"))
CHECKS = ("engine/checks/", "engine/step/diagnosis.py")
TRACE = "StepChecks.traced"  # which traces a step, and then checks it
TWO_REPLICAS = (
    "train --model=mlp --input=synthetic --strategy=mirrored --num_virtual_devices=2 --jit=off --train_steps=1 "
    "--mode=train --progress=off"
)


class Function(NamedTuple):
    """A function that is entered: its file, its qualified name, and how many functions of crankshaft are around it."""

    file: str
    name: str
    depth: int = 0


class Route:
    """The functions that one call of a function enters until it returns, also in threads that it starts.

    Attributes:
      entered: the functions, by their files and names, in the order in which they are first entered, with their depth;
        without those of Python's own making, such as comprehensions.
      checks: those that only checks enter, likewise.
      calls: how often each is called.
    """

    def __init__(self, start: str, number: int = 1):
        self.entered: dict[Function, Function] = {}
        self.checks: dict[Function, Function] = {}
        self.calls = collections.Counter[Function]()
        self._start, self._number = start, number
        self._frame = None
        self._others: set[int | None] = set()  # threads that were there before it
        self._done = False

    def __call__(self, frame, event, _):
        if self._done or event not in ("call", "return") or not frame.f_code.co_filename.startswith(FOLDERS):
            return
        if event == "return":
            self._done = frame is self._frame
        elif self._frame is not None:
            if threading.get_ident() not in self._others:
                self._enter(frame)
        elif frame.f_code.co_qualname.endswith(self._start):
            self._number -= 1
            if self._number == 0:
                self._frame = frame
                self._others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
                self._enter(frame)

    def _enter(self, frame) -> None:
        function = _function(frame)
        if function.name.endswith(">"):
            return
        around = []
        while frame is not self._frame and (frame := frame.f_back) is not None:
            if frame.f_code.co_filename.startswith(FOLDERS):
                around.append(_function(frame))
        is_check = any(one.file.startswith(CHECKS) and one.name != TRACE for one in (function, *around))
        if function not in self.calls:
            (self.checks if is_check else self.entered)[function] = function._replace(depth=len(around))
        elif function in self.checks and not is_check:
            del self.checks[function]
            self.entered[function] = function._replace(depth=len(around))
        self.calls[function] += 1


def _function(frame) -> Function:
    file = pathlib.Path(frame.f_code.co_filename).relative_to(ROOT).as_posix()
    return Function(file, frame.f_code.co_qualname.replace(".<locals>", ""))


def follow(start: str, number: int, words: list[str]) -> Route:
    """Runs a command line of `crankshaft`, and follows a call in it."""
    from crankshaft.launch.command import run

    route = Route(start, number)
    threading.setprofile(route)
    sys.setprofile(route)
    sys.argv = ["crankshaft", *words]
    try:
        run()
    except SystemExit:
        pass
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return route


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--start", default=TRACE, help="the function's qualified name, or its end")
    parser.add_argument("--number", type=int, default=1, help="which call of it, from 1 on")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command line of crankshaft")
    args = parser.parse_args()
    route = follow(args.start, args.number, args.command or TWO_REPLICAS.split())
    for title, functions in ((args.start, route.entered), ("only for checks", route.checks)):
        files = {function.file for function in functions}
        print(f"\n{title}: {len(functions)} functions in {len(files)} files")
        for key, function in functions.items():
            print(f"{function.depth:3} {function.file} {function.name} ({route.calls[key]})")


if __name__ == "__main__":
    main()
