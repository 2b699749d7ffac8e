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


def check_share(name: str, value: float) -> None:
    """Raises InputError if an input's argument is not above 0 and below 1."""
    if not 0 < value < 1:
        raise InputError(f"{name}={value:g} is not a share of the examples; use a number between 0 and 1, e.g. 0.1")


def eval_count(count: int, eval_share: float, source: str) -> int:
    """Returns how many of `count` examples are for evaluation: at least one, leaving at least one for training.

    Raises:
      InputError: there are fewer than two, in the files that `source` names.
    """
    if count < 2:
        raise InputError(f"{source} holds {count} usable records: expected at least 2, one for each split")
    return min(max(round(count * eval_share), 1), count - 1)
