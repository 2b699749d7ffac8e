"""Hosts out of Linux namespaces: each with its network, name, processes, /dev/shm and clock since boot. As root.

Host i is host<i>, 10.53.0.<i> and fd00:53::<i>. All share the folder `Hosts.shared`; each has its own at `Hosts.local`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

from tests.pages import ROOT
from tests.waiting import wait_until

TOOLS = ("unshare", "nsenter", "ip", "mount")
TRAIN = ("--model=mlp", "--model_arg=hidden_units=16", "--input=digits", "--progress=plain")
TRAIN += ("--cluster_timeout_seconds=120",)
_SWITCH = pathlib.Path(__file__).with_name("switch.py")
_SETUP = """
set -e
mount --make-rprivate /
hostname host{host}
mount --bind {here}/hosts /etc/hosts
mount --bind {here}/local {local}
mount -t tmpfs -o size={shm} tmpfs /dev/shm
ip link set lo up
touch {here}/ready
while :; do sleep 100 & wait; done
"""


def missing() -> str:
    """What this machine lacks for hosts; empty if nothing."""
    lacks = [tool for tool in TOOLS if not shutil.which(tool)]
    return f"no {', '.join(lacks)}" if lacks else "" if os.geteuid() == 0 else "hosts need root"


class Task:
    """A command that runs on a host; its output has the time of each line in `times`, as far as it was looked at."""

    def __init__(self, process: subprocess.Popen, path: pathlib.Path):
        self.process, self._path = process, path

    @property
    def output(self) -> str:
        return self._path.read_text(errors="replace")

    @property
    def error(self) -> str:
        """The line with which it ended; its last line without one."""
        lines = [line.removeprefix("error: ") for line in self.output.splitlines() if line.startswith("error: ")]
        return (lines or self.output.splitlines() or [""])[-1]

    def until(self, pattern: str) -> float:
        """Waits until its output has a pattern; returns the seconds that it took."""
        began = time.monotonic()
        wait_until(lambda: re.search(pattern, self.output), self.process, shows=lambda: self.output)
        return time.monotonic() - began

    def wait(self) -> int:
        wait_until(lambda: self.process.poll() is not None, shows=lambda: self.output)
        return self.process.returncode

    def send(self, number: signal.Signals) -> None:
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(children[0]), number)


class Hosts:
    """So many hosts, joined by a switch; see `switch.py` for its links."""

    def __init__(self, folder: pathlib.Path, count: int, shm: str = "1g"):
        self.count, self._folder, self._shm = count, folder, shm
        self.shared, self.local = folder / "shared", folder / "local"
        self.names = ",".join(f"host{host}:2222" for host in range(1, count + 1))
        self._inits: dict[int, int] = {}
        self._processes: list[subprocess.Popen] = []
        self._tasks = 0

    def __enter__(self) -> Hosts:
        for folder in (self.shared, self.local):
            folder.mkdir()
        self.link({})
        with contextlib.ExitStack() as stack:
            stack.callback(self.__exit__)
            self._join()
            stack.pop_all()
        return self

    def __exit__(self, *_) -> None:
        for init in self._inits.values():  # with which all processes of its host end
            with contextlib.suppress(ProcessLookupError):
                os.kill(init, signal.SIGKILL)
        for process in self._processes:
            process.kill()
            process.wait()

    def _join(self) -> None:
        switch = self._begin("switch", ["unshare", "--net", sys.executable, _SWITCH, self._folder, str(self.count)])
        wait_until(lambda: "ready" in (self._folder / "switch").read_text(), switch)
        names = "127.0.0.1 localhost\n" + "".join(f"10.53.0.{i} host{i}\n" for i in range(1, self.count + 1))
        for host in range(1, self.count + 1):
            here = self._folder / f"host{host}"
            (here / "local").mkdir(parents=True)
            (here / "hosts").write_text(names)
            setup = _SETUP.format(host=host, here=here, local=self.local, shm=self._shm)
            spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--time", f"--monotonic={3600 * (host - 1)}"]
            command = ["unshare", *spaces, "--fork", "--kill-child", "--mount-proc", "bash", "-c", setup]
            unshared = self._begin(f"host{host}.out", command)
            wait_until((here / "ready").exists, unshared, shows=(self._folder / f"host{host}.out").read_text)
            children = pathlib.Path(f"/proc/{unshared.pid}/task/{unshared.pid}/children").read_text()
            self._inits[host] = init = int(children.split()[0])
            move = ["nsenter", f"--target={switch.pid}", "--net", "ip", "link", "set", f"tap{host}", "netns", str(init)]
            subprocess.run(move, check=True)
            device = (
                f"ip link set tap{host} name eth0 address 02:53:00:00:00:{host:02x} && ip link set eth0 up && "
                f"ip address add 10.53.0.{host}/24 dev eth0 && ip -6 address add fd00:53::{host}/64 dev eth0 nodad"
            )
            subprocess.run(["nsenter", f"--target={init}", "--net", "sh", "-c", device], check=True)

    def _begin(self, name: str, command: list) -> subprocess.Popen:
        with open(self._folder / name, "wb") as out:
            self._processes.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT))
        return self._processes[-1]

    def link(self, links: dict) -> None:
        """Sets the links; see `switch.py`."""
        new = self._folder / "links.new"
        new.write_text(json.dumps(links))
        new.rename(self._folder / "links.json")

    def start(self, host: int, *command, **variables: str) -> Task:
        """Starts a command on a host."""
        self._tasks += 1
        name = f"task{self._tasks}"
        enter = ["nsenter", f"--target={self._inits[host]}", "--net", "--uts", "--ipc", "--mount", "--pid", "--time"]
        path = f"{pathlib.Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
        home = self._folder / f"host{host}"
        environment = {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT), **variables}
        settings = [f"{key}={value}" for key, value in environment.items()]
        process = self._begin(name, [*enter, "env", "--ignore-environment", *settings, *map(str, command)])
        return Task(process, self._folder / name)

    def train(self, index: int, *flags, host: int = 0, names: str = "", **variables: str) -> Task:
        """Starts a task of a job, by its index, on the host of that number unless another is given."""
        command = [sys.executable, "-m", "crankshaft", "train", *TRAIN]
        if "TF_CONFIG" not in variables:
            command += [f"--cluster_hosts={names or self.names}", f"--task_index={index}"]
        return self.start(host or index + 1, *command, *flags, **variables)

    def end_all(self, host: int) -> None:
        """Kills all processes of a host but the first."""
        script = "cd /proc; for pid in [0-9]*; do [ $pid -gt 1 ] && [ $pid != $$ ] && kill -9 $pid; done"
        enter = ["nsenter", f"--target={self._inits[host]}", "--mount", "--pid"]
        subprocess.run([*enter, "sh", "-c", script], check=False, capture_output=True)
