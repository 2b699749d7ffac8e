"""Which task a process is, by flags, TF_CONFIG, Slurm and Kubernetes: every form of their variables, every mistake."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest

from crankshaft.launch import program
from crankshaft.parts.clusters import arrival, discovery, kubernetes, rendezvous, slurm
from crankshaft.parts.launchers.resources import free_ports
from crankshaft.runner.failures import UsageError
from crankshaft.runner.host.tasks import SCHEDULERS, Cluster, Tasks, split
from tests.waiting import PATIENCE

pytestmark = pytest.mark.thorough

ROOT = pathlib.Path(__file__).resolve().parents[3]


def test_a_process_without_any_of_three_variables_has_no_tasks_to_look_for():
    assert (*SCHEDULERS,) == ("SLURM_STEP_NODELIST", kubernetes.JOBS)
    one = step("n[1-2]", "1(x2)", 0, 0, 0, **{kubernetes.JOBS: "a:2", kubernetes.SERVICE: "s"})
    without = {name: value for name, value in one.items() if name not in SCHEDULERS}
    assert discovery.tasks_from_scheduler(without) is None
    with pytest.raises(UsageError):
        discovery.tasks_from_scheduler(one)


def step(nodes: str, counts: str, rank: int, node: int, local: int, **more: str) -> dict[str, str]:
    """The variables of a task of Slurm's job 7, step 0."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
        **more,
    }


def pod(jobs: str, host: str, **more: str) -> dict[str, str]:
    index = host.rpartition("-")[2]
    return {
        "CRANKSHAFT_JOBS": jobs,
        "CRANKSHAFT_SERVICE": "net",
        "HOSTNAME": host,
        "JOB_COMPLETION_INDEX": index,
        **more,
    }


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[09-10]", ["r1n09", "r1n10", "r2n09", "r2n10"]),
        ("a-[8-11]-ib", ["a-8-ib", "a-9-ib", "a-10-ib", "a-11-ib"]),
    ],
)
def test_slurms_lists_of_nodes(text, nodes):
    assert slurm.expand_nodes(text) == nodes


def test_slurms_tasks_have_their_nodes_address_and_a_port_each():
    tasks = discovery.tasks_from_scheduler(step("n[1-2]", "2,1", rank=2, node=1, local=0))
    first = split(tasks.addresses[0])[1]
    assert 10240 <= first <= 32765
    assert tasks == Tasks("Slurm's job 7.0", (f"n1:{first}", f"n1:{first + 1}", f"n2:{first + 2}"), 2, "/7.0/")


def test_slurms_cyclic_distribution_is_seen_by_a_tasks_own_place():
    hosts = [address.split(":")[0] for address in slurm.tasks(step("n[1-2]", "2(x2)", 1, 1, 0)).addresses]
    assert hosts == ["n1", "n2", "n1", "n2"]
    # Task 0 is at the same place in both; what Slurm says of the distribution decides.
    said = step("n[1-2]", "2(x2)", 0, 0, 0, SLURM_DISTRIBUTION="cyclic")
    assert [address.split(":")[0] for address in slurm.tasks(said).addresses] == hosts


def test_two_of_slurms_jobs_on_a_node_have_ports_and_an_id_of_their_own():
    numbers = [str(7 + 176 * n) for n in range(8)] + [str(8 + n) for n in range(8)]
    jobs = [{"SLURM_JOB_ID": number} for number in numbers]
    jobs += [{"SLURM_STEP_ID": "1"}, {"SLURM_CLUSTER_NAME": "c"}, {"SLURM_RESTART_COUNT": "1"}]
    found = [slurm.tasks({**step("n1", "4", 0, 0, 0), **job}) for job in jobs]
    assert len({address for tasks in found for address in tasks.addresses}) == 4 * len(jobs)
    assert len({discovery.assign_kinds(tasks, 0, False, {}).identity for tasks in found}) == len(jobs)


