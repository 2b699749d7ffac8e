"""The scripts in `benchmarks/` find what they import, though no test runs them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OTHER_LIBRARIES = {"ddp", "nanogpt", "tensor_parallel", "jax_scan", "keras_jax_fit"}  # PyTorch, JAX; Keras on another


def test_scripts_that_compare_can_be_imported():
    paths = [path for path in (ROOT / "benchmarks").rglob("*.py") if path.stem not in OTHER_LIBRARIES]
    names = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)
    assert {"benchmarks.bits", "benchmarks.sweep", "benchmarks.peers.keras_fit"} <= set(names)
    code = f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
