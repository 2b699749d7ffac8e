"""Jobs on hosts: mistakes, poor links and lost hosts. Each prints how soon it was noticed, the lines and exit codes."""

from __future__ import annotations

import json
import signal
import time

import numpy as np
import pytest

from tests.hosts.hosts import Hosts, Task
from tests.runs import tensors
from tests.waiting import wait_until

SLOW = {"2": {"delay_ms": 6}}  # so that a job is under way for some seconds
RESTARTS = ("--max_restarts=5", "--checkpoint_every_steps=200")
LOST = r"is gone|is lost|has not answered|has ended"


@pytest.fixture
def hosts(tmp_path):
    """hosts(count): some hosts, which end with the test."""
    made = []

    def make(count: int, **options) -> Hosts:
        made.append(Hosts(tmp_path, count, **options).__enter__())
        return made[-1]

    yield make
    for each in made:
        each.__exit__()


def report(case: str, tasks: list[Task], noticed: float | None = None) -> list[int]:
    """Prints what a job's tasks have said; returns their exit codes."""
    codes = [task.wait() for task in tasks]
    print(f"\n{case}" + (f", noticed after {noticed:.0f} s" if noticed is not None else ""))
    for host, (task, code) in enumerate(zip(tasks, codes, strict=True), 1):
        print(f"  host{host}: exit {code}: {task.error[:300]}")
    return codes


