"""Division of a model into layers: parameters that are loaded and freed together, and the modules that use them.

Modules on the meta device get their initial values one layer at a time (``Materializer``). Each tensor starts with a
value that no initialization produces, so that tensors left uninitialized are detected.

Invariants: Each trained parameter belongs to one layer, the first that contains it. A module that shares a tied weight
with another layer uses both layers. Tied parameters stay tied.

Not here: hooks (``passes``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from psdist.errors import InvalidArgumentError

#: Modules that use the parameters of their children without calling them.
_WHOLE: Final = (nn.MultiheadAttention,)


@dataclass(frozen=True)
class Part:
    """Layer before it has memory.

    title: name of the layer in the model; empty for parameters of the model itself.
    modules: modules of the layer.
    parameters: by name, without those of earlier parts.
    """

    title: str
    modules: tuple[nn.Module, ...]
    parameters: dict[str, nn.Parameter]


@dataclass(frozen=True)
class Use:
    """Module, and the numbers of the layers whose weights its forward pass needs."""

    module: nn.Module
    layers: tuple[int, ...]


def divide(
    model: nn.Module, trained: Mapping[str, nn.Parameter], layers: Sequence[nn.Module] | None
) -> tuple[list[Part], list[Use]]:
    """Return the parts of ``model`` in its order, and the modules that use them.

    trained: parameters by name.
    layers: modules that are loaded and freed as a whole. None: those of the ``ModuleList`` or ``Sequential`` with most
        of the parameters. Any other module with parameters of its own is a part.

    Raises InvalidArgumentError if ``layers`` contain each other or modules outside the model, and for a model of a
    single part.
    """
    chosen = _default_layers(model) if layers is None else _checked(model, layers)
    names = {parameter: name for name, parameter in trained.items()}
    owner: dict[nn.Parameter, int] = {}
    parts: list[Part] = []
    uses: list[Use] = []
    for title, module, is_whole in _modules(model, set(map(id, chosen))):
        mine = [one for one in module.parameters(recurse=is_whole) if one in names]
        new = [one for one in mine if one not in owner]
        if new:
            owner |= dict.fromkeys(new, len(parts))
            inner = tuple(module.modules()) if is_whole else (module,)
            parts.append(Part(title, inner, {names[one]: one for one in new}))
        if mine:
            uses.append(Use(module, tuple(sorted({owner[one] for one in mine}))))
    if len(parts) == 1:
        raise InvalidArgumentError(
            f"the model has one layer, {parts[0].title or type(model).__name__!r}, but offload() loads layers one "
            "after another. Use psdist.torch.DistributedOptimizer, or give smaller modules as layers="
        )
    return parts, uses


def _modules(model: nn.Module, chosen: set[int]) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the modules to divide into, in the model's order: name, module, and True if its children belong to it."""
    seen: set[int] = set()

    def walk(module: nn.Module, title: str) -> Iterator[tuple[str, nn.Module, bool]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        is_whole = id(module) in chosen or isinstance(module, _WHOLE)
        yield title, module, is_whole
        if not is_whole:
            for name, child in module.named_children():
                yield from walk(child, f"{title}.{name}" if title else name)

    yield from walk(model, "")


def _checked(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    names = {module: name for name, module in model.named_modules()}
    chosen = list(layers)
    for layer in chosen:
        if not isinstance(layer, nn.Module) or layer not in names:
            raise InvalidArgumentError(
                f"layers= contains {type(layer).__qualname__}, which is not a module of the model: give some of its "
                "modules, such as list(model.blocks)"
            )
    for layer in chosen:
        inner = {one for one in layer.modules() if one is not layer}
        if inside := next((one for one in chosen if one in inner), None):
            raise InvalidArgumentError(
                f"layers= contains {names[layer]!r} and {names[inside]!r}, which is a part of it: leave one of them out"
            )
    if not chosen:
        raise InvalidArgumentError("layers= is empty: give modules of the model, or leave it out")
    return chosen


def _default_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the deepest list or sequence with more than half of the parameters of its parent.

    Empty if the model contains no list.
    """
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList | nn.Sequential) and _size(one)]
    if not lists:
        return []
    best = max(lists, key=_size)
    while inner := [one for one in lists if one is not best and _is_in(one, best) and 2 * _size(one) > _size(best)]:
        best = max(inner, key=_size)
    return [one for one in best.children() if _size(one)]


def _is_in(one: nn.Module, other: nn.Module) -> bool:
    return any(module is one for module in other.modules())


def _size(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


Init = Callable[[nn.Module], Any]


class Materializer:
    """Creates tensors on ``device`` and initializes them.

    init: called with each module that has tensors of its own on the meta device. None calls the module's
        ``reset_parameters()``.
    """

    def __init__(self, device: torch.device, init: Init | None) -> None:
        self._device = device
        self._init = init
        #: New parameter of each replaced one.
        self.replaced: dict[Tensor, nn.Parameter] = {}

    def make(self, modules: Iterable[nn.Module]) -> None:
        """Create the meta tensors of these modules, without those of their children.

        Raises InvalidArgumentError for a module without an initialization, or one that leaves a tensor uninitialized.
        """
        for module in modules:
            if any(one.is_meta for one in (*module.parameters(False), *module.buffers(False))):
                self._make(module)

    def _make(self, module: nn.Module) -> None:
        before = {key: one for key, one in module._parameters.items() if one is not None and one.is_meta}
        made: dict[str, nn.Parameter] = {}
        for key, old in before.items():
            made[key] = module._parameters[key] = nn.Parameter(self._unset(old), old.requires_grad)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = self._unset(buffer)
        self._initialize(module)
        self._check(module)
        for key, old in before.items():
            # The first of several tied parameters wins, as if it had replaced the others when the model was made.
            module._parameters[key] = self.replaced.setdefault(old, made[key])

    def _unset(self, like: Tensor) -> Tensor:
        if not (like.dtype.is_floating_point or like.dtype in (torch.int32, torch.int64)):
            raise InvalidArgumentError(
                f"a tensor of dtype {like.dtype} is on the meta device, and psdist could not check its initialization: "
                "build its module with values"
            )
        return torch.full(like.shape, _sentinel(like.dtype), dtype=like.dtype, device=self._device)

    def _initialize(self, module: nn.Module) -> None:
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if self._init is None and reset is None:
            raise InvalidArgumentError(
                f"a {type(module).__name__} of the model is on the meta device, and has no reset_parameters(): give "
                "init=, a function that initializes the tensors of a module"
            )
        with torch.no_grad():
            if self._init is not None:
                self._init(module)
            else:
                assert reset is not None
                reset()

    def _check(self, module: nn.Module) -> None:
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            unset = tensor.isnan() if tensor.dtype.is_floating_point else tensor == _sentinel(tensor.dtype)
            if tensor.is_meta or bool(unset.any()):
                how = "init=" if self._init is not None else "reset_parameters()"
                raise InvalidArgumentError(
                    f"{key} of a {type(module).__name__} was on the meta device, and {how} left it uninitialized: give "
                    "an init= that sets all tensors of the module"
                )


def _sentinel(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
