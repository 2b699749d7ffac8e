"""`crankshaft local` as a user starts it: what tasks are given, what they print, and mistakes. Small scripts for
tasks: real processes and pipes. TensorFlow can't be imported here, so nothing needs it.

Who reaches a cluster on this machine: its tasks know each other, and the kernel keeps others out.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest

from crankshaft.parts.clusters import listeners, tf_config
from crankshaft.parts.launchers import children, resources
from crankshaft.parts.launchers import local as launch_local
from crankshaft.parts.launchers.output import Lines
from crankshaft.parts.launchers.resources import free_ports
from tests.launch.local_tasks import ROOT, TASK, lines_of, pids, until_dead
from tests.limits import files_no_larger_than
from tests.processes import assert_says
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.thorough

# --- what a task is given

SHOW = """
from crankshaft.parts.launchers import children
while len(job := children.job_processes(os.environ)) < 2:
    time.sleep(0.01)
threads = os.environ["TF_NUM_INTRAOP_THREADS"], os.environ["OMP_NUM_THREADS"]
print(json.dumps([config, sys.argv[1:], os.environ["PYTHONUNBUFFERED"], job, sorted(os.sched_getaffinity(0)), threads]))
meet("looked", 1 - index)
"""


def test_each_task_is_told_who_it_is_and_has_cores_and_a_gpu_of_its_own(local, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0")  # TensorFlow numbers them from 0
    program = local(SHOW, "--workers=2", own=("fit", "--lr", "0.1", "--", "data.csv"))
    outcome = program.wait().ok()
    told = [json.loads(lines_of(outcome.out, f"worker {index}")[0]) for index in range(2)]
    addresses = told[0][0]["cluster"]["worker"]
    assert len(set(addresses)) == 2
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)
    for index, (config, arguments, unbuffered, job, _, _) in enumerate(told):
        assert config == {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        assert arguments == ["fit", "--lr", "0.1", "--strategy=multi_worker", f"--gpus={index}", "--", "data.csv"]
        assert unbuffered == "1"
        assert job == sorted(pids(program))  # and no other process
    assert re.search(r"worker 1 is process \d+ at .*, GPU 1$", outcome.err, re.MULTILINE)
    if len(os.sched_getaffinity(0)) > 1:  # a core for each
        (*_, some, threads), (*_, others, _) = told
        assert len(some) == len(others) == len(os.sched_getaffinity(0)) // 2
        assert not set(some) & set(others)
        assert threads == [str(len(some))] * 2


def test_a_process_that_nobody_supervises_is_a_job_of_its_own():
    assert children.job_processes({}) == [os.getpid()]


@pytest.mark.parametrize(
    ("tasks", "gpus", "expected"),
    [
        ({"workers": 2}, 2, ["0", "1"]),
        ({"workers": 2}, 1, ["none", "none"]),  # a GPU can take part in a sum only once
        ({"workers": 2}, 0, [None, None]),
        ({"workers": 3, "ps": 1, "evaluator": True}, 2, ["none", "0", "1", "0", "none", "none"]),
    ],
)
def test_workers_have_a_gpu_each_and_servers_tables_are_in_huge_pages(capsys, tasks, gpus, expected):
    specs = launch_local.task_specs(launch_local.LocalFlags(**tasks), {}, [*map(str, range(gpus))])
    assert [spec.gpus for spec in specs] == expected
    said = "2 workers and 1 GPU: all compute on the CPU; use --workers=1"
    assert (said in capsys.readouterr().err) == (gpus == 1)
    pages = {spec.kind: spec.environment.get("GLIBC_TUNABLES") for spec in specs}
    assert {kind for kind, value in pages.items() if value == "glibc.malloc.hugetlb=1"} == {*pages} & {"ps"}


def test_more_tasks_than_cores_share_them_all():
    workers = len(os.sched_getaffinity(0)) + 1
    for spec in launch_local.task_specs(launch_local.LocalFlags(workers=workers), {}, None):
        assert (spec.cores, {*spec.environment.values()}) == (None, {"1"})
    assert resources.divide_cores([0, 4, 1, 5, 2], 2, 2) == [[0, 4], [1, 5]]


def test_gpus_that_the_user_names_are_all_tasks(local, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    outcome = local("print(json.dumps(sys.argv[1:]))", "--workers=2", own=("--gpus=1",)).wait().ok()
    for index in range(2):
        assert json.loads(lines_of(outcome.out, f"worker {index}")[0]) == ["--gpus=1", "--strategy=multi_worker"]


def test_ports_are_different_free_and_not_for_outgoing_connections():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = resources.free_ports(50)
        assert taken.getsockname()[1] not in ports
    assert len(set(ports)) == 50
    first, last = map(int, pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not [port for port in ports if first <= port <= last]


def test_a_module_is_started_as_python_starts_it(crank, tmp_path, monkeypatch):
    """Its imports may be relative, and its package is found in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "name.py").write_text("NAME = 'relative'\n")
    lines = "import sys\nfrom .name import NAME\nprint(NAME, __name__, sys.argv[1:])\n"
    (tmp_path / "package" / "work.py").write_text(lines)
    start = {"command": "local", "tensorflow": False}
    outcome = crank("--workers=1", "--", "-m", "package.work", "--units=3", "-m", **start).ok()
    assert lines_of(outcome.out, "worker 0") == ["relative __main__ ['--units=3', '-m', '--strategy=multi_worker']"]
    for name in ("package.wrk", "package"):
        missing = crank("--workers=1", "--", "-m", name, **start)
        assert "exit code 1: its script can't be run as it stands, so it is not restarted" in missing.mistake


