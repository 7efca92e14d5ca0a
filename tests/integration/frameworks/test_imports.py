"""Imports of the parts for frameworks change nothing, and start no process group, also in a launched script."""

from __future__ import annotations

from tests.support.import_effects import OF_PSDIST, effects_of


def test_an_import_changes_nothing_more() -> None:
    assert effects_of(frameworks=True) == OF_PSDIST
