"""The browser that tests of the page share; they are skipped where there is none."""

from __future__ import annotations

import pytest

from benchmarks import browser
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def chromium():
    pytest.importorskip("playwright", reason="playwright is not installed; pip install playwright")
    if browser.program() is None:
        pytest.skip("no Chromium is installed; make browser")
    with browser.chromium() as running:
        yield running


@pytest.fixture
def opened(chromium):
    """`opened(link, **how)`: a page of the browser, in a context of its own; `opened.errors` are all pages' scripts'
    errors, and what their policy forbids."""
    contexts = []

    def open_page(link: str, **how):
        context = chromium.new_context(**how)
        contexts.append(context)
        context.set_default_timeout(PATIENCE * 1000)
        page = context.new_page()
        page.on("pageerror", lambda error: open_page.errors.append(str(error)))
        page.on("console", lambda message: open_page.errors.append(message.text) if message.type == "error" else None)
        page.goto(link)
        return page

    open_page.errors = []
    yield open_page
    for context in contexts:
        context.close()
