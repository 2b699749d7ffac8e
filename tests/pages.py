"""The pages that people read, README.md and docs/, as tests look at them: sections, blocks of code, commands."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shlex
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
GUIDES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*GUIDES, *sorted(ROOT.glob("[A-Z]*.md"))]

_PART = re.compile(r'^## ([^\n]*)$|^```(\w*)(?: title="([^"\n]*)")?\n(.*?)^```$', re.M | re.S)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
      section: the title of the section that it stands in; "" before the first.
      language: what follows the opening fence: `bash` and `python` run as tests, `console` is typed by people alone.
      title: the file that it is; "" if it is none.
      text: its lines.
      line: where its text begins in the page, counted from 1.
    """

    section: str
    language: str
    title: str
    text: str
    line: int

    def commands(self) -> Iterator[str]:
        """The lines of a shell, those that a backslash continues as one; of `console`, those that begin with $."""
        text = self.text.replace("\\\n", " ")
        for line in filter(None, map(str.strip, text.splitlines())):
            if self.language == "bash":
                yield line
            elif self.language == "console" and line.startswith("$ "):
                yield line[2:]


def blocks(path: pathlib.Path) -> list[Block]:
    """All of a page, in their order."""
    found, section = [], ""
    text = path.read_text(encoding="utf-8")
    for part in _PART.finditer(text):
        title, language, name, body = part.groups()
        if title is not None:
            section = title
        else:
            line = text.count("\n", 0, part.start()) + 2
            found.append(Block(section, language, name or "", body, line))
    return found


def words(command: str) -> list[str]:
    """A command's words, as a shell has them, up to a comment."""
    return shlex.split(command, comments=True)
