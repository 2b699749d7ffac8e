"""What tests here share stands in tests/bench.py."""

from tests.bench import _float32_policy, bench, distribution  # noqa: F401
