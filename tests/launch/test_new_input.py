"""A new input in 40 lines, the guide's own: it trains to the bit as the same rows in memory do."""

from __future__ import annotations

import numpy as np

from tests.pages import ROOT, blocks
from tests.runs import assert_equal_bits

IN_MEMORY = """
import numpy as np

def load(data_dir, seed):
    rows = np.fromfile(data_dir, np.float32).reshape(-1, 8)
    return (rows[:, :7], rows[:, 7]), None
"""


def test_the_guides_input_trains_to_the_bit_as_its_rows_in_memory_do(inside, tmp_path):
    files = {block.title: block.text for block in blocks(ROOT / "docs" / "data.md") if block.title}
    assert len(files["rows.py"].splitlines()) <= 40
    for name, text in {**files, "memory.py": IN_MEMORY}.items():
        (tmp_path / name).write_text(text)
    np.random.default_rng(0).random([300, 8], np.float32).tofile(tmp_path / "rows.bin")
    flags = [f"--model={tmp_path}/line.py", f"--data_dir={tmp_path}/rows.bin", "--validation_split=0.1", "--jit=off"]
    flags += ["--train_epochs=3", "--global_batch_size=27", "--resident_data_mb=0"]
    for name in ("rows", "memory"):
        inside(*flags, f"--input={tmp_path}/{name}.py", f"--run_dir={tmp_path}/{name}").ok()
    assert_equal_bits(tmp_path / "rows", tmp_path / "memory", "train", "eval")
