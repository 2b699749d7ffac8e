"""`python -m crankshaft`, which is the command `crankshaft`."""

from .launch.command import run

run()
