"""Follows one call through the code: which files of crankshaft it enters, in which order, and how often.

A file is entered when one of its functions is called from another file's, however often that function then calls those
beside it. What is followed is what Python runs, so for a compiled step it is its trace. For example

    python -m benchmarks.route --start=InnerLoop._replicated_step train --model=mlp --input=synthetic --train_steps=2

follows the first step of training, and `--number=2` the second call of that name. Everything after the flags is the
command line of `crankshaft`.
"""

import argparse
import os
import pathlib
import sys
import threading

import crankshaft

ROOT = str(pathlib.Path(crankshaft.__file__).resolve().parent) + os.sep
FOLDERS = tuple(ROOT + folder + os.sep for folder in ("engine", "launch", "models", "input"))


class Route:
    """The files that one call of a function enters until it returns, also in threads that it starts."""

    def __init__(self, start: str, number: int):
        self.entries: list[str] = []
        self._start, self._number = start, number
        self._frame = None
        self._others: set[int | None] = set()  # threads that were there before it
        self._done = False

    def __call__(self, frame, event, _):
        if self._done or event not in ("call", "return") or threading.get_ident() in self._others:
            return
        code = frame.f_code
        if self._frame is None:
            if event == "call" and code.co_qualname.endswith(self._start) and code.co_filename.startswith(FOLDERS):
                self._number -= 1
                if self._number == 0:
                    self._frame = frame
                    self._others = {each.ident for each in threading.enumerate()} - {threading.get_ident()}
                    self._enter(code.co_filename)
        elif event == "return" and frame is self._frame:
            self._done = True
        elif event == "call" and code.co_filename.startswith(FOLDERS) and _caller(frame) != code.co_filename:
            self._enter(code.co_filename)

    def _enter(self, path: str) -> None:
        self.entries.append(path.removeprefix(ROOT))


def _caller(frame) -> str | None:
    """Returns the file of crankshaft that calls, perhaps through a library; None where a thread begins."""
    while (frame := frame.f_back) is not None and not frame.f_code.co_filename.startswith(FOLDERS):
        pass
    return frame and frame.f_code.co_filename


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--start", required=True, help="the function's qualified name, or its end")
    parser.add_argument("--number", type=int, default=1, help="which call of it, from 1 on")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command line of crankshaft")
    args = parser.parse_args()
    route = Route(args.start, args.number)
    from crankshaft.launch.command import run

    threading.setprofile(route)
    sys.setprofile(route)
    sys.argv = ["crankshaft", *args.command]
    try:
        run()
    except SystemExit:
        pass
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    files = list(dict.fromkeys(route.entries))
    folders = list(dict.fromkeys(os.path.dirname(name) or name for name in files))
    print(f"\n{args.start}: {len(files)} files, {len(folders)} folders, {len(route.entries)} entries")
    for name in files:
        print(f"  {name} ({route.entries.count(name)})")


if __name__ == "__main__":
    main()
