"""What is due between calls: the kinds of hook, a user's own, and in files of their own those that are shipped."""

from crankshaft.engine.hooks.base import Hook, Moment, Periodic, StopRequest, Windowed, every_epoch, every_steps

__all__ = ["Hook", "Moment", "Periodic", "StopRequest", "Windowed", "every_epoch", "every_steps"]
