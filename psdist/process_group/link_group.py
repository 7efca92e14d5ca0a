"""The backend ``psdist`` of torch.distributed: a process group on the links between workers.

``torch.distributed.init_process_group("psdist")`` makes the workers of a run the default group
(``psdist.torch_backend``). Calls are those of ``psdist.collectives``: reductions are in rank order, calls that
differ and workers that die are errors that name the rank.
"""

# torch's stubs have overloads for each form of a call; torch calls the one below.
# mypy: disable-error-code="override"

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from psdist.client.context import Context, init
from psdist.collectives.group import AsyncWorkerGroup
from psdist.collectives.sync_group import WorkerGroup
from psdist.errors import InvalidArgumentError
from psdist.process_group.work import CollectiveWork, TensorMemory, rows, set_rows
from psdist.torch_backend import NAME

_OPS: Final = {name: name.lower() for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}


class _GroupBase(dist.ProcessGroup):
    """Place, time limit and messages of a group.

    timeout: time limit of calls without one of their own.
    """

    def __init__(self, group: WorkerGroup, timeout: timedelta) -> None:
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]  # missing in torch's stubs
        self._sync = group
        self._group: AsyncWorkerGroup = group.wrapped
        self._limit = timeout

    # torch calls these methods by name.

    def getBackendName(self) -> str:
        """Name of the backend."""
        return NAME

    @property
    def group_name(self) -> str:
        """Name that torch has given to the group."""
        return str(dist.distributed_c10d._world.pg_names.get(self, ""))

    def size(self) -> int:
        """Number of ranks."""
        return self._group.size

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of calls without one of their own."""
        self._limit = timeout

    def shutdown(self) -> None:
        """End the group."""
        self._sync.close()

    abort = shutdown

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> dist.Work:
        """Send a tensor to a rank."""
        given = TensorMemory(tensors[0]).array
        return self._work([self._group.send(given, target, tag, timeout=self._seconds(None))], tensors)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> dist.Work:
        """Receive a tensor from a rank."""

        async def received() -> None:
            memory = TensorMemory(tensors[0])
            await self._group.recv(memory.array, source, tag, timeout=self._seconds(None))
            memory.finish()

        return self._work([received()], tensors)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        """Refuse a message from any rank."""
        raise InvalidArgumentError("the backend psdist receives no messages from any rank: name the source (src=)")

    def _work(self, calls: Iterable[Coroutine[Any, Any, Any]], tensors: Sequence[Any]) -> CollectiveWork:
        async def together() -> None:
            # All of them are made before those of the next work: the order must be that of the other ranks.
            await asyncio.gather(*calls)

        return CollectiveWork(together(), tensors)

    def _cut(self, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        if sizes:
            return list(torch.split(tensor, list(sizes)))
        if tensor.size(0) % self._group.size:
            raise InvalidArgumentError(f"{tensor.size(0)} rows cannot be divided among {self._group.size} ranks")
        return list(tensor.reshape(self._group.size, -1).unbind())

    def _seconds(self, opts: Any) -> float | None:
        """Return the time limit of a call."""
        own = getattr(opts, "timeout", None)
        limit = own if own is not None and own > timedelta(0) else self._limit
        return limit.total_seconds() if limit > timedelta(0) else None

    @staticmethod
    def _op(opts: Any) -> str:
        operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        for name, op in _OPS.items():
            if operation == getattr(dist.ReduceOp, name):
                return op
        raise InvalidArgumentError(f"the backend psdist has no {operation!r:.60}: use one of {', '.join(_OPS)}")


class LinkGroup(_GroupBase):
    """Collectives of some workers of a run, by torch's names."""

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks."""
        return self._work([self._group.barrier(timeout=self._seconds(opts))], [])

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Reduce the tensors of all ranks."""
        op, limit = self._op(opts), self._seconds(opts)

        async def reduced(tensor: Tensor) -> None:
            memory = TensorMemory(tensor)
            await self._group.all_reduce(memory.array, op, out=memory.array, timeout=limit)
            memory.finish()

        return self._work(map(reduced, tensors), tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        """Reduce the tensors of all ranks at the root."""
        op, limit, root = self._op(opts), self._seconds(opts), opts.rootRank

        async def reduced(tensor: Tensor) -> None:
            memory = TensorMemory(tensor)
            out = memory.array if self._group.rank == root else None
            await self._group.reduce(memory.array, root, op, out=out, timeout=limit)
            if out is not None:
                memory.finish()

        return self._work(map(reduced, tensors), tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        """Copy the root's tensors to all ranks."""

        async def copied(tensor: Tensor) -> None:
            memory = TensorMemory(tensor)
            await self._group.broadcast(memory.array, opts.rootRank, out=memory.array, timeout=self._seconds(opts))
            memory.finish()

        return self._work(map(copied, tensors), tensors)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Collect the tensors of all ranks."""

        async def gathered(places: Sequence[Tensor], tensor: Tensor) -> None:
            found = await self._group.all_gather(TensorMemory(tensor).array, timeout=self._seconds(opts))
            set_rows(places, found)

        return self._work(map(gathered, outputs, inputs), outputs)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Collect lists of tensors. ``outputs`` has a list for each rank."""
        return self.allgather([list(one) for one in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """Collect the tensors of all ranks in one."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    #: Name of ``all_gather_single`` before torch 2.12.
    _allgather_base = all_gather_single  # type: ignore[assignment]  # typed otherwise

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Collect several tensors of all ranks, each in one."""

        async def gathered(output: Tensor, tensor: Tensor) -> None:
            memory, given = TensorMemory(output), TensorMemory(tensor)
            out = memory.array.reshape(self._group.size, *given.array.shape)
            await self._group.all_gather(given.array, out=out, timeout=self._seconds(opts))
            memory.finish()

        return self._work(map(gathered, outputs, inputs), outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]  # typed otherwise

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        """Collect the tensors of all ranks at the root."""

        async def gathered() -> None:
            given = TensorMemory(inputs[0]).array
            found = await self._group.gather(given, opts.rootRank, timeout=self._seconds(opts))
            if found is not None:
                set_rows(outputs[0], found)

        return self._work([gathered()], outputs)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        """Give each rank one of the root's tensors."""

        async def scattered() -> None:
            memory = TensorMemory(outputs[0])
            given = rows(inputs[0]) if self._group.rank == opts.rootRank else None
            await self._group.scatter(given, opts.rootRank, out=memory.array, timeout=self._seconds(opts))
            memory.finish()

        return self._work([scattered()], outputs)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        """Reduce lists of tensors. Rank r receives the result of the r-th."""
        op = self._op(opts)

        async def reduced(output: Tensor, given: Sequence[Tensor]) -> None:
            memory = TensorMemory(output)
            await self._group.reduce_scatter(rows(given), op, out=memory.array, timeout=self._seconds(opts))
            memory.finish()

        return self._work(map(reduced, outputs, inputs), outputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """Reduce a tensor. Each rank receives a part of the result."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    #: Name of ``reduce_scatter_single`` before torch 2.12.
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]  # typed otherwise

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce several tensors. Each rank receives a part of each result."""
        op = self._op(opts)

        async def reduced(output: Tensor, tensor: Tensor) -> None:
            memory = TensorMemory(output)
            given = TensorMemory(tensor).array.reshape(self._group.size, *memory.array.shape)
            await self._group.reduce_scatter(given, op, out=memory.array, timeout=self._seconds(opts))
            memory.finish()

        return self._work(map(reduced, outputs, inputs), outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]  # typed otherwise

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Send a tensor to each rank, and receive one from each."""

        async def exchanged() -> None:
            memory = [TensorMemory(output) for output in outputs]
            given = [TensorMemory(tensor).array for tensor in inputs]
            await self._group.all_to_all_uneven(given, [one.array for one in memory], timeout=self._seconds(opts))
            for one in memory:
                one.finish()

        return self._work([exchanged()], outputs)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, taken: Sequence[int], given: Sequence[int], opts: Any = None
    ) -> dist.Work:
        """Send a part of a tensor to each rank. taken, given: rows of each part; empty for equal parts."""
        memory = output if output.is_contiguous() else torch.empty_like(output).contiguous()
        work = self.alltoall(self._cut(memory, taken), self._cut(tensor, given), opts)
        if memory is not output:
            work.wait()
            output.copy_(memory)
        return work

    #: Name of ``all_to_all_single`` before torch 2.12.
    alltoall_base = all_to_all_single  # type: ignore[assignment]  # typed otherwise


def make_group(options: Any, _: Any, context: Callable[[], Context] = init) -> LinkGroup:
    """Return a process group for torch. options: rank, size, members and time limit, as torch gives them."""
    place = context()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if sorted(ranks) != ranks or place.rank != ranks[options.group_rank]:
        raise InvalidArgumentError(
            f"rank {options.group_rank} of {ranks} is rank {place.rank} of the run: start torch.distributed with RANK "
            "and WORLD_SIZE as the launcher sets them, and groups with sorted ranks"
        )
    return LinkGroup(place.new_group(ranks), options.timeout)
