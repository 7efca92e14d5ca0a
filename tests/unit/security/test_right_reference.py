"""The list of calls in ``docs/roles.md`` matches the code."""

from __future__ import annotations

from tests.right_reference import PAGE, page


def test_the_page_has_every_call_and_every_role() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.right_reference"
