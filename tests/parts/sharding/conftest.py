"""Meshes, each made once in the process."""

from __future__ import annotations

import functools

import pytest

from crankshaft.parts.sharding import Mesh


@pytest.fixture(scope="session")
def meshes(distribution):
    """meshes(data, model): (strategy, mesh), the same each time."""

    @functools.cache
    def make(data, model):
        strategy = distribution(data * model)
        return strategy, Mesh(strategy, model)

    return make
