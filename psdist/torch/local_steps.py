"""``DiLoCo`` and ``LocalSGD``: workers train alone for many steps, and meet on the servers.

A worker makes ``every`` steps with its own optimizer. Then it pushes the difference between the weights that all
workers had and its own, and an outer optimizer on the servers takes the mean of the differences as its gradient
(Douillard et al. 2023, arXiv 2311.08105). With several fragments the parts of the model take turns, and an exchange may
overlap the next local steps (Streaming DiLoCo, Douillard et al. 2025, arXiv 2501.18512).

Invariants: A contribution is a push, so it counts once, whatever is resent. All workers hold the same reference after a
round. The fragment of the next round follows from the numbers of the rounds so far, so a worker that joins takes the
same turn as the others. Ranges of data count as used once a contribution includes them.

Not here: a round on the servers, which is a step of BSP.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import lr_scheduler

from psdist.client.context import Context, init
from psdist.client.means import ServerMean
from psdist.client.session.membership import OnDrop
from psdist.client.session.worker_state import LOCAL_STEPS, DeferredArray, LocalProgress
from psdist.client.sync_client import Client, Parameters
from psdist.compression import Codec
from psdist.consistency import BSP
from psdist.errors import InvalidArgumentError, check_integer
from psdist.optim import SGD, Optimizer
from psdist.torch.guards import WrappedName
from psdist.torch.inspection import BytesOfTensor, KeptBuffers
from psdist.torch.optimizer import tensors_to_train
from psdist.torch.values import TensorWriter, as_real, from_bytes, initial_values, raw_bytes, share_fixed, weight_of
from psdist.types import DType, NonFinite

logger = logging.getLogger("psdist")

Arrays = Mapping[str, NDArray[Any]]
_EVERY_LAST: Final = 1 << 31
_FRAGMENTS_LAST: Final = 1 << 10
_SETTINGS: Final = "settings"
_LOCAL: Final = "local/"
_BUFFER: Final = "buffer/"
_INNER: Final = "inner/"


class DiLoCo:
    """Lets ``optimizer`` train ``model`` alone, and merges the workers' models on the servers every so many steps.

        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        with psdist.torch.DiLoCo(model, optimizer, every=500):
            for inputs, targets in loader:
                ...
                optimizer.step()

    The loop stays as it is: each step of ``optimizer`` counts, also one made by a GradScaler, and the last one of a
    round waits for the other workers. Leaving the ``with`` block contributes the steps made since.

    model: as for ``DistributedOptimizer``. All workers start with the lowest rank's values. Buffers of floating point
        are averaged in each round, others stay each worker's own.
    optimizer: any optimizer of torch. It and its state stay with the worker; snapshots contain them.
    scheduler: learning-rate scheduler of ``optimizer``, whose state snapshots contain, too. The loop steps it.
    every: number of local steps of a round. Workers may have different ones.
    outer: specification of the optimizer on the servers, by default SGD(lr=0.7, momentum=0.9, nesterov=True).
    fragments: number of parts of the model, of about equal size in bytes. One part is exchanged every
        ``every / fragments`` steps, so that the peak of traffic falls by as much.
    delay: local steps during which an exchange may be under way. Its result is loaded after them.
    mix: share of the result in the weights that are loaded; the rest is the worker's own weights (1 - alpha of
        Streaming DiLoCo).
    max_update_norm: a contribution of a larger norm is scaled down to it, and ``clipped`` counts it. The norm is that
        of the fragment. None: no limit.
    compression, pull_dtype, non_finite, on_drop: as for ``Client.parameters``, for contributions.
    name: name of the parameter set; with several fragments they are ``name/0``, ``name/1``, ...
    context: None uses the context of ``psdist.init()``.

    A worker that dies loses the local steps since its last contribution, and the others continue without it. One that
    joins, or is restarted, takes the reference weights, and ``steps`` begins at those of the rounds so far. A run that
    resumes from a snapshot continues with ``steps`` as they were then.

    Raises InvalidArgumentError for a value out of its range, and as ``DistributedOptimizer``; and the
    errors of ``psdist.init`` and ``Client.parameters``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: lr_scheduler.LRScheduler | None = None,
        *,
        every: int = 500,
        outer: Optimizer | None = None,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 1.0,
        max_update_norm: float | None = None,
        compression: Codec | str | None = None,
        pull_dtype: DType = "float32",
        non_finite: NonFinite = "reject",
        on_drop: OnDrop = "warn",
        name: str = "model",
        context: Context | None = None,
    ) -> None:
        outer = SGD(lr=0.7, momentum=0.9, nesterov=True) if outer is None else outer
        _check_optimizers(optimizer, outer)
        _check_rounds(every, fragments, delay)
        _check_number("mix", mix, 1.0)
        if max_update_norm is not None:
            _check_number("max_update_norm", max_update_norm, math.inf)
        tensors = tensors_to_train(model, optimizer)
        parts = _divide(tensors.trained, fragments)
        #: This script's place in its run.
        self.context = init() if context is None else context
        self._client: Client = self.context.client
        #: Local steps of this worker, contributions scaled down by ``max_update_norm``.
        self.steps, self.clipped = 0, 0
        self._interval, self._delay, self._mix, self._max_norm = every // fragments, delay, float(mix), max_update_norm
        #: Everything that ``count`` was given; None if it was never called.
        self._counted: float | None = None
        #: Local steps since the last exchange, and the fragment of the exchange that a snapshot's state belongs to.
        self._since, self._turn = 0, 0
        self._started: tuple[_Fragment, Callable[[], Arrays]] | None = None
        self._restored: dict[str, NDArray[Any]] | None = None
        self._optimizer, self._scheduler = optimizer, scheduler
        names = [name] if fragments == 1 else [f"{name}/{number}" for number in range(fragments)]
        self._name = WrappedName(self._client, name, tensors.trained, is_late=self._client.joins_late(names[0]))
        self._fragments = [
            _Fragment(
                self._client.parameters(
                    own, initial_values(part), outer, BSP(), compression=compression, pull_dtype=pull_dtype,
                    non_finite=non_finite, on_drop=on_drop, master_dtype=tensors.master_dtype,
                ),
                part,
            )
            for own, part in zip(names, parts, strict=True)
        ]  # fmt: skip
        self._name.record(tensors.trained)
        share_fixed(self._client, f"{name}/fixed", tensors.fixed)
        self._trained = tensors.trained
        self._buffers = {key: one for key, one in model.named_buffers() if key in tensors.fixed and one.numel()}
        self._averaged = {key: one for key, one in self._buffers.items() if one.is_floating_point()}
        self._buffer_means = ServerMean(self._client, f"{name}/buffers", on_drop=on_drop)
        self._load_references()
        kept = KeptBuffers(model, names, f"{name}/fixed", tensors.fixed, tensors.aliases)
        kept.save_in_snapshots(self._client, self._fragments[0].handle)
        for fragment in self._fragments:
            fragment.handle.keep_state(self._save, self._restore, prefix=LOCAL_STEPS)
        self._progress = LocalProgress()
        self._begin_at(self._interval * sum(handle.step for handle in self.handles))
        self._take_restored()
        self._client.session.snapshots.local.append(self._progress)
        self._hook = optimizer.register_step_post_hook(self._after_step)

    @property
    def handles(self) -> tuple[Parameters, ...]:
        """Parameter sets of the fragments, whose steps are the rounds."""
        return tuple(fragment.handle for fragment in self._fragments)

    @property
    def round(self) -> int:
        """Number of rounds in which every fragment was exchanged."""
        return min(handle.step for handle in self.handles)

    def count(self, weight: float | Tensor) -> None:
        """Add the samples or tokens of a batch to the weight of the next contribution of each fragment.

        A contribution weighs 1 if this was never called. All workers call it, or none.
        """
        self._counted = (self._counted or 0.0) + weight_of(weight, BSP())

    def sync(self) -> None:
        """Contribute all fragments now, with the local steps made since their last rounds. All workers call it.

        Raises the errors of ``Parameters.push_pull``; calling it again continues.
        """
        self._load_started()
        self._since = 0
        for _ in self._fragments:
            self._exchange()

    def close(self) -> None:
        """Contribute the remaining steps, and give the optimizer back to the script. The model keeps its weights.

        A worker without remaining steps does not take part: the others wait until its client is closed.
        """
        self._load_started()
        if self._since:
            self.sync()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end()

    def _end(self) -> None:
        self._hook.remove()
        if self._progress.made == self._progress.contributed:
            self._client.session.snapshots.local.remove(self._progress)
        self._name.release()

    # --- a round ------------------------------------------------------------------------------------------------------

    def _after_step(self, *_: object) -> None:
        self.steps += 1
        self._progress.made = self.steps
        self._since += 1
        if self._since >= self._delay:
            self._load_started()
        if self._since >= self._interval:
            self._since = 0
            if self._delay:
                fragment, gradients, weight = self._contribution()
                self._started = fragment, fragment.handle.start_push_pull(gradients, weight).result
            else:
                self._exchange()

    def _exchange(self) -> None:
        fragment, gradients, weight = self._contribution()
        fragment.load(fragment.handle.push_pull(gradients, copy=False, weight=weight), self._mix)
        self._contributed(fragment)

    def _contribution(self) -> tuple[_Fragment, Arrays, float]:
        """Return the fragment whose turn it is, this worker's difference and its weight, once the buffers are
        averaged."""
        self._turn, fragment = min(enumerate(self._fragments), key=lambda one: one[1].handle.step)
        fragment.taken, fragment.taken_count = self.steps, self._counted or 0.0
        weight = 1.0 if self._counted is None else self._counted - fragment.contributed_count
        if self._averaged and self._turn == 0:
            values = {key: one.detach().float().cpu().numpy() for key, one in self._averaged.items()}
            TensorWriter(self._averaged).write(self._buffer_means.exchange(values, weight))
        return fragment, self._clip(fragment, fragment.difference()), weight

    def _clip(self, fragment: _Fragment, gradients: Arrays) -> Arrays:
        if self._max_norm is None:
            return gradients
        norm = math.sqrt(sum(float(np.vdot(one, one)) for one in gradients.values()))
        if norm <= self._max_norm:
            return gradients
        self.clipped += 1
        logger.warning(
            "%r: the contribution of this worker has a norm of %.4g, above max_update_norm=%.4g, and was scaled down",
            fragment.handle.name, norm, self._max_norm,
        )  # fmt: skip
        factor = self._max_norm / norm
        return {key: one * one.dtype.type(factor) for key, one in gradients.items()}

    def _load_started(self) -> None:
        """Load the result of the exchange under way, which this waits for."""
        if self._started is None:
            return
        (fragment, result), self._started = self._started, None
        fragment.load(result(), self._mix)
        self._contributed(fragment)

    def _contributed(self, fragment: _Fragment) -> None:
        fragment.contributed, fragment.contributed_count = fragment.taken, fragment.taken_count
        self._progress.contributed = min(one.contributed for one in self._fragments)
        self._take_restored()

    def _load_references(self) -> None:
        for fragment in self._fragments:
            fragment.load(fragment.handle.pull(copy=False), 1.0)

    # --- snapshots ----------------------------------------------------------------------------------------------------

    @property
    def _keeps_weights(self) -> bool:
        """True if a worker's weights differ from the reference when it has contributed."""
        return len(self._fragments) > 1 or self._delay > 0 or self._mix != 1.0

    def _save(self) -> dict[str, NDArray[Any] | DeferredArray]:
        """Return the local state at the step that began an exchange. Runs on psdist's loop, while the script waits."""
        tensors: dict[str, Tensor] = {}
        if self._keeps_weights:
            tensors |= {f"{_LOCAL}{key}": one for key, one in self._trained.items()}
            tensors |= {f"{_BUFFER}{key}": one for key, one in self._buffers.items()}
        numbers: list[tuple[str, str, Any]] = []
        for key, parameter in self._trained.items():
            for entry, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.numel():
                    tensors[f"{_INNER}{entry}/{key}"] = value
                else:
                    numbers.append((key, entry, _encode(value)))
        settings = {
            "steps": self.steps, "turn": self._turn, "clipped": self.clipped, "numbers": numbers,
            "forms": {
                key: (str(one.dtype).removeprefix("torch."), list(one.shape), one.device.type == "cpu")
                for key, one in tensors.items() if key.startswith(_INNER)
            },
            "groups": [
                _encode({key: value for key, value in group.items() if key != "params"})
                for group in self._optimizer.param_groups
            ],
            "scheduler": None if self._scheduler is None else _encode(self._scheduler.state_dict()),
        }  # fmt: skip
        state: dict[str, NDArray[Any] | DeferredArray] = {
            _SETTINGS: np.frombuffer(json.dumps(settings).encode(), np.uint8).copy()
        }
        return state | {key: _deferred(one) for key, one in tensors.items()}

    def _restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Keep the newest state of all fragments, until the script's thread takes it."""
        new = dict(state)
        if _SETTINGS in new and (self._restored is None or _steps_of(new) > _steps_of(self._restored)):
            self._restored = new

    def _begin_at(self, steps: int) -> None:
        """Continue from this number of local steps, all of them contributed."""
        self.steps, self._since, self._counted = steps, 0, None
        self._progress.made = self._progress.contributed = steps
        for fragment in self._fragments:
            fragment.taken = fragment.contributed = steps
            fragment.taken_count = fragment.contributed_count = 0.0

    def _take_restored(self) -> None:
        """Continue from a snapshot's state, after a resume or a rollback."""
        if (state := self._restored) is None:
            return
        self._restored = None
        settings = json.loads(state[_SETTINGS].tobytes())
        self.clipped = settings["clipped"]
        self._begin_at(settings["steps"])
        self._load_references()
        for prefix, tensors in ((_LOCAL, self._trained), (_BUFFER, self._buffers)):
            for key in (key for key in tensors if prefix + key in state):
                tensors[key].data.copy_(from_bytes(state[prefix + key], tensors[key]).view_as(tensors[key]))
        last = self._fragments[min(settings["turn"], len(self._fragments) - 1)]
        merged = last.handle.pull()
        if self._delay:
            self._started = last, lambda: merged
        elif self._keeps_weights:
            last.load(merged, self._mix)
        self._restore_inner(state, settings)

    def _restore_inner(self, state: Arrays, settings: dict[str, Any]) -> None:
        for group, saved in zip(self._optimizer.param_groups, settings["groups"], strict=True):
            for key, value in _decode(saved).items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value
        for name, (dtype, shape, is_on_cpu) in settings["forms"].items():
            entry, key = name.removeprefix(_INNER).split("/", 1)
            if (parameter := self._trained.get(key)) is not None:
                device = torch.device("cpu") if is_on_cpu else parameter.device
                value = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                value.copy_(from_bytes(state[name], value).view_as(value))
                self._optimizer.state[parameter][entry] = value
        for key, entry, number in settings["numbers"]:
            if (parameter := self._trained.get(key)) is not None:
                self._optimizer.state[parameter][entry] = _decode(number)
        if self._scheduler is not None and settings["scheduler"] is not None:
            self._scheduler.load_state_dict(_decode(settings["scheduler"]))


