"""The page on errors and exit statuses matches the code."""

from __future__ import annotations

from pathlib import Path

from tests.error_reference import ERRORS, REMEDIES, page


def test_the_page_has_every_error_and_exit_status() -> None:
    path = Path(__file__).parents[2] / "docs" / "errors.md"
    assert path.read_text(encoding="utf-8") == page(), "run: python -m tests.error_reference > docs/errors.md"


def test_every_code_has_a_remedy() -> None:
    assert set(REMEDIES) == set(ERRORS)
