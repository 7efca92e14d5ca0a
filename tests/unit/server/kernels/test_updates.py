"""The fused updates are those that ``tests.kernel_wrappers`` writes."""

from __future__ import annotations

from tests import kernel_wrappers


def test_updates_are_current() -> None:
    assert kernel_wrappers.TARGET.read_text(encoding="utf-8") == kernel_wrappers.generated(), (
        "run python -m tests.kernel_wrappers"
    )
