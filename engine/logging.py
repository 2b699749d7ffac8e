"""Crankshaft's log: Python's logger `crankshaft`, to which the program gives handlers and levels.

The functions of Python's `logging` and of absl's would give the root logger a handler where it has none.
"""

import functools
import logging

logger = logging.getLogger("crankshaft")
debug, info, warning, error = logger.debug, logger.info, logger.warning, logger.error


@functools.cache
def warning_once(message: str, *arguments: object) -> None:
    """Logs a warning, unless this process has logged the same one."""
    logger.warning(message, *arguments, stacklevel=2)
