"""`crankshaft report RESULT.json` prints a benchmark's result as Markdown. Host code; TensorFlow is not started."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ...engine.machine.files import read_json
from .. import errors
from ..errors import UsageError
from . import schema
from .sections import Section, sections


def main(argv: Sequence[str]) -> None:
    """Prints the report of a file of --result_json, and exits the process."""
    try:
        if len(argv) != 2:
            raise UsageError(f"{len(argv) - 1} arguments; use crankshaft report RESULT.json")
        print(markdown(_read(argv[1])))
    except UsageError as error:
        sys.exit(errors.fail(errors.EXIT_USAGE, str(error)))
    sys.exit(0)


def markdown(result: Mapping[str, Any]) -> str:
    """Returns the report of a result; what the result lacks is left out."""
    about = [str(result[name]) for name in ("model", "input", "strategy") if result.get(name)]
    parts = [f"# Benchmark: {', '.join(about)}" if about else "# Benchmark"]
    parts += [f"{result[name]}" for name in ("date",) if result.get(name)]
    if result.get("command"):
        parts.append(f"```console\n$ {result['command']}\n```")
    parts += [f"## {section.title}\n\n{_body(section)}" for section in sections(result)]
    return "\n\n".join(parts)


def _body(section: Section) -> str:
    rows = [[cell.strip().replace("|", r"\|") for cell in row] for row in section.rows]
    if section.title == "Warnings":
        return "\n".join(f"- {text}" for _, text in rows)
    columns = section.columns or ("", "")
    kinds = ["---", *(["---:"] * (len(columns) - 1) if section.columns else ["---"])]
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, kinds, *rows])


def _read(path: str) -> dict[str, Any]:
    try:
        result = read_json(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read ({error}); give a file of --result_json") from None
    version = result.get("schema") if isinstance(result, dict) else None
    if version != schema.VERSION:  # the rest may be missing: what is there is shown
        raise UsageError(
            f"{path} is of schema {version}, and this reads {schema.VERSION}; give a file of --result_json"
        )
    return result
