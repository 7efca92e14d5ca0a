"""The backend ``psdist`` of torch.distributed: a process group on the links between workers.

``torch.distributed.init_process_group("psdist")`` makes the workers of a run the default group
(``psdist.torch_backend``). Calls are those of ``psdist.collectives``: reductions are in rank order, calls that
differ and workers that die are errors that name the rank.
"""

# torch's stubs have overloads for each form of a call; torch calls the one below.
# mypy: disable-error-code="override"

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import reduce
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend

from psdist.client.context import Context, init, is_placed
from psdist.client.session import loop
from psdist.collectives.core.machine import COLLECTIVES
from psdist.collectives.group import AsyncWorkerGroup
from psdist.errors import InvalidArgumentError, PsdistError, WaitTimeoutError
from psdist.process_group import own_run
from psdist.process_group.checks import FORMER_NAMES, FORMS, Checks, call, monitored_error, opaque
from psdist.process_group.group import REDUCTIONS
from psdist.process_group.own_run import ranks_in_run
from psdist.process_group.work import (
    CollectiveWork,
    SeveralWorks,
    TensorMemory,
    all_reduce_sparse,
    apart,
    each,
    rows,
    set_rows,
    span,
)
from psdist.settings.launcher_reports import mark_group
from psdist.torch_backend import NAME
from psdist.wire.limits import EAGER_BYTES

_OPS: Final = {name: name.lower() for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}


