"""Checks that inputs share, and the error that they raise. NumPy only."""

from __future__ import annotations

from ..engine.errors import InputError


def refuse_data_dir(data_dir: str | None, input_name: str) -> None:
    """Raises InputError if `data_dir` is set for an input that reads no files.

    Ignoring it would train on other data than the user named.
    """
    if data_dir:
        raise InputError(
            f"data_dir={data_dir} is not read by input={input_name}, which brings its own data; leave data_dir out or "
            "choose another input"
        )


def check_at_least(name: str, value: int, minimum: int) -> None:
    """Raises InputError if an input's argument is too small."""
    if value < minimum:
        raise InputError(f"{name}={value} is too small; use at least {minimum}")
