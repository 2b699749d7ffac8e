"""Jobs on hosts: mistakes, poor links and lost hosts. Each prints how soon it was noticed, the lines and exit codes.

Once all have passed, they write the table of README.md again.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.hosts.hosts import TRAIN, Hosts, Task
from tests.pages import ROOT
from tests.runs import tensors
from tests.waiting import wait_until

SLOW = {"2": {"delay_ms": 6}}  # so that a job is under way for some seconds
RESTARTS = ("--max_restarts=5", "--checkpoint_every_steps=200")
LOST = r"is gone|is lost|has not answered|has ended"
SAVED = "was in memory, and is saved now"
EPOCHS, FEW = 25, 6


PAGE = ROOT / "tests/hosts/README.md"
HEADER = "| what | on the hosts | exit codes |\n|---|---|---|\n"


class Report:
    """Prints what each job's tasks have said, and keeps a row for the table."""

    def __init__(self):
        self.rows: dict[str, str] = {}

    def __call__(
        self, case: str, tasks: list[Task], seen: str, noticed: float | None = None, others: str = ""
    ) -> list[int]:
        """Waits for the tasks' ends; returns their exit codes.

        Args:
          seen: what is seen on the hosts, which the test asserts.
          noticed: seconds until a loss was noticed.
          others: further exit codes, for the table.
        """
        codes = [task.wait() for task in tasks]
        seen += "" if noticed is None else f" (noticed after {noticed:.0f} s)"
        print(f"\n{case}: {seen}")
        for host, (task, code) in enumerate(zip(tasks, codes, strict=True), 1):
            print(f"  host{host}: exit {code}: {task.error[:300] if code else 'no error'}")
        self.rows[case] = f"| {case} | {seen} | {', '.join(map(str, codes))}{others} |\n"
        return codes


@pytest.fixture(scope="session")
def report(request):
    made = Report()
    yield made
    if not request.session.testsfailed and len(made.rows) > request.session.testscollected > 20:
        before, _, _ = PAGE.read_text().partition(HEADER)
        PAGE.write_text(f"{before}{HEADER}{''.join(made.rows.values())}")


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


def pair(two: Hosts, *flags, epochs: int = EPOCHS, names: str = "", **variables: str) -> list[Task]:
    run = (f"--train_epochs={epochs}", f"--run_dir={two.shared / 'run'}")
    return [two.train(index, *run, *flags, names=names, **variables) for index in range(2)]


def under_way(two: Hosts, *flags) -> list[Task]:
    """Starts a pair, and returns once it has trained for a while."""
    two.link(SLOW)
    tasks = pair(two, *flags)
    tasks[0].until(r"step [3-9]\d\d/")
    return tasks


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, report):
    """The bits of a run of two hosts, by --cluster_hosts, by its epochs."""
    found = {}
    for epochs in (FEW, EPOCHS):
        with Hosts(tmp_path_factory.mktemp("undisturbed"), 2) as two:
            assert report("`--cluster_hosts`", pair(two, epochs=epochs), "the bits of reference") == [0, 0]
            found[epochs] = tensors(two.shared / "run")
    return found


def same_bits(two: Hosts, undisturbed, epochs: int = EPOCHS) -> bool:
    found, expected = tensors(two.shared / "run"), undisturbed[epochs]
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)


def test_tf_config_gives_the_bits_of_cluster_hosts(hosts, undisturbed, report):
    two = hosts(2)
    tasks = []
    for index in range(2):
        cluster = {"cluster": {"worker": two.names.split(",")}, "task": {"type": "worker", "index": index}}
        flags = (f"--train_epochs={EPOCHS}", f"--run_dir={two.shared / 'run'}")
        tasks.append(two.train(index, *flags, TF_CONFIG=json.dumps(cluster)))
    assert report("`TF_CONFIG`", tasks, "same bits") == [0, 0]
    assert same_bits(two, undisturbed)


