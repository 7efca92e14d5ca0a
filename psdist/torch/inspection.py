"""Inspection of a model: trained tensors, equalized ones, tensors that share memory, and buffers kept in snapshots.

Invariants: Names are those of ``model.named_parameters()`` without the prefix of ``torch.compile``. A tied weight
appears once, under its first name. The servers hold each tensor once: two tensors over the same elements would both be
written, and the last write would count alone. So equal ones are one tensor, and others that overlap are refused.

Each worker saves its own buffers and gets them back by rank when the run resumes. A snapshot of step S holds them from
the call that made push S - 1, after the forward pass of its batch.

Not here: values (``values``), gradients (``gradients``), changes of the model after it was wrapped (``writes``),
buffers shared by the workers (``data_parallel``).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Final, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from psdist.client.session.worker_state import DeferredArray
from psdist.client.sync_client import Client, Parameters
from psdist.errors import DTypeMismatchError, InvalidArgumentError
from psdist.snapshots.model_tensors import BUFFERS, DESCRIPTION, ModelDescription
from psdist.torch.values import from_bytes, is_plain, raw_bytes
from psdist.types import MasterDType

logger = logging.getLogger("psdist")

#: Dtypes of trained parameters, and the dtype in which servers compute for a model that has one of them.
DTYPES: Final[Mapping[torch.dtype, MasterDType]] = {
    torch.float32: "float32", torch.bfloat16: "float32", torch.float16: "float32", torch.complex64: "float32",
    torch.float64: "float64", torch.complex128: "float64",
}  # fmt: skip
#: Prefix that the module of ``torch.compile`` puts before names.
COMPILED: Final = "_orig_mod."


@dataclass(frozen=True)
class ModelTensors:
    """Tensors of a model, by name and in the model's order.

    trained: parameters that the servers train.
    fixed: all other parameters, and the buffers. Each worker keeps its own.
    aliases: by ``merge_shared``: further tensors that are the memory of one of these, and the name of that one.
    """

    trained: dict[str, nn.Parameter]
    fixed: dict[str, Tensor]
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Device of all trained parameters."""
        return next(iter(self.trained.values())).device

    @property
    def master_dtype(self) -> MasterDType:
        """Dtype in which the servers compute: float64 if a trained parameter has as many digits."""
        dtypes: set[MasterDType] = {DTYPES[parameter.dtype] for parameter in self.trained.values()}
        return "float64" if "float64" in dtypes else "float32"


