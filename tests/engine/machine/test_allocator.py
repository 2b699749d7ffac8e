"""Memory that a process has freed stays with it."""

import platform
import subprocess
import sys

import pytest

# Prints by how many MiB a block of 200 MiB has made the process grow, and how many are given back with it.
PROGRAM = """
from crankshaft.engine.machine import allocator, cpus
def mb(name):
    return int(cpus.value(cpus.Path("/proc/self/status"), name).removesuffix("kB")) // 1024
allocator.keep_freed_memory()
before = mb("VmData")
block = b"x" * (200 << 20)
grown, held = mb("VmData") - before, mb("VmRSS")
del block
print(grown, held - mb("VmRSS"))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
def test_a_block_that_was_freed_stays_in_the_process_which_grows_by_more_than_it_needs():
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, check=True)
    grown, given_back = map(int, done.stdout.split())
    assert 200 + 60 < grown < 200 + 70
    assert given_back < 10
