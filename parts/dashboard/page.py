"""The page: one HTML file with script, style and the charts' library inside, and its data or none."""

from __future__ import annotations

import base64
import hashlib
import html as markup
import json
import pkgutil
from typing import Any


def html(data: dict[str, Any] | None = None) -> str:
    """Returns the page with `data`, its server's answer to `/data`; without, it loads that alone, from there."""
    styles = [_asset("uPlot.min.css"), _asset("page.css")]
    scripts = [_asset("uPlot.iife.min.js"), _asset("page.js")]
    # Names in a record are anybody's: if one gets into the page as code, the browser runs none but these scripts.
    policy = (
        f"default-src 'none'; style-src {_hashes(styles)}; script-src {_hashes(scripts)}; img-src data:; "
        f"connect-src {'none' if data else 'self'!r}; base-uri 'none'; form-action 'none'"
    )
    # Data is never executed, and can't end its element, since it has no "<".
    held = json.dumps(data, separators=(",", ":")).replace("<", r"\u003c")
    return (
        _asset("page.html")
        .replace("%%policy%%", policy)
        .replace("%%styles%%", "".join(f"<style>{style}</style>" for style in styles))
        .replace("%%scripts%%", "".join(f"<script>{script}</script>" for script in scripts))
        .replace("%%data%%", held)
    )


class Shown:
    """A page with its data, for a notebook, which shows it below a cell in a frame of its own."""

    def __init__(self, data: dict[str, Any]):
        self.html = html(data)

    def _repr_html_(self) -> str:
        source = markup.escape(self.html)
        return f'<iframe srcdoc="{source}" sandbox="allow-scripts" width="100%" height="900"></iframe>'


def _asset(name: str) -> str:
    return (pkgutil.get_data(__package__, f"assets/{name}") or b"").decode()


def _hashes(texts: list[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
