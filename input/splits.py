"""What every input hands over: a training split and an evaluation split. Host code, NumPy only."""

from typing import Any, NamedTuple


class InputError(ValueError):
    """A file or an argument of an input is not usable; the message is one line for the user."""


class Splits(NamedTuple):
    """The data of a run.

    `train` and `eval` are each either a pair `(features, labels)` of NumPy arrays whose first axis
    is examples (`features` may be a dict of such arrays), or a `tf.data.Dataset` of single
    examples, unbatched, each such a pair.

    `vocabulary` says which features are ids and how many there are: by the feature's name, the ids
    in it are 0..count-1, in each of its columns where it has several. 0 stands for what is missing
    or was not seen in training.
    """

    train: Any
    eval: Any
    num_classes: int | None  # None: labels are not classes
    vocabulary: dict[str, int] | None = None  # None: no feature is an id


def refuse_data_dir(data_dir: str | None, input_name: str) -> None:
    """Raises InputError if a folder is given to an input that reads none.

    To ignore it would train on other data than the user pointed at.
    """
    if data_dir:
        raise InputError(
            f"data_dir={data_dir} is not read by input={input_name}, which brings its own data; "
            "leave --data_dir out or choose another --input"
        )