def test_ports_of_many_tasks_on_a_node_are_one_each_below_those_of_callers():
    for count, nodes, most in ((200, "n1", 200), (2, "n[1-300]", 128), (20000, "n1", 20000)):
        counts = f"{count}(x300)" if "-" in nodes else str(count)
        ports = {split(address)[1] for address in slurm.tasks(step(nodes, counts, 0, 0, 0)).addresses}
        assert len(ports) == most
        assert 10240 <= min(ports) < max(ports) < 32768


def test_ports_that_slurm_has_reserved_are_taken():
    tasks = slurm.tasks(step("n[1-2]", "2(x2)", 3, 1, 1, SLURM_STEP_RESV_PORTS="12000,12005-12006"))
    assert tasks.addresses == ("n1:12000", "n1:12005", "n2:12000", "n2:12005")


def test_jobs_of_kubernetes_have_one_service_and_their_pods_names():
    tasks = discovery.tasks_from_scheduler(pod("run-chief:1,run-worker:2,run-ps:1", "run-worker-1"))
    names = ("run-chief-0", "run-worker-0", "run-worker-1", "run-ps-0")
    assert tasks == Tasks("Kubernetes", tuple(f"{name}.net:2222" for name in names), 2)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "sweep-3"},  # an Indexed Job of tasks that train alone
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script
        step("n1", "1", 0, 0, 0),
        pod("run:1", "run-0"),
    ],
)
def test_a_process_that_was_started_alone_is_alone(environment):
    assert discovery.tasks_from_scheduler(environment) is None


