"""Starts `crankshaft local ARGUMENTS` on a host that has a neighbour, both of them network namespaces, and says who
reaches its tasks: this host itself, at 127.0.0.1, once they train, and the neighbour, over the wire between them, who
calls from the moment on that a task's port is known, and keeps each connection that it gets.

Usage: unshare --user --map-root-user --net python neighbours.py ARGUMENTS. Exit code 77 where that is not to be had.
"""

import re
import subprocess
import sys
import time

HOST, NEIGHBOUR = "10.9.8.1", "10.9.8.2"
CALL = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10).recv(1)[0]"
# Prints a port once anything has come from there.
KEEP_CALLING = """
import socket, sys, time
host, port = sys.argv[1], int(sys.argv[2])
while True:
    try:
        sock = socket.create_connection((host, port), timeout=0.05)
        sock.settimeout(None)
        if sock.recv(1):
            break
    except OSError:
        time.sleep(0.005)
print(port, flush=True)
"""
SPEAKS = """
import socket
with socket.create_server(("", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    while True:
        listener.accept()[0].send(b"hello")
"""


def run(*command: str) -> bool:
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def connect() -> subprocess.Popen:
    """Connects this host with a neighbour: a process that only holds its namespace."""
    other = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo here; exec sleep 3600"], stdout=subprocess.PIPE)
    other.stdout.readline()
    there = ("nsenter", f"--net=/proc/{other.pid}/ns/net", "ip")
    commands = (
        ("ip", "link", "set", "lo", "up"),
        ("ip", "link", "add", "wire0", "type", "veth", "peer", "name", "wire1", "netns", str(other.pid)),
        ("ip", "addr", "add", f"{HOST}/24", "dev", "wire0"),
        ("ip", "link", "set", "wire0", "up"),
        (*there, "addr", "add", f"{NEIGHBOUR}/24", "dev", "wire1"),
        (*there, "link", "set", "wire1", "up"),
    )
    if not all(run(*command) for command in commands):
        other.kill()
        sys.exit(77)
    return other


def main() -> int:
    other = connect()

    there = ("nsenter", f"--net=/proc/{other.pid}/ns/net", sys.executable, "-c")
    program, callers = None, {}

    def keep_calling(name: str, port: int) -> None:
        callers[name] = port, subprocess.Popen([*there, KEEP_CALLING, HOST, str(port)], stdout=subprocess.PIPE)

    def reach(name: str) -> str:
        """Who has reached it."""
        port, caller = callers[name]
        here = run(sys.executable, "-c", CALL, "127.0.0.1", str(port))
        caller.kill()
        return f"{name}: host {here}, neighbour {bool(caller.communicate()[0])}"

    try:
        with subprocess.Popen([sys.executable, "-c", SPEAKS], stdout=subprocess.PIPE) as open_to_all:
            keep_calling("control", int(open_to_all.stdout.readline()))
            time.sleep(1)
            print(reach("control"), flush=True)
            open_to_all.kill()
        command = [sys.executable, "-m", "crankshaft", "local", *sys.argv[1:]]
        program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said = ""
        while " step " not in said:
            line = program.stdout.readline()
            if not line:
                sys.exit(said)
            said += line
            if started := re.search(r"\] (\S+ ?\d*) is process \d+ at 127.0.0.1:(\d+)", line):
                keep_calling(started[1], int(started[2]))
        for task in [name for name in callers if name != "control"]:
            print(reach(task), flush=True)
        program.terminate()
        program.communicate()
        return 0
    finally:
        for started in [other, *(caller for _, caller in callers.values()), *([program] if program else [])]:
            started.kill()


if __name__ == "__main__":
    sys.exit(main())
