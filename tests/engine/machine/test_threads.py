"""Threads where a process has no memory left (`ulimit -v`)."""

import subprocess
import sys

# glibc keeps the first thread's stack for the second, which then finds no memory for its first call.
PROGRAM = """
import resource
from crankshaft.engine.machine.threads import Thread

(first := Thread(target=int)).start()
first.join()
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(),) * 2)
try:
    for _ in range(100):
        Thread(target=int).start()
except RuntimeError as error:
    print(error)
"""


def test_a_thread_that_ends_before_its_first_line_is_an_error_and_not_waited_for():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert ended.stdout == "can't start new thread\n", ended.stderr
