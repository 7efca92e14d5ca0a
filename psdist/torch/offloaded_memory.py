"""Division of an offloaded model into layers, and memory for their weights and gradients while they are used.

**Weights.** Only a few layers are loaded at a time. A layer's weights have the same address whenever they are loaded,
because autograd keeps views of them from the forward to the backward pass. On Linux the pages behind these addresses
move from a finished layer to the next one. The system would have to clear fresh pages, twice per layer and step.

**Freed parameters.** An offloaded parameter stays the same Python object, because modules, optimizers and autograd
refer to it. While its layer is not in use, torch's kernels would read an arbitrary address. Its class is therefore
replaced during that time, so that torch asks this module before each operation.

**Gradients.** Layers of equal size take turns with one memory, so that it is not reallocated for each layer. A push
reads it until it is answered, and the next layer's first gradient waits for that. A second place would shorten this
wait if servers are slow, but it would exist during the whole backward pass: 4 % of a model of 24 layers.

Invariants: Of the layers that are not loaded, at most one has pages, which the next layer takes. An access to the
addresses of a layer that is not loaded faults and reads nothing.

**Layers.** Modules on the meta device get their initial values one layer at a time (``Materializer``). Each tensor
starts with a value that no initialization produces, so that tensors left uninitialized are detected.

Invariants: Each trained parameter belongs to one layer, the first that contains it. A module that shares a tied weight
with another layer uses both layers. Tied parameters stay tied.

Not here: content and time of loading (``offloaded_layer``), hooks and waits for turns (``offloaded_passes``).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from psdist.client.sync_client import Parameters
from psdist.errors import InvalidArgumentError, LimitExceededError

_MREMAP_MAYMOVE: Final = 1
_MREMAP_FIXED: Final = 2
_MREMAP_DONTUNMAP: Final = 4
_PROT_NONE: Final = 0
_HUGE_PAGE_BYTES: Final = 2 << 20


class LayerMemory(Protocol):
    """Memory of one layer. storage: uint8, shared by its parameters."""

    storage: torch.UntypedStorage

    def acquire(self) -> None:
        """Allocate the memory. Its content is undefined."""

    def release(self) -> None:
        """Free the memory. Does nothing if there is none."""

    def close(self) -> None:
        """Free the memory, which no other layer needs."""

    def array(self) -> NDArray[np.uint8] | None:
        """Return the memory as a numpy array while it is allocated; None if numpy cannot access it."""


class ResizedStorage:
    """Storage of ``size`` bytes on ``device``, allocated by torch. It has memory at first."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.storage = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        self._size = size

    def acquire(self) -> None:
        """See ``LayerMemory``."""
        self.storage.resize_(self._size)

    def release(self) -> None:
        """See ``LayerMemory``."""
        self.storage.resize_(0)

    def close(self) -> None:
        """See ``LayerMemory``."""
        self.release()

    def array(self) -> NDArray[np.uint8] | None:
        """See ``LayerMemory``.

        Made from the address, because a storage that torch itself has exported to numpy cannot be resized any more.
        """
        if self.storage.device.type != "cpu":
            return None
        memory = (ctypes.c_uint8 * self._size).from_address(self.storage.data_ptr())
        memory.storage = self.storage  # type: ignore[attr-defined]  # keeps the storage alive
        return np.ctypeslib.as_array(memory)


