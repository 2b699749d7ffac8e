"""Print a benchmark's result as Markdown, or write runs and results as a page of HTML.

For example:

  crankshaft report rate.json
  crankshaft report runs/first --html=first.html
  crankshaft report runs/first runs/second --html=both.html

The page is the one that crankshaft monitor shows, with its data inside: one file, to be opened or mailed.
"""

from __future__ import annotations

import os
import sys

from absl import flags

from .. import errors, explanations
from ..benchmark import report
from ..command_line import help, own_flags, rules
from ..errors import UsageError
from ..host import process
from ..host.files import write_text
from . import page
from .run import Run

FLAGS = flags.FlagValues()  # apart from crankshaft train's
rules.path("html", None, "The page's file, which is written again if it exists.", flag_values=FLAGS)
_FOR_EVER = float("inf")


def main(argv: list[str]) -> None:
    """Prints or writes what the command line asks for, and exits the process."""
    process.prepare_streams()
    try:
        paths = own_flags.read(
            argv,
            FLAGS,
            help.doc_of(__name__),
            "crankshaft report RESULT.json | crankshaft report RUN_DIR|RESULT.json ... --html=FILE",
            takes_words=True,
        )
        text = _text(paths)
    except Exception as error:  # the border of the program
        sys.exit(errors.fail(*explanations.explain(error, has_debug=False)))
    help.show(text)


def _text(paths: list[str]) -> str:
    """Returns what is printed. Writes the page, if that is asked for."""
    if FLAGS.html and paths:
        shown = [Run(path).shown(_FOR_EVER) for path in paths]
        write_text(FLAGS.html, page.html({"runs": shown}))
        return f"written to {FLAGS.html}"
    if len(paths) != 1:
        raise UsageError(f"{len(paths)} paths are given to crankshaft report; give RESULT.json, or --html=FILE and any")
    if not os.path.isdir(paths[0]):
        return report.markdown(report.read(paths[0]))
    raise UsageError(f"{paths[0]} is a run's folder, which is shown as a page; add --html=FILE")
