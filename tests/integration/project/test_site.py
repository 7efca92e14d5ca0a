"""The site of the documents: strict, readable on a phone, and with a search that finds guides first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.perfetto_page import CHROMIUM, served

ROOT = Path(__file__).resolve().parents[3]
#: Words of code that are broken inside, and whatever is wider than the window.
_FAULTS = """() => {
    const root = document.documentElement, found = [];
    if (root.scrollWidth > root.clientWidth) found.push(`the page is ${root.scrollWidth} pixels wide`);
    for (const table of document.querySelectorAll('.md-content table:not([class])')) {
        const box = table.closest('.md-typeset__scrollwrap');
        if (!box || getComputedStyle(box).overflowX !== 'auto') found.push('a table has no box that scrolls');
    }
    for (const word of document.querySelectorAll('.md-content .whole')) {
        if (word.getClientRects().length > 1) found.push(`${word.textContent} is broken`);
    }
    return found;
}"""


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=source, env=environ, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs mkdocs-material")
    target = tmp_path_factory.mktemp("site")
    built = build(ROOT, target)
    assert built.returncode == 0, built.stderr
    return target


@pytest.fixture(scope="module")
def browser(site: Path) -> Iterator[tuple[str, Any]]:
    """The site's address and a browser."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with ExitStack() as stack:
        address = stack.enter_context(served(site)).rsplit("/", 1)[0]
        playwright = stack.enter_context(sync_api.sync_playwright())
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        stack.callback(launched.close)
        yield address, launched


def test_no_page_is_wider_than_a_phone(site: Path, browser: tuple[str, Any]) -> None:
    address, launched = browser
    page = launched.new_page(viewport={"width": 360, "height": 800})
    names = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html")
    assert len(names) > 40
    faults = {}
    for name in names:
        page.goto(f"{address}/{name}")
        page.wait_for_function("!document.querySelector('.md-content table:not([class])')"
                               " || document.querySelector('.md-typeset__scrollwrap')")  # fmt: skip
        if found := page.evaluate(_FAULTS):
            faults[name] = found
    assert faults == {}
    page.evaluate("document.querySelector('.md-content__inner').insertAdjacentHTML("
                  "'beforeend', '<div style=\"width: 400px\"><table></table></div>')")  # fmt: skip
    assert len(page.evaluate(_FAULTS)) == 2


@pytest.mark.parametrize(
    ("words", "first"),
    [("snapshot", "snapshots"), ("compression", "compression"), ("metrics", "metrics"), ("resume", "snapshots"),
     ("kubernetes", "kubernetes"), ("token", "roles")],
)  # fmt: skip
def test_the_search_finds_a_guide_first(browser: tuple[str, Any], words: str, first: str) -> None:
    address, launched = browser
    page = launched.new_page(viewport={"width": 1280, "height": 800})
    page.goto(f"{address}/index.html")
    page.click(".md-search__input")
    page.fill(".md-search__input", words)
    found = page.wait_for_selector(".md-search-result__item > a").get_attribute("href")
    assert found.split("?")[0].split("#")[0] == f"{address}/{first}.html"


@pytest.mark.long  # Builds the site again.
def test_a_page_in_no_navigation_is_noticed(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs mkdocs-material")
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", ".*_cache", "__pycache__", ".site"))
    (copy / "docs/stray.md").write_text("# A page\n")
    built = build(copy, tmp_path / "site")
    assert built.returncode != 0 and "stray.md" in built.stderr
