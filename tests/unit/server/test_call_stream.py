"""Calls under way on one connection name a bounded number of slices, which moves of shards do not change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from psdist.errors import LimitExceededError
from psdist.types import Identity
from psdist.v1 import server_pb2 as pb
from psdist.wire import convert, limits
from psdist_server.call_stream import CallStream, StreamCall

_IDENTITY = Identity("run", "worker-0", 1, 5, "net")
_SLICES = 8


class _Stream(CallStream):
    """A connection to a server that answers nothing. held: the slices that it holds."""

    def __init__(self, held: list[int]) -> None:
        self.held = held
        self.waiting: list[StreamCall] = []
        store = SimpleNamespace(
            dense=SimpleNamespace(indices=held),
            entry=SimpleNamespace(slicing=SimpleNamespace(count=_SLICES)),
            router=SimpleNamespace(check_slice=lambda index, epoch: None, pull=self._wait),
            replicator=SimpleNamespace(needs_confirm=lambda slices: False),
            check_installed=lambda: None,
        )
        admission = SimpleNamespace(heard=lambda identity: None, map=SimpleNamespace(epoch=5))
        server = SimpleNamespace(admission=admission, cancel_call=lambda call: None)
        super().__init__(cast(Any, server), _IDENTITY, cast(Any, store))

    def _wait(self, call: StreamCall, index: int, min_version: int) -> None:
        call.outstanding[len(self.waiting)] = index
        self.waiting.append(call)

    def send(self, response: pb.ShareResponse) -> None: ...

    def hold(self) -> None: ...

    def release(self) -> None: ...

    @property
    def is_full(self) -> bool:
        return False

    def push(self, call: StreamCall, push: pb.SharedPush, bases: Any) -> None: ...

    def call_ended(self, call: StreamCall) -> None: ...

    def pull(self, call_id: int, slices: list[int]) -> StreamCall:
        pull = pb.SharedPull(identity=convert.identity_to_proto(_IDENTITY), slices=slices)
        self.on_message(pb.ShareRequest(call_id=call_id, pull=pull))
        return self.calls[call_id]


async def test_calls_that_name_slices_of_shards_that_moved_away_leave_room_for_others() -> None:
    stream = _Stream(held=list(range(_SLICES)))
    stream.pull(1, [0, 1, 2, 3, 4])
    del stream.held[1:]
    call = stream.pull(2, [0])
    assert call.error is None and call in stream.waiting
    stream.end()


async def test_calls_under_way_name_each_slice_a_limited_number_of_times() -> None:
    stream = _Stream(held=list(range(_SLICES)))
    for number in range(limits.SHARED_ROUNDS_MAX):
        assert stream.pull(number + 1, list(range(_SLICES))).error is None
    assert isinstance(stream.pull(99, [0]).error, LimitExceededError)
    stream.on_message(pb.ShareRequest(call_id=1, cancel=pb.SharedCancel()))
    assert stream.pull(100, [0]).error is None
    stream.end()


async def test_a_server_that_holds_nothing_of_the_set_now_does_not_blame_the_limit() -> None:
    stream = _Stream(held=[])
    assert stream.pull(1, [0]).error is None
    stream.end()
