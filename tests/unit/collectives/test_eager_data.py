"""Data that travels with a call: its size, and limits on the data that waits here for the same call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from psdist.collectives.core import plans
from psdist.collectives.core.machine import COLLECTIVES, GroupMachine, SendCall, SendPart
from psdist.collectives.frames import IncomingLink
from psdist.collectives.mesh import Mesh
from psdist.errors import LimitExceededError
from psdist.v1 import worker_pb2 as pb
from psdist.wire import limits

LARGE = np.ones(limits.EAGER_REDUCED_BYTES // 4, np.float32)


def all_reduce(array: np.ndarray, rank: int, size: int) -> list[Any]:
    """Return the messages of a rank when it makes the call."""
    return GroupMachine(rank, size).start(COLLECTIVES, plans.all_reduce(rank, size, array, array.copy(), "sum"))[1]


def test_two_ranks_reduce_an_array_by_one_message_each() -> None:
    machines = [GroupMachine(rank, 2) for rank in range(2)]
    results = [np.empty_like(LARGE) for _ in machines]
    sent = []
    for rank, (machine, result) in enumerate(zip(machines, results, strict=True)):
        plan = plans.all_reduce(rank, 2, LARGE * (rank + 1), result, "sum")
        (effect,) = machine.start(COLLECTIVES, plan)[1]
        assert isinstance(effect, SendCall) and effect.data.nbytes == LARGE.nbytes
        sent.append(effect)
    for rank, machine in enumerate(machines):
        other = sent[1 - rank]
        effects = machine.on_call(1 - rank, COLLECTIVES, 0, other.header, other.data)
        assert not any(isinstance(effect, SendPart) for effect in effects)
        assert (results[rank] == 3).all()


def test_segments_travel_with_the_call_up_to_the_limit() -> None:
    for array, travels in ((np.tile(LARGE, 4), True), (np.ones(4 * LARGE.size + 4, np.float32), False)):
        sent = all_reduce(array, 0, 4)
        assert [effect.data.nbytes for effect in sent] == [array.nbytes // 4 * travels] * 3


def test_a_rank_that_is_late_in_several_large_groups_can_hold_what_arrives() -> None:
    for size in [2, 8, 64, 200, 256]:
        for kind in ["all_reduce", "reduce_scatter"]:
            array = np.zeros((size, LARGE.size), np.float32)  # Memory that is never touched.
            for columns in (LARGE.size, LARGE.size // 2, limits.EAGER_BYTES // 4):
                rows = array.reshape(-1)[: size * columns].reshape(size, columns)
                plan = (
                    plans.all_reduce(0, size, rows, rows, "sum")
                    if kind == "all_reduce"
                    else plans.reduce_scatter(0, size, rows, np.empty(columns, np.float32), "sum")
                )
                # Each rank receives as much as it sends.
                sent = [
                    effect
                    for effect in GroupMachine(0, size).start(COLLECTIVES, plan)[1]
                    if isinstance(effect, SendCall)
                ]
                assert 4 * sum(effect.data.nbytes for effect in sent) <= limits.EARLY_BYTES_MAX


def link() -> IncomingLink:
    connection: Any = SimpleNamespace(set_receiver=lambda _: None, allow_stalls=lambda: None)
    return IncomingLink(SimpleNamespace(), ("worker-1", 1), connection)


@pytest.mark.parametrize(
    ("source", "most"), [(COLLECTIVES.source, limits.EAGER_REDUCED_BYTES), (0, limits.EAGER_BYTES)]
)
def test_more_data_with_a_call_is_refused(source: int, most: int) -> None:
    frame = pb.PeerFrame(call=pb.CollectiveCall(lane=pb.CollectiveLane(group=b"g", source=source)))
    assert len(link().payload_buffer(frame, most)) == most
    with pytest.raises(LimitExceededError, match=f"a payload has {most + 1} bytes, over {most}"):
        link().payload_buffer(frame, most + 1)


def test_data_of_unopened_groups_is_limited() -> None:
    mesh = object.__new__(Mesh)
    mesh._groups, mesh._epochs, mesh._early = {}, {}, []
    data = LARGE.view(np.uint8)

    def arrive(number: int) -> None:
        lane = pb.CollectiveLane(group=f"group {number}".encode().ljust(32), source=COLLECTIVES.source)
        mesh.on_frame(("worker-1", 1), pb.PeerFrame(call=pb.CollectiveCall(lane=lane)), data)

    most = limits.EARLY_BYTES_MAX // data.nbytes
    for number in range(most):
        arrive(number)
    with pytest.raises(LimitExceededError, match=f"calls and {limits.EARLY_BYTES_MAX} bytes"):
        arrive(most)
    assert len(mesh._early) == most