class PagePool:
    """Pages that the layers of a model use in turn. Linux only: see ``is_supported``."""

    def __init__(self) -> None:
        #: Finished region that still has its pages.
        self._spare: MovedPages | None = None

    def take_over(self, region: MovedPages) -> None:
        """Move the spare pages to ``region``, as far as they suffice."""
        spare, self._spare = self._spare, None
        if spare is not None and spare is not region:
            spare.move_to(region)

    def leave(self, region: MovedPages) -> None:
        """Make the pages of ``region`` spare. Earlier spare pages are returned to the system."""
        self.drop()
        self._spare = region

    def drop(self) -> None:
        """Return the spare pages to the system."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.drop_pages()


class MovedPages:
    """Fixed addresses for ``size`` bytes, with pages of ``pool`` while they are allocated.

    ``acquire`` and ``release`` raise LimitExceededError if the system allows no more mappings.
    """

    def __init__(self, size: int, pool: PagePool) -> None:
        self._pool = pool
        self._is_here = False
        #: Size, rounded up to whole pages.
        self.bytes = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        # Whole huge pages of addresses: each moves by one entry of a page table.
        memory = mmap.mmap(-1, self.bytes + _HUGE_PAGE_BYTES, flags)
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.address = -(-first // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self._array: NDArray[np.uint8] = np.frombuffer(memory, np.uint8, size, self.address - first)
        #: Keeps the addresses as long as any tensor refers to it.
        self.storage = torch.from_numpy(self._array).untyped_storage()
        huge = self.bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if huge:
            _library().madvise(self.address, huge, mmap.MADV_HUGEPAGE)
        self._protect(_PROT_NONE)

    def acquire(self) -> None:
        """See ``LayerMemory``."""
        if not self._is_here:
            self._pool.take_over(self)
            self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
            self._is_here = True

    def release(self) -> None:
        """See ``LayerMemory``."""
        if self._is_here:
            self._is_here = False
            self._protect(_PROT_NONE)
            self._pool.leave(self)

    def close(self) -> None:
        """See ``LayerMemory``."""
        self.release()
        self._pool.drop()

    def array(self) -> NDArray[np.uint8]:
        """See ``LayerMemory``."""
        return self._array

    def move_to(self, other: MovedPages) -> None:
        """Move the pages to the addresses of another region, and drop the pages that it had.

        Pages beyond the other region's size return to the system; all pages do if the system cannot move them.
        """
        how = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
        size = min(self.bytes, other.bytes)
        _library().mremap(self.address, size, size, how, other.address)
        self.drop_pages()

    def drop_pages(self) -> None:
        """Return all pages to the system."""
        _library().madvise(self.address, self.bytes, mmap.MADV_DONTNEED)

    def _protect(self, protection: int) -> None:
        if _library().mprotect(self.address, self.bytes, protection):
            reason = os.strerror(ctypes.get_errno())
            raise LimitExceededError(
                f"the memory of a layer of {self.bytes} bytes cannot be mapped or unmapped: {reason}. Each layer needs "
                "up to three mappings of the process; vm.max_map_count limits them"
            )


def is_supported() -> bool:
    """True if the system can move pages."""
    return sys.platform == "linux" and hasattr(_library(), "mremap")


@cache
def _library() -> Any:
    """Load the C library's calls, with addresses as whole words."""
    library = ctypes.CDLL(None, use_errno=True)
    word = ctypes.c_size_t
    for name, arguments in (
        ("mprotect", [word, word, ctypes.c_int]),
        ("madvise", [word, word, ctypes.c_int]),
        ("mremap", [word, word, word, ctypes.c_int, word]),
    ):
        if hasattr(library, name):
            getattr(library, name).argtypes = arguments
            getattr(library, name).restype = word if name == "mremap" else ctypes.c_int
    return library


#: Operations that need no values.
_ALLOWED: Final = frozenset(
    [
        *(
            getattr(Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn"),
                *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes"),
                *("_version", "_backward_hooks", "_post_accumulate_grad_hooks"),
            )
        ),
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.stride,
        Tensor.element_size,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.__len__,
        Tensor.register_hook,
        Tensor.register_post_accumulate_grad_hook,
    ]
)
#: Operations that are allowed until the gradient was taken.
_GRADIENT: Final = frozenset(
    [
        Tensor.grad.__get__,  # type: ignore[union-attr]  # a descriptor, which torch's stubs show as a tensor
        Tensor.grad.__set__,  # type: ignore[union-attr]  # as above
    ]
)


