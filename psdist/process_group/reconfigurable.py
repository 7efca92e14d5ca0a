"""``ReconfigurableGroup``: a process group whose members torchft's Manager chooses, again after each loss.

The members name themselves to each other by handles: torchft's lighthouse hands them on, or a store of torch does. A
handle has no address, since the scheduler knows where a worker of the run is.

Invariant: A call belongs to the members that the group had when it was made. Late messages of earlier members are
dropped, because each formation has a number that is higher than those of all members before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]  # missing in torch's stubs
    ErrorType,
    PrefixStore,
    Store,
    TCPStore,
    _create_work_from_future,
)

from psdist.client.context import Context, init
from psdist.client.session import loop
from psdist.client.session.loop import on_loop
from psdist.collectives import SILENCE_SECONDS
from psdist.collectives.frames import Sender
from psdist.collectives.group import AsyncWorkerGroup
from psdist.errors import ClosedError, InvalidArgumentError, PeerUnreachableError, WaitTimeoutError, check_integer
from psdist.process_group.checks import FORMER_NAMES, FORMS, opaque
from psdist.process_group.link_group import LinkGroup
from psdist.torch_backend import NAME
from psdist.types import check_name
from psdist.wire.limits import HANDLE_CHARACTERS_MAX, WORLD_MAX

#: Calls that are passed to the members of the moment. torch and torchft call them by name.
_CALLS: Final = (
    *FORMS, *FORMER_NAMES, "send", "recv", "recv_anysource", "size", "monitored_barrier", "_start_coalescing",
    "_end_coalescing", "_get_sequence_number_for_group", "_set_sequence_number_for_group",
)  # fmt: skip


class ReconfigurableGroup(dist.ProcessGroup):
    """Process group for ``torchft.Manager(pg=...)``.

    timeout: time limit of calls, and of the formation of a group, in which all members take part.
    name: name of the groups. Groups of one process that exist side by side have different ones.
    silence: seconds after which a member counts as lost if its process is stopped, or its host cannot be reached. None
        leaves that to its lease.
    context: None uses the context of ``psdist.init()``.

    All members are workers of one run. Calls raise ClosedError before the first ``configure``, and after ``shutdown``.
    """

    #: Read by torchft.
    supports_reconfigure = True

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        *,
        name: str = "torchft",
        silence: float | None = SILENCE_SECONDS,
        context: Context | None = None,
    ) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # missing in torch's stubs
        self._limit = timeout
        self._name = check_name(name, "group name")
        self._silence = silence
        self._context = init() if context is None else context
        self._members: LinkGroup | None = None
        #: Number of the newest formation that this worker took part in.
        self._number = 0

    @property
    def members(self) -> LinkGroup:
        """The group of the moment. Raises ClosedError before ``configure``, and after ``shutdown``."""
        if self._members is None:
            raise ClosedError(f"process group {self._name!r} has no members: call configure() first")
        return self._members

    # torch and torchft call these methods by name.

    def getBackendName(self) -> str:
        """Name of the backend."""
        return NAME

    def rank(self) -> int:
        """This worker's number among the members."""
        return self.members.rank()

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Replace the members by ``world_size`` workers, which all call this.

        store_addr: "host:port/prefix" of a store of torch, with a prefix of its own for each call.
        rank, world_size: this worker's number among the members, and how many they are.
        The other arguments are torchft's names for this worker, which psdist does not need.

        Raises InvalidArgumentError for other values, WorkerLostError if a member is gone, PeerUnreachableError without
        the store, WaitTimeoutError after the group's time limit, and FencedError if this worker was expelled meanwhile.
        """
        check_integer("world_size", world_size, 1, WORLD_MAX)
        check_integer("rank", rank, 0, world_size - 1)
        self.abort()
        try:
            handles = self._exchange_handles(store_addr, rank, world_size)
        except (PeerUnreachableError, WaitTimeoutError):  # Of a member, or the store, that left first.
            loop.shared().call(self._outlast_stop())
            raise
        self._form(handles)

    async def _outlast_stop(self) -> None:
        await self._context.async_collectives().outlast_stop()

    def _exchange_handles(self, store_addr: str, rank: int, size: int) -> list[str]:
        """Return the members' handles by rank, by a store of torch."""
        try:
            store = _connect(store_addr, self._limit)
            store.set(f"member/{rank}", self.get_reconfigure_handle())
            return [store.get(f"member/{other}").decode(errors="replace") for other in range(size)]
        except dist.DistNetworkError as error:
            raise PeerUnreachableError(
                f"process group {self._name!r} cannot reach the store {store_addr!r:.80}: {_first_line(error)}"
            ) from None
        except dist.DistStoreError as error:
            raise WaitTimeoutError(
                f"the {size} members of process group {self._name!r} did not all call configure() within "
                f"{self._limit.total_seconds():g} s: {_first_line(error)}"
            ) from None

    def get_reconfigure_handle(self) -> str:
        """Return the text by which ``reconfigure`` of the other members knows this worker."""
        worker, incarnation = loop.shared().call(on_loop(lambda: self._context.async_collectives().identity))
        return json.dumps([worker, incarnation, self._number])

    def reconfigure(self, opts: Any) -> dist.Work:
        """Replace the members by those with the handles ``opts.handles``, in order. Raises as ``configure``."""
        handles = opts.handles
        if not isinstance(handles, Sequence) or not 0 < len(handles) <= WORLD_MAX:
            raise InvalidArgumentError(f"opts.handles={handles!r:.60}: give a list of 1 to {WORLD_MAX} handles")
        self.abort()
        self._form(handles)
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        work: dist.Work = _create_work_from_future(future)
        return work

    def _form(self, handles: Sequence[str]) -> None:
        found = [_read(handle) for handle in handles]
        self._number = 1 + max(number for _, number in found)
        formed = loop.shared().call(self._enter([member for member, _ in found]))
        self._members = LinkGroup(formed, self._limit)

    async def _enter(self, members: Sequence[Sender]) -> AsyncWorkerGroup:
        collectives, limit = self._context.async_collectives(), self._limit.total_seconds()
        return await collectives.enter_group(self._name, self._number, members, silence=self._silence, timeout=limit)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of later calls and formations."""
        self._limit = timeout
        if self._members is not None:
            self._members.set_timeout(timeout)

    def errored(self) -> Exception | None:
        """Return the error that ended the group of the moment, or None."""
        return None if self._members is None else self._members.error

    def abort(self) -> None:
        """End the group of the moment: its calls raise ClosedError, at all members that are in one."""
        if self._members is not None:
            self._members.abort()

    def shutdown(self) -> None:
        """End the group of the moment. ``configure`` forms another one."""
        self.abort()
        self._members = None

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> dist.Work:
        """Copy the root's tensor to all members."""
        work: dist.Work = self.members.broadcast(tensor, root)
        return work

    # torchft asks groups that are not derived from its own class for the errors of their backends.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def get_error(self) -> Any:
        """Return torch's kind of ``errored``."""
        return ErrorType.SUCCESS if self.errored() is None else ErrorType.COMM_ERROR


