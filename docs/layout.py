"""Draws the package from its imports, into BUILD.md: `python docs/layout.py`. Reads the source by `ast`.

`tests/test_imports.py` holds the architecture's rules against the same arrows.
"""

import ast
import pathlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("launch", "parts", "runner", "models", "input", "engine")
NOT_THE_HOUSE = {"build", "dist", "runs", "tests"}
_DRAWING = re.compile(r"(?<=```mermaid\n).*?(?=```)", re.DOTALL)


def source_files(root: Path) -> Iterator[Path]:
    """The package's Python files, relative to `root`; not tests, hidden folders or build outputs."""
    for entry in sorted(root.iterdir()):
        if entry.is_dir() and entry.name not in NOT_THE_HOUSE and not entry.name.startswith("."):
            yield from (path.relative_to(root) for path in sorted(entry.rglob("*.py")))
        elif entry.suffix == ".py":
            yield entry.relative_to(root)


def imported_from(node: ast.ImportFrom, path: Path) -> str:
    """The absolute dotted module of a `from ... import`, whose leading dots count from `path`."""
    if not node.level:
        return node.module
    package = ("crankshaft", *path.parts[:-1])[: len(path.parts) + 1 - node.level]
    return ".".join((*package, *([node.module] if node.module else [])))


def imports(tree: ast.Module, path: Path) -> Iterator[tuple[int, str, str]]:
    """Every import in the file, inside functions too: (line, absolute dotted name, name it binds).

    `import_module` and `__import__` count where their argument is a plain string; they bind no
    name.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield node.lineno, alias.name, alias.asname or top
        elif isinstance(node, ast.ImportFrom):
            module = imported_from(node, path)
            for alias in node.names:
                name = f"{module}.{alias.name}" if module else alias.name
                yield node.lineno, name, alias.asname or alias.name
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            argument = node.args[0]
            if called in {"import_module", "__import__"} and isinstance(argument, ast.Constant):
                yield node.lineno, str(argument.value), ""


def arrows(root: Path) -> dict[Path, set[Path]]:
    """The package's files that each of them imports, inside functions and for types too."""
    files = [path for path in source_files(root) if path.parts[0] in FOLDERS]
    modules = {".".join(("crankshaft", *path.with_suffix("").parts)).removesuffix(".__init__"): path for path in files}
    arrows: dict[Path, set[Path]] = {}
    for path in files:
        names = [name for _, name, _ in imports(ast.parse((root / path).read_text(encoding="utf-8")), path)]
        ends = {modules.get(name) or modules.get(name.rpartition(".")[0]) for name in names}
        arrows[path] = {end for end in ends if end and end != path}
    return arrows


def between_folders(arrows: dict[Path, set[Path]], depth: int = 2) -> dict[Path, set[Path]]:
    """The same arrows, between folders and single files within the top folders; with `depth` 1 between these."""
    folders: dict[Path, set[Path]] = {}
    for path, ends in arrows.items():
        start = Path(*path.parts[:depth])
        folders.setdefault(start, set()).update({Path(*end.parts[:depth]) for end in ends} - {start})
    return folders


def circles(arrows: dict[Path, set[Path]]) -> list[str]:
    """What is left once everything whose arrows all end outside has been taken away, again and again, from both ends:
    nothing, unless arrows run in a circle."""
    left = {start: set(ends) for start, ends in arrows.items()}
    while done := {start for start, ends in left.items() if not ends & left.keys()}:
        left = {start: ends for start, ends in left.items() if start not in done}
    while first := {start for start in left if not any(start in ends for ends in left.values())}:
        left = {start: ends for start, ends in left.items() if start not in first}
    return [f"{start} imports {end}" for start, ends in left.items() for end in sorted(ends & left.keys())]


def without_shortcuts(arrows: dict[Path, set[Path]]) -> dict[Path, set[Path]]:
    """The arrows that no longer way stands for; of a drawing without circles."""
    below: dict[Path, set[Path]] = {}

    def everything_below(start: Path) -> set[Path]:
        if start not in below:
            ends = arrows.get(start, set())
            below[start] = ends.union(*map(everything_below, ends))
        return below[start]

    return {start: ends - set().union(*map(everything_below, ends)) for start, ends in arrows.items()}


def drawing(root: Path = ROOT) -> str:
    """The folders and their arrows as a Mermaid flowchart, without those that a longer way stands for.

    A folder is known by its name alone; those that import the same folders share a line.
    """
    files = arrows(root)
    folders = between_folders(files)
    lines = ["flowchart TB"]
    for folder in FOLDERS:
        lines.append(f"  subgraph {folder}_[{folder}]")
        inside = {
            start: {end for end in ends if end.parts[0] == folder and _is_drawn(end)}
            for start, ends in folders.items()
            if start.parts[0] == folder and _is_drawn(start)
        }
        alike: dict[str, list[str]] = {}
        for start, ends in without_shortcuts(inside).items():
            alike.setdefault(" & ".join(sorted(end.stem for end in ends)), []).append(start.stem)
        named = {end for ends in alike for end in ends.split(" & ")}
        for ends, starts in sorted(alike.items()):
            if ends:
                lines.append(f"    {' & '.join(sorted(starts))} --> {ends}")
            elif alone := sorted(set(starts) - named):
                lines.append(f"    {' & '.join(alone)}")
        lines.append("  end")
    for folder in FOLDERS:
        below = {end.parts[0] for start, ends in files.items() if start.parts[0] == folder for end in ends} - {folder}
        if below:
            lines.append(f"  {folder}_ --> {' & '.join(f'{end}_' for end in sorted(below))}")
    return "\n".join(lines) + "\n"


def _is_drawn(folder: Path) -> bool:
    return folder.name != "__init__.py"


def with_drawing(page: str) -> str:
    """BUILD.md's text with the drawing of today."""
    return _DRAWING.sub(lambda _: drawing(), page, count=1)


if __name__ == "__main__":
    page = pathlib.Path(*sys.argv[1:] or [ROOT / "BUILD.md"])
    page.write_text(with_drawing(page.read_text(encoding="utf-8")), encoding="utf-8")
