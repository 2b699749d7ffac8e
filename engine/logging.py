"""Crankshaft's log: Python's logger `crankshaft`, to which the program gives handlers and levels.

The functions of Python's `logging` and of absl's would give the root logger a handler where it has none.
"""

import functools
import logging

from .errors import as_line

logger = logging.getLogger("crankshaft")
debug, info, warning, error = logger.debug, logger.info, logger.warning, logger.error


@functools.cache
def warning_once(message: str, *arguments: object) -> None:
    """Logs a warning, unless this process has logged the same one."""
    logger.warning(message, *arguments, stacklevel=2)


def _keep_to_a_line(record: logging.LogRecord) -> bool:
    """Escapes what would end a record's line or act on a terminal: names in it may be from files of anyone's."""
    message = record.getMessage()
    if message != (line := as_line(message)):
        record.msg, record.args = line, ()
    return True


logger.addFilter(_keep_to_a_line)
