"""Who reaches a cluster on this machine: its tasks know each other, and a network of their own keeps others out."""

import pathlib
import re
import shutil
import socket
import subprocess
import sys

import pytest

from crankshaft.launch.cluster import listeners, tf_config
from tests.launch.local_tasks import ROOT
from tests.waiting import PATIENCE

NEIGHBOURS = pathlib.Path(__file__).parent / "neighbours.py"

SAYS_ITS_SECRET = """
secret = os.environ["CRANKSHAFT_JOB_SECRET"]
(here / f"secret-{index}").write_text(secret)
(here / f"command-{index}").write_bytes(pathlib.Path("/proc/self/cmdline").read_bytes())
"""
MEETS = """
import socket
own, other = (config["cluster"]["worker"][place].split(":") for place in (index, 1 - index))
listener = socket.create_server(("0.0.0.0", int(own[1])))
while True:
    try:
        socket.create_connection((other[0], int(other[1]))).close()
        break
    except OSError:
        time.sleep(0.05)
print("met over", [name for _, name in socket.if_nameindex()], "as", os.getuid())
time.sleep(1)  # for the other to come
"""


def _is_allowed() -> bool:
    code = "from crankshaft.launch.cluster import own_network; own_network.enter()"
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, check=False).returncode == 0


def secrets_of(tmp_path) -> set[str]:
    return {(tmp_path / f"secret-{index}").read_text() for index in (0, 1)}


def test_a_jobs_tasks_have_one_secret_that_nobody_else_is_told(local, tmp_path):
    run_dir = tmp_path / "run"
    outcome = local(SAYS_ITS_SECRET, own=(f"--run_dir={run_dir}",)).wait().ok()
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


def test_tasks_with_a_network_of_their_own_meet_there_and_nowhere_else(local):
    if not _is_allowed():
        pytest.skip("this kernel or container gives no process a network of its own")
    program = local(MEETS, "--own_network")
    outcome = program.wait().ok()
    assert outcome.out.count("met over ['lo'] as ") == 2
    assert "all interfaces" not in outcome.err


def test_who_reaches_the_tasks_is_said_once(local):
    assert local("").wait().ok().err.count("--own_network keeps others out") == 1


@pytest.mark.slow  # two clusters that train
@pytest.mark.skipif(not (shutil.which("ip") and shutil.which("unshare")), reason="no tools for network namespaces")
@pytest.mark.parametrize("tasks", [{"worker 0", "worker 1"}, {"chief", "worker 0", "ps 0"}], ids=["workers", "servers"])
def test_another_host_does_not_reach_a_cluster_on_this_one(tasks):
    flags = ("--workers=1", "--ps=1") if "chief" in tasks else ("--workers=2",)
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, str(NEIGHBOURS), *flags, "--"]
    own = ("--model=mlp", "--input=digits", "--jit=off", "--train_steps=10000000", "--progress=plain")
    done = subprocess.run([*command, *own], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this kernel or container gives no process networks of its own")
    assert done.returncode == 0, done.stderr
    control, *found = done.stdout.splitlines()
    assert control == "control: host True, neighbour True"
    assert set(found) == {f"{task}: host True, neighbour False" for task in tasks}


@pytest.mark.parametrize(
    ("addresses", "device"),
    [(("127.0.0.1:{}", "localhost:1"), b"lo"), (("127.0.0.1:{}", "10.0.0.1:1"), b"")],
    ids=["this host", "several hosts"],
)
def test_listeners_at_a_tasks_port_are_bound_to_loopback_if_all_tasks_are_there(addresses, device):
    if not listeners.can_be_closed():
        pytest.skip("this kernel binds nobody's listeners to a device")
    with socket.create_server(("", 0)) as its_own, socket.create_server(("", 0)) as another:
        port = its_own.getsockname()[1]
        names = ("worker 0", "worker 1")
        found = tf_config.Cluster(tuple(zip(names, (each.format(port) for each in addresses), strict=True)), 0)
        listeners.close_to_other_hosts(found)
        assert [device_of(sock) for sock in (its_own, another)] == [device, b""]
        assert tf_config.answers(f"127.0.0.1:{port}")


def device_of(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")


def test_a_secret_that_can_be_guessed_is_refused(monkeypatch):
    from crankshaft.launch.errors import UsageError

    config = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    with pytest.raises(UsageError, match="CRANKSHAFT_JOB_SECRET has 5 characters"):
        tf_config.from_environment({"TF_CONFIG": config, "CRANKSHAFT_JOB_SECRET": "12345"})
    found = tf_config.from_environment({"TF_CONFIG": config, "CRANKSHAFT_JOB_SECRET": "1234567890123456"})
    assert found.secret == b"1234567890123456"
    assert "1234567890123456" not in repr(found)
