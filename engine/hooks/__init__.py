"""Hooks act between calls of the inner loop: their kinds, a user's own, and those of the core. Runs on the host."""

from ..meter import Meter, Segment, Totals, Window
from .base import Hook, Periodic, Status, StopRequest, Windowed, before_every_epoch, every_epoch, every_steps

__all__ = [
    "Hook",
    "Meter",
    "Periodic",
    "Segment",
    "Status",
    "StopRequest",
    "Totals",
    "Window",
    "Windowed",
    "before_every_epoch",
    "every_epoch",
    "every_steps",
]