MISTAKES = {
    "other nodes than counts": (step("n[1-3]", "2,1", 0, 0, 0), ["has 3 nodes", "SLURM_STEP_TASKS_PER_NODE=2,1 2"]),
    "counts of another form": (step("n1", "two", 0, 0, 0), ["'two' is not a list of counts"]),
    "brackets of another form": (step("n[a-c]", "3", 0, 0, 0), ["'n[a-c]' is not a list of numbers"]),
    "a rank of another form": (step("n1", "2", 0, 0, 0, SLURM_PROCID="x"), ["SLURM_PROCID='x' is not a number"]),
    "a rank of other digits": (
        step("n1", "2", 0, 0, 0, SLURM_PROCID="\u0663"),
        ["is not a number; start the tasks by"],
    ),
    "a rank of many digits": (step("n1", "2", 0, 0, 0, SLURM_JOB_ID="1" * 5000), ["is not a number; start the tasks"]),
    "millions of nodes": (step("a[0-30000000]", "1", 0, 0, 0), ["'a[0-30000000]' has more than 65,536 nodes"]),
    "many brackets": (step("a" + "[0-9]" * 9, "1", 0, 0, 0), ["has more than 65,536 nodes; start the tasks by srun"]),
    "many lists": (step("a[0-60000],b[0-60000]", "1", 0, 0, 0), ["has more than 65,536 nodes; start the tasks by sr"]),
    "a number of many digits": (step(f"a[{'0' * 999}1-9]", "9", 0, 0, 0), ["is not a list of numbers and ranges"]),
    "a range that falls": (step("a[5-3]", "1", 0, 0, 0), ["'a[5-3]' is not a list of numbers and ranges"]),
    "an open bracket": (step("a[5-9", "1", 0, 0, 0), ["'a[5-9' is not a list of nodes such as gpu[01-03,7]"]),
    "a name of two lines": (step("a\nb", "2", 0, 0, 0), ["'a\\nb' is not a list of nodes such as gpu[01-03,7]"]),
    "millions of tasks": (step("a[0-9]", "1(x30000000)", 0, 0, 0), ["'1(x30000000)' has more than 65,536 tasks"]),
    "no tasks on a node": (step("a[0-1]", "1,0", 0, 0, 0), ["'1,0' is not a list of counts such as 2(x3),1"]),
    "another distribution": (step("n[1-2]", "2(x2)", 1, 1, 1), ["task 1 of node 1", "srun --distribution=block"]),
    "too few reserved ports": (
        step("n1", "2", 0, 0, 0, SLURM_STEP_RESV_PORTS="12000"),
        ["1 ports for up to 2 tasks", "srun --resv-ports=2"],
    ),
    "millions of ports": (
        step("n1", "2", 0, 0, 0, SLURM_STEP_RESV_PORTS="1-30000000"),
        ["'1-30000000' has a port above 65535"],
    ),
    "millions of pods": (pod(",".join(["run:9999"] * 999), "run-0"), ["has more than 65,536 pods; set it to"]),
    "no service": ({**pod("run:2", "run-0"), "CRANKSHAFT_SERVICE": ""}, ["CRANKSHAFT_SERVICE is not"]),
    "no index": ({**pod("run:2", "run-0"), "JOB_COMPLETION_INDEX": ""}, ["use an Indexed Job"]),
    "Jobs of another form": (pod("run=2", "run-0"), ["run=2 is not a list of Jobs"]),
    "a pod of another Job": (pod("run:2", "other-0"), ["this pod is other-0", "has run-0 to run-1"]),
    "an index beyond": (pod("run:2", "run-2"), ["this pod is run-2"]),
    "two schedulers": (
        {**step("n1", "4", 0, 0, 0), **pod("run:2", "run-0")},
        ["has 4 tasks and Kubernetes has 2 tasks"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_one_line_with_its_cure(mistake):
    environment, said = MISTAKES[mistake]
    with pytest.raises(UsageError) as error:
        discovery.tasks_from_scheduler(environment)
    line = str(error.value)
    assert "\n" not in line
    assert [part for part in said if part not in line] == [], line


def test_tasks_are_coordinator_workers_servers_evaluator_in_this_order():
    tasks = Tasks("here", tuple(f"h{i}:1" for i in range(6)), 5)
    cluster = discovery.assign_kinds(tasks, 2, True, {})
    assert [name for name, _ in cluster.addresses] == ["chief", "worker 0", "worker 1", "ps 0", "ps 1", "evaluator"]
    assert cluster.task == "evaluator"
    line = arrival.describe(cluster)
    assert line == "cluster: evaluator, task 5 of 1 chief, 2 workers, 2 ps, 1 evaluator; from here"
    with pytest.raises(UsageError, match="here has 6 tasks, too few for a coordinator, a worker, num_ps=4 servers and"):
        discovery.assign_kinds(tasks, 4, True, {})


@pytest.mark.holds("yourself, Slurm or Ray, on several hosts")
def test_who_reaches_tasks_on_several_hosts_is_said(capsys):
    (port,) = free_ports(1)
    addresses = (("worker 0", f"127.0.0.1:{port}"), ("worker 1", "192.0.2.1:1"))
    arrival.arrive(Cluster(addresses, 0), 1.0)
    line = "TensorFlow's servers listen on all interfaces and trust whoever calls: close the tasks' ports to all others"
    assert line in capsys.readouterr().out


@pytest.mark.holds("a peer, in a job without")
@pytest.mark.parametrize("secret", [b"", b"x" * 16], ids=["without", "with"])
def test_a_job_without_a_secret_says_that_it_believes_who_answers(caplog, secret):
    (port,) = free_ports(1)
    cluster = Cluster((("worker 0", f"127.0.0.1:{port}"),), 0, secret=secret)
    with caplog.at_level("WARNING", logger="crankshaft"), arrival.waiting_for_peers(cluster, 1.0, elastic=False):
        pass
    line = "UDP heartbeats are not authenticated; set CRANKSHAFT_JOB_SECRET, the same random text for all workers"
    assert (line in caplog.text) == (not secret)


def test_a_host_without_an_address_is_named_once_it_was_waited_for():
    tasks = Tasks("cluster_hosts", ("localhost:1", "no-such-host.invalid:1"), 0)
    with pytest.raises(UsageError, match=r"worker 1 is at no-such-host.invalid:1, a host that has no address after"):
        arrival.wait_for_addresses(discovery.assign_kinds(tasks, 0, False, {}), 0.1)


def test_a_task_that_waits_for_a_host_says_so(monkeypatch, caplog):
    monkeypatch.setattr(arrival, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(rendezvous, "_LOG_AFTER_SECONDS", 0.1)
    tasks = Tasks("cluster_hosts", ("localhost:1", "no-such-host.invalid:1"), 0)
    with caplog.at_level("WARNING", logger="crankshaft"), pytest.raises(UsageError):
        arrival.wait_for_addresses(discovery.assign_kinds(tasks, 0, False, {}), 0.4)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "worker 0 waits for worker 1's host, no-such-host.invalid, to have an address"
    )


FLAGS = {
    "no index": (["--cluster_hosts=a:1,b:2"], "names 2 tasks, and task_index is missing"),
    "an index beyond": (["--cluster_hosts=a:1,b:2", "--task_index=2"], "and task_index is 2"),
    "an index alone": (["--task_index=1"], "has no use without cluster_hosts"),
    "a host twice": (["--cluster_hosts=a:1,a:1", "--task_index=0"], "worker 0 and worker 1 are both a:1"),
    "no port": (["--cluster_hosts=a,b:1", "--task_index=0"], "write its address as 'host:port'"),
    "servers without tasks": (["--num_ps=2"], "num_ps=2 needs tasks, and none are known"),
    "too few": (["--cluster_hosts=a:1,b:2", "--task_index=0", "--num_ps=1"], "start 3 or more"),
    "servers of workers": (
        ["--cluster_hosts=a:1,b:2", "--task_index=0", "--num_ps=1", "--strategy=multi_worker"],
        "is for strategy=parameter_server",
    ),
    "an evaluator alone": (["--cluster_hosts=a:1,b:2", "--task_index=0", "--evaluator"], "is for num_ps=N"),
    "no cluster": (["--strategy=multi_worker"], "this is not a step of Slurm's or a pod of Kubernetes'"),
}


@pytest.mark.parametrize("mistake", FLAGS)
def test_mistake_in_flags_is_one_line(mistake, monkeypatch):
    from crankshaft.launch import program, train

    arguments, said = FLAGS[mistake]
    given = train.parse(["crankshaft train", "--model=mlp", "--input=digits", *arguments])
    with pytest.raises(UsageError) as error:
        program.configure(given, None, False, {})
    assert said in error.value.message
    assert "\n" not in error.value.message


def asked(*arguments: str, **environment: str):
    from crankshaft.launch import program, train

    given = train.parse(["crankshaft train", "--model=mlp", "--input=digits", *arguments])
    return program.configure(given, None, False, environment)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], None),
        (["--max_restarts=0"], "is for workers that start again in their places"),
        (["--mode=benchmark"], "needs a run that trains and has run_dir"),
        (["--auto_shard_policy=file"], "use auto_shard_policy=data"),
        (["--global_batch_size=15", "--min_workers=2"], "no number of workers from 2 to 2 divides global_batch_size"),
        (["--gpus=0,1", "--global_batch_size=6"], None),
        (["--gpus=0,1", "--global_batch_size=6", "--min_workers=2"], "divides global_batch_size=6"),
        (["--mesh=data:3"], "divides global_batch_size=12"),
        (["--min_workers=3"], "there are 3 workers; give fewer than that"),
    ],
)
def test_a_job_that_can_not_continue_without_some_workers_ends_with_a_line(flags, said, tmp_path):
    hosts = ",".join(f"localhost:{port}" for port in free_ports(3))
    own = [f"--cluster_hosts={hosts}", "--task_index=0", "--max_restarts=2", "--min_workers=1", f"--run_dir={tmp_path}"]
    raised = contextlib.nullcontext() if said is None else pytest.raises(UsageError)
    with raised as error:
        program.check(asked(*own, "--global_batch_size=12", *flags))
    assert said is None or said in error.value.message


