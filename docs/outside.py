"""A hook of MkDocs: what lies outside docs/ has no page on the site, so a link to it becomes its text alone."""

import posixpath
import re

_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page, **_) -> str:
    """The page's Markdown with links into docs/ alone."""
    folder = posixpath.dirname(page.file.src_uri)

    def inside(link: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[1] if target.startswith("../") else link[0]

    return _LINK.sub(inside, markdown)
