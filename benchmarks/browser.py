"""A page in a headless Chromium, by Playwright: for what looks at `crankshaft monitor` as people do."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def program() -> str | None:
    """Returns the browser's path, if one is installed."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


@contextlib.contextmanager
def chromium() -> Iterator:
    """Yields a Playwright browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Its sandbox needs rights that containers do not give; the pages are ours.
        browser = playwright.chromium.launch(executable_path=program(), args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def monitor(*arguments: object) -> Iterator[str]:
    """Yields the link of `crankshaft monitor` with these arguments, a process that ends with the block."""
    command = [sys.executable, "-m", "crankshaft", "monitor", "--port=0", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().split()[0]
        finally:
            process.terminate()