def test_one_index_on_two_hosts_is_named_on_both(hosts, report):
    two = hosts(2)
    tasks = [two.train(0, f"--run_dir={two.shared}/run", host=1)]
    tasks[0].until("waits for worker 1")  # and has the lock, which the other waits for
    tasks.append(two.train(0, f"--run_dir={two.shared}/run", host=2))
    assert report("`--task_index=0` on both", tasks, "both name both, at once") == [2, 2]
    for task in tasks:
        assert "host1" in task.error
        assert "host2" in task.error
        assert "give each task an index of its own" in task.error


@pytest.mark.parametrize(
    ("names", "seen"),
    [
        ("host1:2222,10.53.0.1:2222", "both name the address that another task has"),
        ("host1:2222,HOST1:2222", "both name the list"),
    ],
)
def test_one_host_named_twice_is_refused_on_both(hosts, report, names, seen):
    two = hosts(2)
    tasks = [two.train(index, names=names) for index in range(2)]
    assert report(f"`{names}` on both", tasks, seen) == [2, 2]
    assert all("give each" in task.error for task in tasks)


def test_a_host_of_another_job_is_refused_and_that_job_goes_on(hosts, report):
    three = hosts(3)
    right = [three.train(0, host=1, names="host1:2222,host2:2222")]
    wrong = three.train(0, host=3, names="host3:2222,host2:2222")
    right.append(three.train(1, host=2, names="host1:2222,host2:2222"))
    seen = "the wrong one names it; the other job goes on (three hosts)"
    assert report("another job's host", [wrong], seen, others="; 0, 0") == [2]
    assert "of another job or another list of tasks" in wrong.error
    assert [task.wait() for task in right] == [0, 0]


def test_lists_spelled_otherwise_are_refused_on_both(hosts, report):
    two = hosts(2)
    tasks = [two.train(index, names=names) for index, names in enumerate([two.names, "host1:2222,10.53.0.2:2222"])]
    assert report("two spellings of one list", tasks, "both name both, at once") == [2, 2]
    assert all("spelled alike" in task.error for task in tasks)


@pytest.mark.parametrize("first", [0, 1])
def test_a_mistake_on_one_host_ends_both(hosts, report, first):
    two = hosts(2)
    flags = ((), ("--data_dir=/elsewhere",))
    tasks = {first: two.train(first, *flags[first])}
    time.sleep(3)
    tasks[1 - first] = two.train(1 - first, *flags[1 - first])
    began = time.monotonic()
    case = f"a wrong flag on one, which starts {'first' if first else 'last'}"
    assert report(case, [tasks[0], tasks[1]], "both have its line") == [2, 2]
    assert "worker 1 (host2:2222) has not started: data_dir=" in tasks[0].error
    assert time.monotonic() - began < 20


def test_a_run_dir_that_is_not_shared_is_refused_on_both(hosts, report):
    two = hosts(2)
    tasks = [two.train(index, f"--train_epochs={EPOCHS}", f"--run_dir={two.local}") for index in range(2)]
    assert report("`--run_dir` is not shared", tasks, "both name it") == [2, 2]
    assert all("is another folder at worker 1 than at the chief" in task.error for task in tasks)


@pytest.mark.skipif(not shutil.which("bindfs"), reason="no bindfs")
def test_min_workers_is_refused_where_a_lock_holds_on_one_host(hosts, report):
    two = hosts(2)
    two.start(2, "bindfs", "-f", "-o", "nonempty", two.shared, two.shared)  # passes on no flock
    assert two.start(2, "sh", "-c", f"until mountpoint -q {two.shared}; do sleep 0.1; done").wait() == 0
    flags = ("--min_workers=1", "--max_restarts=1", f"--train_epochs={EPOCHS}", f"--run_dir={two.shared}/run")
    tasks = [two.train(index, *flags) for index in range(2)]
    assert report("`--min_workers`, and `flock` holds on one host", tasks, "both name it") == [2, 2]
    assert all("min_workers=1 needs a file system whose flock holds on all hosts" in task.error for task in tasks)


