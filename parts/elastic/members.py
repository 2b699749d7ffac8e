"""Agrees on the workers of each attempt, where a job continues without those that do not return.

Before an attempt the agents (`agent.py`) meet at the addresses of their tasks, which do not run then. The first
that is there, in the order of addresses, decides once all are there, or the others have not come in time: it takes the
lock on run_dir, which its task then has, and announces the members. No agent decides without the lock, so at most one
half of a divided network continues; the other members try the lock, too, and refuse an attempt that it does not keep
out. Members are workers that all reach each other. A later agent waits, and the attempt's chief notices it
(`is_waiting`).

A worker whose host has a notice of preemption comes too, to let the others know that it leaves: they do not wait for
it. They wait two seconds for further notices, as those of a whole job do not come at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...engine import logging
from ...runner.failures import UsageError
from ...runner.host.locks import LockedRunDir, RunDirInUse, can_lock
from ...runner.host.tasks import Cluster
from ..clusters import rendezvous
from ..clusters.rendezvous import ClusterError, RefusedError, Rendezvous, Wait

_POLL_SECONDS = 0.1
_LATE_SECONDS = 5.0  # a worker waits longer than this only for an attempt that is not about to end
# For the tasks of an attempt that ends to come; and beyond the timeout, for another half of the network to decide,
# or for the lock of a process that has ended to become free.
_GRACE_SECONDS = 10.0
# For the others to read who is a member: they may be waiting for the answer of a host that is lost.
_READ_SECONDS = 60.0
_BEGIN_SECONDS = 2.0  # for the members' tasks to come, or for a refusal
_CALL_SECONDS = 2.0  # for a host that does not answer at all
_NOTICE_SECONDS = 2.0  # wait for further notices of preemption after the first


def is_waiting(address: str, identity: bytes, members: Sequence[tuple[str, str]] = ()) -> bool:
    """Returns whether an agent of the job waits at its task's address for an attempt, and reaches all its members."""
    reply = rendezvous.call(address, identity=identity)
    note = reply.note
    if not (note and reply.is_peers and _is_agent(note)) or rendezvous.leaves(note):
        return False
    return not {*map(str, rendezvous.missed(note))} & {address for _, address in members}


def _is_agent(note: Mapping[str, Any] | None) -> bool:
    """Whether an agent announces the note; else its task does."""
    return note is not None and "absent" in note


