"""Fourteen kinds of program: where each recipe is, and the loop that it replaces: `python -m tests.recipes.kinds`.

Prints how many lines of code each has. Both train the same model on the same data, which is not counted, nor are
imports, comments and blank lines. `test_recipes.py` runs both, and compares their results.
"""

from __future__ import annotations

import ast
import dataclasses
import pathlib

from benchmarks.markdown import table
from tests.pages import ROOT, blocks

LOOPS = pathlib.Path(__file__).with_name("loops.py")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of program.

    Attributes:
      page: the file that the recipe is in.
      markers: for each of the recipe's blocks, a text that no other block of the page has; none for a whole file.
      loop: such a text of the loop, if it is on the page too; otherwise its function in `loops.py`.
    """

    page: str
    markers: tuple[str, ...]
    loop: str

    @property
    def is_on_page(self) -> bool:
        return self.page == "docs/from_keras.md"

    def recipe(self) -> str:
        """Returns the recipe's program."""
        if not self.markers:
            return (ROOT / self.page).read_text(encoding="utf-8")
        return "\n".join(self.block(marker) for marker in self.markers)

    def block(self, marker: str) -> str:
        """Returns the page's block that has a text."""
        (found,) = [each.text for each in blocks(ROOT / self.page) if marker in each.text]
        return found

    def lines(self) -> tuple[int, int]:
        """Returns how many lines of code the loop has, and the recipe."""
        recipe = self.recipe()
        if self.is_on_page:
            loop = self.block(self.loop)
            return _count(loop, _without_imports(loop)), _count(recipe, _without_imports(recipe))
        text = LOOPS.read_text(encoding="utf-8")
        (loop,) = (x for x in ast.parse(text).body if getattr(x, "name", "") == self.loop)
        *body, _ = loop.body  # the last one returns what is compared
        return _count(text, body), _count(recipe, _program(recipe))


def _without_imports(text: str) -> list[ast.stmt]:
    return [x for x in ast.parse(text).body if not isinstance(x, ast.Import | ast.ImportFrom)]


def _program(text: str) -> list[ast.stmt]:
    """Returns a recipe's statements that are not data: its trainers, and what calls a run, itself or by a function."""
    found, calls = list[ast.stmt](), {"run", "open_run", "Data"}
    for x in ast.parse(text).body:
        called = (each.func for each in ast.walk(x) if isinstance(each, ast.Call))
        if isinstance(x, ast.If):  # of a script, which a function is not
            counts = False
        elif isinstance(x, ast.ClassDef):
            counts = any(ast.unparse(base).endswith("Trainer") for base in x.bases)
        else:
            counts = bool(calls & {getattr(each, "id", getattr(each, "attr", "")) for each in called})
        if counts:
            found.append(x)
            calls.add(getattr(x, "name", "run"))
    return found


def _count(text: str, statements: list[ast.stmt]) -> int:
    """Counts statements' lines without docstrings, comments and blank lines."""
    lines = text.splitlines()
    numbers = {n for x in statements for n in range(x.lineno, x.end_lineno + 1)}
    for each in (each for x in statements for each in ast.walk(x)):
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
            numbers -= {*range(each.lineno, each.end_lineno + 1)}
    return sum(1 for n in numbers if lines[n - 1].strip() and not lines[n - 1].lstrip().startswith("#"))


_COOKBOOK, _FROM = "docs/cookbook.md", "docs/from_keras.md"
KINDS = {
    "tutorial": Kind(_FROM, ("class Heights(",), 'CheckpointManager(checkpoint, "runs/tape"'),
    "detection": Kind(_COOKBOOK, ("class Detector(",), "detection"),
    "forecasting": Kind(_COOKBOOK, ("class Forecaster(",), "forecasting"),
    "translation": Kind(_COOKBOOK, ("class Translator(",), "translation"),
    "diffusion": Kind(_COOKBOOK, ("class Denoiser(",), "diffusion"),
    "mean teacher": Kind(_COOKBOOK, ("class MeanTeacher(",), "mean_teacher"),
    "graph network": Kind(_COOKBOOK, ("class GraphNetwork(",), "graph_network"),
    "multi-task": Kind(_COOKBOOK, ("class Tasks(",), "multi_task"),
    "ranking": Kind(_COOKBOOK, ("class Ranker(",), "ranking"),
    "PPO": Kind("examples/ppo.py", (), "ppo"),
    "click logs": Kind(_COOKBOOK, ('for day in ("monday"',), "click_logs"),
    "physics": Kind(_COOKBOOK, ("class Poisson(",), "physics"),
    "speech": Kind(_COOKBOOK, ("class Ctc(",), "speech"),
    "a scheduler": Kind(_COOKBOOK, ("def loss_at(",), "scheduler"),
}


def main() -> None:
    rows = [(name, kind.page, *map(str, kind.lines())) for name, kind in KINDS.items()]
    print(table(("program", "recipe", "lines of the loop", "lines of the recipe"), rows, names=2))


if __name__ == "__main__":
    main()
