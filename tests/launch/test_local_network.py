"""Who reaches a cluster on this machine: its tasks know each other, and the kernel keeps others out."""

import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys

import pytest

from crankshaft.launch.cluster import listeners, tf_config
from crankshaft.launch.cluster.resources import free_ports
from tests.launch.local_tasks import ROOT, TASK
from tests.waiting import PATIENCE

NEIGHBOURS = pathlib.Path(__file__).parent / "neighbours.py"

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


def test_a_jobs_tasks_have_one_secret_that_nobody_else_is_told(local, tmp_path):
    run_dir = tmp_path / "run"
    outcome = local(SAYS_ITS_SECRET, own=(f"--run_dir={run_dir}",)).wait().ok()
    assert outcome.err.count("keeps others out") == 1  # who reaches the tasks is said once
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


def test_tasks_with_a_network_of_their_own_meet_there_and_nowhere_else(tmp_path):
    if not _is_allowed():
        pytest.skip("this kernel or container gives no process a network of its own")
    (tmp_path / "task.py").write_text(TASK + MEETS)
    command = [*OWN_NETWORK, sys.executable, "-m", "crankshaft", "local", "--", tmp_path / "task.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stdout.count("met over ['lo'] as ") == 2, done.stderr


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
    from crankshaft.launch.errors import UsageError

    config = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    with pytest.raises(UsageError, match="CRANKSHAFT_JOB_SECRET has 5 characters"):
        tf_config.from_environment({"TF_CONFIG": config, "CRANKSHAFT_JOB_SECRET": "12345"})
    found = tf_config.from_environment({"TF_CONFIG": config, "CRANKSHAFT_JOB_SECRET": "1234567890123456"})
    assert found.secret == b"1234567890123456"
    assert "1234567890123456" not in repr(found)