def test_a_host_that_nothing_may_enter_learns_which_port_to_open(hosts, report):
    two = hosts(2)
    two.link({"1": {"inbound": [22]}})
    tasks = [two.train(index, "--cluster_timeout_seconds=15") for index in range(2)]
    seen = "both name the port, TCP and UDP, after `--cluster_timeout_seconds`"
    assert report("nothing may enter one", tasks, seen) == [1, 1]
    assert "does not reach worker 0 (host1:2222), this process: let TCP and UDP in here at port 2222" in tasks[0].error
    assert "let TCP and UDP pass to it at port 2222" in tasks[1].error


POOR = {
    "1 % of packets lost": {host: {"loss": 0.005} for host in "12"},
    "5 % of packets lost": {host: {"loss": 0.025} for host in "12"},
    "100 ms there and back": {host: {"delay_ms": 25} for host in "12"},
    "100 Mbit/s": {host: {"mbit": 100} for host in "12"},
}


@pytest.mark.parametrize("link", POOR)
def test_poor_links_change_no_bit(hosts, undisturbed, report, link):
    two = hosts(2)
    two.link(POOR[link])
    assert report(link, pair(two, epochs=FEW), "same bits") == [0, 0]
    assert same_bits(two, undisturbed, FEW)


def test_a_small_shared_memory_changes_no_bit(hosts, undisturbed, report):
    two = hosts(2, shm="64m")
    assert report("a `/dev/shm` of 64 MB", pair(two, epochs=FEW), "same bits") == [0, 0]
    assert same_bits(two, undisturbed, FEW)


@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")
def test_clocks_an_hour_apart_change_no_bit_and_ask_is_answered(hosts, undisturbed, report, tmp_path):
    two, library = hosts(2), tmp_path / "skew.so"
    source = pathlib.Path(__file__).with_name("skew.c")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    ahead = {"LD_PRELOAD": str(library), "SKEW_SECONDS": "3600"}
    two.link(SLOW)
    run = (f"--train_epochs={EPOCHS}", f"--run_dir={two.shared / 'run'}")
    tasks = [two.train(0, *run), two.train(1, *run, **ahead)]
    tasks[0].until(r"step [1-9]\d*/")
    asked = two.start(2, sys.executable, "-m", "crankshaft", "ask", two.shared / "run", "status", **ahead)
    assert asked.wait() == 0
    assert "step" in asked.output
    seen = "same bits; `crankshaft ask` on the other is answered"
    assert report("clocks an hour apart", tasks, seen) == [0, 0]
    assert same_bits(two, undisturbed)


def test_a_link_that_is_down_for_2_s_is_not_noticed(hosts, undisturbed, report):
    two = hosts(2)
    tasks = under_way(two)
    two.link({"2": {"down": True}})
    time.sleep(2)
    two.link(SLOW)
    assert report("a link is down for 2 s", tasks, "the run waits, and goes on: same bits") == [0, 0]
    assert same_bits(two, undisturbed)


def test_a_link_that_is_down_for_5_s_is_waited_for_or_named(hosts, undisturbed, report):
    """So long a silence is the limit: which comes first, an answer or the loss, is chance."""
    two = hosts(2)
    tasks = under_way(two)
    two.link({"2": {"down": True}})
    time.sleep(5)
    two.link(SLOW)
    seen = "at the limit: the run goes on to the same bits, or each names the other and what was in memory is saved"
    codes = report("a link is down for 5 s", tasks, seen)
    assert codes in ([0, 0], [1, 1])
    assert same_bits(two, undisturbed) if codes == [0, 0] else all("lost" in task.error for task in tasks)
    assert codes == [0, 0] or SAVED in tasks[0].output


