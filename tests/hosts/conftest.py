"""Each test here has hosts of its own, as root on Linux; `make test-hosts` runs them and prints what each found."""

import pathlib

import pytest

from tests.hosts import hosts


def pytest_collection_modifyitems(items):
    for item in items:
        if pathlib.Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.clusters)
            if lacks := hosts.missing():
                item.add_marker(pytest.mark.skip(reason=lacks))