class FreedParameter(nn.Parameter):
    """Parameter whose layer is not in use: it has a shape and no values.

    Every operation that needs values raises InvalidArgumentError, and so does its gradient once it was taken.
    """

    #: Name of the parameter, for messages.
    psdist_name: str
    #: Names of the layer's parameters whose gradients of this step were taken.
    psdist_taken: AbstractSet[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` if it is allowed. torch calls this in place of ``func``."""
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _GRADIENT:
            return args[0]._psdist_gradient(func, args)
        raise InvalidArgumentError(
            f"{getattr(func, '__name__', func)} was called with parameter {_name_in(args, kwargs)}, whose values are "
            "on the servers: they are in memory only during the forward and backward pass of its layer. If another "
            "module uses it, give that module in layers= of offload(); weights() of the optimizer returns all values"
        )

    def _psdist_gradient(self, func: Any, args: Any) -> Any:
        if self.psdist_name in self.psdist_taken:
            raise InvalidArgumentError(
                f"the gradient of parameter {self.psdist_name!r} was sent to the servers in the backward pass: it "
                "cannot be read, clipped, unscaled or cleared before step(). Clipping and a GradScaler need the "
                "gradients of all layers at the same time: use DistributedOptimizer, with max_grad_norm= to clip, or "
                "overlap=False for a scaler. After a failed backward pass call zero_grad() of the optimizer"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args)

    def __repr__(self) -> str:  # type: ignore[override]  # same signature as nn.Parameter
        return f"<offloaded parameter {self.psdist_name!r} of shape {tuple(self.shape)}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise InvalidArgumentError(
            f"parameter {self.psdist_name!r} is offloaded, and cannot be copied: copy the model before offload()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidArgumentError(
            f"parameter {self.psdist_name!r} is offloaded, and cannot be saved: `psdist snapshot export` writes the "
            "weights of a snapshot to a file"
        )


def _name_in(args: Any, kwargs: Any) -> str:
    leaves = tree_leaves((args, kwargs))
    return ", ".join(repr(one.psdist_name) for one in leaves if isinstance(one, FreedParameter)) or "of some layer"


def mark_freed(parameter: nn.Parameter, name: str, taken: AbstractSet[str]) -> None:
    """Mark a parameter as one without values.

    taken: names of the parameters whose gradients cannot be read; the set may change.
    """
    parameter.psdist_name = name  # type: ignore[attr-defined]  # the class that it gets now has it
    parameter.psdist_taken = taken  # type: ignore[attr-defined]  # as above
    parameter.__class__ = FreedParameter


def mark_present(parameter: nn.Parameter) -> None:
    """Mark a parameter as one with values again."""
    parameter.__class__ = nn.Parameter


def drop_gradient(parameter: nn.Parameter) -> None:
    """Clear the gradient, even if it was taken."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = None


class PlaceUser(Protocol):
    """Layer that puts its gradients into a place."""

    handle: Parameters
    parameters: dict[str, nn.Parameter]
    place: GradientPlace


class GradientPlace:
    """Memory for the gradients of one layer, or of several that take turns."""

    def __init__(self, *, is_shared: bool) -> None:
        self.is_shared = is_shared
        #: Layer whose gradients are in the memory.
        self.holder: PlaceUser | None = None
        #: Gradients by name.
        self._buffers: dict[str, Tensor] = {}
        #: True if it was written to in this step.
        self.is_used = False

    def buffer(self, layer: PlaceUser, name: str) -> Tensor:
        """Return the memory of one gradient of ``layer``. Starts the layer's turn; no other layer may have one."""
        if self.holder is None:
            arrays = layer.handle.gradient_buffers(is_checked=False)
            self._buffers = {key: torch.from_numpy(one) for key, one in arrays.items()}
            self.holder, self.is_used = layer, True
        assert self.holder is layer, "the place has gradients of another layer"
        return self._buffers[name]

    def leave(self, layer: PlaceUser) -> None:
        """End the turn of ``layer``, if it has one."""
        if self.holder is layer:
            self.holder, self._buffers = None, {}


def take_turns(layers: Sequence[PlaceUser]) -> None:
    """Let layers of equal size share one place, if servers read their gradients in place.

    Otherwise each layer uses memory of this process, which is cheaper to allocate.
    """
    for layer in layers:
        layer.handle.share_gradient_memory(None)  # It may have been a layer of another model.
    layers[0].handle.gradient_buffers()  # Connects to the servers.
    layers[0].handle.release_memory()
    if layers[0].handle.statistics().transport != "shm":
        return
    by_size: dict[int, list[PlaceUser]] = {}
    for layer in layers:
        by_size.setdefault(sum(one.numel() for one in layer.parameters.values()), []).append(layer)
    for alike in by_size.values():
        place = GradientPlace(is_shared=len(alike) > 1)
        for layer in alike:
            layer.handle.share_gradient_memory(alike[0].handle)
            layer.place = place


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
