"""What of a program is Crankshaft's own code, by module or file. Needs no TensorFlow."""

from __future__ import annotations

import os

PACKAGE = __name__.partition(".")[0]
ROOT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
COMPUTING = ("engine", "parts")  # what makes and holds tensors
OWN = (*COMPUTING, "launch", "runner", "__init__.py", "__main__.py")
# Models and inputs are written as a user's are: the line of a mistake in one is what a user looks for.
LIKE_USERS = ("input", "models")


def is_module_of(name: str, folders: tuple[str, ...]) -> bool:
    """Returns whether a dotted module is in one of the package's folders, such as `OWN`."""
    package, _, rest = name.partition(".")
    return package == PACKAGE and rest.partition(".")[0] in folders


def is_file_of(path: str, folders: tuple[str, ...]) -> bool:
    """Returns whether a file, by its absolute path, is in one of the package's folders, such as `OWN`."""
    return path.startswith(ROOT) and path.removeprefix(ROOT).partition(os.sep)[0] in folders