def _pass_on(name: str) -> Callable[..., Any]:
    def call(self: ReconfigurableGroup, *arguments: Any, **keywords: Any) -> Any:
        return getattr(self.members, name)(*arguments, **keywords)

    call.__name__, call.__doc__ = name, getattr(LinkGroup, name).__doc__
    return call


for _name in _CALLS:
    setattr(ReconfigurableGroup, _name, _pass_on(_name))
opaque(ReconfigurableGroup)


def _connect(store_addr: str, timeout: timedelta) -> Store:
    address, _, prefix = store_addr.partition("/")
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise InvalidArgumentError(f"store_addr={store_addr!r:.80}: give host:port/prefix of a store of torch")
    store = TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    return PrefixStore(f"{prefix}/psdist", store)


def _first_line(error: Exception) -> str:
    """Return the message of one of torch's errors without the C++ frames that follow."""
    return str(error).partition("\n")[0]


def _read(handle: str) -> tuple[Sender, int]:
    """Return the worker of a handle, and the number of its newest formation. Raises InvalidArgumentError."""
    try:
        if len(handle) > HANDLE_CHARACTERS_MAX:
            raise ValueError
        worker, incarnation, number = json.loads(handle)
        check_name(worker, "worker id")
        check_integer("incarnation", incarnation, 1, 2**63 - 1)
        check_integer("number", number, 0, 2**63 - 2)
    except (TypeError, ValueError, RecursionError):  # InvalidArgumentError is a ValueError.
        raise InvalidArgumentError(
            f"a member of a process group has the handle {handle!r:.80}, which is not one of psdist: all members use "
            "psdist's ReconfigurableGroup"
        ) from None
    return (worker, incarnation), number
