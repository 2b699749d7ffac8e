"""The pages agree with the project: links lead somewhere, flags that are named exist, and every flag has its row.

Nothing here starts TensorFlow."""

from __future__ import annotations

import re

import pytest

from crankshaft.launch import local
from crankshaft.launch.benchmark import standard
from crankshaft.launch.command_line.flags import GROUPS
from tests.pages import GUIDES, PAGES, README, ROOT, blocks, words

NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]
OF_TRAIN = {name for names in GROUPS.values() for name in names} | {"flagfile", "help", "helpshort"}
OF_COMMAND = {"train": OF_TRAIN, "local": set(local.FLAGS), "benchmark": set(standard.FLAGS), "report": set()}
# Of the scripts that compare.
OF_SCRIPTS = {
    name
    for path in (ROOT / "benchmarks").glob("*.py")
    for name in re.findall(r'add_argument\("--(\w+)"', path.read_text(encoding="utf-8"))
}
_FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """Of a page's titles, as GitHub and MkDocs make them."""
    titles = re.findall(r"^#+ (.*)$", _FENCED.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def flags_of(line: list[str]) -> list[str]:
    """The names of the flags among a command's words."""
    return [re.match(r"--?([\w]*)", word)[1] for word in line if word.startswith("-") and word != "--"]


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


def test_flags_page_has_every_flag():
    rows = set(re.findall(r"^\| `--(\w+)` \|", (ROOT / "docs" / "flags.md").read_text(), re.M))
    assert rows == {name for names in OF_COMMAND.values() for name in names} - {"flagfile", "help", "helpshort"}


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


def test_readme_and_its_script_are_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150
    (script,) = [block for block in blocks(README) if block.title]
    assert len(script.text.splitlines()) < 30
    assert "    main(" in script.text
