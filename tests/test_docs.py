"""The pages and docstrings agree with the project: links lead somewhere, what is named exists, every flag has its row.

Nothing here starts TensorFlow."""

from __future__ import annotations

import ast
import fnmatch
import functools
import itertools
import pathlib
import re

import pytest

import benchmarks.__main__
from crankshaft.launch import prepare
from crankshaft.parts.ask import command as ask
from crankshaft.parts.dashboard import report, server
from crankshaft.parts.launchers import local
from crankshaft.parts.plan import main as plan
from crankshaft.runner.command_line.flags import GROUPS
from crankshaft.runner.command_line.rules import fields
from tests.conftest import IN_MAKE_TEST
from tests.pages import GUIDES, PAGES, README, ROOT, blocks, words

NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]
OF_TRAIN = {name for names in GROUPS.values() for name in names} | {"flagfile", "help", "helpshort"}
OF_COMMAND = {
    "train": OF_TRAIN,
    "local": set(fields(local.LocalFlags)),
    "plan": set(fields(plan.PlanFlags)) | OF_TRAIN,
    "prepare": set(fields(prepare.PrepareFlags)),
    "monitor": set(fields(server.DashboardFlags)),
    "report": set(fields(report.ReportFlags)),
    "ask": set(fields(ask.AskFlags)),
}
# Of the scripts that compare.
OF_SCRIPTS = {
    name
    for path in (ROOT / "benchmarks").glob("*.py")
    for name in re.findall(r'add_argument\("--(\w+)"', path.read_text(encoding="utf-8"))
}
_FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
_LINK = re.compile(r'(?:\]\(|\bsrc(?:set)?=")([^)\s"]+)')


