"""The process group ``psdist`` of torch.distributed, whose collectives travel through the servers, and its start.

**All-gather of bytes.** Each worker pushes its bytes into its own place and zeros elsewhere, so the mean is each
worker's bytes divided by the number of contributions. A flag per worker travels in each slice. It gives this number,
which differs between slices only if a worker leaves in the middle of a push.

Bytes travel as 16-bit numbers, which float32 represents exactly, also after the division.

**The group.** Frameworks that find a default group use it, and start no other. Collectives of tensors on any device are
carried out in main memory by ``AllGather``.

A worker that has left the run does not stop the others. The values of the lowest remaining rank take the place of its
values, on all workers, and a warning says so once.

Gradients do not travel here: ``psdist.torch`` sends them.
"""

# torch's stubs have overloads for each form of a call; torch calls the one below.
# mypy: disable-error-code="override"

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import HashStore, _create_work_from_future  # type: ignore[attr-defined]  # no stub
from torch.distributed.rendezvous import rendezvous

from psdist.client.context import Context, init
from psdist.client.means import ServerMean
from psdist.client.session.loop import names_torch_store
from psdist.client.sync_client import Client
from psdist.errors import InvalidArgumentError, LimitExceededError
from psdist.torch.values import raw_bytes
from psdist.types import SLICE_ELEMENTS_MIN
from psdist.wire.limits import COLLECTIVE_BYTES_MAX, COLLECTIVE_WORKERS_MAX, VALUE_BYTES_MAX

#: Elements of a slice, which holds the flags and the words of all workers.
_SLICE: Final = SLICE_ELEMENTS_MIN
#: Slices of a later round of a long exchange.
_SLICES: Final = 32
#: Bytes in front of the payload that give its length.
_PREFIX: Final = 8
_TENSOR: Final = "words"


class AllGather:
    """Collects the bytes of all workers. All workers make the same calls.

    name: prefix of the parameter sets that carry the bytes.

    Raises InvalidArgumentError for more than 512 workers.
    """

    def __init__(self, client: Client, name: str, rank: int, world_size: int) -> None:
        if world_size > COLLECTIVE_WORKERS_MAX:
            raise InvalidArgumentError(
                f"{world_size} workers are too many to exchange values through torch.distributed: use at most "
                f"{COLLECTIVE_WORKERS_MAX}"
            )
        self._places = {count: _Slices(client, f"{name}/{count}", rank, world_size, count) for count in (1, _SLICES)}

    def exchange(self, payload: bytes) -> list[bytes | None]:
        """Return the payload of each rank, and None for ranks that have left the run.

        Raises LimitExceededError for a payload of more than 1 GiB, PushDroppedError if this worker was expelled
        meanwhile, and the errors of ``Parameters.push_pull``.
        """
        sent = len(payload).to_bytes(_PREFIX, "little") + payload
        first = self._places[1]
        received = first.exchange(sent[: first.bytes])
        lengths = [None if part is None else _PREFIX + int.from_bytes(part[:_PREFIX], "little") for part in received]
        whole = [None if part is None else bytearray(part) for part in received]
        longest = max((length for length in lengths if length is not None), default=0)
        if longest > _PREFIX + COLLECTIVE_BYTES_MAX:
            raise LimitExceededError(
                f"a worker gives {longest - _PREFIX} bytes to a collective of torch.distributed: use at most "
                f"{COLLECTIVE_BYTES_MAX}, such as smaller batches of predictions (eval_accumulation_steps)"
            )
        start = first.bytes
        while start < longest:
            more = self._places[_SLICES]
            for rank, part in enumerate(more.exchange(sent[start : start + more.bytes])):
                if part is None or whole[rank] is None:
                    whole[rank] = None
                else:
                    whole[rank] += part  # type: ignore[operator]  # not None, as just checked
            start += more.bytes
        return [
            None if found is None or length is None else bytes(found[_PREFIX:length])
            for found, length in zip(whole, lengths, strict=True)
        ]


