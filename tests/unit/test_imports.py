"""Imports change nothing: no thread, socket, child, variable or handler comes of one, also in a launched script."""

from __future__ import annotations

from tests.support.import_effects import OF_PSDIST, effects_of


def test_an_import_changes_nothing_but_grpcs_settings() -> None:
    assert effects_of(frameworks=False) == OF_PSDIST
