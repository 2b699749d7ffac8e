"""What a plan that was written says to who uses it, and what is not a plan."""

import json

import pytest

from crankshaft.parts.dashboard import plan_file
from crankshaft.runner.failures import UsageError

STEP = {"seconds": 0.2, "bound": "compute", "network_seconds": 0.05}
PLAN = {
    "hosts": [
        {"hosts": hosts, "host_bytes": 3 * 2**30, "goodput": 0.9, "examples_per_sec": 2e3 * hosts} | {"step": STEP}
        for hosts in (4, 64)
    ]
}


def test_a_plan_is_read_by_its_number_of_hosts(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    plan = plan_file.read(str(tmp_path / "plan.json"))
    assert list(plan) == [4, 64]
    assert (plan[64]["examples_per_sec"], plan[64]["network_share"]) == (128e3, pytest.approx(0.25))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"hosts": [{}]}', "KeyError"),
        (json.dumps(PLAN).replace("0.9", "-1"), "goodput is -1"),
        (json.dumps(PLAN).replace('"hosts": 4', '"hosts": 4.5'), "hosts is 4.5"),
        (json.dumps(PLAN).replace("0.9", "NaN"), "goodput is nan"),
    ],
)
def test_what_is_not_a_plan_is_one_line(tmp_path, text, says):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UsageError, match=f"plan.json is not a plan .*{says}.*; give a file of crankshaft plan"):
        plan_file.read(str(tmp_path / "plan.json"))
