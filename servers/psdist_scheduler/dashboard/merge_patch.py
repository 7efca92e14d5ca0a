"""JSON merge patches (RFC 7396): the members of an object that changed, and null for those that are gone.

Pure. Lists are replaced as a whole. An object that is to be patched holds no null.
"""

from __future__ import annotations

from typing import Any

Tree = dict[str, Any]


def difference(before: Tree, after: Tree) -> Tree:
    """Return the patch that turns ``before`` into ``after``; empty if they are equal."""
    patch: Tree = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            if inner := difference(old, value):
                patch[name] = inner
        elif name not in before or old != value:
            patch[name] = value
    return patch


def without_nulls(tree: Tree) -> Tree:
    """Return ``tree`` without the members that are None, which a patch could not set."""
    return {
        name: without_nulls(value) if isinstance(value, dict) else value
        for name, value in tree.items()
        if value is not None
    }