class Members:
    """The workers of a job's attempts, for the agent of one of them.

    Args:
      run_dir: folder that the workers share.
      least: the fewest workers of an attempt.
      timeout_seconds: how long to wait for workers that are missing.
      fits: returns whether a number of workers can train.

    Attributes:
      is_late: whether an attempt has run without this worker while it waited.
      is_left: whether this worker is the first of too few, and has to save what is in memory.
    """

    def __init__(self, workers: Cluster, run_dir: str, least: int, timeout_seconds: float, fits: Callable[[int], bool]):
        self._workers, self._index = workers, workers.index
        self._run_dir, self._least, self._timeout_seconds, self._fits = run_dir, least, timeout_seconds, fits
        self.is_late = self.is_left = False
        self._has_begun = False  # an attempt
        self._absent: set[int] = set()  # from the last attempt, or leaving: not awaited again
        self._awaited_by: set[int] = set()  # the others of the last attempt
        self._noticed_at = math.inf  # when the first leaving agent was noticed
        self._wait = self._new_wait()

    def agree(self, is_stopped: Callable[[], bool]) -> Cluster | None:
        """Waits until this worker is a member of the next attempt, and returns its cluster.

        None once `is_stopped`, or if others have notices of preemption and too few are left.

        Raises:
          ClusterError: too few workers have come, and this one is the first of them; or another process has run_dir.
          RefusedError: the lock on run_dir does not hold on another member's host.
          UsageError: this task's port is in use, or run_dir can't be locked.
        """
        began, ran_at, self.is_late = time.monotonic(), -math.inf, False
        self._wait, self._noticed_at = self._new_wait(), math.inf
        with self._meet() as here:
            while not is_stopped():
                notes, runs = self._exchange(here)
                notes = {number: note for number, note in notes.items() if not rendezvous.leaves(note)}
                for note in notes.values():
                    if self._index in (members := self._numbers(note, "members")):
                        self._check_lock()
                        return self._begin_attempt(members, None)
                    # The first of those that are left has decided that they are too few, and saves.
                    if note.get("members") == []:
                        return None
                now = time.monotonic()
                if runs:
                    ran_at = now
                    if not self.is_late and now - began > _LATE_SECONDS:
                        self.is_late = True
                        logging.warning("%s waits to be included, at the run's next checkpoint", self._workers.task)
                is_ending = not runs and now - ran_at < _GRACE_SECONDS
                is_first = self._index == min(self.connected(notes))
                if is_first and self._is_due(notes, is_ending) and (lock := self._lock(here, notes, bool(runs))):
                    members = self._choose_members(notes)
                    here.announce({"absent": sorted(self._absent), "members": members})
                    # Its task listens at this address next, and does not announce anything.
                    self._await_readers(members or [*notes])
                    if refused := self._refusal(members):
                        lock.release()
                        raise RefusedError(refused)
                    if members:
                        return self._begin_attempt(members, lock)
                    lock.release()
                    self.is_left = True
                    return None
                time.sleep(_POLL_SECONDS)
        return None

    def leave(self) -> None:
        """Lets the others know that this worker leaves, as its host has a notice of preemption.

        Waits until all that await it know: those that are here, and those of the last attempt, whose tasks may yet run.
        """
        began = time.monotonic()
        until = began + _GRACE_SECONDS
        with contextlib.suppress(UsageError), self._meet() as here:
            while not self.is_late and time.monotonic() < until:
                notes, runs = self._exchange(here, leaving=True)
                unaware = {number for number, note in notes.items() if self._index not in self._numbers(note, "absent")}
                unaware |= self._awaited_by - notes.keys() - self._absent
                if not unaware:
                    return
                # Their tasks still run; the agents come once these have saved and ended.
                if unaware & runs:
                    until = min(time.monotonic(), began + _READ_SECONDS) + _GRACE_SECONDS
                time.sleep(_POLL_SECONDS)

    def _meet(self) -> Rendezvous:
        # A worker that is away has left its port to any program, but not the job's secret.
        return Rendezvous(self._workers)

    def _exchange(self, here: Rendezvous, leaving: bool = False) -> tuple[dict[int, Mapping[str, Any]], set[int]]:
        """Announces who is absent; returns the notes of the others that are here, and the others whose tasks run."""
        notice = leaving or self._noticed_at < math.inf
        here.announce({"absent": sorted(self._absent), "notice": notice, "leaves": leaving})
        calls = here.ask(_CALL_SECONDS)
        replies = {self._workers.addresses.index(peer): reply for peer, reply in calls.items()}
        for number, reply in replies.items():
            if (reason := rendezvous.refusal(reply.note)) and number not in self._absent:
                refuses = rendezvous.describe_peers([self._workers.addresses[number]])
                logging.warning("%s has not started, and is not awaited: %s", refuses, reason)
                self._absent.add(number)
        notes = {number: reply.note for number, reply in replies.items() if reply.note and _is_agent(reply.note)}
        runs = {number for number, reply in replies.items() if reply.answer and number not in notes}
        self._absent |= {number for number, note in notes.items() if rendezvous.leaves(note)}
        if runs:  # an earlier notice has been followed by an attempt, or its tasks are about to end
            self._noticed_at = math.inf
        elif any(note.get("notice") is True for note in notes.values()):
            self._noticed_at = min(self._noticed_at, time.monotonic())
        return notes, runs

    def _new_wait(self) -> Wait:
        return Wait(self._workers.task, self._timeout_seconds)

    def _begin_attempt(self, members: Sequence[int], lock: LockedRunDir | None) -> Cluster:
        self._has_begun = True
        self._workers = dataclasses.replace(self._workers, port_seconds=self._timeout_seconds)
        self._absent = {*range(self._workers.num_workers)} - {*members}
        self._awaited_by = {*members} - {self._index}
        return self._workers.subset(members, lock)

    def _choose_members(self, notes: Mapping[int, Any]) -> list[int]:
        """Chooses the members of an attempt from those that are here; none if they are too few."""
        here = self.connected(notes)
        return here[: next((n for n in range(len(here), self._least - 1, -1) if self._fits(n)), 0)]

    def connected(self, notes: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """Finds the workers that are here and all reach each other: without those that reach the fewest."""
        here, numbers = {self._index, *notes}, {address: n for n, (_, address) in enumerate(self._workers.addresses)}
        missed = {(n, numbers.get(str(address))) for n, note in notes.items() for address in rendezvous.missed(note)}
        apart = {pair for pair in missed | {(b, a) for a, b in missed} if here.issuperset(pair)}
        while lost := [n for n, _ in apart if n is not None]:
            # Of equals the last in the order: the first one, which decides, stays.
            out = max(lost, key=lambda n: (lost.count(n), n))
            here.remove(out)
            apart = {pair for pair in apart if out not in pair}
        return sorted(here)

    def _check_lock(self) -> None:
        """Raises `UsageError` if the lock on run_dir, which another member's host has, can be had here too."""
        if can_lock(self._run_dir):
            raise UsageError(
                f"min_workers={self._least} needs a file system whose flock holds on all hosts, and another's lock on "
                f"run_dir={self._run_dir} does not on {socket.gethostname()}: both halves of a divided network would "
                "continue; mount it without local_lock, nolock or localflock, use another, or leave min_workers out"
            )

    def _missing(self, notes: Mapping[int, Any]) -> list[int]:
        return sorted({*range(self._workers.num_workers)}.difference(self.connected(notes)))

    def _is_due(self, notes: Mapping[int, Mapping[str, Any]], is_ending: bool) -> bool:
        """Whether it is time to decide: all have come that are awaited, or have not come in time.

        `is_ending`: an attempt has just ended, so its workers will arrive soon.
        """
        absent = self._absent.union(*(self._numbers(note, "absent") for note in notes.values()))
        awaited = [self._workers.addresses[n] for n in self._missing(notes) if n not in absent]
        if awaited and not self._wait.is_over:
            self._wait.log_progress(f"{rendezvous.describe_peers(awaited)} to come")
        if 0 <= time.monotonic() - self._noticed_at < _NOTICE_SECONDS:
            return False
        if len(self.connected(notes)) <= len(notes) and self._wait.left_seconds > -_GRACE_SECONDS:
            return False  # one that has just come is not seen by all yet
        return not awaited or (self._wait.is_over and not is_ending)

    def _lock(self, here: Rendezvous, notes: Mapping[int, Any], runs: bool) -> LockedRunDir | None:
        """Returns the lock on run_dir, if enough workers are here or others leave; raises if it is too late to wait.

        `runs`: whether some task answers. If the lock is taken too, an attempt runs, and time begins to count again.
        """
        lock, are_too_few = LockedRunDir(self._run_dir), False
        try:
            lock.acquire()
        except RunDirInUse as error:
            problem = ClusterError(error.message)
            self._wait = self._new_wait() if runs else self._wait
        else:
            if lock.is_by_flock and (self._choose_members(notes) or self._noticed_at < math.inf):
                return lock
            has_flock = lock.is_by_flock
            lock.release()
            if not has_flock:
                raise UsageError(
                    f"min_workers={self._least} needs a file system with flock, and run_dir={self._run_dir} has none; "
                    "use another, or leave it out"
                )
            count = f"{len(self.connected(notes))} of {self._workers.num_workers} workers are here"
            timeout = f"cluster_timeout_seconds={self._timeout_seconds:g}"
            event = f"did not come within {timeout} ({count}, and min_workers={self._least})"
            missing = [self._workers.addresses[n] for n in self._missing(notes)]
            problem, are_too_few = ClusterError(here.missing_line(missing, event)), True
        if self._wait.left_seconds > -_GRACE_SECONDS:
            return None
        self.is_left = are_too_few
        raise problem

    def _await_readers(self, members: Sequence[int]) -> None:
        left = [self._workers.addresses[number][1] for number in members if number != self._index]
        end = time.monotonic() + _READ_SECONDS
        while time.monotonic() < end and (left := [at for at in left if is_waiting(at, self._workers.identity)]):
            time.sleep(_POLL_SECONDS)

    def _refusal(self, members: Sequence[int]) -> str:
        """Returns why a member refuses the attempt, on whose host the lock does not hold; empty if all begin it."""
        left = [self._workers.addresses[number] for number in members if number != self._index]
        end = time.monotonic() + _BEGIN_SECONDS
        # Once its agent has left, a member does not answer for a moment; a host that is lost, never.
        while left and time.monotonic() < end:
            replies = {peer: rendezvous.call(peer[1], identity=self._workers.identity) for peer in left}
            for peer, reply in replies.items():
                if reply.is_peers and (reason := rendezvous.refusal(reply.note)):
                    return f"{rendezvous.describe_peers([peer])} has not started: {reason}"
            left = [peer for peer, reply in replies.items() if not reply.answer or _is_agent(reply.note)]
            time.sleep(_POLL_SECONDS)
        return ""

    def _numbers(self, note: Mapping[str, Any], name: str) -> list[int]:
        """Reads workers' numbers from a note of another process, which may be any program."""
        numbers = note.get(name)
        return [n for n in range(self._workers.num_workers) if n in numbers] if isinstance(numbers, list) else []
