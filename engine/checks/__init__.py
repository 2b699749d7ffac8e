"""Checks a traced step for mistakes that would silently train something else, or end in errors. Runs on the host.

`InnerLoop` has a step checked as soon as it is traced, with its graph. What the checks have to know of the trace is in
the steps' contexts: each replica's batch, the calls of losses and metrics, the options that were applied. What counts,
or changes the batch, is where it happens: `engine.step.diagnosis`, `engine.step.batches.check_weighed`. What a program
changes after the trace is found by `engine.captured`, and graphs are searched by `engine.internals.graphs`.
"""

from .step_checks import StepChecks
from .variables import updates_explained

__all__ = ["StepChecks", "updates_explained"]
