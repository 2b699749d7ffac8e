"""What a seed determines, and a run of it: faults are injected into a job, and the job must end as if undisturbed."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import random
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from .job import TASKS, Job, JobFailed, Settings, is_metric
from .plan import STEPS, write_files
from .table import FAULTS, Injection, sample

_LOOK_SECONDS = 0.005
_MOST_SECONDS = 400  # of a run: two faults, each with a time limit of the job, and restarts on a busy machine
_SECOND_FAULT = 0.3  # the share of the runs that have two


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What a seed determines."""

    seed: int
    settings: Settings
    injections: tuple[Injection, ...]

    @classmethod
    def from_seed(cls, seed: int, strategy: str, only: str = "") -> Scenario:
        """Returns the scenario of a seed. Seeds in a row have all faults in turn, so a few of them meet each."""
        rng = random.Random(f"{strategy} {seed}")
        rows = [row for row in FAULTS.values() if strategy in row.strategies and re.search(only, row.name)]
        chosen = [rows[seed % len(rows)], *([rng.choice(rows)] if rng.random() < _SECOND_FAULT else [])]
        files, shards, precision = _VARIANTS[rng.randrange(len(_VARIANTS))]
        files = files or any(row.files for row in chosen)
        precision = "float32" if strategy == "hosts" else precision
        settings = Settings(strategy, files, shards and strategy in ("two_workers", "hosts"), precision)
        if strategy == "program":
            settings = Settings(strategy, False, False, "float32", program=seed)
        injections = [sample(rng, row, TASKS[strategy], STEPS) for row in chosen]
        return cls(seed, settings, tuple(sorted(injections, key=lambda each: each.step)))


# Whether it reads files and shards the optimizer, and its dtype: the settings that seeds have in turn.
_VARIANTS = ((False, False, "float32"), (True, True, "float32"), (False, True, "bfloat16"), (True, False, "bfloat16"))


@dataclasses.dataclass
class Happened:
    """A fault that has happened.

    Attributes:
      injection: which.
      at: when, by the clock of notes.
    """

    injection: Injection
    at: float