def test_an_evaluator_gets_checkpoints_by_steps_and_other_runs_by_minutes(tmp_path):
    job = ("--num_ps=1", "--mode=train", f"--run_dir={tmp_path}", "--checkpoint_every_minutes=0.5")
    tasks = step("n1", "4", 0, 0, 0)
    assert asked(*job, **tasks).checkpoint_period == (0, 30.0)
    assert asked(*job, "--checkpoint_every_steps=7", **tasks).checkpoint_period == (7, 30.0)
    assert asked(*job, "--evaluator", **tasks).checkpoint_period == (1000, 0.0)
    assert asked(*job, "--evaluator", "--checkpoint_every_steps=7", **tasks).checkpoint_period == (7, 0.0)


def test_several_tasks_train_as_workers_or_with_servers_without_a_strategy():
    assert asked(**step("n1", "2", 1, 0, 1)).strategy == "multi_worker"
    servers = asked("--num_ps=1", **step("n1", "4", 3, 0, 3))
    assert (servers.strategy, servers.cluster.task) == ("parameter_server", "ps 0")
    assert asked("--cluster_timeout_seconds=9", **step("n1", "2", 1, 0, 1)).cluster_timeout_seconds == 9
    assert asked("--strategy=one_device", **step("n1", "2", 1, 0, 1)).cluster is None
    jobs = {"chief": ["a:1"], "worker": ["b:2"], "ps": ["c:3"]}
    text = json.dumps({"cluster": jobs, "task": {"type": "worker", "index": 0}})
    assert asked(TF_CONFIG=text).strategy == "parameter_server"


