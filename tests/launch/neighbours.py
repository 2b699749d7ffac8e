"""Starts `crankshaft local ARGUMENTS` on a host that has a neighbour, both of them network namespaces, and says who
reaches its tasks once they train: this host itself, at 127.0.0.1, and the neighbour, over the wire between them.

Usage: unshare --user --map-root-user --net python neighbours.py ARGUMENTS. Exit code 77 where that is not to be had.
"""

import re
import socket
import subprocess
import sys

HOST, NEIGHBOUR = "10.9.8.1", "10.9.8.2"
CALL = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)"


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

    def reach(port: int) -> str:
        """Who reaches it."""
        call = (sys.executable, "-c", CALL)
        here = run(*call, "127.0.0.1", str(port))
        there = run("nsenter", f"--net=/proc/{other.pid}/ns/net", *call, HOST, str(port))
        return f"host {here}, neighbour {there}"

    program = None
    try:
        with socket.create_server(("", 0)) as open_to_all:
            print(f"control: {reach(open_to_all.getsockname()[1])}", flush=True)
        command = [sys.executable, "-m", "crankshaft", "local", *sys.argv[1:]]
        program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said = ""
        while " step " not in said:
            line = program.stdout.readline()
            if not line:
                sys.exit(said)
            said += line
        for task, port in re.findall(r"(\S+ ?\d*) is process \d+ at 127.0.0.1:(\d+)", said):
            print(f"{task}: {reach(int(port))}", flush=True)
        program.terminate()
        program.communicate()
        return 0
    finally:
        other.kill()
        if program:
            program.kill()


if __name__ == "__main__":
    sys.exit(main())
