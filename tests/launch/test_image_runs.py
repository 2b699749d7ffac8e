"""Runs on image files: resumed to the same bits, as on one device, ended or gone on with where some are bad."""

from __future__ import annotations

import pytest

from tests.input.test_images import jpeg, png, write
from tests.runs import assert_equal_bits, result

RUN = ("--model=cnn", "--input=images", "--input_arg=size=12", "--global_batch_size=6", "--jit=off", "--progress=plain")
TWO = ("--strategy=mirrored", "--num_virtual_devices=2")


@pytest.fixture
def folder(tmp_path):
    """20 images: three whole batches of 6 an epoch, and one of 2."""
    for number in range(20):
        name, content = (f"{number}.jpg", jpeg(number)) if number % 3 else (f"{number}.png", png(number))
        write(tmp_path / "images" / "ab"[number % 2] / name, content)
    return tmp_path / "images"


@pytest.mark.slow
def test_a_resumed_run_gives_the_bits_of_one_that_was_not(inside, folder, tmp_path):
    data = (f"--data_dir={folder}", "--validation_split=0.2")
    inside(*RUN, *data, "--train_steps=7", f"--run_dir={tmp_path}/whole").ok()
    for steps in (2, 7):  # ends within an epoch
        inside(*RUN, *data, f"--train_steps={steps}", f"--run_dir={tmp_path}/again").ok()
    assert_equal_bits(tmp_path / "whole", tmp_path / "again")


@pytest.mark.slow
def test_replicas_train_as_one_device_does(inside, folder, tmp_path):
    losses = []
    for devices in ((), TWO):
        run_dir = tmp_path / f"run{len(losses)}"
        flags = (f"--data_dir={folder}", f"--eval_data_dir={folder}", "--train_steps=5", f"--run_dir={run_dir}")
        inside(*RUN, *devices, *flags).ok()
        losses.append(result(run_dir)["eval"]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_bad_image_ends_the_run_unless_it_may_be_left_out(inside, folder):
    write(folder / "a" / "4.jpg", jpeg(4)[:300])
    flags = (f"--data_dir={folder}", "--train_steps=4", *TWO)
    failed = inside(*RUN, *flags)
    assert failed.code == 2
    assert "a/4.jpg does not decode" in failed.error
    assert "let --max_bad_records leave such images out" in failed.error
    done = inside(*RUN, *flags, "--max_bad_records=1").ok()
    assert done.err.count("a/4.jpg does not decode") == 1
    assert "left out, as 1 of the 1 that --max_bad_records allows" in done.err
