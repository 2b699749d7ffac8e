"""How long tests wait for what has to come: a deadline is for hangs, not for speed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

# Seconds. What takes longer hangs: on two cores that are busy with other work, a process starts TensorFlow and compiles
# within a minute, a cluster within two and a half.
PATIENCE = 600.0


def wait_until(
    condition: Callable[[], object],
    *processes: subprocess.Popen,
    shows: Callable[[], object] = str,
    pause: float = 0.01,
) -> None:
    """Waits for `condition()`; fails, with what `shows()` returns, if one of the processes ends before, or time does.

    Between two looks it pauses for so many seconds.
    """
    end = time.monotonic() + PATIENCE
    while not condition():
        ended = [process.returncode for process in processes if process.poll() is not None]
        assert not ended or condition(), f"ended with {ended}\n{shows()}"
        assert time.monotonic() < end, f"waited {PATIENCE} s in vain\n{shows()}"
        time.sleep(pause)
