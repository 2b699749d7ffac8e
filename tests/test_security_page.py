"""docs/security.md: each of its sentences is the promise of a test, which quotes its beginning: `pytest.mark.holds`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.pages import ROOT

PAGE = ROOT / "docs" / "security.md"
FROM, TO = "| who | is", "## What is not protected"


def sentences() -> list[str]:
    """The page's sentences and rows of tables, without the introduction and what is not promised."""
    text = PAGE.read_text(encoding="utf-8")
    found: list[str] = []
    for part in text[text.index(FROM) : text.index(TO)].split("\n\n"):
        if part.startswith("|"):
            found += [line.removeprefix("| ") for line in part.splitlines()[2:]]  # after the head and its rule
        elif not part.startswith("#"):
            found += re.split(r"(?<=\.) (?=[A-Z`\[])", " ".join(part.split()))
    return [sentence for sentence in found if sentence]


def quotes() -> Iterator[tuple[str, str]]:
    """(test, quote) of each that a test quotes."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.holds":
                        yield from ((node.name, ast.literal_eval(quote)) for quote in mark.args)


def test_each_sentence_is_held_by_a_test_and_each_quote_is_of_one():
    held = dict.fromkeys(sentences(), 0)
    for test, quote in quotes():
        matching = [sentence for sentence in held if sentence.startswith(quote)]
        assert len(matching) == 1, f"{test} quotes {quote!r}, with which {len(matching)} sentences of the page begin"
        held[matching[0]] += 1
    assert [sentence for sentence, count in held.items() if not count] == []
    assert len(held) > 35