def test_a_link_that_is_down_for_30_s_changes_no_bit_with_restarts(hosts, undisturbed, report):
    two = hosts(2)
    tasks = under_way(two, *RESTARTS)
    two.link({"2": {"down": True}})
    noticed = tasks[0].until(LOST)
    time.sleep(30 - noticed)
    two.link(SLOW)
    seen = "each names the other, all start again: same bits"
    assert report("a link is down for 30 s, `--max_restarts`", tasks, seen, noticed) == [0, 0]
    assert same_bits(two, undisturbed)


def test_a_link_that_never_comes_back_loses_no_step_that_is_held(hosts, report):
    two = hosts(2)
    tasks = under_way(two)
    two.link({"2": {"down": True}})
    noticed = tasks[0].until(LOST)
    seen = "each names the other; what was in memory is saved"
    assert report("a link is cut for ever", tasks, seen, noticed) == [1, 1]
    assert SAVED in tasks[0].output
    assert "has not answered for" in tasks[0].error
    assert "has not answered for" in tasks[1].error


def test_a_link_that_is_cut_one_way_ends_both(hosts, report):
    two = hosts(2)
    tasks = under_way(two)
    two.link({**SLOW, "cuts": [[1, 2]]})
    noticed = tasks[1].until(LOST)
    seen = "the host that hears nothing names the other; both print that line, and end"
    assert report("a link is cut one way", tasks, seen, noticed) == [1, 1]
    assert all("worker 0 (host1:2222) has not answered for" in task.error for task in tasks)


def test_a_link_that_swallows_long_packets_ends_both(hosts, report):
    two = hosts(2)
    two.link({"2": {"largest": 1400}})
    tasks = pair(two, "--step_timeout_seconds=30")
    seen = "both name the other as lost, by TensorFlow's own means"
    assert report("packets over 1,400 bytes vanish", tasks, seen) == [1, 1]
    assert all("is lost, as TensorFlow reports" in task.error for task in tasks)


def test_a_host_that_dies_and_returns_changes_no_bit(hosts, undisturbed, report):
    two = hosts(2)
    tasks = under_way(two, *RESTARTS)
    two.link({"2": {"down": True}})  # so that nobody learns of it
    two.end_all(2)
    noticed = tasks[0].until(LOST)
    tasks[1].wait()
    two.link(SLOW)
    tasks[1] = two.train(1, f"--train_epochs={EPOCHS}", f"--run_dir={two.shared / 'run'}", *RESTARTS)
    seen = "it is named; all start again: same bits"
    assert report("a host dies and returns, `--max_restarts`", tasks, seen, noticed) == [0, 0]
    assert same_bits(two, undisturbed)


def test_who_is_left_saves_what_it_holds_if_the_chiefs_host_dies(hosts, undisturbed, report):
    two = hosts(2)
    tasks = under_way(two)
    two.link({"1": {"down": True}})
    two.end_all(1)
    noticed = tasks[1].until(LOST)
    tasks[0].wait()
    seen = "it is named; the other saves what was in memory, and the same command ends with the same bits"
    assert report("the chief's host dies", tasks[1:], seen, noticed, others="; 0, 0") == [1]
    assert SAVED in tasks[1].output
    two.link({})
    again = pair(two)
    assert [task.wait() for task in again] == [0, 0]
    assert "resumed at step" in again[0].output
    assert same_bits(two, undisturbed)


def test_ctrl_c_in_one_terminal_saves_and_ends_all(hosts, report):
    two = hosts(2)
    tasks = under_way(two)
    tasks[1].send(signal.SIGINT)
    noticed = tasks[0].until("stopped at step")
    assert report("Ctrl-C in one terminal", tasks, "the run is saved, and ends on both", noticed) == [130, 130]
    assert tensors(two.shared / "run")