def anchors(text: str) -> set[str]:
    """Of a page's titles, as GitHub and MkDocs make them."""
    titles = re.findall(r"^#+ (.*)$", _FENCED.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def flags_of(line: list[str]) -> list[str]:
    """The names of the flags among a command's words."""
    return [re.match(r"--([\w]*)", word)[1] for word in line if word.startswith("--") and word != "--"]


def unknown(line: list[str]) -> list[str]:
    """Flags of a command of ours that it does not have."""
    program, command, *rest = line
    if program != "crankshaft" or command not in OF_COMMAND:
        return []
    cut = rest.index("--") if "--" in rest else len(rest)
    found = [*flags_of(rest[:cut]), *(f"{name} after --" for name in flags_of(rest[cut:]) if not known(name, OF_TRAIN))]
    return [name for name in found if name.endswith("after --") or not known(name, OF_COMMAND[command])]


def known(name: str, names: set[str]) -> bool:
    return name in names or name.removeprefix("no") in names


FOLDERS = ("benchmarks", "docs", "engine", "examples", "input", "launch", "models", "parts", "runner", "tests")
SOURCES = [ROOT / "__init__.py", *(path for name in FOLDERS for path in sorted((ROOT / name).rglob("*.py")))]
# What nobody shall write; scripts that stand on a page.
NO_FILES = {"utils.py", *(block.title for path in GUIDES for block in blocks(path))}


def paths_in(text: str) -> set[str]:
    """What a text names in backquotes as a file or a folder of the project, as it stands there."""
    spans = re.findall(r"`([^`]+)`", _FENCED.sub("", text))
    words = {word.rstrip(",;:") for span in spans for word in span.split()}
    ours = {word.partition("::")[0] for word in words if re.fullmatch(r"[\w./-]+(::\w+)?", word)}
    named = {word for word in ours if word.endswith(".py") or word.startswith(tuple(f"{name}/" for name in FOLDERS))}
    return {word for word in named if "..." not in word}


@functools.cache
def _endings() -> set[str]:
    """Every path of the project and every end of one: `engine/state.py` and `state.py`."""
    parts = [path.relative_to(ROOT).parts for path in (*SOURCES, ROOT / "__main__.py")]
    return {"/".join(path[start:]) for path in parts for start in range(len(path))}


def exists(path: str) -> bool:
    return path in _endings() or (ROOT / path).exists()


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _is_there(module: pathlib.Path, name: str, *rest: str) -> bool:
    """Whether a module or a package has a name, and that name the attributes that follow, its bases' among them."""
    if module.is_dir():
        inside = module / name if (module / name).is_dir() else module / f"{name}.py"
        if inside.exists():
            return not rest or _is_there(inside, *rest)
        module /= "__init__.py"
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
            (alias,) = (alias for alias in node.names if name == (alias.asname or alias.name))
            inner = node.module.split(".") if node.module else []
            if not node.level:  # another package's
                return True
            return _is_there(module.parents[node.level - 1], *inner, alias.name, *rest)
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return not rest
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = (base.id for base in node.bases if isinstance(base, ast.Name))
            return not rest or rest[0] in _members(node) or any(_is_there(module, base, *rest) for base in bases)
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in _assigned(node):
            return not rest
    return False


def _assigned(node: ast.AST) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {getattr(target, "id", getattr(target, "attr", "")) for target in targets}


def _members(node: ast.ClassDef) -> set[str]:
    """The names of a class's functions, and of what it or they assign."""
    functions = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    assigned = (_assigned(part) for part in ast.walk(node) if isinstance(part, ast.Assign | ast.AnnAssign))
    return functions.union(*assigned)


def written_out(text: str) -> str:
    """BUILD.md with each name that begins with a dot in full: it replaces the last word of the name before it."""

    def in_full(line: str) -> str:
        before = ""
        spans = line.split("`")
        for at in range(1, len(spans), 2):
            if spans[at].startswith("."):
                spans[at] = before.rpartition(".")[0] + spans[at]
            before = spans[at] if re.fullmatch(r"\w+(\.\w+)+", spans[at]) else before
        return "`".join(spans)

    return "\n".join(map(in_full, text.splitlines()))


def dotted_in(text: str) -> set[str]:
    """The dotted names of the project's own that a text has in backquotes."""
    names = re.findall(
        r"`(?:crankshaft\.)?((?:engine|input|launch|models|parts|runner)(?:\.\w+)+)(?:\([^`]*\))?`", text
    )
    return {name for name in names if not name.endswith(".py")}


@pytest.mark.parametrize("path", [*GUIDES, ROOT / "BUILD.md", ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_files_and_names_that_a_page_names_exist(path):
    text = path.read_text(encoding="utf-8")
    text = written_out(text) if path.name == "BUILD.md" else text
    lost = [name for name in paths_in(text) - NO_FILES if not exists(name)]
    lost += [name for name in dotted_in(text) if not _is_there(ROOT, *name.split("."))]
    assert lost == []


def test_each_row_of_where_is_names_what_exists():
    table = (ROOT / "BUILD.md").read_text(encoding="utf-8").split("## Where is ...")[1].split("## ")[0]
    rows = [row.split("|") for row in re.findall(r"^\|.*\|$", table, re.M)[2:]]
    questions = [line for row in rows if row[2].strip() for line in written_out(row[2]).split("<br>")]
    assert len(questions) >= 150
    assert [line for line in questions if not dotted_in(line)] == []
    assert [name for line in questions for name in dotted_in(line) if not _is_there(ROOT, *name.split("."))] == []


def test_a_name_that_begins_with_a_dot_is_written_out():
    assert written_out("`a.b.c`, `.d`<br>and: `.E.f`\n`.g`") == "`a.b.c`, `a.b.d`<br>and: `a.b.E.f`\n`.g`"


def test_the_heart_names_a_steps_functions_as_they_are():
    heart = (ROOT / "BUILD.md").read_text(encoding="utf-8").split("## The heart")[1].split("What they rely on")[0]
    functions = {
        (*path.split("/"), *name.split("."))
        for path, text in re.findall(r"^\d+\. `(\S+)\.py`(.*?)(?=^\d+\. |\Z)", heart, re.M | re.S)
        for name in re.findall(r"`((?:[A-Z]\w+\.)?_*[a-z]\w*)`", text)
    }
    assert [name for name in functions if not _is_there(ROOT, *name)] == []
    assert 20 < len(functions) <= 30
    assert len({name[:3] for name in functions}) <= 18


def test_the_loop_of_tensorflow_alone_imports_no_more_and_names_the_files_that_do_the_same():
    text = (ROOT / "examples" / "minimal.py").read_text(encoding="utf-8")
    assert re.findall(r"^ *(?:from|import) (\S+)", text, re.M) == ["numpy", "tensorflow"]
    files = paths_in(text)
    assert len(files) >= 8
    assert [name for name in files if not exists(name)] == []


def test_each_script_that_measures_is_listed_in_a_line():
    names = [line.split()[0] for line in benchmarks.__main__.lines()]
    assert {"bits", "faults", "plan_validation"} <= {*names}
    assert "markdown" not in names


def test_tests_that_docstrings_name_exist():
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    defined = {name for text in texts.values() for name in re.findall(r"^def (test_\w+)", text, re.M)}
    keras_methods = {"test_step"}
    named = {name for text in texts.values() for name in re.findall(r"`(test_\w+)`", text)} - keras_methods
    assert "test_masked_positions_count_on_no_replica" in named
    assert named - defined == set()


def test_names_in_docstrings_and_comments_exist():
    found = itertools.chain.from_iterable(
        ((path.relative_to(ROOT).as_posix(), name) for name in dotted_in(path.read_text(encoding="utf-8")))
        for path in SOURCES
        if path != pathlib.Path(__file__)  # names what is not there
    )
    assert [(path, name) for path, name in found if not _is_there(ROOT, *name.split("."))] == []


# What only a command line calls, and lines of benchmark mode.
COMMANDS = (
    "launchers/local.py",
    "ask/command.py",
    "prepare.py",
    "dashboard",
    "benchmark",
    "plan",
    "command_line/command_flags.py",
)


def test_errors_and_the_engine_name_no_flag():
    """They name settings as NAME=VALUE, whether a flag or a keyword sets them."""
    named = [
        (path.relative_to(ROOT).as_posix(), node.lineno, name)
        for path in SOURCES
        if path.is_relative_to(ROOT / "engine")
        or any(path.is_relative_to(ROOT / each) for each in ("input", "launch", "models", "parts", "runner"))
        if not any(path.is_relative_to(ROOT / top / each) for top in ("launch", "parts", "runner") for each in COMMANDS)
        for top in ([_tree(path)] if path.is_relative_to(ROOT / "engine") else _raised(_tree(path)))
        for node in ast.walk(top)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "crankshaft " not in node.value
        for name in re.findall(r"--(\w+)", node.value)
        if known(name, OF_TRAIN - {"help", "flagfile"})
    ]
    assert named == []


def _raised(tree: ast.Module) -> list[ast.Raise]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]


def test_what_is_not_there_is_found_missing():
    """Of the two tests above: they would pass, too, if they found nothing at all."""
    text = "`engine/state.py`, `state.py` and `tests/gone.py::test_it`; `engine.gone`, `engine.state.RULES`"
    assert {name for name in paths_in(text) if not exists(name)} == {"tests/gone.py"}
    assert dotted_in(text) == {"engine.gone", "engine.state.RULES"}
    assert not _is_there(ROOT, "engine", "gone")
    assert not _is_there(ROOT, "engine", "step", "context", "StepContext", "figures")
    assert _is_there(ROOT, "engine", "step", "context", "StepContext", "seed")


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    path = ROOT / name
    text = _FENCED.sub("", path.read_text(encoding="utf-8"))
    astray = []
    for link in _LINK.findall(text):
        target, _, anchor = link.partition("#")
        if target.startswith(("https://", "http://")):
            continue
        found = path.parent / target if target else path
        if not found.exists() or (anchor and anchor not in anchors(found.read_text(encoding="utf-8"))):
            astray.append(link)
    assert astray == []


def _long_cells(text: str) -> list[str]:
    """The cells of a page's tables, or lines of them, with more than two sentences, which also a semicolon ends."""
    rows = re.findall(r"^\|(.*)\|$", _FENCED.sub("", text), re.M)
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    plain = {part: re.sub(r"`[^`]*`", "code", part).strip() for cell in cells for part in cell.split("<br>")}
    return [part for part, words in plain.items() if len(re.findall(r"[.!?]\)? (?=[A-Z(\[]|code)|; ", words)) > 1]


@pytest.mark.parametrize("name", NAMES)
def test_a_pages_cells_have_at_most_two_sentences(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert _long_cells(text) == []
    assert "of which" not in " ".join(text.split())


def test_a_cell_of_three_sentences_is_found():
    assert _long_cells("| One; `two.` Two. | One. `Two` (a; b). Three. |\n") == [" One. `Two` (a; b). Three. "]
    assert _long_cells("| One; two; three |\n") == [" One; two; three "]
    assert not _long_cells("| `a`: one; two<br>`b`: one; two |\n")


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_flags_that_a_page_names_exist(path):
    text = path.read_text(encoding="utf-8")
    everywhere = set.union(OF_SCRIPTS, *OF_COMMAND.values())
    spans = re.findall(r"`(--[^`]+)`", _FENCED.sub("", text))
    lines = [words(command) for block in blocks(path) for command in block.commands()]
    lines += [words(span) for span in re.findall(r"`(crankshaft \w+ -[^`]*)`", text.replace("\n", " "))]
    wrong = [name for span in spans for name in flags_of(span.split()) if not known(name, everywhere)]
    wrong += [name for line in lines if len(line) > 1 for name in unknown(line)]
    assert wrong == []


def test_guides_build_as_a_site(tmp_path):
    """As `make docs` does it: a broken link, or a page that the navigation lacks, is an error."""
    build = pytest.importorskip("mkdocs.commands.build")
    config = pytest.importorskip("mkdocs.config")
    build.build(config.load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path / "site")))
    index = (tmp_path / "site" / "index.html").read_text()
    assert "The README</a>" not in index  # it has no page
    assert 'href="workers.html"' in index


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_a_block_that_is_a_file_is_introduced_by_its_name(path):
    """In the paragraph before it: a page shows no block's title."""
    text = path.read_text(encoding="utf-8")
    for before, title in re.findall(r'([^\n]*(?:\n[^\n]+)*)\n\n```\w+ title="([^"]+)"', text):
        assert f"`{title}`" in before, title


def test_pages_that_all_read_and_the_readmes_script_are_short():
    for page, most in (("README.md", 150), ("BUILD.md", 300)):
        assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= most
    (script,) = [block for block in blocks(README) if block.title]
    assert len(script.text.splitlines()) < 30
    assert "    main(" in script.text


def test_the_readme_begins_with_the_examples_step():
    def step(text: str) -> str:
        (found,) = (node for node in ast.walk(ast.parse(text)) if getattr(node, "name", "") == "train_step")
        found.body = found.body[ast.get_docstring(found) is not None :]
        return ast.unparse(found)

    first = blocks(README)[0]
    assert first.line < 20
    assert step(first.text) == step((ROOT / "examples" / "own_step.py").read_text(encoding="utf-8"))


def test_nothing_tells_anyone_to_install_the_other_crankshaft():
    """PyPI's project of that name is a library for Minecraft: ours is installed from its folder."""
    texts = [
        *SOURCES,
        *PAGES,
        *(ROOT / "examples").iterdir(),
        ROOT / "Makefile",
        ROOT / "tests" / "clusters" / "install.sh",
    ]
    other = re.compile(r"\binstall\b[^`\n]*[ '\"]crankshaft(?![\w.-])|\bcrankshaft\[\w+\]")
    found = {
        path.name: other.findall(path.read_text(encoding="utf-8"))
        for path in texts
        if path != ROOT / "tests" / "test_docs.py" and path.is_file()
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_each_line_of_what_must_hold_names_a_test_of_make_test(request):
    """But for the line of clusters. A run of some files checks the lines that name one of these."""
    in_make_test = request.config.stash[IN_MAKE_TEST]
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", page.partition("## What must hold")[2], re.M)[1:]
    assert len(rows) > 20
    for promise, cell in rows:
        folder, paths = "", []
        for name in re.findall(r"`([^`]+)`", cell):
            folder = name.rpartition("/")[0] if "/" in name else folder
            path = name if "/" in name or (ROOT / "tests" / name).exists() else f"{folder}/{name}"
            assert [*(ROOT / "tests").glob(path)], f"{promise}: {path} is not there"
            paths += [found for found in in_make_test if fnmatch.fnmatch(found, f"{path}*")]
        assert any(in_make_test[path] for path in paths) or not paths or cell == "`clusters/`", promise
