"""`python -m crankshaft`, which is the command `crankshaft`."""

from crankshaft.launch.command import run

run()
