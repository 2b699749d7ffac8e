"""The language model on text, as users run it: it learns a small text by heart."""

import math

import pytest

from tests.runs import result

TEXT = b"the cat sat on the mat, and the mat lay under the cat. " * 12
RUN = (
    *("--model=transformer_lm", "--input=text", "--input_arg=context=32", "--jit=off", "--progress=plain", "--seed=1"),
    *("--model_arg=layers=2", "--model_arg=width=32", "--model_arg=heads=2", "--global_batch_size=7"),
)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(TEXT)
    return f"--data_dir={tmp_path}/text", f"--eval_data_dir={tmp_path}/text"


def test_numerics_are_checked_op_by_op(inside, tmp_path, text):
    inside(*RUN, text[0], "--train_steps=2", "--check_numerics").ok()


def test_a_small_text_is_learned_by_heart(inside, tmp_path, text):
    # At 0.01 it is the kind of CPU that decides, by its rounding, which seeds are still on a plateau after 150 steps.
    flags = ("--train_steps=150", "--learning_rate=0.003", f"--run_dir={tmp_path}/run")
    inside(*RUN, *text, *flags).ok()
    found = result(tmp_path / "run")["eval"]
    # 55 bytes again and again: but for those of a window's beginning, each is told by those before it.
    assert found["loss"] < 0.5
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
