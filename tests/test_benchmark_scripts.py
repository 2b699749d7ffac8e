"""The scripts in `benchmarks/` find what they import, though no test runs them."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
OTHER_LIBRARIES = {"ddp", "nanogpt", "tensor_parallel", "jax_scan", "keras_jax_fit"}  # PyTorch, JAX; Keras on another


def test_scripts_that_compare_can_be_imported():
    names = sorted(path.stem for path in FOLDER.rglob("*.py") if path.stem not in OTHER_LIBRARIES)
    assert {"bits", "rates", "turns", "keras_fit", "ps_table"} <= set(names)
    code = f"""
import importlib, sys
sys.path[:0] = [{str(FOLDER)!r}, {str(FOLDER / "peers")!r}]
for name in {names!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
