"""Two hosts, both network namespaces, on each of which a task is told that it is worker 0: what the second says.

Usage: unshare --user --map-root-user --net python twins.py. Exit code 77 where that is not to be had.
"""

import subprocess
import sys

from tests.launch.neighbours import HOST, connect

TWIN = f"""
from crankshaft.runner.host.tasks import Cluster
from crankshaft.parts.clusters.rendezvous import Rendezvous
with Rendezvous(Cluster((("worker 0", "{HOST}:2222"), ("worker 1", "localhost:2223")), 0)) as peers:
    print("here", flush=True)
    if input() == "wait":
        peers.wait(0.5)
"""


def main() -> None:
    other = connect()
    first = subprocess.Popen([sys.executable, "-c", TWIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        first.stdout.readline()
        there = ("nsenter", f"--net=/proc/{other.pid}/ns/net", sys.executable, "-c", TWIN)
        done = subprocess.run(there, input="wait\n", capture_output=True, text=True, check=False)
        print(done.stderr.splitlines()[-1])
    finally:
        first.communicate("end\n")
        other.kill()


if __name__ == "__main__":
    main()
