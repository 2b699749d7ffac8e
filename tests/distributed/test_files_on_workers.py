"""Workers with parameter servers read their own files: the counts, and the messages about mistakes."""

from __future__ import annotations

import re

import pytest

from tests import runs
from tests.distributed.jobs import STEPS_PER_EPOCH, check_updates

FLAGS = ("--mode=train", "--steps_per_loop=10")
CHUNKED = ("--chunk=32", "--shuffle_window=4")


def files(tmp_path, number: int, *flags: str) -> tuple[str, ...]:
    return (f"--files={number}", f"--folder={tmp_path / 'files'}", *flags)


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_reads_on_and_no_example_is_left_out(start, tmp_path):
    """Each example once an epoch, but for those that the killed worker had applied and not yet counted."""
    steps = 60 * STEPS_PER_EPOCH
    asked = files(tmp_path, 2, *CHUNKED, "--validation_split=0.1")
    flags = (f"--train_steps={steps}", "--steps_per_loop=10", "--checkpoint_every_steps=100")
    job = start("run", *flags, *asked, local=("--ps=1",))
    job.until(lambda: runs.newest(job.run_dir) >= 100)
    job.kill("worker 0")
    job.ok()
    seen = check_updates(job, steps)[:900]
    epochs = 60 * STEPS_PER_EPOCH // 15  # 900 examples: 15 steps, the last of 4
    assert seen.min() >= epochs
    assert seen.sum() - epochs * 900 <= 2 * 64
    assert "worker 0 was killed by SIGKILL; it starts again at once, the others continue" in job.output
    assert len(re.findall(r"\[local\] chief is process", job.output)) == 1
    assert job.result["eval"]["example"] == 949.5  # the mean of 900 to 999, each once
    assert 0 < job.result["input_steps_ahead"] <= 64


@pytest.mark.slow
def test_the_number_of_files_and_servers_changes_no_bit(start, tmp_path):
    """One worker: with more, the order of updates is chance."""
    flags = (*FLAGS, "--train_steps=40", *CHUNKED)
    one = start("one", *flags, *files(tmp_path, 1), local=("--workers=1", "--ps=1")).ok()
    seven = start("seven", *flags, *files(tmp_path / "more", 7), local=("--workers=1", "--ps=2")).ok()
    runs.assert_equal_bits(one.run_dir, seven.run_dir, "train")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("fewer", r"0 (.*): its files have 998 examples, and the coordinator's 1,000; give all"),
        ("missing", r"0 (.*): FileNotFoundError: .* 'part-6', at .*counting\.py:\d+ in in_files"),
        ("undecodable", r"\d (.*): record 432 does not decode; write it again$"),
    ],
)
def test_files_that_a_worker_cannot_train_on_are_one_line_that_names_it(start, tmp_path, wrong, says):
    job = start("run", *FLAGS, "--train_steps=40", *files(tmp_path, 2, f"--wrong={wrong}"), local=("--ps=1",))
    assert job.wait().code == 2
    (line,) = re.findall(r"\[chief\] error: (.*)", job.output)
    assert re.match("worker " + says.replace("(.*)", r"\(127\.0\.0\.1:\d+\)"), line), line


@pytest.mark.slow
def test_a_read_that_hangs_names_the_worker_and_the_files(start, tmp_path):
    hangs = files(tmp_path, 2, "--read_seconds=100000", "--step_timeout_seconds=6")
    job = start("run", *FLAGS, "--train_steps=40", *hangs, local=("--ps=1", "--max_restarts=0"))
    assert job.wait().code == 1
    (line,) = re.findall(r"\[chief\] error: (.*)", job.output)
    assert re.match(
        r"worker [01] \(127\.0\.0\.1:\d+\): InFiles\.read has not returned for \d\S* s, at \S+counting", line
    ), line
    assert re.search(
        r" from example \d+ on of \S+worker-[01]/part-0 and 1 more; see whether its files' disk or", line
    ), line


@pytest.mark.slow
def test_bad_records_are_left_out_up_to_their_number_and_what_reading_took_is_told(start, tmp_path):
    steps = 2 * STEPS_PER_EPOCH
    wrong = files(tmp_path, 2, "--wrong=bad", "--max_bad_records=1", "--read_seconds=0.1")
    job = start("run", *FLAGS, f"--train_steps={steps}", *wrong, local=("--workers=1", "--ps=1")).ok()
    seen = check_updates(job, steps)
    assert (seen[432], seen[433]) == (0, 4)  # the next one in its place
    assert seen.sum() == 2 * 1000
    assert job.result["bad_records"] == {"train": 1}
    assert (
        "part-1 has a bad record 432; write it again; left out, as 1 of the 1 that max_bad_records allows" in job.output
    )
    # Nearly all of the time, but on a busy machine, whose steps take as long as reads.
    assert 0 < job.result["input_wait_fraction"] <= 1
    assert job.result["input_wait_ms"] > 0
    assert 0 <= job.result["input_steps_ahead"] < STEPS_PER_EPOCH
    rate = job.result["input_bytes_per_sec"] / job.result["examples_per_sec"]
    assert rate == pytest.approx(20 * 4 + 2 * 8)  # of each example
