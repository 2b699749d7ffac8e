"""What every input hands over: a training split and an evaluation split. Host code, NumPy only."""

from typing import Any, NamedTuple

from .treatments import Treatment


class InputError(ValueError):
    """A file or an argument of an input is not usable; the message is one line for the user."""


class Splits(NamedTuple):
    """The data of a run.

    `train` and `eval` (which may be None) are each either a pair `(features, labels)` of NumPy arrays whose first axis
    is examples (`features` may be a dict of such arrays), or a `tf.data.Dataset` of single examples, unbatched, each
    such a pair.

    `vocabulary` says which features are ids and how many ids each has: the ids of a feature, in each of its columns
    where it has several, are 0..count-1. 0 stands for what is missing or was not seen in training.

    `ids` tells one numbering of ids from another, where the training data decides it: a digest of which id has which
    number.

    `tokens` says what text was cut into, for models that generate: `input.files.tokens.Bytes` or `Vocabulary`.

    `classes` names the classes, in the order of the label numbers.

    `words` says of each feature that was text what was looked up: id i+1 is `words[feature][i]`, and 0 stands for text
    that is empty or was not seen in training.

    `treatments` says what is done to the raw values of a table's columns before they are features, by column; what is
    done to an array of columns has the name "".

    `columns` says how each column of a table is read, in lines for people.
    """

    train: Any
    eval: Any
    num_classes: int | None  # None: labels are not classes
    vocabulary: dict[str, int] | None = None  # None: no feature is an id
    ids: int | None = None  # None: the training data does not decide it
    tokens: Any = None  # None: it is no text that was cut
    classes: tuple[str, ...] | None = None  # None: the classes have no names but their numbers
    words: dict[str, list[bytes]] | None = None  # None: no feature was text
    columns: str | None = None  # None: it is not a table
    treatments: dict[str, Treatment] | None = None  # None: raw values are taken as they are


def refuse_data_dir(data_dir: str | None, input_name: str) -> None:
    """Raises InputError if a folder is given to an input that reads none.

    To ignore the folder would train on other data than the user pointed at.
    """
    if data_dir:
        raise InputError(
            f"data_dir={data_dir} is not read by input={input_name}, which brings its own data; "
            "leave --data_dir out or choose another --input"
        )


def check_at_least(name: str, value: int, minimum: int) -> None:
    """Raises InputError if an input's argument is too small."""
    if value < minimum:
        raise InputError(f"{name}={value} is too small; use at least {minimum}")


def check_share(name: str, value: float) -> None:
    """Raises InputError if an input's argument is not above 0 and below 1."""
    if not 0 < value < 1:
        raise InputError(f"{name}={value:g} is no share of the examples; use a number between 0 and 1, e.g. 0.1")


def eval_count(count: int, eval_share: float, where: str) -> int:
    """Returns how many of `count` examples are for evaluation: at least one, leaving at least one for training.

    Raises:
      InputError: there are fewer than two, in the files that `where` names.
    """
    if count < 2:
        raise InputError(f"{where} holds {count} usable records: expected at least 2, one for each split")
    return min(max(round(count * eval_share), 1), count - 1)