@opaque
class _GroupBase(dist.ProcessGroup):
    """Place, time limit and messages of a group. To torch it is its own backend, for tensors on the CPU.

    timeout: time limit of calls without one of their own.
    """

    supports_coalescing = supports_shrinking = supports_splitting = supports_time_estimate = False

    def __init__(self, group: AsyncWorkerGroup, timeout: timedelta) -> None:
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]  # missing in torch's stubs
        self._group = group
        self._limit = timeout
        self._memory = group.memory_order(span)
        self._checks = {name: Checks(name, group.size) for name in (*FORMS, "send", "recv", "recv_anysource")}
        #: Collectives made.
        self._sequence = 0
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

    @property
    def options(self) -> Any:
        """Options of the backend, with the time limit."""
        return Backend.Options(NAME, self._limit)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device | str) -> Any:
        if torch.device(device).type != "cpu":
            raise InvalidArgumentError(f"No backend type associated with device type {device}: psdist has the CPU's")
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: ranks count collectives from 0."""

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

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

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """End the group."""
        loop.shared().call(self._group.close(), ending=True)

    abort = shutdown

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> dist.Work:
        """Send a tensor to a rank."""
        self._check_message("send", tensors)
        limit, (tensor,), is_small = self._seconds(None), tensors, tensors[0].nbytes <= EAGER_BYTES

        async def given() -> Any:
            array = TensorMemory(tensor).array
            # Two ranks may exchange small tensors in place, and would wait for each other.
            return array.copy() if is_small else array

        async def sent() -> None:
            if is_small:
                array = await self._in_order(("send", target, tag), tensors, [], given)
                await self._group.send(array, target, tag, timeout=limit)
            else:
                await self._in_order(("send", target, tag), tensors, [], sent_from_memory)

        async def sent_from_memory() -> None:
            await self._group.send(await given(), target, tag, timeout=limit)

        return self._record(CollectiveWork(sent(), tensors, f"{NAME}:send", tensors))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> dist.Work:
        """Receive a tensor from a rank."""
        self._check_message("recv", tensors)

        async def received() -> int:
            memory = TensorMemory(tensors[0])
            await self._group.recv(memory.array, source, tag, timeout=self._seconds(None))
            memory.finish()
            return source

        call = self._in_order(("recv", source, tag), [], tensors, received)
        return self._record(CollectiveWork(call, tensors, f"{NAME}:recv", tensors))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        """Receive a tensor from the first rank that sends one."""
        self._check_message("recv_anysource", tensors)

        async def received() -> int:
            memory = TensorMemory(tensors[0])
            source = await self._group.recv_any(memory.array, tag, timeout=self._seconds(None))
            memory.finish()
            return source

        call = self._in_order(("recv", tag), [], tensors, received)
        return self._record(CollectiveWork(call, tensors, f"{NAME}:recvAnySource", tensors))

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
        self._sequence += 1

        async def together() -> None:
            with self._group.preparing():
                # All of them are made before those of the next work: the order must be that of the other ranks.
                made = asyncio.gather(*calls)
            await made

        async def in_order() -> None:
            try:
                await self._in_order(COLLECTIVES, _flat(inputs), _flat(tensors), together)
            except BaseException:
                for call in calls:
                    call.close()
                raise

        try:
            return self._record(CollectiveWork(in_order(), tensors, f"{NAME}:{name}", inputs))
        except BaseException:  # Also for SystemExit: unawaited coroutines would cause warnings.
            for call in calls:
                call.close()
            raise

    def _work_of_several_calls(
        self, name: str, call: Coroutine[Any, Any, None], tensors: Sequence[Tensor]
    ) -> CollectiveWork:
        """Return a work whose calls follow from each other's results. The next work begins after it."""
        self._sequence += 1

        async def alone() -> None:
            with self._group.preparing():
                # As other works do: a direct await would begin before the calls of the work that was made before.
                made = asyncio.gather(call)
            await made

        made = self._in_order(COLLECTIVES, [], [], alone, alone=True)
        return self._record(CollectiveWork(made, tensors, f"{NAME}:{name}", tensors))

    async def _in_order(
        self,
        lane: Hashable,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        call: Callable[[], Coroutine[Any, Any, Any]],
        *,
        alone: bool = False,
    ) -> Any:
        """Make a call after the earlier ones whose memory it shares. Tensors are looked at after that."""
        turn = self._memory.enter(lane, reads, writes, alone=alone)
        return await self._memory.make(turn, self._seconds(None), call)

    def _check_message(self, name: str, tensors: Sequence[Tensor]) -> None:
        checks = self._checks[name]
        checks.single(tensors)
        checks.dense(tensors)

    def _cut(self, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return each rank's part of a tensor. sizes: rows of each; empty for equal parts."""
        if sizes:
            return list(torch.split(tensor, list(sizes)))
        return list(tensor.reshape(self._group.size, -1).unbind())

    def _seconds(self, opts: Any) -> float | None:
        """Return the time limit of a call."""
        own = getattr(opts, "timeout", None)
        limit = own if own is not None and own > timedelta(0) else self._limit
        return limit.total_seconds() if limit > timedelta(0) else None

    @staticmethod
    def _op(opts: Any) -> str:
        for name, op in _OPS.items():
            if opts.reduceOp == getattr(dist.ReduceOp, name):
                return op
        raise InvalidArgumentError(f"the backend psdist has no {opts.reduceOp!r:.60}: use one of {', '.join(_OPS)}")


@opaque
class LinkGroup(_GroupBase):
    """Collectives of some workers of a run, by torch's names."""

    @call
    def barrier(self, opts: Any) -> dist.Work:
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

    @call
    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        """Reduce the tensors of all ranks and lists to one, which all of them become."""
        op, limit, checks = self._op(opts), self._seconds(opts), self._checks["allreduce"]
        checks.some(tensors)
        if len(tensors) > 1:
            checks.alike(tensors, tensors[0])
        if tensors[0].layout is torch.sparse_coo:
            checks.sparse(op, tensors)
            summed = all_reduce_sparse(self._group, tensors, op, limit)
            return self._work_of_several_calls("sparse_all_reduce", summed, tensors)
        checks.reduced(op, tensors)
        return self._work("all_reduce", [self._reduced(None, tensors, op, limit)], tensors, tensors)

    async def _reduced(self, own: Tensor | None, tensors: Sequence[Tensor], op: str, limit: float | None) -> None:
        """Reduce ``own``, and copy the result to ``tensors``. None is the reduction of the tensors themselves."""
        if own is None:
            own = tensors[0] if len(tensors) == 1 else _combined(tensors, op)
        memory = TensorMemory(own)
        await self._group.all_reduce(memory.array, op, out=memory.array, timeout=limit)
        memory.finish()
        _spread(own, tensors)

    @call
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        """Reduce several tensors of all ranks, each by itself."""
        op, limit, checks = self._op(opts), self._seconds(opts), self._checks["allreduce_coalesced"]
        checks.some(tensors)
        checks.same_kind(tensors)
        checks.reduced(op, tensors)

        def calls() -> Iterator[Coroutine[Any, Any, None]]:
            for own, tensor in zip(apart(tensors), tensors, strict=True):
                yield self._reduced(own, [tensor], op, limit)

        return self._work("all_reduce", calls(), tensors, tensors)

    @call
    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        """Reduce the tensors of all ranks at the root."""
        op, limit, root, checks = self._op(opts), self._seconds(opts), opts.rootRank, self._checks["reduce"]
        checks.root(root)
        checks.root_tensor(opts.rootTensor, tensors)
        checks.single(tensors)
        checks.reduced(op, tensors)

        async def reduced() -> None:
            memory = TensorMemory(tensors[0])
            out = memory.array if self._group.rank == root else None
            await self._group.reduce(memory.array, root, op, out=out, timeout=limit)
            if out is not None:
                memory.finish()

        return self._work("reduce", [reduced()], tensors, tensors)

    @call
    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        """Copy one of the root's tensors to all tensors of all ranks."""
        root, limit, checks = opts.rootRank, self._seconds(opts), self._checks["broadcast"]
        checks.root(root)
        checks.root_tensor(opts.rootTensor, tensors)
        checks.dense(tensors)
        if len(tensors) > 1:
            checks.alike(tensors, tensors[0])
        tensor = tensors[opts.rootTensor]

        async def copied() -> None:
            memory = TensorMemory(tensor)
            await self._group.broadcast(memory.array, root, out=memory.array, timeout=limit)
            memory.finish()
            _spread(tensor, tensors)

        return self._work("broadcast", [copied()], tensors, tensors)

    @call
    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        """Collect the tensors of all ranks, rank by rank, in each of the lists ``outputs``."""
        limit, checks = self._seconds(opts), self._checks["allgather"]
        checks.pairs(outputs, inputs)
        checks.dense(inputs)
        checks.alike(inputs, inputs[0])
        for number, places in enumerate(outputs):
            checks.length(number, places, self._group.size * len(inputs))
            checks.alike(places, inputs[0])

        async def gathered(number: int, tensor: Tensor) -> None:
            found = await self._group.all_gather(TensorMemory(tensor).array, timeout=limit)
            for places in outputs:
                set_rows(places[number :: len(inputs)], found)

        calls = each(gathered, range(len(inputs)), inputs, written=_flat(outputs))
        return self._work("all_gather", calls, _flat_if_one(outputs), inputs)

    @call
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> dist.Work:
        """Collect several tensors, each by itself. ``outputs`` has a list for each rank."""
        limit, checks = self._seconds(opts), self._checks["allgather_coalesced"]
        checks.some(inputs, "input ")
        checks.dense(inputs)
        if len(outputs) != self._group.size:
            checks.refuse(f"output lists should be equal to world size: {len(outputs)} and {self._group.size}")
        for places in outputs:
            checks.each_alike(places, inputs)

        async def gathered(places: Sequence[Tensor], tensor: Tensor) -> None:
            set_rows(places, await self._group.all_gather(TensorMemory(tensor).array, timeout=limit))

        calls = each(gathered, list(zip(*outputs, strict=True)), inputs, written=_flat(outputs))
        return self._work("all_gather", calls, _flat_if_one(outputs), inputs)

    @call
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:
        """Collect the tensors of all ranks in one."""
        return self._gather_single("all_gather_single", [output], [input], opts)

    @call
    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        """Collect several tensors of all ranks, each in one."""
        return self._gather_single("all_gather_single_coalesced", outputs, inputs, opts)

    def _gather_single(self, name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        limit, checks = self._seconds(opts), self._checks[name]
        checks.pairs(outputs, inputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            checks.whole(output, tensor)

        async def gathered(output: Tensor, tensor: Tensor) -> None:
            memory, given = TensorMemory(output), TensorMemory(tensor)
            out = memory.array.reshape(self._group.size, *given.array.shape)
            await self._group.all_gather(given.array, out=out, timeout=limit)
            memory.finish()

        return self._work("all_gather", each(gathered, outputs, inputs, written=outputs), outputs, inputs)

    @call
    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        """Collect the tensors of all ranks at the root."""
        root, limit, checks = opts.rootRank, self._seconds(opts), self._checks["gather"]
        checks.root(root)
        checks.single(inputs, "input ")
        checks.dense(inputs)
        checks.rows(outputs, "output", is_root=self._group.rank == root, like=inputs[0])

        async def gathered() -> None:
            found = await self._group.gather(TensorMemory(inputs[0]).array, root, timeout=limit)
            if found is not None:
                set_rows(outputs[0], found)

        return self._work("gather", [gathered()], _flat_if_one(outputs), inputs)

    @call
    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        """Give each rank one of the root's tensors."""
        root, limit, checks = opts.rootRank, self._seconds(opts), self._checks["scatter"]
        checks.root(root)
        checks.single(outputs, "output ")
        checks.dense(outputs)
        checks.rows(inputs, "input", is_root=self._group.rank == root, like=outputs[0])

        async def scattered() -> None:
            memory = TensorMemory(outputs[0])
            given = rows(inputs[0]) if self._group.rank == root else None
            await self._group.scatter(given, root, out=memory.array, timeout=limit)
            memory.finish()

        return self._work("scatter", [scattered()], outputs, [tensor for given in inputs for tensor in given])

    @call
    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        """Reduce lists of tensors. Rank r receives the result of the r-th."""
        op, limit, checks = self._op(opts), self._seconds(opts), self._checks["reduce_scatter"]
        checks.pairs(outputs, inputs)
        checks.reduced(op, outputs)
        for number, (output, given) in enumerate(zip(outputs, inputs, strict=True)):
            checks.length(number, given, self._group.size)
            checks.alike(given, output)

        async def reduced(output: Tensor, given: Sequence[Tensor]) -> None:
            memory = TensorMemory(output)
            await self._group.reduce_scatter(rows(given), op, out=memory.array, timeout=limit)
            memory.finish()

        return self._work(
            "reduce_scatter", map(reduced, outputs, inputs), outputs, [t for given in inputs for t in given]
        )

    @call
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:
        """Reduce a tensor. Each rank receives a part of the result."""
        return self._scatter_single("reduce_scatter_single", [output], [input], opts)

    @call
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> dist.Work:
        """Reduce several tensors. Each rank receives a part of each result."""
        return self._scatter_single("reduce_scatter_single_coalesced", outputs, inputs, opts)

    def _scatter_single(self, name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        op, limit, checks = self._op(opts), self._seconds(opts), self._checks[name]
        checks.pairs(outputs, inputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            checks.whole(tensor, output)
        checks.reduced(op, outputs)

        async def reduced(output: Tensor, tensor: Tensor) -> None:
            memory = TensorMemory(output)
            given = TensorMemory(tensor).array.reshape(self._group.size, *memory.array.shape)
            await self._group.reduce_scatter(given, op, out=memory.array, timeout=limit)
            memory.finish()

        return self._work("reduce_scatter", each(reduced, outputs, inputs, written=outputs), outputs, inputs)

    @call
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        """Send a tensor to each rank, and receive one from each."""
        checks = self._checks["alltoall"]
        for tensors in (outputs, inputs):
            checks.length(0, tensors, self._group.size)
        checks.same_kind([*outputs, *inputs])
        checks.dense([*outputs, *inputs])
        return self._work("all_to_all", [self._exchange(outputs, inputs, self._seconds(opts))], outputs, inputs)

    async def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], limit: float | None) -> None:
        memory = [TensorMemory(output) for output in outputs]
        given = [TensorMemory(tensor).array for tensor in inputs]
        await self._group.all_to_all_uneven(given, [one.array for one in memory], timeout=limit)
        for one in memory:
            one.finish()

    @call
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any,
    ) -> dist.Work:
        """Send a part of a tensor to each rank. Sizes are rows of each part; empty for equal parts."""
        checks = self._checks["all_to_all_single"]
        checks.splits(output, output_split_sizes)
        checks.splits(input, input_split_sizes)
        checks.same_kind([output, input])
        checks.packed(input)
        memory = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
        parts, limit = self._cut(memory, output_split_sizes), self._seconds(opts)

        async def exchanged() -> None:
            await self._exchange(parts, self._cut(input, input_split_sizes), limit)
            if memory is not output:
                output.copy_(memory)

        return self._work("all_to_all", [exchanged()], [output], [input])


for _former, _name in FORMER_NAMES.items():
    setattr(LinkGroup, _former, getattr(LinkGroup, _name))


def _combined(tensors: Sequence[Tensor], op: str) -> Tensor:
    """Return a new tensor: the reduction of a rank's own tensors."""
    combined = reduce(REDUCTIONS[op.upper()], tensors)
    return combined / len(tensors) if op == "avg" else combined


def _spread(tensor: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a tensor to all of a list but itself."""
    for other in tensors:
        if other is not tensor:
            other.copy_(tensor)


def _flat(tensors: Sequence[Any]) -> list[Tensor]:
    """Return the tensors of a list, or of lists."""
    return [tensor for one in tensors for tensor in ([one] if isinstance(one, Tensor) else one)]


def _flat_if_one(lists: Sequence[Sequence[Tensor]]) -> Sequence[Any]:
    """Return the value of c10d's futures for outputs in lists: the list itself if it is the only one."""
    return lists[0] if len(lists) == 1 else lists


def make_group(options: Any, _: Any, context: Callable[[], Context] = init) -> LinkGroup:
    """Return a process group for torch. options: rank, size, members, time limit and store, as torch gives them."""
    if context is init and not is_placed():
        place = own_run.join(options.store, options.group_rank, options.group_size)
    else:
        place = context()
    ranks = ranks_in_run(options, place.rank)
    if place.rank != ranks[options.group_rank]:
        raise InvalidArgumentError(
            f"rank {options.group_rank} of {ranks} is rank {place.rank} of the run: start torch.distributed with RANK "
            "and WORLD_SIZE as the launcher sets them"
        )
    made = LinkGroup(place.new_group(ranks, ordered=True).wrapped, options.timeout)
    if 1 < len(ranks) == place.world_size:
        mark_group()
    return made