class _Slices:
    """A parameter set of ``count`` slices. bytes: the most that one worker sends in an exchange."""

    def __init__(self, client: Client, name: str, rank: int, world_size: int, count: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._words = (_SLICE - world_size) // world_size
        self.bytes = 2 * self._words * count
        self._sent = np.zeros((count, _SLICE), np.float32)
        self._sent[:, rank] = 1.0
        self._mean = ServerMean(client, name, on_drop="raise", slice_elements=_SLICE)
        self._mean.open({_TENSOR: self._sent.ravel()})

    def exchange(self, part: bytes) -> list[bytes | None]:
        """Return each rank's part, filled with zeros to ``bytes``."""
        words = np.frombuffer(part.ljust(self.bytes, b"\0"), "<u2").reshape(-1, self._words)
        self._sent[:, self._place(self._rank)] = words
        means = self._mean.exchange({_TENSOR: self._sent.ravel()})[_TENSOR].reshape(self._sent.shape)
        contributions = np.rint(1.0 / means[:, : self._world_size].max(axis=1, keepdims=True))
        return [self._part(means, contributions, rank) for rank in range(self._world_size)]

    def _place(self, rank: int) -> slice:
        start = self._world_size + rank * self._words
        return slice(start, start + self._words)

    def _part(self, means: NDArray[np.float32], contributions: NDArray[np.float32], rank: int) -> bytes | None:
        if not means[:, rank].all():
            return None
        words: NDArray[np.uint16] = np.rint(means[:, self._place(rank)] * contributions).astype("<u2")
        return words.tobytes()


def broadcast_value(value: Any, source: int = 0) -> Any:
    """Return the value that rank ``source`` gave, on all workers.

    value: None, a boolean, a number, text, a path (which becomes text), or a list or dict of them.

    Raises InvalidArgumentError for other values, LimitExceededError for more than 1 MiB of JSON.
    """
    try:
        content = json.dumps(value, default=os.fspath).encode()
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"value of type {type(value).__qualname__} cannot be broadcast: use None, booleans, numbers, text, paths, "
            "and lists and dicts of them, or torch.distributed.broadcast for tensors"
        ) from None
    if not dist.is_initialized():
        return value
    size = torch.tensor(len(content))
    dist.broadcast(size, source)
    if int(size) > VALUE_BYTES_MAX:
        raise LimitExceededError(f"a broadcast value has {int(size)} bytes of JSON: use at most {VALUE_BYTES_MAX}")
    body = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank() == source:
        body.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(body, source)
    return value if dist.get_rank() == source else json.loads(body.numpy().tobytes())


logger = logging.getLogger("psdist")

BACKEND: Final = "psdist_servers"
_NAME: Final = "psdist/collectives"
#: By the names of ReduceOp.
REDUCTIONS: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


