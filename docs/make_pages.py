"""Writes docs/flags.md and the lists of keys in events.md and benchmark.md: `python docs/make_pages.py [FOLDER]`.

They are made from the flags, models and inputs, and from the schemas; FOLDER is where the pages go, by default docs/.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import sys
from collections.abc import Iterable, Sequence

from crankshaft.engine.record import events
from crankshaft.launch import prepare
from crankshaft.parts.ask import command as ask
from crankshaft.parts.benchmark import result
from crankshaft.parts.dashboard import report, server
from crankshaft.parts.launchers import local
from crankshaft.parts.plan import main as plan
from crankshaft.runner.command_line import help, registry
from crankshaft.runner.command_line.flags import FIELDS, GROUPS
from crankshaft.runner.command_line.rules import default_value, fields

PAGES = pathlib.Path(__file__).parent
_MADE = re.compile(r"(<!-- made of .* -->\n).*(<!-- end -->\n)", re.DOTALL)

_INTRODUCTION = """# Flags

`crankshaft train --help` prints this list, `--helpshort` the flags that most runs use. In Python, `crankshaft.run`
takes flags as keywords. Values are checked before TensorFlow starts. A flag that would have no effect is an error,
which names [the line to write](model.md#a-flag-that-has-no-effect). `--nodebug` is `--debug=false`.

Flags may be in a file: `--flagfile=run.flags`, one per line, or `--config=run.yaml` (`pip install PyYAML`; JSON without
it), also a run's own `config.json`, with another `--run_dir`. The command line takes precedence over `--config`, and
over a flagfile before it:

```yaml
model: mlp
model_arg: {hidden_units: [128, 64], dropout: 0.1}
input: digits
learning_rate: 0.01
train_epochs: 5
```

Text and paths are UTF-8 (in a locale with another encoding, set `PYTHONUTF8=1`).
"""
_LOCAL = "These stand before the `--` of `crankshaft local`; after it the flags above, or a script and its flags."


def pages() -> dict[str, str]:
    """Returns the text of each page, by its name."""
    kinds = [
        [f"`{kind}`", "<br>".join(f"`{name}`: {key.description}" for name, key in keys.items())]
        for kind, keys in events.SCHEMA.items()
    ]
    keys = "".join(f"- `{name}`: {key.description}\n" for name, key in result.KEYS.items())
    return {
        "flags.md": _flags(),
        "events.md": _with_part("events.md", _table(kinds, ("`event`", "its keys"))),
        "benchmark.md": _with_part("benchmark.md", keys),
    }


def _with_part(page: str, text: str) -> str:
    return _MADE.sub(lambda match: f"{match[1]}\n{text}\n{match[2]}", (PAGES / page).read_text(encoding="utf-8"))


def _flags() -> str:
    parts = [_INTRODUCTION]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n\n{_list([FIELDS[name] for name in names])}")
    for kind in registry.NAMES:
        heading = f"## {kind.capitalize()}s\n\n`--{kind}=NAME`, with `--{kind}_arg=ARGUMENT=VALUE`"
        parts.append(f"{heading}:\n\n{_entries(kind)}")
    parts.append(f"## crankshaft local\n\n{_LOCAL}\n\n{_command(local.LocalFlags)}")
    for name, command in (
        ("plan", plan.PlanFlags),
        ("prepare", prepare.PrepareFlags),
        ("monitor", server.DashboardFlags),
        ("report", report.ReportFlags),
        ("ask", ask.AskFlags),
    ):
        parts.append(f"## crankshaft {name}\n\n{_command(command)}")
    return "\n".join(parts)


def _command(command: type) -> str:
    return _list(fields(command).values())


def _list(flags: Iterable[dataclasses.Field]) -> str:
    """Lists flags with what they take, and their defaults."""
    lines = []
    for field in flags:
        info, default = field.metadata["info"], default_value(field)
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        takes = re.sub(r"(?:of (\S+) or more|from (\S+) to 2147483647)", r"≥ \1\2", info.kind.expected)
        takes = re.sub("^(an? |true or false$)", "", takes)
        described = "; ".join(filter(None, [takes, default not in (None, "", [], {}) and f"`{shown}`"]))
        lines.append(f"- `--{field.name}` ({described}): {info.help}\n")
    return "".join(lines)


def _entries(kind: str) -> str:
    rows = []
    for name in registry.NAMES[kind]:
        entry = registry.find(kind, name)
        arguments = [f"`{key}={help.as_typed(value)}`" for key, value in entry.defaults.items()]
        rows.append([f"`{name}`", entry.summary, "<br>".join([*(f"`{key}`" for key in entry.required), *arguments])])
    return _table(rows, ("name", "what it is", "arguments, with their defaults"))


def _table(rows: list[list[str]], heads: Sequence[str]) -> str:
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    for page, text in pages().items():
        pathlib.Path(sys.argv[1] if sys.argv[1:] else PAGES, page).write_text(text, encoding="utf-8")
