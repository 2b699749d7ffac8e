"""Refuses libraries that are older than what this package is tested with, and Keras 2 in place of Keras 3."""

import importlib

from ..errors import UsageError

LEAST = {"tensorflow": "2.19", "keras": "3.12"}


def refuse_other_libraries() -> None:
    """Raises `UsageError` where this process has loaded an older library, though a newer one may be installed since.

    So it does where another module has a library's name, and where `tf.keras` is Keras 2.
    """
    for name, least in LEAST.items():
        module = importlib.import_module(name)
        if not hasattr(module, "__version__"):  # a file of that name beside the program, or what an uninstall left
            raise UsageError(
                f"the module {name} is {getattr(module, '__file__', None) or [*module.__path__]}, and not the library; "
                "rename or remove it, and see that the library is installed"
            )
        loaded = module.__version__
        if [*map(int, loaded.split(".")[:2])] < [*map(int, least.split("."))]:
            raise UsageError(
                f"this process has loaded {name} {loaded}, and Crankshaft needs {least} or newer; install that (pip "
                f"install -U {name}), unless it is by now, and restart the kernel, or the program"
            )
    try:
        model = importlib.import_module("tensorflow").keras.Model
    except ImportError:  # Keras 2 is selected, and not installed
        model = None
    if model is not importlib.import_module("keras").Model:
        raise UsageError(
            "tf.keras is Keras 2 in this process, by TF_USE_LEGACY_KERAS, and models here are of Keras 3; unset it "
            "before TensorFlow is imported"
        )