class LocalSGD(DiLoCo):
    """Averages the workers' weights on the servers every so many steps (local SGD, Stich 2019, arXiv 1805.09767).

    It is ``DiLoCo`` whose outer optimizer sets the mean of the weights. The arguments are the same, without ``outer``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: lr_scheduler.LRScheduler | None = None,
        *,
        every: int,
        **options: Any,
    ) -> None:
        if "outer" in options:
            raise InvalidArgumentError("outer= does not apply to LocalSGD, which sets the mean: use DiLoCo")
        super().__init__(model, optimizer, scheduler, every=every, outer=SGD(lr=1.0), **options)


class _Fragment:
    """A part of the model: its parameter set, and the weights that all workers had in its last round."""

    def __init__(self, handle: Parameters, tensors: Mapping[str, nn.Parameter]) -> None:
        self.handle = handle
        self._tensors = tensors
        self._writer = TensorWriter(tensors)
        self._reference: dict[str, NDArray[Any]] = {}
        #: Local steps in the newest contribution, and in the newest one that the servers have taken.
        self.taken, self.contributed = 0, 0
        #: The same in what ``count`` was given.
        self.taken_count, self.contributed_count = 0.0, 0.0

    def load(self, weights: Arrays, mix: float) -> None:
        """Take a round's result. mix: its share in the model's weights."""
        if mix == 1.0:
            self._writer.write(weights)
            # Of the values in the model: rounding to its dtype is not this worker's progress.
            self._reference = {key: _values(self._tensors[key], one.dtype).copy() for key, one in weights.items()}
            return
        mixed = {
            key: one.dtype.type(1.0 - mix) * _values(self._tensors[key], one.dtype) + one.dtype.type(mix) * one
            for key, one in weights.items()
        }
        self._writer.write(mixed)
        self._reference = {key: np.array(one) for key, one in weights.items()}

    def difference(self) -> dict[str, NDArray[Any]]:
        """Return reference minus weights, by name: the gradient of the outer optimizer."""
        return {key: one - _values(self._tensors[key], one.dtype) for key, one in self._reference.items()}


def _values(tensor: Tensor, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a tensor's values as the servers hold them. They may share its memory."""
    kind = torch.float64 if dtype == np.float64 else torch.float32
    values: NDArray[Any] = as_real(tensor.detach()).to("cpu", kind).contiguous().numpy()
    return values