def inspect(
    model: nn.Module,
    wanted: Iterable[nn.Parameter] | None = None,
    *,
    has_values: bool = True,
    with_frozen: bool = False,
) -> ModelTensors:
    """Return the tensors of ``model``.

    wanted: parameters of the model's optimizer; None for all with ``requires_grad``.
    has_values: False also accepts parameters on the meta device and on several devices.
    with_frozen: count frozen parameters of the optimizer as trained, because the script may unfreeze them. Those that
        servers cannot hold with the others stay fixed.

    Raises InvalidArgumentError for something that is no module, for a model without trained parameters, for parameters
    that are not the model's, on several devices, on the meta device, lazy or DTensors, and for parameters and buffers
    that cannot be written to; DTypeMismatchError for a dtype that cannot be trained.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"model is of type {type(model).__qualname__}: give a torch.nn.Module")
    # On a machine without a GPU a DataParallel only calls its module.
    is_parallel = isinstance(model, nn.DataParallel) and bool(model.device_ids)
    if is_parallel or isinstance(model, nn.parallel.DistributedDataParallel):
        raise InvalidArgumentError(f"the model is wrapped in {type(model).__name__}: give its .module")
    named = {name.replace(COMPILED, ""): parameter for name, parameter in model.named_parameters()}
    _check_whole({**named, **dict(model.named_buffers())})
    chosen = None if wanted is None else set(wanted)
    if chosen is not None:
        _check_known(chosen, named)
    trained = {
        name: parameter
        for name, parameter in named.items()
        if parameter.requires_grad and (chosen is None or parameter in chosen)
    }
    if not trained:
        raise InvalidArgumentError("the model has no parameter to train: all are frozen, or it has none")
    for name, parameter in trained.items():
        _check_trained(name, parameter, has_values=has_values)
    if has_values:
        _check_devices(trained)
    if with_frozen and chosen is not None:
        later = {name for name, one in named.items() if one in chosen and _may_be_unfrozen(one, trained)}
        trained = {name: one for name, one in named.items() if name in trained or name in later}
    fixed = fixed_tensors(model, trained)
    for name, tensor in fixed.items():
        if not isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
            _check_written(name, tensor, "buffer" if not isinstance(tensor, nn.Parameter) else "parameter")
    return ModelTensors(trained, fixed)


def merge_shared(model: nn.Module, tensors: ModelTensors, optimizer: torch.optim.Optimizer | None) -> ModelTensors:
    """Return ``tensors`` with those that are the same memory only once, and tie the trained ones of them. A frozen
    parameter that is the memory of a trained one is an alias of it.

    optimizer: as for ``tie``. Raises InvalidArgumentError for tensors that share parts of their memory.
    """
    learning = {name: one for name, one in tensors.trained.items() if one.requires_grad}
    aliases = find_aliases({**learning, **tensors.trained, **tensors.fixed})
    followers = {name for name, first in aliases.items() if name not in learning and first in learning}
    trained = {name: one for name, one in tensors.trained.items() if name not in followers}
    tie(model, trained, aliases, optimizer)
    return ModelTensors(
        {name: one for name, one in trained.items() if name not in aliases},
        {name: one for name, one in tensors.fixed.items() if name not in aliases},
        {name: first for name, first in aliases.items() if name not in trained},
    )


def _check_whole(tensors: Mapping[str, Tensor]) -> None:
    """Raise InvalidArgumentError for a tensor that torch divides among workers."""
    # Until the module is imported there is none.
    divided = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for name, tensor in tensors.items():
        if isinstance(tensor, divided):
            raise InvalidArgumentError(
                f"{name!r} is a DTensor, which torch divides among workers: the servers train whole tensors. Create a "
                "parameter set of the local parts by context.subset(ranks).client.parameters(), for the workers that "
                "hold the same part, as in examples/torch_hybrid.py; or keep an optimizer of torch"
            )


def _check_known(chosen: set[nn.Parameter], named: Mapping[str, nn.Parameter]) -> None:
    strangers = chosen - set(named.values())
    if strangers:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in list(strangers)[:4])
        raise InvalidArgumentError(
            f"the optimizer has {len(strangers)} parameters that are not the model's (of shapes {shapes}): give the "
            "model that they belong to, and make the optimizer after the last change of it"
        )


def _check_trained(name: str, parameter: nn.Parameter, *, has_values: bool) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise InvalidArgumentError(f"parameter {name!r} has no shape yet: run one forward pass before wrapping")
    if has_values and parameter.device.type == "meta":
        raise InvalidArgumentError(f"parameter {name!r} is on the meta device: move it by model.to_empty()")
    if parameter.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise DTypeMismatchError(
            f"parameter {name!r} has dtype {parameter.dtype}, which cannot be trained here: use one of {known}, or "
            "requires_grad_(False) for it",
            tensor=name,
            given=str(parameter.dtype),
        )
    _check_written(name, parameter, "parameter")


def _may_be_unfrozen(parameter: nn.Parameter, trained: Mapping[str, nn.Parameter]) -> bool:
    """Return True for a frozen parameter whose values servers can hold beside those of ``trained``."""
    device, dtypes = next(iter(trained.values())).device, {DTYPES[one.dtype] for one in trained.values()}
    if parameter.requires_grad or isinstance(parameter, nn.parameter.UninitializedParameter):
        return False
    if parameter.device != device or DTYPES.get(parameter.dtype) not in dtypes | {"float32"}:
        return False
    try:
        _check_written("", parameter, "parameter")
    except InvalidArgumentError:
        return False
    return bool(torch.isfinite(parameter.detach()).all())


def _check_written(name: str, tensor: Tensor, what: str) -> None:
    """Raise InvalidArgumentError for a tensor to which another worker's values cannot be written."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "is nested" if tensor.is_nested else f"has layout {tensor.layout} and dtype {tensor.dtype}"
        raise InvalidArgumentError(
            f"{what} {name!r} {kind}, and cannot be shared with other workers: use a dense one, or keep it in an "
            "attribute that is not registered"
        )
    if tensor.is_inference():
        raise InvalidArgumentError(
            f"{what} {name!r} was made under torch.inference_mode(), and cannot be written to: make the model elsewhere"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise InvalidArgumentError(
            f"{what} {name!r} is expanded, so several of its elements share memory: make it by clone()"
        )


def _check_devices(trained: Mapping[str, nn.Parameter]) -> None:
    first, reference = next(iter(trained.items()))
    for name, parameter in trained.items():
        if parameter.device != reference.device:
            raise InvalidArgumentError(
                f"parameter {first!r} is on {reference.device}, but {name!r} on {parameter.device}: move the model to "
                "one device"
            )


def fixed_tensors(model: nn.Module, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the parameters of ``model`` whose names are not in ``trained``, and its buffers, by name."""
    named = {name.replace(COMPILED, ""): parameter for name, parameter in model.named_parameters()}
    frozen: dict[str, Tensor] = {name: tensor for name, tensor in named.items() if name not in trained}
    buffers = {name.replace(COMPILED, ""): buffer for name, buffer in model.named_buffers()}
    return frozen | buffers


class ModelParameters:
    """Parameters of a model at the time it was wrapped, and the frozen ones among them.

    wanted: as for ``inspect``. Other parameters may be unfrozen, because the script does not expect them to be trained.
    trained: names of frozen parameters that may be unfrozen, because the servers hold them.

    Logs a warning for a SyncBatchNorm that synchronizes nothing.
    """

    def __init__(
        self, model: nn.Module, wanted: Iterable[nn.Parameter] | None = None, trained: Collection[str] = ()
    ) -> None:
        chosen = None if wanted is None else set(wanted)
        _warn_of_own_statistics(model)
        self._model = model
        self._all = list(model.parameters())
        self._frozen = {
            name: parameter
            for name, parameter in model.named_parameters()
            if not parameter.requires_grad
            and (chosen is None or parameter in chosen)
            and name.replace(COMPILED, "") not in trained
        }

    def check(self) -> None:
        """Raise InvalidArgumentError if parameters were added, removed, replaced or unfrozen since."""
        if set(map(id, self._model.parameters())) != set(map(id, self._all)):
            raise InvalidArgumentError(
                "parameters of the model were added, replaced or removed after it was wrapped: change the model first, "
                "then wrap it"
            )
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise InvalidArgumentError(
                    f"parameter {name!r} was unfrozen after the model was wrapped, and its gradients are ignored, "
                    "because the servers do not hold it: pass it to the optimizer of torch from the start, frozen, and "
                    "that to DistributedOptimizer; or change the model first, then wrap it, in a new run or under "
                    "another name="
                )


def _warn_of_own_statistics(model: nn.Module) -> None:
    """Warn that torch's SyncBatchNorm silently acts as a plain BatchNorm in a process without a process group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    found = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if found:
        logger.warning(
            "SyncBatchNorm %r (one of %d in the model) computes the statistics of each worker's own batches, as "
            "torch.distributed is not initialized: call torch.distributed.init_process_group('gloo') before wrapping a "
            "model that is on a GPU, or convert the model by psdist.torch.SyncBatchNorm after it",
            found[0].replace(COMPILED, ""), len(found),
        )  # fmt: skip


@dataclass(frozen=True)
class _Place:
    """Tensor and its memory: bytes ``start`` to ``stop`` of ``memory``."""

    name: str
    tensor: Tensor
    memory: str
    start: int
    stop: int


def find_aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the tensors that are the same memory as an earlier one, by name, each with the name of that one.

    Raises InvalidArgumentError for tensors that overlap otherwise: other elements, another order, or another dtype.
    """
    order = {name: number for number, name in enumerate(tensors)}
    aliases: dict[str, str] = {}
    reached: list[_Place] = []
    for place in sorted(_places(tensors), key=lambda one: (one.memory, one.start, order[one.name])):
        reached = [one for one in reached if one.memory == place.memory and one.stop > place.start]
        for other in reached:
            first, second = sorted((other, place), key=lambda one: order[one.name])
            if _is_same(first, second):
                aliases[second.name] = first.name
            elif _overlaps(first, second):
                _refuse(first, second)
        if place.name not in aliases:
            reached.append(place)
    return {name: aliases[name] for name in tensors if name in aliases}


def _places(tensors: Mapping[str, Tensor]) -> Iterable[_Place]:
    for name, tensor in tensors.items():
        if (
            isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer)
            or tensor.layout is not torch.strided
        ):
            continue
        if not tensor.numel():
            continue
        start, memory = tensor.data_ptr(), str(tensor.device)
        if tensor.device.type == "meta":  # No address: only tensors of one storage can overlap.
            memory += f" {tensor.untyped_storage()._cdata}"
            start = int(tensor.storage_offset()) * tensor.element_size()
        steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        yield _Place(name, tensor, memory, start, start + (1 + sum(steps)) * tensor.element_size())


def _is_same(one: _Place, other: _Place) -> bool:
    return one.start == other.start and _form(one.tensor) == _form(other.tensor)


def _form(tensor: Tensor) -> tuple[object, ...]:
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tensor.dtype, tensor.shape, strides


def _overlaps(one: _Place, other: _Place) -> bool:
    """True if two tensors whose ranges of memory overlap have bytes in common."""
    start = min(one.start, other.start)
    marks = torch.zeros(max(one.stop, other.stop) - start, dtype=torch.bool)
    _bytes_of(one, marks, start).fill_(True)
    return bool(_bytes_of(other, marks, start).any())


def _bytes_of(place: _Place, marks: Tensor, start: int) -> Tensor:
    size = place.tensor.element_size()
    strides = [stride * size for stride in place.tensor.stride()]
    return marks.as_strided([*place.tensor.shape, size], [*strides, 1], place.start - start)


def _refuse(one: _Place, other: _Place) -> NoReturn:
    raise InvalidArgumentError(
        f"{one.name!r} of shape {tuple(one.tensor.shape)} and {other.name!r} of shape {tuple(other.tensor.shape)} "
        "overlap in memory without being the same tensor, but the servers hold each on its own: give one of them "
        "memory of its own by clone(), or let the forward pass compute it from the other"
    )


def tie(
    model: nn.Module,
    trained: Mapping[str, nn.Parameter],
    aliases: Mapping[str, str],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Make each trained parameter that is the same memory as another one that parameter itself, as for tied weights.

    aliases: by ``find_aliases``. Frozen parameters and buffers follow the memory anyway, and stay.
    optimizer: loses the parameter that is replaced.

    Logs a warning, because an optimizer of torch would update the memory once for each of the two. Raises
    InvalidArgumentError, before it changes anything, if they are in different groups.
    """
    pairs = {name: first for name, first in aliases.items() if name in trained}
    groups = [] if optimizer is None else optimizer.param_groups
    for name, first in pairs.items():
        if _groups_with(trained[name], groups) != _groups_with(trained[first], groups):
            raise InvalidArgumentError(
                f"parameters {first!r} and {name!r} are the same memory, but not in the same parameter group: put both "
                "into one, or tie them by assigning the parameter itself instead of its .data"
            )
    for name, first in pairs.items():
        _replace(model, trained[name], trained[first])
        for group in groups:
            group["params"] = [one for one in group["params"] if one is not trained[name]]
    if pairs:
        name, first = next(iter(pairs.items()))
        logger.warning(
            "parameter %r is the memory of %r (one of %d such pairs): they are trained as one tied parameter, with the "
            "sum of their gradients. To tie them in the model, assign the parameter itself instead of its .data",
            name, first, len(pairs),
        )  # fmt: skip


def _groups_with(parameter: nn.Parameter, groups: list[dict[str, Any]]) -> list[int]:
    return [number for number, group in enumerate(groups) if any(one is parameter for one in group["params"])]


def _replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is old:
                setattr(module, key, new)


class BytesOfTensor(DeferredArray):
    """Bytes of a buffer, read when a snapshot needs them."""

    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.uint8)


class KeptBuffers:
    """Buffers in the ``state_dict`` of ``model``. A module may replace one by another of its shape.

    trained: names of the model's parameter sets.
    fixed: name of the parameter set of ``fixed_tensors``.
    fixed_tensors: frozen parameters and buffers by name.
    aliases: tensors that are the memory of others, and are not saved on their own: their names and those of the others.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Iterable[str],
        fixed: str,
        fixed_tensors: Mapping[str, Tensor],
        aliases: Mapping[str, str],
    ) -> None:
        buffers = {
            f"{prefix}.{key}".replace(COMPILED, "").removeprefix("."): (module, key)
            for prefix, module in model.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is not None and key not in module._non_persistent_buffers_set
        }
        buffers = {name: place for name, place in buffers.items() if name not in aliases}
        #: Owning module of each buffer, and the buffer's name in it.
        self._places = {name: (module, key) for name, (module, key) in buffers.items() if module._buffers[key].numel()}
        frozen = {name: tensor for name, tensor in fixed_tensors.items() if isinstance(tensor, nn.Parameter)}
        plain = [name for name, tensor in frozen.items() if is_plain(tensor) and tensor.numel()]
        encoded = {name: tensor for name, tensor in frozen.items() if name not in plain}
        encoded |= {name: module._buffers[key] for name, (module, key) in buffers.items()}
        self._description = ModelDescription(
            tuple(trained), fixed, tuple(plain),
            {name: _buffer_form(tensor) for name, tensor in encoded.items()}, _aliases(model, buffers, aliases),
        )  # fmt: skip
        self._description_bytes = len(self._description.to_bytes())
        self._is_needed = bool(fixed_tensors or self._description.aliases)
        self._is_restored = False

    def save_in_snapshots(self, client: Client, handle: Parameters) -> None:
        """Save the buffers in snapshots from now on, together with the pushes of ``handle``.

        In a resumed run the buffers become those that the snapshot holds for this rank. Logs a warning if it holds
        none.
        """
        if not self._is_needed:
            return
        handle.keep_state(self._save, self._restore, prefix=BUFFERS)
        if self._places and not self._is_restored and (client.joins_late(handle.name) or handle.restored):
            logger.warning(
                "buffers of %r (%s) start with their initial values instead of those at the run's current step: no "
                "snapshot holds buffers of this worker, or other workers, which have their own, were already training. "
                "Save the model of a worker that has trained from the beginning",
                handle.name, ", ".join(list(self._places)[:4]),
            )  # fmt: skip

    def _save(self) -> dict[str, DeferredArray]:
        state: dict[str, DeferredArray] = {DESCRIPTION: BytesOfTensor(self._description_bytes, self._describe)}
        for name in self._places:
            # On the buffer's device, so that only snapshots copy it from there.
            buffer = self._buffer(name).detach().clone()
            state[name] = BytesOfTensor(buffer.nbytes, partial(_copied_bytes, buffer))
        return state

    def _describe(self) -> NDArray[np.uint8]:
        now = {name: _buffer_form(self._buffer(name)) for name in self._places}
        return np.frombuffer(
            replace(self._description, encoded={**self._description.encoded, **now}).to_bytes(), np.uint8
        )

    def _buffer(self, name: str) -> Tensor:
        module, key = self._places[name]
        buffer: Tensor | None = module._buffers[key]
        assert buffer is not None
        return buffer

    def _restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Load buffers from a snapshot's state.

        Called again, on another thread, when the run rolls back to a snapshot.
        """
        for name in state.keys() & self._places.keys():
            buffer = self._buffer(name)
            # By ``data``, because a backward pass under way would refuse a change.
            buffer.data.copy_(from_bytes(state[name], buffer).view_as(buffer))
            self._is_restored = True


def _copied_bytes(buffer: Tensor) -> NDArray[Any]:
    return raw_bytes(buffer).copy()


def _buffer_form(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _aliases(model: nn.Module, buffers: Container[str], shared: Mapping[str, str]) -> dict[str, str]:
    """Return the other names under which a ``state_dict`` lists tensors.

    buffers: names of those saved one by one.
    shared: names of tensors that are the memory of others.
    """
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = {key: one for key, one in module._buffers.items() if key not in module._non_persistent_buffers_set}
        for key, tensor in [*module._parameters.items(), *own.items()]:
            name = f"{prefix}.{key}".replace(COMPILED, "").removeprefix(".")
            if tensor is None:
                continue
            other = shared.get(name) or first.setdefault(id(tensor), name)
            if other != name and name not in buffers:
                aliases[name] = other
    return aliases