# --- what it prints


def test_lines_are_prefixed_whole_and_in_order_on_the_stream_they_were_for(local):
    script = """
for i in range(300):
    print(index, i)
    print("error", index, i, file=sys.stderr)
"""
    outcome = local(script).wait().ok()
    for index in (0, 1):
        assert lines_of(outcome.out, f"worker {index}") == [f"{index} {i}" for i in range(300)]
        assert lines_of(outcome.err, f"worker {index}") == [f"error {index} {i}" for i in range(300)]
    assert len(outcome.out.splitlines()) == 600


def command_of(tmp_path, script: str) -> list:
    """The command that starts one task with this script."""
    (tmp_path / "task.py").write_text(TASK + script)
    return [sys.executable, "-m", "crankshaft", "local", "--workers=1", "--", str(tmp_path / "task.py")]


def test_bytes_that_are_no_text_long_lines_and_no_line_end_come_through(tmp_path):
    script = r"sys.stdout.buffer.write(b'\xff\xfe caf\xe9\n\n' + b'x' * 3_000_000 + b'\nlast, without end')"
    command = [*command_of(tmp_path, script), f"--run_dir={tmp_path / 'run'}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    assert shown.startswith(b"[worker 0] \xff\xfe caf\xe9\n[worker 0] \n[worker 0] xxx")
    assert shown.endswith(b"\n[worker 0] last, without end\n")
    assert shown.count(b"x") == 3_000_000
    assert b"\n\xff\xfe caf\xe9\n\nxxx" in (tmp_path / "run/logs/worker-0.log").read_bytes()


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_are_the_same_however_they_are_cut(size):
    data = b"one\r\n\r\ntwo\n 10%\r 20%\r 30%\n\nend\r"
    lines = Lines()
    found = [line for start in range(0, len(data), size) for line in lines.feed(data[start : start + size])]
    assert found + lines.end() == [b"one", b"", b"two", b" 10%", b" 20%", b" 30%", b"", b"end"]


def test_logs_that_cannot_be_written_do_not_stop_the_job(local, tmp_path):
    (tmp_path / "file").write_text("")
    script = "print('done')\nsys.exit(index)"
    outcome = local(script, "--max_restarts=0", own=(f"--run_dir={tmp_path / 'file'}",)).wait()
    assert outcome.out.count("done") == 2
    assert "[local] no logs of worker 0: " in outcome.err
    assert_says(outcome.error, "worker 1 ended with exit code 1; ... ; its last lines:")


@pytest.mark.holds("Links there are refused")
def test_a_log_is_written_through_no_link_and_waits_for_no_reader(local, tmp_path):
    (tmp_path / "victim").write_text("dear")
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs" / "worker-0.log")
    (tmp_path / "logs" / "worker-1.log").symlink_to("../victim")
    outcome = local("print('done')", own=(f"--run_dir={tmp_path}",)).wait().ok()
    for index in (0, 1):
        assert f"[local] no logs of worker {index}: {tmp_path}/logs/worker-{index}.log: it is " in outcome.err
        assert f"[worker {index}] done\n" in outcome.out
    assert (tmp_path / "victim").read_text() == "dear"


def test_lines_stay_whole_where_both_streams_are_one_and_its_reader_is_slow(tmp_path):
    script = """
for _ in range(200):
    print("o" * 3000)
    print("e" * 3000, file=sys.stderr)
"""
    command = command_of(tmp_path, script)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT) as process:
        time.sleep(1.0)  # for the pipe to be full
        shown = process.stdout.read().decode()
    lines = lines_of(shown, "worker 0")
    assert sorted(lines) == ["e" * 3000] * 200 + ["o" * 3000] * 200


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_who_has_gone_does_not_end_the_job(tmp_path, stream):
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: subprocess.PIPE}
    command = command_of(tmp_path, "print('x' * 200_000); (here / 'done').touch()")
    process = subprocess.Popen(command, cwd=ROOT, **streams)
    getattr(process, stream).close()
    assert process.wait(timeout=PATIENCE) == 0
    assert (tmp_path / "done").exists()


