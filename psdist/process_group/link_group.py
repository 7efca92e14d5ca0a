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

from psdist.client.context import Context, init, is_placed
from psdist.client.process import loop
from psdist.collectives.group import AsyncWorkerGroup
from psdist.errors import InvalidArgumentError, PsdistError, WaitTimeoutError
from psdist.process_group import own_run
from psdist.process_group.monitored import monitored_error
from psdist.process_group.sparse import all_reduce_sparse
from psdist.process_group.work import CollectiveWork, SeveralWorks, TensorMemory, rows, set_rows
from psdist.settings import group_marks
from psdist.torch_backend import NAME

_OPS: Final = {name: name.lower() for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}


class _GroupBase(dist.ProcessGroup):
    """Place, time limit and messages of a group.

    timeout: time limit of calls without one of their own.
    """

    def __init__(self, group: AsyncWorkerGroup, timeout: timedelta) -> None:
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]  # missing in torch's stubs
        self._group = group
        self._limit = timeout
        #: Set once the last work of several calls has ended.
        self._several_calls: asyncio.Event | None = None
        #: Works made since ``_start_coalescing``, or None outside of it.
        self._coalesced: list[CollectiveWork] | None = None

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

    @property
    def error(self) -> PsdistError | None:
        """The error that ended the group, or None."""
        return self._group.error

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of calls without one of their own."""
        self._limit = timeout

    def shutdown(self) -> None:
        """End the group."""
        loop.shared().call(self._group.close(), ending=True)

    abort = shutdown

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> dist.Work:
        """Send a tensor to a rank."""
        given = TensorMemory(tensors[0]).array
        sent = self._group.send(given, target, tag, timeout=self._seconds(None))
        return self._record(CollectiveWork(sent, tensors, f"{NAME}:send", tensors))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> dist.Work:
        """Receive a tensor from a rank."""

        async def received() -> int:
            memory = TensorMemory(tensors[0])
            await self._group.recv(memory.array, source, tag, timeout=self._seconds(None))
            memory.finish()
            return source

        return self._record(CollectiveWork(received(), tensors, f"{NAME}:recv", tensors))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        """Receive a tensor from the first rank that sends one."""

        async def received() -> int:
            memory = TensorMemory(tensors[0])
            source = await self._group.recv_any(memory.array, tag, timeout=self._seconds(None))
            memory.finish()
            return source

        return self._record(CollectiveWork(received(), tensors, f"{NAME}:recvAnySource", tensors))

    def _start_coalescing(self, device: torch.device) -> None:
        """Collect the works that are made until ``_end_coalescing``. They begin nevertheless."""
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """Return one work for those that were collected."""
        works, self._coalesced = self._coalesced or [], None
        return SeveralWorks(works)

    def _record(self, work: CollectiveWork) -> CollectiveWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _work(
        self, name: str, calls: Iterable[Coroutine[Any, Any, Any]], tensors: Sequence[Any], inputs: Sequence[Tensor]
    ) -> CollectiveWork:
        before = self._several_calls

        async def together() -> None:
            if before is not None:
                await before.wait()
            # All of them are made before those of the next work: the order must be that of the other ranks.
            await asyncio.gather(*calls)

        try:
            return self._record(CollectiveWork(together(), tensors, f"{NAME}:{name}", inputs))
        except BaseException:  # Also for SystemExit: unawaited coroutines would cause warnings.
            for call in calls:
                call.close()
            raise

    def _work_of_several_calls(self, name: str, call: Coroutine[Any, Any, None], tensor: Tensor) -> CollectiveWork:
        """Return a work whose calls follow from each other's results. The next work begins after it."""
        before, ended = self._several_calls, asyncio.Event()
        self._several_calls = ended

        async def alone() -> None:
            try:
                if before is not None:
                    await before.wait()
                # As other works do: a direct await would begin before the calls of the work that was made before.
                await asyncio.gather(call)
            finally:
                ended.set()

        return self._record(CollectiveWork(alone(), [tensor], f"{NAME}:{name}", [tensor]))

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
        return self._work("barrier", [self._group.barrier(timeout=self._seconds(opts))], [], [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks. Rank 0 raises an error that names the first rank that is missing.

        wait_all_ranks: name all of them. Texts are those of gloo, to which torch.distributed.monitored_barrier is
        limited: call this method of a group.
        """
        limit = self._limit if timeout is None else timeout
        if limit <= timedelta(0):
            raise WaitTimeoutError(f"Rank {self._group.rank} timed out in monitoredBarrier after {limit}")
        try:
            loop.shared().call(self._group.barrier(timeout=limit.total_seconds()))
        except WaitTimeoutError as error:
            raise monitored_error(error, self._group.rank, limit, wait_all_ranks) from error

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Reduce the tensors of all ranks."""
        op, limit = self._op(opts), self._seconds(opts)
        if len(tensors) == 1 and tensors[0].layout is torch.sparse_coo:
            return self._work_of_several_calls(
                "sparse_all_reduce", all_reduce_sparse(self._group, tensors[0], op, limit), tensors[0]
            )

        async def reduced(tensor: Tensor) -> None:
            memory = TensorMemory(tensor, is_reduced=True)
            await self._group.all_reduce(memory.array, op, out=memory.array, timeout=limit)
            memory.finish()

        return self._work("all_reduce", map(reduced, tensors), tensors, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        """Reduce the tensors of all ranks at the root."""
        op, limit, root = self._op(opts), self._seconds(opts), opts.rootRank

        async def reduced(tensor: Tensor) -> None:
            memory = TensorMemory(tensor, is_reduced=True)
            out = memory.array if self._group.rank == root else None
            await self._group.reduce(memory.array, root, op, out=out, timeout=limit)
            if out is not None:
                memory.finish()

        return self._work("reduce", map(reduced, tensors), tensors, tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        """Copy the root's tensors to all ranks."""

        async def copied(tensor: Tensor) -> None:
            memory = TensorMemory(tensor)
            await self._group.broadcast(memory.array, opts.rootRank, out=memory.array, timeout=self._seconds(opts))
            memory.finish()

        return self._work("broadcast", map(copied, tensors), tensors, tensors)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Collect the tensors of all ranks."""

        async def gathered(places: Sequence[Tensor], tensor: Tensor) -> None:
            found = await self._group.all_gather(TensorMemory(tensor).array, timeout=self._seconds(opts))
            set_rows(places, found)

        return self._work("all_gather", map(gathered, outputs, inputs), outputs, inputs)

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

        return self._work("all_gather", map(gathered, outputs, inputs), outputs, inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]  # typed otherwise

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        """Collect the tensors of all ranks at the root."""

        async def gathered() -> None:
            given = TensorMemory(inputs[0]).array
            found = await self._group.gather(given, opts.rootRank, timeout=self._seconds(opts))
            if found is not None:
                set_rows(outputs[0], found)

        return self._work("gather", [gathered()], outputs, inputs)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        """Give each rank one of the root's tensors."""

        async def scattered() -> None:
            memory = TensorMemory(outputs[0])
            given = rows(inputs[0]) if self._group.rank == opts.rootRank else None
            await self._group.scatter(given, opts.rootRank, out=memory.array, timeout=self._seconds(opts))
            memory.finish()

        return self._work("scatter", [scattered()], outputs, [tensor for given in inputs for tensor in given])

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        """Reduce lists of tensors. Rank r receives the result of the r-th."""
        op = self._op(opts)

        async def reduced(output: Tensor, given: Sequence[Tensor]) -> None:
            memory = TensorMemory(output, is_reduced=True)
            await self._group.reduce_scatter(
                rows(given, is_reduced=True), op, out=memory.array, timeout=self._seconds(opts)
            )
            memory.finish()

        return self._work(
            "reduce_scatter", map(reduced, outputs, inputs), outputs, [t for given in inputs for t in given]
        )

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
            memory = TensorMemory(output, is_reduced=True)
            given = TensorMemory(tensor, is_reduced=True).array.reshape(self._group.size, *memory.array.shape)
            await self._group.reduce_scatter(given, op, out=memory.array, timeout=self._seconds(opts))
            memory.finish()

        return self._work("reduce_scatter", map(reduced, outputs, inputs), outputs, inputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]  # typed otherwise

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Send a tensor to each rank, and receive one from each."""
        return self._work("all_to_all", [self._exchange(outputs, inputs, self._seconds(opts))], outputs, inputs)

    async def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], limit: float | None) -> None:
        memory = [TensorMemory(output) for output in outputs]
        given = [TensorMemory(tensor).array for tensor in inputs]
        await self._group.all_to_all_uneven(given, [one.array for one in memory], timeout=limit)
        for one in memory:
            one.finish()

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, taken: Sequence[int], given: Sequence[int], opts: Any = None
    ) -> dist.Work:
        """Send a part of a tensor to each rank. taken, given: rows of each part; empty for equal parts."""
        memory = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
        parts, limit = self._cut(memory, taken), self._seconds(opts)

        async def exchanged() -> None:
            await self._exchange(parts, self._cut(tensor, given), limit)
            if memory is not output:
                output.copy_(memory)

        return self._work("all_to_all", [exchanged()], [output], [tensor])

    #: Name of ``all_to_all_single`` before torch 2.12.
    alltoall_base = all_to_all_single  # type: ignore[assignment]  # typed otherwise


def make_group(options: Any, _: Any, context: Callable[[], Context] = init) -> LinkGroup:
    """Return a process group for torch. options: rank, size, members, time limit and store, as torch gives them."""
    if context is init and options.group_size > 1 and not is_placed():
        place = own_run.join(options.store, options.group_rank, options.group_size)
    else:
        place = context()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if place.rank != ranks[options.group_rank]:
        raise InvalidArgumentError(
            f"rank {options.group_rank} of {ranks} is rank {place.rank} of the run: start torch.distributed with RANK "
            "and WORLD_SIZE as the launcher sets them"
        )
    made = LinkGroup(place.new_group(ranks, ordered=True).wrapped, options.timeout)
    if 1 < len(ranks) == place.world_size:
        group_marks.mark()
    return made
