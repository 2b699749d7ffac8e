"""Hooks of MkDocs for what lies outside docs/: links to it, and the package whose docstrings are the API reference."""

import pathlib
import posixpath
import re
import tempfile

from mkdocs.plugins import event_priority

_ROOT = pathlib.Path(__file__).parents[1]
_LINKS = tempfile.TemporaryDirectory()  # removed as the process ends
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)(?:#[^)\s]*)?\)")


@event_priority(100)  # before the plugin's own, which reads it
def on_config(config):
    """Shows mkdocstrings the package in a folder of its own: at the top of the repository it would read .venv too."""
    package = pathlib.Path(_LINKS.name, "crankshaft")
    package.mkdir(exist_ok=True)
    for name in ("__init__.py", "__init__.pyi", "engine", "input", "launch", "models", "parts", "runner"):
        if not (package / name).is_symlink():
            (package / name).symlink_to(_ROOT / name)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_LINKS.name]
    return config


def on_page_markdown(markdown: str, page, **_) -> str:
    """Returns the page's Markdown with links into docs/ alone: what is outside has no page on the site."""
    folder = posixpath.dirname(page.file.src_uri)

    def inside(link: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[1] if target.startswith("../") else link[0]

    return _LINK.sub(inside, markdown)
