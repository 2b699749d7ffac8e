"""Keras's backend where the environment names another one for other programs, each time in a process of its own."""

import os
import subprocess
import sys

import pytest

from tests.waiting import PATIENCE

pytestmark = pytest.mark.thorough

TRAINER = "from crankshaft.engine.trainer import Trainer\n"
NAMED = {**os.environ, "KERAS_BACKEND": "jax"}


def script(source: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", source], env=NAMED, capture_output=True, text=True, timeout=PATIENCE)


def test_keras_computes_by_tensorflow():
    done = script(TRAINER + "import keras\nprint(keras.backend.backend())")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "tensorflow\n"


def test_a_backend_that_was_chosen_before_is_told():
    done = script("import tensorflow\nimport crankshaft\n" + TRAINER)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: Keras runs on jax, by KERAS_BACKEND or keras.json, and crankshaft needs tenso")
    assert last.endswith("; set KERAS_BACKEND=tensorflow, in the shell or, before keras is imported, in os.environ")
