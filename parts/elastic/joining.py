"""Includes workers that have come in the next attempt of a run: a hook that ends the present one."""

from __future__ import annotations

import threading

from ...engine.hooks import Status
from ...engine.hooks.base import Periodic
from ...engine.strategies.base import Stop
from ...runner.command_line import checks
from ...runner.command_line.config import Config
from ...runner.failures import EXIT_REGROUP
from ..clusters import arrival, rendezvous
from . import members

_POLL_SECONDS = 1.0


class IncludeWorkers(Periodic):
    """Ends an attempt at a checkpoint if workers have come that it lacks; the next one includes them.

    A thread of the chief looks for them, since a host that is away may not answer for seconds.
    """

    name = "included"

    def __init__(self, config: Config):
        super().__init__(config.checkpoint_period[0])
        self._config, self._cluster, self._waiting = config, config.tasks, list[tuple[str, str]]()
        self._ended = threading.Event()

    def begin(self, status: Status) -> None:
        if self._config.is_chief:
            threading.Thread(target=self._poll, name="included", daemon=True).start()

    def _poll(self) -> None:
        absent, newcomers, identity = self._cluster.absent, self._cluster.newcomers, self._cluster.identity
        while not self._ended.wait(_POLL_SECONDS):
            returned = [
                (name, address)
                for name, address in absent
                if members.is_waiting(address, identity, self._cluster.addresses)
            ]
            self._waiting = returned + (arrival.newcomers(self._cluster, newcomers) if newcomers else [])

    def act(self, status: Status) -> None:
        waiting, now = self._waiting, self._cluster.num_workers
        can_train = self._cluster.newcomers or any(
            checks.fits(self._config, number) for number in range(now + 1, now + len(waiting) + 1)
        )
        if waiting and can_train and not status.last:
            have = "have" if len(waiting) > 1 else "has"
            reason = f"to include {rendezvous.describe_peers(waiting)}, which {have} come"
            status.stop = status.stop or Stop(reason, exit_code=EXIT_REGROUP)

    def close(self) -> None:
        self._ended.set()