def test_flags_come_before_tf_config_and_that_before_slurm():
    text = json.dumps({"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 0}})
    both = {"TF_CONFIG": text, **step("n1", "2", 1, 0, 1)}
    assert asked("--cluster_hosts=c:1,d:1,e:1", "--task_index=2", **both).cluster.address == "e:1"
    assert asked(**both).cluster.address == "a:1"
    with pytest.raises(UsageError, match=r"TF_CONFIG has 2 tasks, and Slurm's job 7.0 3; unset TF_CONFIG"):
        asked(**{**both, **step("n1", "3", 1, 0, 1)})


@pytest.mark.skipif(not (shutil.which("ip") and shutil.which("unshare")), reason="no tools for network namespaces")
def test_a_task_whose_index_another_host_has_says_so():
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-m", "tests.parts.clusters.twins"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this kernel or container gives no process networks of its own")
    assert "is worker 0 at 10.9.8.1:2222, where another task answers" in done.stdout, done.stderr


ALONE = """
import sys
from crankshaft.parts.workers.peers import Peers
from crankshaft.parts.clusters import listeners, rendezvous
from crankshaft.parts.launchers import resources
from crankshaft.runner.host.tasks import Cluster
ports = resources.free_ports(2)
addresses = tuple(f"{resources.loopback()}:{port}" for port in ports)
clusters = [Cluster((("worker 0", addresses[0]), ("worker 1", addresses[1])), index) for index in range(2)]
with listeners.only_this_host(resources.free_ports(1)[0]), rendezvous.Rendezvous(clusters[0]):
    with rendezvous.Rendezvous(clusters[1]) as here:
        here.wait(60)
peers = [Peers(index, ("worker 0", "worker 1"), addresses) for index in range(2)]
for each in peers:
    each.open()
while not all(each.heard for each in peers):
    for each in peers:
        each.send(0, 0, 0)
        each.listen(0.1)
print(addresses[1].rpartition(":")[0])
"""


@pytest.mark.skipif(not (shutil.which("ip") and shutil.which("unshare")), reason="no tools for network namespaces")
def test_tasks_of_a_host_without_ipv4_meet():
    alone = f"ip link set lo up && ip address delete 127.0.0.1/8 dev lo && exec {sys.executable} -c '{ALONE}'"
    command = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", alone]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if "unshare" in done.stderr:
        pytest.skip("this kernel or container gives no process networks of its own")
    assert done.stdout == "[::1]\n", done.stderr


@contextlib.contextmanager
def serving(address: str):
    """Answers as a server of TensorFlow's does: with settings, as any of HTTP/2."""

    def answer() -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                with listener.accept()[0] as caller:
                    caller.sendall(bytes((0, 0, 6, 4, 0, 0, 0, 0, 0)))

    with socket.create_server(split(address)) as listener:
        (thread := threading.Thread(target=answer)).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_workers_at_new_addresses_are_those_that_were_announced_and_answer(tmp_path, monkeypatch):
    chief, worker, server, newcomer, gone = (f"127.0.0.1:{port}" for port in free_ports(5))
    cluster = Cluster((("chief", chief), ("worker 0", worker), ("ps 0", server)), 0)
    notes = tmp_path / "workers"
    assert arrival.newcomers(cluster, str(notes)) == []
    for address in (worker, newcomer, gone, "no address", "..:1"):
        arrival.announce(Cluster((("worker 0", address),), 0), str(notes))
    with serving(newcomer), serving(worker):
        assert arrival.newcomers(cluster, str(notes)) == [("worker 1", newcomer)]
        joined = arrival.with_newcomers(cluster, str(notes))
        assert (joined.job("worker"), joined.task) == ((worker, newcomer), "chief")
        assert arrival.newcomers(joined, str(notes)) == []
        monkeypatch.setattr(time, "time", lambda: 0.0)  # this host's clock is not the file server's
        assert arrival.newcomers(cluster, str(notes)) == [("worker 1", newcomer)]
        os.utime(notes / newcomer, (0, 0))  # it has left, and another program has its port
        assert arrival.newcomers(cluster, str(notes)) == []


def test_with_a_secret_a_worker_at_a_new_address_has_signed_its_note(tmp_path):
    chief, server, newcomer, *others = (f"127.0.0.1:{port}" for port in free_ports(5))
    cluster = Cluster((("chief", chief), ("ps 0", server), ("worker 0", newcomer)), 2, b"a secret of ours")
    arrival.announce(cluster, str(tmp_path))
    (tmp_path / others[0]).touch()
    (tmp_path / others[1]).write_text((tmp_path / newcomer).read_text())
    coordinator = dataclasses.replace(cluster, addresses=cluster.addresses[:2], index=0)
    with serving(newcomer), serving(others[0]), serving(others[1]):
        assert arrival.newcomers(coordinator, str(tmp_path)) == [("worker 0", newcomer)]
        (tmp_path / newcomer).write_text("another's")
        assert arrival.newcomers(coordinator, str(tmp_path)) == []
        arrival.announce(cluster, str(tmp_path))
        assert arrival.newcomers(coordinator, str(tmp_path)) == [("worker 0", newcomer)]


def test_a_newcomer_takes_the_place_of_a_worker_that_has_left(tmp_path):
    chief, worker, left, server, newcomer = (f"127.0.0.1:{port}" for port in free_ports(5))
    cluster = Cluster((("chief", chief), ("worker 0", left), ("worker 1", worker), ("ps 0", server)), 0)
    assert arrival.with_newcomers(cluster, str(tmp_path)).addresses == cluster.addresses  # it is awaited
    arrival.announce(Cluster((("worker 0", newcomer),), 0), str(tmp_path))
    with serving(newcomer), serving(worker):
        joined = arrival.with_newcomers(cluster, str(tmp_path))
    assert joined.addresses == (*cluster.addresses[:1], ("worker 0", newcomer), *cluster.addresses[2:])