def test_a_worker_around_servers_leaves_and_returns_elsewhere(hosts, report):
    """The coordinator, on host 1, starts again in its place, and awaits worker 1 at host 3 no longer."""
    five = hosts(5)
    names = [f"host{host}:2222" for host in range(1, 6)]
    run = ("--num_ps=1", "--train_epochs=300", "--checkpoint_every_steps=500", f"--run_dir={five.shared / 'run'}")
    tasks = {1: five.train(0, *run, "--max_restarts=3", names=",".join(names[:4]))}
    tasks |= {host: five.train(host - 1, *run, names=",".join(names[:4])) for host in (2, 3, 4)}
    tasks[1].until(r"step [\d,]+/")
    five.end_all(3)
    tasks.pop(3).wait()
    tasks[5] = five.train(2, *run, host=5, names=",".join([*names[:2], names[4], names[3]]))
    tasks[1].until(r"to include worker 2 \(host5:2222\)")
    seen = "the others go on; it is included at the next checkpoint (four hosts, one a server)"
    assert report("a worker around servers returns at another address", [*tasks.values()], seen) == [0, 0, 0, 0]
    assert "evaluation at step 6900" in tasks[1].output


SLURM = """
ClusterName=test
SlurmctldHost=host1
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={local}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={local}
SlurmctldPidFile={local}/slurmctld.pid
SlurmdPidFile={local}/slurmd.pid
SlurmdSpoolDir={local}
SlurmctldLogFile={local}/slurmctld.log
SlurmdLogFile={local}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=20
JobRequeue=1
NodeName=host[1-3] CPUs=4 RealMemory=8000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE
"""
MUNGED = """
chmod 700 {local} && cp {shared}/key {local}/key && chmod 600 {local}/key
exec munged --force --key-file={local}/key --socket={local}/munge.socket --pid-file={local}/munge.pid \
  --log-file={local}/munge.log --seed-file={local}/munge.seed
"""
JOB = """
cd {shared} && exec sbatch --parsable --job-name=first --nodes=2 --ntasks=2 --cpus-per-task=2 --time=1:00:00 \
  {script} crankshaft train {flags}
"""


@pytest.mark.skipif(not shutil.which("slurmctld"), reason="no Slurm; `make test-clusters` installs it")
def test_slurm_on_three_hosts_requeues_a_job_whose_task_is_killed(hosts, undisturbed, report):
    three = hosts(3)
    paths = {"local": three.local, "shared": three.shared, "script": ROOT / "examples/slurm.sh"}
    settings = {"SLURM_CONF": str(three.shared / "slurm.conf")}
    (three.shared / "slurm.conf").write_text(SLURM.format(**paths))
    (three.shared / "key").write_bytes(os.urandom(1024))
    three.link({"2": {"delay_ms": 6}})

    def done(host: int, *command) -> str:
        task = three.start(host, *command, **settings)
        assert task.wait() == 0, task.output
        return task.output

    for host in (1, 2, 3):
        done(host, "sh", "-c", MUNGED.format(**paths))
    done(1, "slurmctld")
    for host in (1, 2, 3):
        done(host, "slurmd", "-N", f"host{host}")
    wait_until(lambda: done(1, "sinfo", "-hNo%T").count("idle") == 3, pause=0.5)
    flags = [*TRAIN, f"--train_epochs={EPOCHS}", "--checkpoint_every_steps=200", f"--run_dir={three.shared / 'run'}"]
    job = done(1, "sh", "-c", JOB.format(flags=" ".join(flags), **paths)).split()[-1]
    output = three.shared / f"first-{job}.out"
    text = lambda: output.read_text(errors="replace") if output.exists() else ""  # noqa: E731
    wait_until(lambda: re.search(r"step [3-9]\d\d/", text()), shows=text, pause=0.1)
    done(2, "pkill", "-KILL", "-f", "crankshaft train")  # its own processes alone
    state = lambda: done(1, "scontrol", "show", "job", job).partition("JobState=")[2].split()[0]  # noqa: E731
    wait_until(lambda: state() not in ("RUNNING", "PENDING", "COMPLETING"), shows=text, pause=1.0)
    seen = "it is named, and the job requeued: same bits"
    report("Slurm on three, a task is killed", [], seen, others="the job: COMPLETED")
    assert state() == "COMPLETED", text()
    assert "error: worker 1 (host2:" in text()
    assert same_bits(three, undisturbed)
