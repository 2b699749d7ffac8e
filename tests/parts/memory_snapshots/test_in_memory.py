"""A snapshot in memory is a checkpoint, to the bit; one that was not finished, or is another run's, does not exist."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from crankshaft.engine.checkpoints import Checkpoints, WritingProcess
from crankshaft.engine.checkpoints import manifest as manifests
from crankshaft.engine.machine import memory
from crankshaft.parts.memory_snapshots.in_memory import Snapshots
from crankshaft.parts.memory_snapshots.snapshot_memory import Slots, are_slots, make, newest_whole
from tests.engine.checkpoints.checkpoint_cases import bits, fill, make_state
from tests.runs import steps
from tests.waiting import PATIENCE

ABOUT = {"model": "mlp", "units": 3}


@pytest.fixture
def slots():
    descriptors = make()
    yield Slots(descriptors)
    for each in descriptors:
        os.close(each)


def snapshots_of(folder, state, slots, about=ABOUT) -> Snapshots:
    folder.mkdir(exist_ok=True)
    return Snapshots(Checkpoints(folder / "checkpoints", state, keep=3, about=about), slots, lambda text: [text])


def test_what_another_process_left_becomes_the_checkpoint_that_it_would_have_written(tmp_path, slots):
    state = make_state()
    taken = snapshots_of(tmp_path / "run", state, slots)
    for step in (3, 5, 8):
        fill(state, step)
        taken.take(step, {"best": np.float32(step / 8), "patience": step})
    before = bits(state)
    fill(state, 9)  # while it is copied
    taken.wait()
    assert [each.step for each in slots.read()] == [8, 5]

    again = make_state()
    found = snapshots_of(tmp_path / "run", again, slots, {**ABOUT, "strategy": {"hosts": 3}})  # it fits any number
    assert found.write_newest(8) is None
    assert found.write_newest(7) == 8
    checkpoints = Checkpoints(tmp_path / "run/checkpoints", again, keep=3, about=ABOUT)
    manifest = checkpoints.restore()
    assert bits(again) == before
    assert (manifest.step, manifest.host_state, manifest.about) == (8, {"best": 1.0, "patience": 8}, ABOUT)
    checkpoints.save(9, {}, wait=True)
    assert checkpoints.latest().variables == manifest.variables


def test_a_process_whose_memory_is_lost_gets_the_state_of_another(tmp_path, slots):
    """Two processes, in threads: one has no snapshot, here the first, which seals checkpoints."""
    state, barrier, texts, owner = make_state(), threading.Barrier(2), ["", ""], 1
    (tmp_path / "run").mkdir()

    def process(number: int) -> Snapshots:
        def exchange(text: str) -> list[str]:
            texts[number] = text
            barrier.wait(PATIENCE)
            exchanged = [*texts]
            barrier.wait(PATIENCE)
            return exchanged

        writer = WritingProcess(number, "attempt")
        checkpoints = Checkpoints(tmp_path / "run/checkpoints", state, keep=3, about=ABOUT, writer=writer)
        return Snapshots(checkpoints, slots if number == owner else Slots(), exchange)

    def both(call) -> list:
        with ThreadPoolExecutor(2) as pool:
            return [each.result() for each in [pool.submit(call, process(number), number) for number in (0, 1)]]

    def take(snapshots: Snapshots, number: int) -> None:
        snapshots.take(6, {"of": 0})
        snapshots.close()

    fill(state, 6)
    before = bits(state)
    both(take)
    fill(state, 7)
    assert both(lambda snapshots, number: snapshots.write_newest(-1)) == [6, 6]
    checkpoints = Checkpoints(tmp_path / "run/checkpoints", state, keep=3, about=ABOUT)
    assert checkpoints.restore().host_state == {"of": 0}
    assert bits(state) == before
    (newest,) = slots.read()
    slots.write(8, {**newest.record, "parts": [0, 1]}, [])
    assert both(lambda snapshots, number: snapshots.write_newest(6)) == [None, None]
    owner = 0
    slots.write(7, {**newest.record, "process": 0}, [({**each}, newest.read(each)) for each in newest.values])
    assert both(lambda snapshots, number: snapshots.write_newest(6)) == [7, 7]
    owner = 1
    slots.write(9, newest.record, [({**each}, newest.read(each)) for each in newest.values])
    (tmp_path / "run/checkpoints").rename(tmp_path / "moved")
    (tmp_path / "run/checkpoints").touch()  # the first process can't write there, and the other need not
    assert both(lambda snapshots, number: snapshots.write_newest(6)) == [None, None]


def test_the_newest_is_written_alone_beside_the_run_unless_a_checkpoint_is_newer(tmp_path):
    state = make_state()
    fill(state, 1)
    taken = snapshots_of(tmp_path, state, Slots())
    checkpoints = Checkpoints(tmp_path / "checkpoints", state, keep=3, about=ABOUT)
    taken.take(4, {})
    taken.wait()
    assert taken.write_alone() == 4
    assert taken.write_alone() is None
    assert checkpoints.restore().step == 4
    for step in (9, 5):  # a run that went back to an earlier state
        checkpoints.save(step, {}, wait=True)
    taken.take(6, {})
    taken.wait()
    assert taken.write_alone() == 6
    taken.take(7, {})
    taken.clear()
    assert taken.write_alone() is None
    taken.close()


def test_a_checkpoint_that_the_run_writes_after_it_is_due_replaces_it(tmp_path, monkeypatch):
    taken = snapshots_of(tmp_path, make_state(), Slots())
    checkpoints = Checkpoints(tmp_path / "checkpoints", make_state(), keep=3, about=ABOUT)
    looks = [-1]  # before the run has saved step 7
    look = manifests.newest_step
    monkeypatch.setattr(manifests, "newest_step", lambda directory: looks.pop() if looks else look(directory))
    taken.take(4, {})
    taken.wait()
    checkpoints.save(7, {}, wait=True)
    assert taken.write_alone() is None
    assert steps(tmp_path) == [7]


def test_a_snapshot_of_another_configuration_or_folder_is_not_used(tmp_path, slots):
    state, run = make_state(), tmp_path / "run"
    taken = snapshots_of(run, state, slots)
    taken.take(4, {})
    taken.wait()
    assert snapshots_of(run, state, slots, {**ABOUT, "units": 4}).write_newest(-1) is None
    assert snapshots_of(tmp_path / "other", state, slots).write_newest(-1) is None
    run.rename(tmp_path / "before")  # a run that begins again at the same path
    assert snapshots_of(run, state, slots).write_newest(-1) is None
    assert os.listdir(run) == []


def test_a_process_that_is_killed_while_it_copies_leaves_the_snapshot_before(slots):
    slots.write(1, {"n": 1}, [({"key": "a"}, np.arange(1000)), ({"key": "empty"}, b"")])
    slots.write(2, {"n": 2}, [({"key": "a"}, np.arange(1000))])
    if not (child := os.fork()):

        def values():
            yield {"key": "a"}, np.zeros(1000, np.int64)
            os.kill(os.getpid(), signal.SIGKILL)

        slots.write(3, {"n": 3}, values())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (left,) = slots.read()
    assert (left.step, left.record) == (2, {"n": 2})
    assert np.array_equal(np.frombuffer(left.read(left.values[0]), np.int64), np.arange(1000))
    slots.write(3, {}, [])
    assert [each.step for each in slots.read()] == [3, 2]


def test_the_newest_step_counts_of_which_every_part_exists():
    of = [("a", process, []) for process in range(3)]
    shard = [("a", process, [0, 1]) for process in range(2)]
    assert newest_whole([{4: of[0], 6: of[0]}, {4: of[1], 6: of[1]}]) == (6, [0, 1])
    assert newest_whole([{4: of[0]}, {4: of[1], 6: of[1]}]) == (6, [1])  # every process has all
    assert newest_whole([{4: shard[0]}, {4: shard[1], 6: shard[1]}]) == (4, [0, 1])
    assert newest_whole([{}, {4: shard[1]}]) is None
    assert newest_whole([{}, {}]) is None
    # The processes have other numbers than in the attempt before, and one has memory of an attempt before that.
    assert newest_whole([{4: shard[1]}, {}, {4: shard[0]}]) == (4, [0, 2])
    assert newest_whole([{4: ("b", 0, [0, 1])}, {4: shard[0]}, {4: shard[1]}]) == (4, [1, 2])
    assert newest_whole([{4: ("b", 0, [0, 1])}, {4: shard[1]}]) is None


def test_there_are_none_where_memory_is_short(tmp_path, monkeypatch):
    group = tmp_path / "sys/job"
    group.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/job\n")
    (tmp_path / "meminfo").write_text("MemTotal: 8192 kB\nMemAvailable: 4096 kB\n")
    there = tmp_path, tmp_path / "sys"
    assert (memory.available_bytes(*there), memory.usable_bytes(*there)) == (4 << 20, 8 << 20)
    for name, value in (("max", "1000000"), ("current", "990000"), ("stat", "anon 5\ninactive_file 1000\n")):
        (group / f"memory.{name}").write_text(value)
    assert (memory.available_bytes(*there), memory.usable_bytes(*there)) == (11000, 1000000)
    (group / "memory.max").write_text("max\n")
    assert memory.available_bytes(*there) == 4 << 20

    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    slots = Slots()
    taken = snapshots_of(tmp_path / "run", make_state(), slots)
    taken.take(4, {})
    taken.wait()
    assert taken.is_off
    assert slots.read() == []


def test_files_of_slots_are_known_from_others(tmp_path, slots):
    other = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    assert not are_slots([other, other])
    os.close(other)
    assert not are_slots([other])
    assert slots.num_bytes == 0
