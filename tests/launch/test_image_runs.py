"""Runs on image files: ended or gone on with where some are bad."""

from __future__ import annotations

import pytest

from tests.input.test_images import jpeg, png, write

RUN = ("--model=cnn", "--input=images", "--input_arg=size=12", "--global_batch_size=6", "--jit=off", "--progress=plain")
TWO = ("--strategy=mirrored", "--num_virtual_devices=2")


@pytest.fixture
def folder(tmp_path):
    """20 images: three whole batches of 6 an epoch, and one of 2."""
    for number in range(20):
        name, content = (f"{number}.jpg", jpeg(number)) if number % 3 else (f"{number}.png", png(number))
        write(tmp_path / "images" / "ab"[number % 2] / name, content)
    return tmp_path / "images"


def test_a_bad_image_ends_the_run_unless_it_may_be_left_out(inside, folder):
    write(folder / "a" / "4.jpg", jpeg(4)[:300])
    flags = (f"--data_dir={folder}", "--train_steps=4", *TWO)
    failed = inside(*RUN, *flags)
    assert failed.code == 2
    assert "a/4.jpg does not decode" in failed.error
    assert "let max_bad_records leave such images out" in failed.error
    done = inside(*RUN, *flags, "--max_bad_records=1").ok()
    assert done.err.count("a/4.jpg does not decode") == 1
    assert "left out, as 1 of the 1 that max_bad_records allows" in done.err