class PsdistGroup(dist.ProcessGroup):
    """Collectives of all workers of a run. The workers make the same calls in the same order.

    context: returns the script's place in its run; called at the first collective.
    """

    def __init__(self, rank: int, world_size: int, context: Callable[[], Context]) -> None:
        super().__init__(rank, world_size)  # type: ignore[call-arg]  # missing in torch's stubs
        self._world_size = world_size
        self._place = rank
        self._context = context
        self._exchange: AllGather | None = None
        self._missing: set[int] = set()

    # torch calls these methods by name.

    def size(self) -> int:
        """Number of workers."""
        return self._world_size

    def getBackendName(self) -> str:
        """Name of the backend."""
        return BACKEND

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all workers."""
        self._gather(torch.empty(0))
        return _done([])

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        """Copy the root's tensors to all workers."""
        for tensor in tensors:
            tensor.copy_(self._gather(tensor)[opts.rootRank])
        return _done(tensors)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Combine the tensors of all workers, in rank order."""
        for tensor in tensors:
            self._reduce(tensor, dist.ReduceOp.SUM if opts is None else opts.reduceOp)
        return _done(tensors)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Combine the tensors of all workers, in rank order."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        """Combine the tensors of all workers. All of them receive the result."""
        return self.allreduce(tensors, opts)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Collect the tensors of all workers."""
        for places, tensor in zip(outputs, inputs, strict=True):
            for place, found in zip(places, self._gather(tensor), strict=True):
                place.copy_(found)
        return _done(outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """Collect the tensors of all workers in one."""
        output.view(-1).copy_(torch.cat([found.reshape(-1) for found in self._gather(tensor)]))
        return _done([output])

    #: Name of ``all_gather_single`` before torch 2.12.
    _allgather_base = all_gather_single  # type: ignore[assignment]  # typed otherwise

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        """Collect the tensors of all workers at the root."""
        for number, tensor in enumerate(inputs):
            found = self._gather(tensor)
            if self._place == opts.rootRank:
                for place, value in zip(outputs[number], found, strict=True):
                    place.copy_(value)
        return _done(outputs)

    def _reduce(self, tensor: Tensor, operation: Any) -> None:
        name = next((name for name in REDUCTIONS if operation == getattr(dist.ReduceOp, name)), None)
        if name is None:
            raise InvalidArgumentError(
                f"the process group of psdist has no {operation!r:.60}: use one of {', '.join(REDUCTIONS)}"
            )
        result = reduce(REDUCTIONS[name], self._gather(tensor))
        tensor.copy_(result / self._world_size if name == "AVG" else result)

    def open(self) -> AllGather:
        """Create the parameter sets of the collectives, which otherwise happens in the first one."""
        if self._exchange is None:
            self._exchange = AllGather(self._context().client, _NAME, self._place, self._world_size)
        return self._exchange

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks on the CPU."""
        payloads = self.open().exchange(raw_bytes(tensor).tobytes())
        if missing := {rank for rank, payload in enumerate(payloads) if payload is None}:
            self._report(missing)
        first = next(payload for payload in payloads if payload is not None)
        return [_tensor(first if payload is None else payload, tensor) for payload in payloads]

    def _report(self, missing: set[int]) -> None:
        if new := missing - self._missing:
            self._missing |= new
            ranks = ", ".join(map(str, sorted(new)))
            logger.warning(
                "rank %s has left the run: in what torch.distributed gathers, such as the samples of an evaluation, "
                "values of the lowest remaining rank take the place of its values",
                ranks,
            )


def _tensor(payload: bytes, like: Tensor) -> Tensor:
    expected = like.numel() * like.element_size()
    if len(payload) != expected:
        raise InvalidArgumentError(
            f"a worker gave {len(payload)} bytes to a collective of torch.distributed, and this one gave {expected}: "
            "all workers must make the same calls, with tensors of the same shape and dtype"
        )
    if not payload:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(like.dtype).view(like.shape)


def _done(result: Any) -> dist.Work:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(list(result))
    work: dist.Work = _create_work_from_future(future)
    return work


def start(context: Context | None = None) -> bool:
    """Make the run's workers the default process group of torch.distributed, unless there is one.

    context: this script's place in its run. None reads it from the environment that a launcher has set, and calls
        ``psdist.init()`` at the first collective. Without a launcher nothing is started.

    Returns True if the group of psdist is the default one now.
    """
    if dist.is_initialized():
        return dist.get_backend() == BACKEND
    if context is None and not is_launched():
        return False
    store: Any = HashStore()
    if context is not None:
        rank, size = context.rank, context.world_size
    elif _names_scheduler():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    else:
        store, rank, size = next(rendezvous("env://"))  # By it ``init`` finds the run that rank 0 starts.
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu", "cuda"])
    # torch replaces the hook by one of its own.
    hook = sys.excepthook
    dist.init_process_group(BACKEND, rank=rank, world_size=size, store=store)
    sys.excepthook = hook
    group = dist.group.WORLD
    if context is not None and isinstance(group, PsdistGroup):
        group._context = lambda: context
    return True


def open_collectives() -> None:
    """Create the parameter sets of psdist's process group, if it is the default one.

    Called by all workers before they wrap the model: a worker that restarts later finds them, and makes the others wait
    for nothing.
    """
    if dist.is_initialized() and isinstance(group := dist.group.WORLD, PsdistGroup):
        group.open()


def is_launched() -> bool:
    """True if a launcher of psdist, or torchrun with several ranks, has started this script."""
    has_place = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return has_place and (_names_scheduler() or names_torch_store(os.environ))


def _names_scheduler() -> bool:
    return any(name in os.environ for name in ("PSDIST_SCHEDULER", "PSDIST_SCHEDULER_FILE"))


def _make(_: Any, rank: int, size: int, timeout: Any) -> PsdistGroup:
    return PsdistGroup(rank, size, init)
