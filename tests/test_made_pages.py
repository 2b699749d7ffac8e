"""Pages made from the code are what their command makes now: in a process where no test has registered anything."""

import subprocess
import sys

from tests.pages import ROOT


def test_made_pages_are_current(tmp_path):
    command = [sys.executable, str(ROOT / "docs" / "make_pages.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # where it is 0, what TensorFlow says as it starts
    made = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert set(made) == {"flags.md", "events.md", "benchmark_result.md"}
    for name, text in made.items():
        assert text == (ROOT / "docs" / name).read_text(encoding="utf-8"), "run `python docs/make_pages.py`"