def pair(two: Hosts, *flags, names: str = "", **variables: str) -> list[Task]:
    run = ("--train_epochs=40", f"--run_dir={two.shared / 'run'}")
    return [two.train(index, *run, *flags, names=names, **variables) for index in range(2)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The bits of a run of two hosts, by --cluster_hosts."""
    with Hosts(tmp_path_factory.mktemp("undisturbed"), 2) as two:
        assert report("two hosts by --cluster_hosts", pair(two)) == [0, 0]
        return tensors(two.shared / "run")


def same_bits(two: Hosts, undisturbed) -> bool:
    found = tensors(two.shared / "run")
    return found.keys() == undisturbed.keys() and all(np.array_equal(found[name], undisturbed[name]) for name in found)


def test_tf_config_gives_the_bits_of_cluster_hosts(hosts, undisturbed):
    two = hosts(2)
    tasks = []
    for index in range(2):
        cluster = {"cluster": {"worker": two.names.split(",")}, "task": {"type": "worker", "index": index}}
        flags = ("--train_epochs=40", f"--run_dir={two.shared / 'run'}")
        tasks.append(two.train(index, *flags, TF_CONFIG=json.dumps(cluster)))
    assert report("two hosts by TF_CONFIG", tasks) == [0, 0]
    assert same_bits(two, undisturbed)


def test_one_index_on_two_hosts_is_named_on_both(hosts):
    two = hosts(2)
    tasks = [two.train(0, host=host) for host in (1, 2)]
    assert report("--task_index=0 on both", tasks) == [2, 2]
    for task in tasks:
        assert "host1" in task.error
        assert "host2" in task.error
        assert "give each task an index of its own" in task.error


@pytest.mark.parametrize("names", ["host1:2222,10.53.0.1:2222", "host1:2222,HOST1:2222"])
def test_one_host_named_twice_is_refused(hosts, names):
    two = hosts(2)
    tasks = [two.train(0, names=names)]
    assert report(names, tasks) == [2]
    assert "give each" in tasks[0].error


def test_a_host_of_another_job_is_refused_and_that_job_goes_on(hosts):
    three = hosts(3)
    right = [three.train(0, host=1, names="host1:2222,host2:2222")]
    wrong = three.train(0, host=3, names="host3:2222,host2:2222")
    right.append(three.train(1, host=2, names="host1:2222,host2:2222"))
    assert report("another job's host", [wrong]) == [2]
    assert "of another job or another list of tasks" in wrong.error
    assert report("the other job", right) == [0, 0]


def test_lists_spelled_otherwise_are_refused_on_both(hosts):
    two = hosts(2)
    tasks = [two.train(index, names=names) for index, names in enumerate([two.names, "host1:2222,10.53.0.2:2222"])]
    assert report("two spellings of one list", tasks) == [2, 2]


def test_a_mistake_on_one_host_ends_both(hosts):
    two = hosts(2)
    tasks = [two.train(0), two.train(1, "--data_dir=/elsewhere")]
    assert report("a flag is wrong on one host", tasks) == [2, 2]
    assert "worker 1 (host2:2222) has not started: data_dir=" in tasks[0].error


def test_a_run_dir_that_is_not_shared_is_refused_on_both(hosts):
    two = hosts(2)
    tasks = [two.train(index, "--train_epochs=40", f"--run_dir={two.local}") for index in range(2)]
    assert report("run_dir is not shared", tasks) == [2, 2]
    assert all("is another folder at worker 1 than at the chief" in task.error for task in tasks)


def test_a_host_that_nothing_may_enter_learns_which_port_to_open(hosts):
    two = hosts(2)
    two.link({"1": {"inbound": [22]}})
    tasks = [two.train(index, "--cluster_timeout_seconds=15") for index in range(2)]
    assert report("nothing may enter host1", tasks) == [1, 1]
    assert "does not reach worker 0 (host1:2222), this process: let TCP and UDP in here at port 2222" in tasks[0].error
    assert "let TCP and UDP pass to it at port 2222" in tasks[1].error


POOR = {
    "1 % loss": {host: {"loss": 0.005} for host in "12"},
    "5 % loss": {host: {"loss": 0.025} for host in "12"},
    "100 ms": {host: {"delay_ms": 25} for host in "12"},
    "100 Mbit/s": {host: {"mbit": 100} for host in "12"},
}


@pytest.mark.parametrize("link", POOR)
def test_poor_links_change_no_bit(hosts, undisturbed, link):
    two = hosts(2)
    two.link(POOR[link])
    assert report(link, pair(two)) == [0, 0]
    assert same_bits(two, undisturbed)


def test_a_small_shared_memory_changes_no_bit(hosts, undisturbed):
    two = hosts(2, shm="64m")
    assert report("/dev/shm of 64 MB", pair(two)) == [0, 0]
    assert same_bits(two, undisturbed)


@pytest.mark.parametrize("seconds", [5, 30])
def test_a_link_that_is_down_for_a_while_changes_no_bit(hosts, undisturbed, seconds):
    two = hosts(2)
    two.link(SLOW)
    tasks = pair(two, *RESTARTS)
    tasks[0].until(r"step [3-9]\d\d/")
    two.link({"2": {"down": True}})
    time.sleep(seconds)
    two.link(SLOW)
    assert report(f"a link is down for {seconds} s, --max_restarts=5", tasks) == [0, 0]
    assert same_bits(two, undisturbed)


def test_a_link_that_never_comes_back_loses_no_step_that_the_chief_holds(hosts):
    two = hosts(2)
    two.link(SLOW)
    tasks = pair(two)
    tasks[0].until(r"step [3-9]\d\d/")
    two.link({"2": {"down": True}})
    noticed = tasks[0].until(LOST)
    assert report("a link is cut for ever", tasks, noticed) == [1, 1]
    assert "was in memory, and is saved now" in tasks[0].output


def test_a_link_that_is_cut_one_way_ends_both(hosts):
    two = hosts(2)
    two.link(SLOW)
    tasks = pair(two)
    tasks[0].until(r"step [3-9]\d\d/")
    two.link({**SLOW, "cuts": [[1, 2]]})
    noticed = tasks[0].until(LOST)
    assert report("a link is cut one way", tasks, noticed) == [1, 1]


def test_a_link_that_swallows_long_packets_ends_both(hosts):
    two = hosts(2)
    two.link({"2": {"largest": 1400}})
    tasks = pair(two, "--step_timeout_seconds=30")
    assert all(report("packets over 1,400 bytes vanish", tasks))


def test_a_host_that_dies_and_returns_changes_no_bit(hosts, undisturbed):
    two = hosts(2)
    two.link(SLOW)
    tasks = pair(two, *RESTARTS)
    tasks[0].until(r"step [3-9]\d\d/")
    two.end_all(2)
    noticed = tasks[0].until(LOST)
    tasks[1].wait()
    tasks[1] = two.train(1, "--train_epochs=40", f"--run_dir={two.shared / 'run'}", *RESTARTS)
    assert report("a host dies and returns, --max_restarts=5", tasks, noticed) == [0, 0]
    assert same_bits(two, undisturbed)


def test_ctrl_c_in_one_terminal_saves_and_ends_all(hosts):
    two = hosts(2)
    two.link(SLOW)
    tasks = pair(two)
    tasks[0].until(r"step [3-9]\d\d/")
    tasks[1].send(signal.SIGINT)
    assert report("Ctrl-C on one host", tasks) == [130, 130]
    assert tensors(two.shared / "run")


def test_a_worker_around_servers_leaves_and_returns_elsewhere(hosts):
    """The coordinator, on host 1, starts again in its place, and awaits worker 1 at host 3 no longer."""
    five = hosts(5)
    names = [f"host{host}:2222" for host in range(1, 6)]
    run = ("--num_ps=1", "--train_epochs=400", "--checkpoint_every_steps=500", f"--run_dir={five.shared / 'run'}")
    tasks = {1: five.train(0, *run, "--max_restarts=3", names=",".join(names[:4]))}
    tasks |= {host: five.train(host - 1, *run, names=",".join(names[:4])) for host in (2, 3, 4)}
    tasks[1].until(r"step [\d,]+/")
    five.end_all(3)
    tasks.pop(3).wait()
    tasks[5] = five.train(2, *run, names=",".join([*names[:2], names[4], names[3]]))
    tasks[1].until("to include worker 2 ")
    wait_until(lambda: "evaluation at" in tasks[1].output, tasks[1].process, shows=lambda: tasks[1].output)
    assert report("a worker around servers returns elsewhere", list(tasks.values()))[0] == 0
