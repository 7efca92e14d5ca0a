"""The page of the metrics lists the catalog."""

from __future__ import annotations

from tests.metric_reference import PAGE, page


def test_the_page_has_what_the_catalog_declares() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.metric_reference"
