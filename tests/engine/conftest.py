"""What tests here share stands in tests/bench.py."""

from tests.bench import _compiled, _float32_policy, bench, compiled, distribution  # noqa: F401