def test_output_that_a_full_device_loses_is_an_error_and_ends_no_task(tmp_path):
    command = command_of(tmp_path, "print('shown'); (here / 'done').touch()")
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
    assert ended.returncode == 1
    assert ended.stderr.endswith("error: a part of the output is lost: No space left on device\n")
    assert (tmp_path / "done").exists()


def test_a_reader_who_does_not_read_holds_up_no_signal(tmp_path):
    command = command_of(tmp_path, "print(os.getpid(), file=sys.stderr)\nwhile True: print('x' * 1000)")
    with open(tmp_path / "err", "w") as err:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, cwd=ROOT)
    try:
        wait_until(lambda: "worker 0 is process" in (tmp_path / "err").read_text(), process)
        time.sleep(1.0)  # for the pipes to be full
        process.terminate()
        assert process.wait(timeout=PATIENCE) == 143
    finally:
        process.kill()
        process.stdout.close()
    until_dead(*map(int, re.findall(r"^\[worker 0\] (\d+)", (tmp_path / "err").read_text(), re.MULTILINE)))


# --- mistakes


MISTAKES = {
    "": "the command of the tasks is missing; write it after --, e.g. crankshaft local -- --model=mlp ",
    "--workers=2 --": "the command of the tasks is missing; ",
    "--workers=0 -- --model=mlp": "--workers=0 can't be used: it takes an integer from 1 to 1000; ",
    "--evaluator -- --model=mlp": "--evaluator is for --ps=N parameter servers; add them, or start the tasks' program ",
    "--evaluator=maybe -- --model=mlp": "--evaluator=maybe can't be used: it takes true or false; ",
    "--wrkers=2 -- --model=mlp": "wrkers is unknown; did you mean workers?",
    "--model=mlp": "model is a flag of the tasks; write it after --, see --help",
    "two -- --model=mlp": "'two' is not a flag; ",
    "-- missing.py": "the script missing.py does not exist; ",
    "-- training": "'training' is neither a flag of crankshaft train nor a script; ",
    "-- -m no/module": "-m no/module names no module; write -m package.module",
    "-- --strategy=mirrored": "strategy=mirrored is not for workers; ",
}


@pytest.fixture(scope="module")
def ended(crank_each):
    """How the command ends, by mistake; last, by help."""
    return dict(zip([*MISTAKES, "--help"], crank_each([*map(str.split, MISTAKES), ["--help"]], "local"), strict=True))


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line(ended, line):
    assert ended[line].mistake.startswith(MISTAKES[line])


