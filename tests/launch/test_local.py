"""`crankshaft local` as a user starts it: what tasks are given, what they print, and mistakes. Small scripts for
tasks: real processes and pipes. TensorFlow can't be imported here, so nothing needs it."""

from __future__ import annotations

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import pytest

from crankshaft.launch.cluster import children, resources
from crankshaft.launch.cluster.output import Lines
from tests.launch.local_tasks import ROOT, TASK, lines_of, pids, until_dead
from tests.waiting import PATIENCE, wait_until

# --- what a task is given


def test_each_task_is_told_who_it_is_and_where_all_are(local):
    script = "print(json.dumps([config, sys.argv[1:], os.environ['PYTHONUNBUFFERED']]))"
    outcome = local(script, "--workers=3", own=("--lr", "0.1")).wait().ok()
    told = [json.loads(lines_of(outcome.out, f"worker {index}")[0]) for index in range(3)]
    addresses = told[0][0]["cluster"]["worker"]
    assert len(set(addresses)) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)
    for index, (config, arguments, unbuffered) in enumerate(told):
        assert config == {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        assert arguments == ["--strategy=multi_worker", "--lr", "0.1"]
        assert unbuffered == "1"


def test_a_task_finds_all_tasks_of_its_job_and_no_other_process(local):
    script = """
from crankshaft.launch.cluster import children
while len(found := children.job_of(os.environ)) < 2:
    time.sleep(0.01)
print(json.dumps(found))
time.sleep(0.3)  # the other looks too
"""
    program = local(script)
    outcome = program.wait().ok()
    for index in range(2):
        assert json.loads(lines_of(outcome.out, f"worker {index}")[0]) == sorted(pids(program))


def test_a_process_that_nobody_supervises_is_a_job_of_its_own():
    assert children.job_of({}) == [os.getpid()]


SHOW_SHARE = (
    "print(json.dumps([sorted(os.sched_getaffinity(0)), os.environ['TF_NUM_INTRAOP_THREADS'],"
    " os.environ['OMP_NUM_THREADS']]))"
)


def shown_shares(outcome, workers: int) -> list:
    return [json.loads(lines_of(outcome.out, f"worker {index}")[0]) for index in range(workers)]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two tasks of one core each need two cores")
def test_tasks_get_cores_of_their_own_and_as_many_threads(local):
    outcome = local(SHOW_SHARE, "--workers=2").wait().ok()
    (some, *threads), (others, *_) = shown_shares(outcome, 2)
    assert len(some) == len(others) == len(os.sched_getaffinity(0)) // 2
    assert not set(some) & set(others)
    assert threads == [str(len(some))] * 2


def test_more_tasks_than_cores_share_them_all(local):
    usable = sorted(os.sched_getaffinity(0))
    outcome = local(SHOW_SHARE, f"--workers={len(usable) + 1}").wait().ok()
    assert shown_shares(outcome, len(usable) + 1) == [[usable, "1", "1"]] * (len(usable) + 1)


ARGUMENTS = "print(json.dumps(sys.argv[1:]))\n"


def test_each_worker_gets_a_gpu_of_its_own(local, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0")  # TensorFlow numbers them from 0
    outcome = local(ARGUMENTS, "--workers=2", own=("--lr", "0.1")).wait().ok()
    for index in range(2):
        arguments = json.loads(lines_of(outcome.out, f"worker {index}")[0])
        assert arguments == ["--strategy=multi_worker", f"--gpus={index}", "--lr", "0.1"]
    assert re.search(r"worker 1 is process \d+ at .*, GPU 1$", outcome.err, re.MULTILINE)


def test_what_does_not_train_gets_no_gpu_and_workers_around_servers_share(local, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    script = ARGUMENTS + (
        "sys.stdout.flush(), (here / f\"{config['task']['type']}{index}.here\").touch()\n"
        "while config['task']['type'] != 'chief' or len(list(here.glob('*.here'))) < 6: time.sleep(0.01)"
    )
    flags = ("--workers=3", "--ps=1", "--evaluator")
    outcome = local(script, *flags, own=(f"--run_dir={tmp_path / 'run'}",)).wait().ok()
    told = {"chief": "none", "worker 0": "0", "worker 1": "1", "worker 2": "0", "ps 0": "none", "evaluator": "none"}
    for task, gpus in told.items():
        assert f"--gpus={gpus}" in json.loads(lines_of(outcome.out, task)[0])


def test_workers_in_step_without_a_gpu_each_all_compute_on_the_cpu(local, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    outcome = local(ARGUMENTS, "--workers=2").wait().ok()
    assert "2 workers and 1 GPU: all compute on the CPU; use --workers=1" in outcome.err
    for index in range(2):
        assert "--gpus=none" in json.loads(lines_of(outcome.out, f"worker {index}")[0])


def test_gpus_that_the_user_names_are_all_tasks(local, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    outcome = local(ARGUMENTS, "--workers=2", own=("--gpus=1",)).wait().ok()
    for index in range(2):
        assert json.loads(lines_of(outcome.out, f"worker {index}")[0]) == ["--strategy=multi_worker", "--gpus=1"]


def test_servers_alone_have_tables_in_huge_pages(local):
    script = (
        "kind = config['task']['type']\n"
        "print(os.environ.get('GLIBC_TUNABLES'), flush=True)\n"
        "(here / kind).touch()\n"
        "while kind != 'chief' or not ((here / 'ps').exists() and (here / 'worker').exists()): time.sleep(0.01)"
    )
    outcome = local(script, "--workers=1", "--ps=1").wait().ok()
    assert lines_of(outcome.out, "ps 0")[0] == "glibc.malloc.hugetlb=1"
    assert lines_of(outcome.out, "worker 0")[0] == "None"


def test_ports_are_different_free_and_not_for_outgoing_connections():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = resources.free_ports(50)
        assert taken.getsockname()[1] not in ports
    assert len(set(ports)) == 50
    first, last = map(int, pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not [port for port in ports if first <= port <= last]


def test_cores_are_divided_evenly_or_shared():
    assert resources.divide_cores([0, 4, 1, 5, 2], 2, 2) == [[0, 4], [1, 5]]
    assert resources.divide_cores([0, 1], 3, 1) == [None, None, None]


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
    assert lines_of(outcome.out, "worker 0") == ["relative __main__ ['--strategy=multi_worker', '--units=3', '-m']"]
    for name in ("package.wrk", "package"):
        missing = crank("--workers=1", "--", "-m", name, **start)
        assert "exit code 1: its script can't be run as it stands, so it is not restarted" in missing.mistake
    assert "-m no/module names no module; write -m package.module" in crank("--", "-m", "no/module", **start).mistake


# --- what it prints


def test_a_run_dir_that_is_not_utf_8_is_a_mistake_as_any_other(local, tmp_path):
    script = "from crankshaft.launch import train\ntrain.main(argv=['crankshaft train', *sys.argv[1:]])"
    outcome = local(script, own=(f"--run_dir={tmp_path}/\udcfc", *("--model=mlp", "--input=digits"))).wait()
    assert "\\udcfc can't be used: it has \\xfc in it, which is not UTF-8" in outcome.err
    assert "a mistake in what was asked, so it is not restarted" in outcome.mistake


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


def test_bytes_that_are_no_text_long_lines_and_no_line_end_come_through(tmp_path):
    script = r"sys.stdout.buffer.write(b'\xff\xfe caf\xe9\n\n' + b'x' * 3_000_000 + b'\nlast, without end')"
    (tmp_path / "task.py").write_text(TASK + script)
    command = [sys.executable, "-m", "crankshaft", "local", "--workers=1", "--", str(tmp_path / "task.py")]
    shown = subprocess.run(
        [*command, f"--run_dir={tmp_path / 'run'}"], cwd=ROOT, capture_output=True, check=True
    ).stdout
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


def test_a_log_file_a_task_grows_over_restarts(local, tmp_path):
    run_dir = tmp_path / "run"
    script = """
n = started()
print("start", n)
print("to stderr", file=sys.stderr)
sys.exit(4 if n == 1 and index == 1 else 0)
"""
    local(script, own=("--run_dir", run_dir)).wait().ok()
    for index in (0, 1):
        log = (run_dir / f"logs/worker-{index}.log").read_text()
        assert len(re.findall(rf"^=== .* worker {index} starts as process \d+ ===$", log, re.MULTILINE)) == 2
        assert log.index("start 1") < log.index("start 2")
        assert log.count("to stderr") == 2


def test_logs_that_cannot_be_written_do_not_stop_the_job(local, tmp_path):
    (tmp_path / "file").write_text("")
    script = "print('done')\nsys.exit(index)"
    outcome = local(script, "--max_restarts=0", own=(f"--run_dir={tmp_path / 'file'}",)).wait()
    assert outcome.out.count("done") == 2
    assert "[local] no logs of worker 0: " in outcome.err
    assert outcome.error.startswith("worker 1 ended with exit code 1; ")
    assert outcome.error.endswith("; its last lines:")


def test_lines_stay_whole_where_both_streams_are_one_and_its_reader_is_slow(tmp_path):
    script = """
for _ in range(200):
    print("o" * 3000)
    print("e" * 3000, file=sys.stderr)
"""
    (tmp_path / "task.py").write_text(TASK + script)
    command = [sys.executable, "-m", "crankshaft", "local", "--workers=1", "--", str(tmp_path / "task.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT) as process:
        time.sleep(1.0)  # for the pipe to be full
        shown = process.stdout.read().decode()
    lines = lines_of(shown, "worker 0")
    assert sorted(lines) == ["e" * 3000] * 200 + ["o" * 3000] * 200


def test_a_reader_who_has_gone_does_not_end_the_job(local, tmp_path):
    command = [sys.executable, "-m", "crankshaft", "local", "--workers=1", "--", str(tmp_path / "task.py")]
    (tmp_path / "task.py").write_text(TASK + "print('x' * 200_000); (here / 'done').touch()")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT)
    process.stdout.close()
    assert process.wait(timeout=PATIENCE) == 0
    assert (tmp_path / "done").exists()


def test_a_reader_of_errors_who_has_gone_does_not_end_the_job(tmp_path):
    command = [sys.executable, "-m", "crankshaft", "local", "--workers=1", "--", str(tmp_path / "task.py")]
    (tmp_path / "task.py").write_text(TASK + "(here / 'done').touch()")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT)
    process.stderr.close()
    assert process.wait(timeout=PATIENCE) == 0
    assert (tmp_path / "done").exists()


def test_a_reader_who_does_not_read_holds_up_no_signal(tmp_path):
    (tmp_path / "task.py").write_text(TASK + "print(os.getpid(), file=sys.stderr)\nwhile True: print('x' * 1000)")
    command = [sys.executable, "-m", "crankshaft", "local", "--workers=1", "--", str(tmp_path / "task.py")]
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


MISTAKES = [
    ([], "what the workers run is missing; write it after --, e.g. crankshaft local -- --model=mlp "),
    (["--workers=2", "--"], "what the workers run is missing; "),
    (["--workers=0", "--", "--model=mlp"], "--workers=0 can't be used: it takes an integer from 1 to 1000; "),
    (["--workers=two", "--", "--model=mlp"], "--workers=two can't be used: it takes an integer from 1 to 1000; "),
    (
        ["--max_restarts=-1", "--", "--model=mlp"],
        "--max_restarts=-1 can't be used: it takes an integer from 0 to 2147483647; ",
    ),
    (
        ["--grace_seconds=nan", "--", "--model=mlp"],
        "--grace_seconds=nan can't be used: it takes a number from 0 to 1e+06; ",
    ),
    (["--evaluator=maybe", "--", "--model=mlp"], "--evaluator=maybe can't be used: it takes true or false; "),
    (["--wrkers=2", "--", "--model=mlp"], "--wrkers is unknown; did you mean workers?"),
    (["--model=mlp"], "--model is a flag of the tasks; write it after --, see --help"),
    (["two", "--", "--model=mlp"], "'two' is not a flag; "),
    (["--", "missing.py"], "the script missing.py does not exist; "),
    (["--", "train"], "'train' is neither a flag of crankshaft train nor a script; "),
    (["--", "--strategy=mirrored"], "--strategy=mirrored is not for workers; "),
]


@pytest.fixture(scope="module")
def ended(crank_each):
    """How the command ends, by mistake."""
    return crank_each([arguments for arguments, _ in MISTAKES], "local")


@pytest.mark.parametrize("mistake", range(len(MISTAKES)), ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_a_mistake_is_one_line(ended, mistake):
    assert ended[mistake].code == 2
    assert ended[mistake].error.startswith(MISTAKES[mistake][1])


def test_another_system_than_linux_is_told_in_one_line():
    """After the imports, which would need that system's library."""
    code = (
        "import sys; from crankshaft.launch import local; sys.platform = 'darwin'\n"
        "local.main(['crankshaft local', '--workers=2', '--', '--model=mlp', '--input=digits'])"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: crankshaft local needs Linux, ")
    assert "this is darwin; use crankshaft train --strategy=mirrored" in line


def test_help_names_every_flag(crank):
    outcome = crank("--help", command="local", tensorflow=False).ok()
    for name in ("workers", "max_restarts", "grace_seconds"):
        assert f"\n  --{name}=...\n" in outcome.out


def test_flags_alone_are_those_of_launch_train(crank):
    outcome = crank("--", "--modle=mlp", command="local", tensorflow=False)
    assert outcome.code == 2
    assert "\n    error: --modle is unknown; did you mean " in outcome.err