def _deferred(tensor: Tensor) -> DeferredArray:
    copy = tensor.detach().clone()  # On its device, so that only snapshots copy it from there.
    return BytesOfTensor(copy.nbytes, lambda: raw_bytes(copy).copy())


def _steps_of(state: Arrays) -> int:
    steps: int = json.loads(state[_SETTINGS].tobytes())["steps"]
    return steps


def _divide(tensors: Mapping[str, nn.Parameter], count: int) -> list[dict[str, nn.Parameter]]:
    """Return parts of about equal bytes: the largest tensor that is left goes into the lightest part."""
    if count > len(tensors):
        raise InvalidArgumentError(
            f"fragments={count} for {len(tensors)} trained tensors: each fragment has one at least, use fewer"
        )
    parts: list[list[str]] = [[] for _ in range(count)]
    sizes = [0] * count
    for key in sorted(tensors, key=lambda key: -tensors[key].nbytes):
        lightest = sizes.index(min(sizes))
        parts[lightest].append(key)
        sizes[lightest] += max(1, tensors[key].nbytes)
    chosen = [set(part) for part in parts]
    return [{key: one for key, one in tensors.items() if key in part} for part in chosen]


def _check_optimizers(optimizer: Any, outer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"optimizer is of type {type(optimizer).__qualname__}: give the torch.optim optimizer that makes the "
            "local steps; the one on the servers is outer="
        )
    if not isinstance(outer, Optimizer):
        raise InvalidArgumentError(
            f"outer is of type {type(outer).__qualname__}: give a specification of psdist.optim, such as "
            "psdist.optim.SGD(lr=0.7, momentum=0.9, nesterov=True)"
        )


