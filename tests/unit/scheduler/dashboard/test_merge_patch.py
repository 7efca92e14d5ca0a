"""Merge patches: every change of a tree arrives."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from psdist_scheduler.dashboard.run_state import difference, without_nulls

TREES = st.recursive(
    st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from(["a", "b", "c", "__proto__"]), inner, max_size=4),
).filter(lambda tree: isinstance(tree, dict))


def apply(target: Any, patch: dict[str, Any]) -> dict[str, Any]:
    """Apply a patch as RFC 7396 says."""
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = apply(result.get(name), value) if isinstance(value, dict) else value
    return result


@given(TREES, TREES)
def test_a_patch_leads_from_one_tree_to_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert apply(before, difference(before, after)) == after


@given(TREES)
def test_nothing_changes_without_a_change(tree: dict[str, Any]) -> None:
    assert difference(tree, tree) == {}


def test_only_what_changed_is_in_a_patch() -> None:
    before = {"a": {"x": 1, "y": [1, 2]}, "b": 1, "c": {"z": 1}}
    assert difference(before, {"a": {"x": 2, "y": [1, 2]}, "b": 1}) == {"a": {"x": 2}, "c": None}


def test_nulls_are_left_out() -> None:
    assert without_nulls({"a": None, "b": {"c": None, "d": 0}, "e": [None]}) == {"b": {"d": 0}, "e": [None]}
