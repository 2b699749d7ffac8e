"""Values as plain JSON and as text, and how two configurations differ."""

import json
import math

import pytest

from crankshaft.runner.command_line import values


def test_a_value_is_shown_in_sixty_characters():
    assert values.short("x" * 60) == "x" * 60
    assert values.short("x" * 61) == "x" * 57 + "..."
    assert values.shown({"a": ["x" * 99]}) == '{"a": ["' + "x" * 49 + "..."


def test_differences_are_named_one_by_one_and_what_is_gone_or_new_too():
    before = {
        "same": 1,
        "gone": 2,
        "changed": 0.5,
        "arguments": {"same": [1], "changed": 1, "gone": None},
        "kind": {"a": 1},
    }
    now = {"new": 3, "changed": 0.25, "same": 1, "arguments": {"changed": 2, "same": [1], "new": 3}, "kind": 5}
    assert values.differences(before, now) == [
        *("gone: 2 -> None", "changed: 0.5 -> 0.25", "arguments changed: 1 -> 2", "arguments new: None -> 3"),
        *("kind: {'a': 1} -> 5", "new: None -> 3"),
    ]
    assert values.differences(now, now) == []


def test_values_become_those_that_json_gives_back():
    class Own:
        pass

    found = values.plain(
        {"a": (1, 2.5), "b": {"c": None}, "nan": math.nan, "inf": [-math.inf], "by": len, "own": Own()}
    )
    own = f"<{__name__}.{Own.__qualname__} object>"
    by = "builtins.len"
    assert found == {"a": [1, 2.5], "b": {"c": None}, "nan": "NaN", "inf": ["-Infinity"], "by": by, "own": own}
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("-0.5", -0.5), ("1e3", 1000.0), ("inf", math.inf), ("TRUE", True), ("False", False), ("None", None)]
    + [("0.5", 0.5), (".5", 0.5), ("5.", 5.0), ("+.5E-05", 5e-6), ("0e0", 0.0)]
    + [(text, text) for text in ("010", "-00.5", "0x10", "1_0", "yes", "1,2", "", ".", "e5", "1e")],
)
def test_text_of_no_type_is_what_it_looks_like(text, value):
    found = values.guessed(text)
    assert (found, type(found)) == (value, type(value))


def test_words_for_true_and_false_are_few():
    assert [*map(values.boolean, ("true", "T", "YES", "1", "false", "f", "No", "0"))] == [True] * 4 + [False] * 4
    for word in ("on", "", "2"):
        with pytest.raises(ValueError, match=f"^{word} is neither true nor false$"):
            values.boolean(word)