class Campaign:
    """Runs scenarios of one strategy.

    Args:
      folder: for the runs; that of a run that ends well is removed.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._data = folder / "data"
        write_files(self._data)
        self._undisturbed: dict[Settings, tuple[dict, set[str]]] = {}

    def run(self, scenario: Scenario) -> dict:
        """Runs a scenario and returns its result: why it was skipped or failed, and what each fault has cost."""
        began = time.monotonic()
        result = {**dataclasses.asdict(scenario), "skipped": "", "failed": "", "costs": []}
        if lacks := next(filter(None, (FAULTS[each.fault].lacks() for each in scenario.injections)), ""):
            return {**result, "skipped": lacks}
        job = None
        try:
            expected = self._expected(scenario.settings)
            job = Job(scenario.settings, scenario.injections, self._folder / f"seed {scenario.seed}", self._data)
            happened = self._disturb(job, scenario.injections)
            result["costs"] = costs(happened, job.steps)
            self._check(job, scenario, expected)
        except JobFailed as failure:
            result["failed"] = str(failure)
        finally:
            if job:
                job.end()
        if not result["failed"]:
            shutil.rmtree(job.folder)
        return {**result, "starts": job.starts if job else 0, "seconds": round(time.monotonic() - began, 1)}

    def _expected(self, settings: Settings) -> tuple[dict, set[str]]:
        """Returns what an undisturbed run comes to, and the kinds of files that it leaves."""
        if settings not in self._undisturbed:
            job = Job(settings, (), self._folder / f"undisturbed {len(self._undisturbed)}", self._data)
            try:
                self._disturb(job)
                if job.starts > 1:
                    raise JobFailed(f"an undisturbed run failed: {job.last_error()}")
                if settings.strategy == "servers":
                    job.check_counts(disturbed=0)
                self._undisturbed[settings] = job.values(), job.kinds_left()
            finally:
                job.end()
        return self._undisturbed[settings]

    def _disturb(self, job: Job, injections: Sequence[Injection] = ()) -> list[Happened]:
        """Runs a job to its end, while faults happen."""
        waiting = [*injections]
        happened: list[Happened] = []
        later: list[tuple[float, Callable[[], None]]] = []  # what is to be done when

        def inject(injection: Injection) -> None:
            fault = FAULTS[injection.fault]
            happened.append(Happened(injection, time.monotonic()))
            if then := None if fault.inside else fault.act(job, injection):
                later.append((time.monotonic() + (injection.seconds or 0), then))

        began = time.monotonic()
        job.start()
        try:
            while True:
                while waiting and job.step >= waiting[0].step:
                    injection = waiting.pop(0)
                    later.append((time.monotonic() + injection.delay_seconds, functools.partial(inject, injection)))
                now = math.inf if job.ended_by_mistake else time.monotonic()  # mended before it is started again
                for each in [each for each in later if each[0] <= now]:
                    later.remove(each)
                    each[1]()
                if time.monotonic() - began > _MOST_SECONDS:
                    raise JobFailed(f"it has not ended after {_MOST_SECONDS} s")
                if not job.go_on(may_end=any(FAULTS[each.injection.fault].ends for each in happened)):
                    break
                time.sleep(_LOOK_SECONDS)
        finally:
            for _, then in later:
                then()
        if len(happened) < len(injections):
            raise JobFailed(f"it ended before {injections[len(happened)].fault} happened")
        return happened

    def _check(self, job: Job, scenario: Scenario, expected: tuple[dict, set[str]]) -> None:
        values, kinds = expected
        if scenario.settings.strategy == "servers":
            job.check_counts(len(scenario.injections))
        else:
            found = job.values()
            if any(FAULTS[each.fault].leaves_gaps for each in scenario.injections):
                values = {name: value for name, value in values.items() if name in found or not is_metric(name)}
            same = _alike if scenario.settings.strategy == "hosts" else operator.eq
            names = found.keys() | values.keys()
            differing = sorted(name for name in names if not same(found.get(name), values.get(name)))
            if differing:
                raise JobFailed(f"{len(differing)} of {len(values)} values differ: {', '.join(differing[:3])}")
        if more := job.kinds_left() - kinds:
            raise JobFailed(f"files are left: {', '.join(sorted(more))}")
        for injection in scenario.injections:
            says = FAULTS[injection.fault].says
            if says and not re.search(says, job.output):
                raise JobFailed(f"after {injection.fault} no line has {says!r}")


def _alike(found, expected) -> bool:
    """Returns whether values are equal within the rounding of sums over another number of workers."""
    return found is not None and expected is not None and np.allclose(found, expected, rtol=1e-4, atol=1e-5)


def costs(happened: list[Happened], notes: list[tuple[float, str, int]]) -> list[dict]:
    """Returns, of each fault, the seconds from it to the next new step, and how much training was repeated.

    Args:
      happened: the faults, in their order.
      notes: notes of the job's steps, see `Job.steps`.
    """
    found = []
    for each, end in zip(happened, [*(later.at for later in happened[1:]), math.inf], strict=True):
        # A task goes on for a moment where another is killed: what counts comes after the restart, if there is one.
        restart = next((row for row in notes if each.at <= row[0] < end and row[1] == "begins"), None)
        since = restart[0] if restart else each.at
        reached = max((step for at, event, step in notes if event == "step" and at < since), default=0)
        next_at = next((at for at, event, step in notes if event == "step" and at >= since and step > reached), None)
        seconds = None if next_at is None or next_at >= end else round(next_at - each.at, 2)
        lost = max(0, reached - restart[2]) if restart else 0
        attempt = [row for row in notes if row[0] < each.at and row[1] in ("begins", "step")]
        began = max((index for index, row in enumerate(attempt) if row[1] == "begins"), default=0)
        kept_at = next((at for at, _, step in attempt[began:] if restart and step >= restart[2]), each.at)
        row = {"fault": each.injection.fault, "seconds": seconds, "steps_lost": lost}
        found.append({**row, "seconds_lost": round(max(0.0, each.at - kept_at), 2)})
    return found
