"""What a benchmark's result is: its version, and what every result says beside the measurements. Host code."""

from __future__ import annotations

import datetime
import os
import shlex
import sys

VERSION = "crankshaft.benchmark/1"


def heading(global_batch_size: int) -> dict:
    """What a result begins with: schema, date (UTC, ISO 8601), command (as one would type it), global_batch_size."""
    program, *arguments = sys.orig_argv
    return {
        "schema": VERSION,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([os.path.basename(program), *arguments]),
        "global_batch_size": global_batch_size,
    }
