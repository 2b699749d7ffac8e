"""Pages and the stub made from the code are what their command makes now, and what no test runs can be imported.

In one process, where no test has registered anything."""

import subprocess
import sys

from tests.pages import ROOT

OTHER_LIBRARIES = {
    "ddp_recovering",
    "nanogpt",
    "tensor_parallel",
    "torch_loop",
    "jax_scan",
}  # PyTorch, JAX
CODE = """
import importlib, runpy, sys
sys.argv, names = sys.argv[1:3], sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
for name in names:
    importlib.import_module(name)
"""


def test_made_pages_are_current_and_scripts_that_compare_can_be_imported(tmp_path):
    paths = [path for path in (ROOT / "benchmarks").rglob("*.py") if path.stem not in OTHER_LIBRARIES]
    names = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)
    assert {"benchmarks.bits", "benchmarks.compare", "benchmarks.peers.keras_fit"} <= set(names)
    command = [sys.executable, "-c", CODE, ROOT / "docs" / "make_pages.py", tmp_path, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # where it is 0, what TensorFlow says as it starts
    made = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert set(made) == {"flags.md", "events.md", "benchmark.md", "__init__.pyi"}
    for name, text in made.items():
        path = ROOT / ("" if name == "__init__.pyi" else "docs") / name
        assert text == path.read_text(encoding="utf-8"), "run `python docs/make_pages.py`"
