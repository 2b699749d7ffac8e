"""Hooks act between calls of the inner loop: their kinds, a user's own, and in separate files the shipped ones."""

from .base import Hook, Periodic, Status, StopRequest, Windowed, every_epoch, every_steps

__all__ = ["Hook", "Periodic", "Status", "StopRequest", "Windowed", "every_epoch", "every_steps"]
