"""Names of a pytree's leaves in a parameter set: the keys of a leaf's path, joined by dots.

``{"layers": [{"w": ...}]}`` has the leaf ``layers.0.w``, and a model's ``.layers[0].weight`` is ``layers.0.weight``. So
patterns of ``psdist.optim.override``, such as ``*.bias``, work as for a PyTorch model.

Invariant: Two leaves of one tree never get the same name. Within a key, dots, ``%`` and all characters that cannot be
printed are written as ``%`` and two hexadecimal digits for each byte, so dots separate keys and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import tree_util

from psdist.errors import InvalidArgumentError

#: Name of the only leaf of a tree that is just one array.
_ROOT = "value"

Path = tuple[Any, ...]


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return the names of the leaves at these paths of one tree.

    Flax's variables are nodes with one leaf, ``.value``: this last key is left out if all leaves have it.
    """
    if paths and all(path and path[-1] == tree_util.GetAttrKey("value") for path in paths):
        paths = [path[:-1] for path in paths]
    names = [".".join(map(_text, path)) or _ROOT for path in paths]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidArgumentError(
            f"two leaves of the tree have the name {twice!r}: use keys that differ as text, such as strings"
        )
    return names


def _text(key: Any) -> str:
    """Return one key of a path as a part of a name."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            key = getattr(key, attribute)
            break
    return "".join(map(_escaped, str(key))) or "%"  # An empty key. No other text is "%" alone.


def _escaped(character: str) -> str:
    if character.isprintable() and character not in ".%":
        return character
    return "".join(f"%{byte:02x}" for byte in character.encode("utf-8", "surrogatepass"))


def shown(path: Path) -> str:
    """Return a path as JAX shows it, for a message."""
    return tree_util.keystr(path) or "(the tree itself)"
