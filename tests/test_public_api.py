"""The public API does not change unnoticed."""

from __future__ import annotations

import difflib
import re

from tests.public_api import PATH, ROOT, public_api


def test_the_public_api_is_as_recorded() -> None:
    """If this fails on purpose, ``make api`` records the change. CONTRIBUTING.md says how a name may go."""
    recorded, found = PATH.read_text(), public_api()
    changes = list(
        difflib.unified_diff(recorded.splitlines(), found.splitlines(), "recorded", "found", lineterm="", n=0)
    )
    assert not changes, "the public API has changed; if this is meant, run make api:\n" + "\n".join(changes)


def test_names_that_went_since_the_last_release_are_in_the_changelog() -> None:
    def names(text: str) -> set[str]:
        return {re.match(r"(?:class )?([\w.]+)", line)[1] for line in text.splitlines()}  # type: ignore[index]

    gone = names((PATH.parent / "released-api.txt").read_text()) - names(PATH.read_text())
    gone = {name for name in gone if name.rpartition(".")[0] not in gone}  # Members go with their class.
    unreleased = (ROOT / "CHANGELOG.md").read_text().split("\n## [")[1]
    unnamed = {name for name in gone if name.rpartition(".")[2] not in unreleased}
    assert not unnamed, f"name them under Removed, with what replaces them: {', '.join(sorted(unnamed))}"
