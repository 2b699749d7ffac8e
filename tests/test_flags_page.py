"""docs/flags.md is what its command makes now: in a process of its own, where no test has registered anything."""

import subprocess
import sys

from tests.pages import ROOT


def test_flags_page_is_current(tmp_path):
    command = [sys.executable, str(ROOT / "docs" / "make_flags.py"), str(tmp_path / "flags.md")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # where it is 0, what TensorFlow says as it starts
    made = (tmp_path / "flags.md").read_text(encoding="utf-8")
    assert made == (ROOT / "docs" / "flags.md").read_text(encoding="utf-8"), "run `python docs/make_flags.py`"