def _check_rounds(every: int, fragments: int, delay: int) -> None:
    check_integer("every", every, 1, _EVERY_LAST)
    check_integer("fragments", fragments, 1, _FRAGMENTS_LAST)
    if every % fragments:
        raise InvalidArgumentError(
            f"every={every} with fragments={fragments}: a fragment is exchanged each every / fragments steps, which "
            f"must be a whole number: use every={every // fragments * fragments or fragments}"
        )
    check_integer("delay", delay, 0, _EVERY_LAST)
    if delay >= every // fragments:
        raise InvalidArgumentError(
            f"delay={delay} with every={every} and fragments={fragments}: an exchange must end before the next one "
            f"begins, after {every // fragments} steps: use a smaller delay"
        )


def _check_number(name: str, value: Any, last: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= last:
        limit = f"and at most {last:g}" if last < math.inf else "and finite"
        raise InvalidArgumentError(f"{name}={value!r:.60} must be a number above 0 {limit}")


_KINDS: Final[dict[str, Callable[[Any], Any]]] = {
    "list": lambda items: [_decode(one) for one in items],
    "tuple": lambda items: tuple(_decode(one) for one in items),
    "dict": lambda items: {_decode(key): _decode(value) for key, value in items},
    "counter": lambda items: Counter({_decode(key): _decode(value) for key, value in items}),
}


def _encode(value: Any) -> Any:
    """Return a value of an optimizer's or scheduler's state in a form for JSON that keeps its types."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor() if value.numel() == 1:
            return value.item()
        case Counter() | dict():
            kind = "counter" if isinstance(value, Counter) else "dict"
            return {kind: [(_encode(key), _encode(one)) for key, one in value.items()]}
        case list() | tuple():
            return {type(value).__name__: [_encode(one) for one in value]}
    raise InvalidArgumentError(
        f"snapshots cannot contain a {type(value).__qualname__} of the state of an optimizer or scheduler: numbers, "
        "tensors, and lists, tuples and dicts of numbers are possible"
    )


def _decode(value: Any) -> Any:
    """Return the value of ``_encode``."""
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    return _KINDS[kind](items)
