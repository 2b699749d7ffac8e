"""What of files is in memory, as the system itself says."""

import os

import pytest

from benchmarks import pages
from benchmarks.pages import Pages

# A page that the kernel works on (migration, compaction) stays where it is: posix_fadvise(2) calls dropping an attempt.
_KEPT = 0.02


@pytest.fixture
def paths(tmp_path):
    """Two files, dropped; skips where the file system keeps its pages, as one in memory does."""
    found = []
    for number in range(2):
        found.append(str(tmp_path / f"{number}"))
        (tmp_path / f"{number}").write_bytes(os.urandom(4 << 20))
    pages.drop(found)
    share = pages.share_in_memory(found)
    if share is None or share > _KEPT:
        pytest.skip("this file system's pages can't be dropped, or not be asked for")
    pages.drop(found)  # what asking has fetched
    return found


def test_warm_files_are_in_memory_and_cold_ones_are_not(paths):
    warm = Pages(paths, "warm")
    warm.before_round()
    assert warm.in_memory >= 1 - _KEPT
    assert warm.bytes == 8 << 20
    cold = Pages(paths, "cold")
    cold.before_round()
    assert cold.in_memory <= _KEPT
    pages.read_through(paths)
    cold.before_round()
    assert pages.share_in_memory(paths) <= _KEPT


def test_files_are_left_as_found_unless_asked(paths):
    pages.read_through(paths[:1])
    found = Pages(paths, "as_found")
    found.before_round()
    assert found.in_memory == pytest.approx(0.5, abs=_KEPT)


def test_empty_files_have_no_share(tmp_path):
    (tmp_path / "empty").touch()
    assert pages.share_in_memory([str(tmp_path / "empty")]) is None