@pytest.mark.parametrize(
    "command", ["local -- --model=mlp --input=digits", "plan --model=mlp --input=digits --on=a100"]
)
def test_temporary_files_that_cannot_be_written_are_one_line_that_names_the_variable(tmp_path, command):
    program = [sys.executable, "-m", "crankshaft", *command.split()]
    with files_no_larger_than(0):
        ended = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: No usable temporary directory found in ['/")
    assert line.endswith("; set the variable TMPDIR to a folder that can be written")


def test_help_names_every_flag(ended):
    for field in dataclasses.fields(launch_local.LocalFlags):
        assert re.search(rf"\n  --(\[no\])?{field.name}\b", ended["--help"].ok().out)


def test_another_system_than_linux_is_told_in_one_line():
    """After the imports, which would need that system's library."""
    code = (
        "import sys\nfrom crankshaft.launch import command\nfrom crankshaft.parts.launchers import local\n"
        "sys.platform = 'darwin'\n"
        "command.execute('local', ['--workers=2', '--', '--model=mlp', '--input=digits'])"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: crankshaft local needs Linux, ")
    assert "this is darwin; use crankshaft train --strategy=mirrored" in line


@pytest.mark.parametrize("words", [(), ("crankshaft", "train")])
def test_flags_alone_are_those_of_launch_train(crank, words):
    outcome = crank("--", *words, "--modle=mlp", command="local", tensorflow=False)
    assert outcome.code == 2
    assert "\n    error: modle is unknown; did you mean " in outcome.err


NEIGHBOURS = pathlib.Path(__file__).parents[2] / "launch" / "neighbours.py"

SAYS_ITS_SECRET = """
secret = os.environ["CRANKSHAFT_JOB_SECRET"]
(here / f"secret-{index}").write_text(secret)
(here / f"command-{index}").write_bytes(pathlib.Path("/proc/self/cmdline").read_bytes())
"""
MEETS = """
import socket
own, other = (config["cluster"]["worker"][index].split(":") for index in (index, 1 - index))
listener = socket.create_server(("0.0.0.0", int(own[1])))
while True:
    try:
        socket.create_connection((other[0], int(other[1]))).close()
        break
    except OSError:
        time.sleep(0.05)
print("met over", [name for _, name in socket.if_nameindex()], "as", os.getuid())
meet("met", 1 - index)
"""


OWN_NETWORK = ("unshare", "-rn", "sh", "-c", 'ip link set lo up; exec "$@"', "sh")  # as the guide has it


def _is_allowed() -> bool:
    found = shutil.which("ip") and shutil.which("unshare")
    return bool(found) and subprocess.run([*OWN_NETWORK, "true"], capture_output=True, check=False).returncode == 0


def secrets_of(tmp_path) -> set[str]:
    return {(tmp_path / f"secret-{index}").read_text() for index in (0, 1)}


@pytest.mark.holds(
    "With several processes, TensorFlow's servers",
    "`CRANKSHAFT_JOB_SECRET`, with which",
    "`crankshaft local` and [examples/slurm.sh]",
)
def test_a_jobs_tasks_have_one_secret_that_nobody_else_is_told(local, tmp_path):
    run_dir = tmp_path / "run"
    outcome = local(SAYS_ITS_SECRET, own=(f"--run_dir={run_dir}",)).wait().ok()
    assert outcome.err.count("to keep others out") == 1  # who reaches the tasks is said once
    (secret,) = secrets_of(tmp_path)
    assert re.fullmatch("[0-9a-f]{64}", secret)
    for text in (outcome.out, outcome.err, *(path.read_text() for path in (run_dir / "logs").iterdir())):
        assert secret not in text
    assert secret.encode() not in (tmp_path / "command-0").read_bytes()
    local(SAYS_ITS_SECRET).wait().ok()
    assert secret not in secrets_of(tmp_path)


def test_a_secret_that_is_given_is_the_jobs(local, tmp_path, monkeypatch):
    monkeypatch.setenv("CRANKSHAFT_JOB_SECRET", "given by its owner")
    local(SAYS_ITS_SECRET).wait().ok()
    assert secrets_of(tmp_path) == {"given by its owner"}


@pytest.mark.holds("`crankshaft local` in [a network of its own]")
def test_tasks_with_a_network_of_their_own_meet_there_and_nowhere_else(tmp_path):
    if not _is_allowed():
        pytest.skip("this kernel or container gives no process a network of its own")
    (tmp_path / "task.py").write_text(TASK + MEETS)
    command = [*OWN_NETWORK, sys.executable, "-m", "crankshaft", "local", "--", tmp_path / "task.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stdout.count("met over ['lo'] as ") == 2, done.stderr


@pytest.mark.holds("`crankshaft local` (or yourself")
@pytest.mark.slow  # two clusters that train
@pytest.mark.skipif(not (shutil.which("ip") and shutil.which("unshare")), reason="no tools for network namespaces")
@pytest.mark.parametrize("tasks", [{"worker 0", "worker 1"}, {"chief", "worker 0", "ps 0"}], ids=["workers", "servers"])
def test_another_host_never_reaches_a_cluster_on_this_one(tasks):
    flags = ("--workers=1", "--ps=1") if "chief" in tasks else ("--workers=2",)
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, str(NEIGHBOURS), *flags, "--"]
    own = ("--model=mlp", "--input=digits", "--jit=off", "--train_steps=10000000", "--progress=plain")
    done = subprocess.run([*command, *own], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this kernel or container gives no process networks of its own")
    assert done.returncode == 0, done.stderr
    control, *reached = done.stdout.splitlines()
    assert control == "control: host True, neighbour True"
    assert set(reached) == {f"{task}: host True, neighbour False" for task in tasks}


def test_a_port_that_is_closed_to_other_hosts_takes_nobody_until_its_server_is_there():
    if not listeners.can_refuse_hosts():
        pytest.skip("this kernel divides nobody's callers")
    (port,) = free_ports(1)
    with listeners.only_this_host(port), socket.socket(socket.AF_INET6) as server:
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", port), timeout=0.1)
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC does, told by this variable
        assert os.environ["TF_GRPC_REUSE_PORT"] == "1"
        server.bind(("", port))
        server.listen()
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port)).close()
            server.accept()[0].close()


def test_a_secret_that_can_be_guessed_is_refused(monkeypatch):
    from crankshaft.runner.failures import UsageError

    config = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    with pytest.raises(UsageError, match="CRANKSHAFT_JOB_SECRET has 5 characters"):
        tf_config.from_environment({"TF_CONFIG": config, "CRANKSHAFT_JOB_SECRET": "12345"})
    found = tf_config.from_environment({"TF_CONFIG": config, "CRANKSHAFT_JOB_SECRET": "1234567890123456"})
    assert found.secret == b"1234567890123456"
    assert "1234567890123456" not in repr(found)


@pytest.mark.holds("the folder that you give a command in")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no -P")
def test_no_child_imports_modules_of_the_folder_that_a_command_is_given_in(tmp_path):
    """Those of an unpacked data set, for example. A program of the user's has its own folder."""
    run = "from crankshaft.launch.command import run\nif __name__ == '__main__':\n    run()"
    (installed := tmp_path / "crankshaft").write_text(run)  # as pip writes it
    (tmp_path / "data").mkdir()
    for name in ("json", "csv", "secrets", "tempfile", "selectors", "multiprocessing"):
        (tmp_path / "data" / f"{name}.py").write_text(f"raise SystemExit('{name} of the folder was imported')")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "beside.py").write_text("print('beside it')")
    (tmp_path / "own" / "script.py").write_text("import tensorflow, beside")
    local = ("local", "--workers=1", "--max_restarts=0", "--")
    flags = ("--model=mlp", "--input=digits", "--jit=off", "--train_steps=1", "--progress=off")
    prepare = ("prepare", "--input=digits", "--output_dir=shards", "--shards=2", "--processes=2")
    for words in ((*local, *flags), (*local, "../own/script.py"), prepare):
        done = subprocess.run(
            [sys.executable, installed, *words],
            cwd=tmp_path / "data",
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("beside it" in done.stdout) == ("../own/script.py" in words)
