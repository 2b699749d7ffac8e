"""A training script of which a task takes memory without end, once a file asks it to by the task's name."""

from __future__ import annotations

import pathlib
import socket
import threading
import time

import crankshaft

ASKS = pathlib.Path("/runs") / f"hungry-{socket.gethostname()}"


def _eat() -> None:
    while not ASKS.exists():
        time.sleep(0.1)
    ASKS.unlink()
    eaten = []
    while True:
        eaten.append(b"x" * 2**26)


if __name__ == "__main__":
    threading.Thread(target=_eat, daemon=True).start()
    crankshaft.main()
