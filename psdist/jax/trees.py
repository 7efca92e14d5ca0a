"""Conversion between pytrees of JAX arrays and named numpy arrays.

Leaves on the CPU become numpy views of JAX's own memory. Arrays from psdist are copied once, into memory that belongs
to the new JAX array alone, because the next step overwrites them.

A leaf's name in a parameter set is the keys of its path, joined by dots: ``{"layers": [{"w": ...}]}`` has the leaf
``layers.0.w``, and a model's ``.layers[0].weight`` is ``layers.0.weight``. So patterns of ``psdist.optim.override``,
such as ``*.bias``, work as for a PyTorch model.

Invariant: Two leaves of one tree never get the same name. Within a key, dots, ``%`` and all characters that cannot be
printed are written as ``%`` and two hexadecimal digits for each byte, so dots separate keys and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax import tree_util
from numpy.typing import NDArray

from psdist.errors import DTypeMismatchError, InvalidArgumentError
from psdist.types import MasterDType

#: The dtypes of leaves.
_DTYPES: Final = ("float32", "bfloat16", "float16", "float64")
#: Alignment at which JAX's CPU backend takes memory without a copy, in bytes.
_ALIGNMENT: Final = 64
_ARRAYS_ONLY: Final = (
    "Give a tree of floating-point arrays, such as equinox.filter(model, equinox.is_inexact_array), or flax's "
    "nnx.state(model, nnx.Param)"
)


class LeafForm(NamedTuple):
    """Dtype and placement of a leaf. sharding: None for JAX's default device."""

    dtype: np.dtype[Any]
    sharding: Any


class Leaves(NamedTuple):
    """Checked leaves of a tree, in order."""

    paths: list[Path]
    values: list[Any]
    structure: Any


def leaves_of(tree: Any, call: str) -> Leaves:
    """Return the leaves of a tree of floating-point arrays.

    call: the function that got the tree, for messages.

    Raises InvalidArgumentError for a tree without leaves, for leaves that are no arrays or that other processes hold
    a part of, and inside ``jax.jit``; DTypeMismatchError for dtypes other than float32, bfloat16, float16 and, if JAX
    has it enabled, float64.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    if not pairs:
        raise InvalidArgumentError(f"{call}: the tree has no leaves. {_ARRAYS_ONLY}")
    for path, value in pairs:
        _check_leaf(path, value, call)
    return Leaves([path for path, _ in pairs], [value for _, value in pairs], structure)


def _check_leaf(path: Path, value: Any, call: str) -> None:
    if isinstance(value, jax.core.Tracer):
        raise InvalidArgumentError(
            f"{call}: leaf {shown(path)} is a tracer. This call talks to servers, so it cannot be inside jax.jit, "
            "jax.grad, jax.vmap or a scan: call it with the results of the jitted function"
        )
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise InvalidArgumentError(
            f"{call}: leaf {shown(path)} is of type {type(value).__name__} and not an array. {_ARRAYS_ONLY}"
        )
    _check_dtype(path, value.dtype, call)
    if isinstance(value, jax.Array) and value.is_deleted():
        raise InvalidArgumentError(
            f"{call}: leaf {shown(path)} was deleted, because a jitted function got it by donate_argnums. Give the "
            "function's result instead"
        )
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        raise InvalidArgumentError(
            f"{call}: leaf {shown(path)} is on devices of several processes ({value.sharding}). psdist connects the "
            "processes by itself: do not call jax.distributed.initialize(), and give arrays on this process's devices"
        )


def _check_dtype(path: Path, dtype: Any, call: str) -> None:
    if str(dtype) not in _DTYPES:
        text = f"but only {', '.join(_DTYPES)} are trained. {_ARRAYS_ONLY}"
    elif dtype == np.float64 and not jax.config.jax_enable_x64:
        text = "and JAX would return float32: cast it to float32, or set jax_enable_x64"
    else:
        return
    raise DTypeMismatchError(f"{call}: leaf {shown(path)} has dtype {dtype}, {text}", tensor=shown(path), given=dtype)


class TreeForm:
    """Structure of a tree, with name, shape, dtype and placement of each leaf. Other trees are compared with it."""

    def __init__(self, tree: Any, call: str) -> None:
        leaves = leaves_of(tree, call)
        self._structure = leaves.structure
        self._paths = leaves.paths
        self.names = names_of(leaves.paths)
        self.shapes = [value.shape for value in leaves.values]
        self._leaves = [_leaf_of(value) for value in leaves.values]

    @property
    def master_dtype(self) -> MasterDType:
        """Dtype in which servers compute: float64 if a leaf has it."""
        return "float64" if any(leaf.dtype == np.float64 for leaf in self._leaves) else "float32"

    def arrays(self, tree: Any, call: str) -> dict[str, NDArray[Any]]:
        """Return the leaves of a tree with this structure by name, on the host.

        Raises InvalidArgumentError for another structure or shape; and as ``leaves_of``.
        """
        leaves = leaves_of(tree, call)
        if leaves.structure != self._structure:
            raise InvalidArgumentError(
                f"{call}: the tree has another structure than before: {self._difference(leaves)}"
            )
        for path, value, shape in zip(leaves.paths, leaves.values, self.shapes, strict=True):
            if value.shape != shape:
                raise InvalidArgumentError(f"{call}: leaf {shown(path)} has shape {value.shape}, expected {shape}")
        # Starts all transfers from devices before it waits for the first one.
        return dict(zip(self.names, map(np.asarray, jax.device_get(leaves.values)), strict=True))

    def _difference(self, leaves: Leaves) -> str:
        mine, theirs = list(map(shown, self._paths)), list(map(shown, leaves.paths))
        if missing := next((path for path in mine if path not in theirs), None):
            return f"leaf {missing} is missing. Give a tree like the one before, or another name= for another tree"
        if unknown := next((path for path in theirs if path not in mine), None):
            return f"leaf {unknown} is new. Give a tree like the one before, or another name= for another tree"
        return "the leaves are the same, but their containers are not. Give the same types as before"

    def tree(self, arrays: Mapping[str, NDArray[Any]], like: TreeForm | None = None) -> Any:
        """Return a tree of JAX arrays with copies of ``arrays``, which may change afterwards.

        like: form whose dtypes and placements the leaves get; None for this form's.
        """
        wanted = self._leaves if like is None else like._leaves
        leaves = [_to_jax(arrays[name], leaf) for name, leaf in zip(self.names, wanted, strict=True)]
        return jax.tree_util.tree_unflatten(self._structure, leaves)


def _leaf_of(value: Any) -> LeafForm:
    is_placed = isinstance(value, jax.Array) and value.committed
    return LeafForm(np.dtype(value.dtype), value.sharding if is_placed else None)


def _to_jax(array: NDArray[Any], leaf: LeafForm) -> jax.Array:
    copy = _aligned(array.shape, leaf.dtype)
    with np.errstate(over="ignore"):
        copy[...] = array
    return jax.device_put(copy) if leaf.sharding is None else jax.device_put(copy, leaf.sharding)


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return new memory that JAX's CPU backend takes over without another copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


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
