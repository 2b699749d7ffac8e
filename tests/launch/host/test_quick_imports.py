"""Garbage is not looked for while TensorFlow is imported, and is again afterwards."""

from __future__ import annotations

import gc

import pytest

from crankshaft.launch.host import imports


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_looked_for_afterwards_where_it_was_before(collects):
    frozen = gc.get_freeze_count()
    assert gc.isenabled()
    try:
        if not collects:
            gc.disable()
        with imports.quick():
            assert not gc.isenabled()
        assert gc.isenabled() == collects
        imports.keep.cache_clear()
        imports.keep()
        assert 0 < gc.get_freeze_count() <= frozen  # what tests/conftest.py has frozen, less what has gone since
    finally:
        gc.enable()
