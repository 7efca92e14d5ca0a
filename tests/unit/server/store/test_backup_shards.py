"""Copies at a replica: which stream of a primary counts, where acknowledgements go, and squares for clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from psdist import BSP, optim
from psdist.errors import InvalidArgumentError, LimitExceededError, PsdistError, StaleTermError
from psdist.types import ParametersEntry, ParametersSpec, Replica, Shard
from psdist.v1 import common_pb2
from psdist.v1 import server_pb2 as pb
from psdist.wire.frames import Frame
from psdist_server.kernels.arrays import DenseParameters
from psdist_server.kernels.pool import KernelLauncher
from psdist_server.store.backup_shards import BackupShards
from psdist_server.store.gradients import NormBoard
from psdist_server.store.statistics import Counters

SLICE, SLICES = 4096, 2
P, B = Replica("server-0", 1), Replica("server-1", 1)
SPEC = ParametersSpec("p", optim.SGD(lr=1.0, max_grad_norm=1.0), BSP(), slice_elements=SLICE)
ENTRY = ParametersEntry(spec=SPEC, total=SLICES * SLICE, shards=(Shard(P, 1, (B,)),), ready=True)
ZEROS = np.zeros(SLICE, np.float32)


class Kernels:
    """In place of the launcher: kernels end when the test says so."""

    def __init__(self) -> None:
        self.running: dict[int, Callable[[], None]] = {}

    def submit(self, index: int, run: Callable[[Any], Any], work: Any, done: Callable[[Any, Any], None]) -> None:
        self.running[index] = lambda: done(work, run([(index, work)])[0])

    def end(self, index: int) -> None:
        self.running.pop(index)()


class Backup:
    """A replica of the only shard."""

    def __init__(self) -> None:
        self.dense = DenseParameters(ENTRY)
        self.kernels, self.norms = Kernels(), NormBoard()
        self.stopped: list[PsdistError] = []
        kernels = cast(KernelLauncher, self.kernels)
        self.backups = BackupShards(SPEC, self.dense, kernels, self.norms, Counters(), self.stopped.append)
        self.backups.add(0, range(SLICES), ENTRY.shards[0])
        self.machine = self.backups.machines[0]

    def open(self) -> list[pb.ReplicateResponse]:
        """A new stream of the primary: what is answered on it."""
        answers: list[pb.ReplicateResponse] = []
        answers.append(self.backups.open_stream(P, answers.append))
        return answers

    def take(self, answers: list[pb.ReplicateResponse], payload: bytes = b"", **kind: Any) -> None:
        message = pb.ReplicateRequest(shard=0, term=1, **kind)
        self.backups.on_message(P, Frame(message, memoryview(payload)), ENTRY, answers.append)

    def fill(self, answers: list[pb.ReplicateResponse]) -> None:
        self.take(answers, begin=pb.ReplicateRequest.Begin(lsn=0))
        for index in range(SLICES):
            state = pb.ReplicateRequest.SliceState(slice=index, array=0, arrays=1)
            self.take(answers, ZEROS.tobytes(), state=state)
        self.take(answers, end=pb.ReplicateRequest.End())

    def update(self, answers: list[pb.ReplicateResponse], lsn: int, index: int, square: float = 1.0) -> None:
        update = pb.ReplicateRequest.Update(
            lsn=lsn,
            slice=index,
            version=0,
            dtype=common_pb2.DTYPE_FLOAT32,
            has_gradient=True,
            lr_scale=1.0,
            square=square,
        )
        self.take(answers, (ZEROS + 1).tobytes(), update=update)


@pytest.fixture
def backup() -> Iterator[Backup]:
    made = Backup()
    yield made
    made.dense.close()


def acked(answers: list[pb.ReplicateResponse]) -> int:
    return max((answer.ack.lsn for answer in answers if answer.HasField("ack")), default=0)


def test_what_comes_late_on_an_earlier_stream_changes_nothing(backup: Backup) -> None:
    """Otherwise a copy would restart, and updates that are only counted would be acknowledged."""
    old = backup.open()
    new = backup.open()
    backup.fill(new)
    with pytest.raises(InvalidArgumentError, match="another stream"):
        backup.take(old, begin=pb.ReplicateRequest.Begin(lsn=0))
    backup.update(new, 1, 0)
    assert acked(new) == 0
    backup.kernels.end(0)
    assert acked(new) == 1 and (backup.dense.export(0)[0] == -1.0).all()


def test_updates_of_a_stream_that_broke_are_acknowledged_on_the_next(backup: Backup) -> None:
    """The primary counts updates in the welcome as acknowledged, and waits for the others on the newest stream."""
    old = backup.open()
    backup.fill(old)
    backup.update(old, 1, 0)
    new = backup.open()
    assert new[0].welcome.held[0].lsn == 1
    backup.update(new, 2, 1)
    backup.kernels.end(1)
    backup.kernels.end(0)
    assert acked(new) == 2


def test_the_square_of_a_gradient_of_zeros_is_known_too(backup: Backup) -> None:
    """Once this server is the primary others ask it, and wait for as long as it does not know."""
    answers = backup.open()
    backup.fill(answers)
    backup.update(answers, 1, 0, square=0.0)
    backup.kernels.end(0)
    assert backup.norms.known(0) == {0: 0.0}


def test_an_update_of_an_earlier_term_is_acknowledged_to_nobody(backup: Backup) -> None:
    answers = backup.open()
    backup.fill(answers)
    backup.update(answers, 1, 0)
    entry = replace(ENTRY, shards=(Shard(Replica("server-2", 1), 2, (B,)),))
    backup.machine.adopt_map(entry.shards[0])
    backup.machine.start_copy(2, 1)
    backup.kernels.end(0)
    assert acked(answers) == 0


def test_the_square_of_a_slices_last_step_comes_with_its_copy(backup: Backup) -> None:
    """A server that is still at that step asks for it, and perhaps nobody else is left who knows."""
    answers = backup.open()
    backup.take(answers, begin=pb.ReplicateRequest.Begin(lsn=7))
    state = pb.ReplicateRequest.SliceState(slice=1, array=0, arrays=1, version=5, square=2.5)
    backup.take(answers, ZEROS.tobytes(), state=state)
    assert backup.norms.known(4) == {1: 2.5}


def test_a_copy_that_has_no_room_is_refused_with_the_reason(backup: Backup, monkeypatch: pytest.MonkeyPatch) -> None:
    def hold(indices: range) -> None:
        raise LimitExceededError("the weights of more slices have no room")

    monkeypatch.setattr(backup.dense, "hold", hold)
    backup.backups.remove(0)
    backup.backups.add(0, range(SLICES), ENTRY.shards[0])
    answers = backup.open()
    backup.take(answers, begin=pb.ReplicateRequest.Begin(lsn=0))
    assert [answer.WhichOneof("kind") for answer in answers] == ["welcome", "refused"]
    assert answers[1].refused.error.code == LimitExceededError.code


@pytest.mark.parametrize(("sender", "term"), [(P, 1), (Replica("server-3", 1), 2), (Replica("server-2", 2), 2)])
def test_a_replica_refuses_whoever_is_not_the_primary_of_its_map(backup: Backup, sender: Replica, term: int) -> None:
    primary = Replica("server-2", 1)
    entry = replace(ENTRY, shards=(Shard(primary, 2, (B,)),))
    backup.backups.adopt_map(entry.shards)
    for who, number, refused in ((sender, term, True), (primary, 2, False)):
        answers: list[pb.ReplicateResponse] = []
        backup.backups.open_stream(who, answers.append)
        message = pb.ReplicateRequest(shard=0, term=number, begin=pb.ReplicateRequest.Begin(lsn=0))
        backup.backups.on_message(who, Frame(message, memoryview(b"")), entry, answers.append)
        assert [answer.refused.error.code for answer in answers] == [StaleTermError.code] * refused


def assigned(lsn: int) -> pb.ReplicateRequest.Update:
    return pb.ReplicateRequest.Update(lsn=lsn, slice=0, version=0, dtype=1, lr_scale=1.0, assigned=True)


def test_assigned_weights_are_used_by_the_update_behind_them_only(backup: Backup) -> None:
    """A copy that is promoted in between has neither."""
    stream = backup.open()
    backup.fill(stream)
    values = (ZEROS + 5).tobytes()
    backup.take(stream, values, assign=pb.ReplicateRequest.Assign(lsn=1, slice=0))
    assert (backup.dense.export(0)[0] == 0.0).all() and not backup.kernels.running
    backup.take(stream, update=assigned(1))
    backup.kernels.end(0)
    assert acked(stream) == 1 and (backup.dense.export(0)[0] == 5.0).all()
    backup.take(stream, values, assign=pb.ReplicateRequest.Assign(lsn=2, slice=1))
    backup.update(stream, 2, 1)
    backup.kernels.end(1)
    assert (backup.dense.export(1)[0] == -1.0).all()


@pytest.mark.parametrize("announced", [None, 7])
def test_an_update_without_the_weights_that_it_begins_with_breaks_the_stream(
    backup: Backup, announced: int | None
) -> None:
    stream = backup.open()
    backup.fill(stream)
    if announced is not None:
        backup.take(stream, ZEROS.tobytes(), assign=pb.ReplicateRequest.Assign(lsn=announced, slice=0))
    with pytest.raises(InvalidArgumentError, match="without its assigned weights"):
        backup.take(stream, update=assigned(1))


def test_lags_come_with_copies_and_grow_with_updates(backup: Backup) -> None:
    answers = backup.open()
    backup.take(answers, begin=pb.ReplicateRequest.Begin(lsn=0))
    lags = common_pb2.Lags(slices=[0], starts=[10], sizes=[5], updates=[3])
    for index in range(SLICES):
        state = pb.ReplicateRequest.SliceState(slice=index, array=0, arrays=1, lags=lags if index == 0 else None)
        backup.take(answers, ZEROS.tobytes(), state=state)
    backup.take(answers, end=pb.ReplicateRequest.End())
    assert backup.dense.lags.rows(range(SLICES)) == ((0, 10, 15, 3),)
    absent = pb.ElementRanges(starts=[12], sizes=[8])
    update = pb.ReplicateRequest.Update(
        lsn=1, slice=0, dtype=common_pb2.DTYPE_FLOAT32, has_gradient=True, lr_scale=1.0, absent=absent
    )
    backup.take(answers, (ZEROS + 1).tobytes(), update=update)
    backup.kernels.end(0)
    assert backup.dense.lags.of(0) == ((10, 12, 3), (12, 15, 4), (15, 20, 1))
    weights = backup.dense.export(0)[0]
    assert (weights[12:20] == 0.0).all() and (weights[:12] == -1.0).all() and (weights[20:] == -1.0).all()


@pytest.mark.parametrize(
    ("lags", "text"),
    [
        (common_pb2.Lags(slices=[1], starts=[0], sizes=[5], updates=[3]), "slice 1 in a copy"),
        (common_pb2.Lags(slices=[0], starts=[4090], sizes=[7], updates=[3]), "4096 of slice 0 in a copy"),
        (common_pb2.Lags(slices=[0], starts=[0], sizes=[7]), "columns of 1, 1, 1, 0 numbers"),
    ],
)
def test_lags_that_a_copy_cannot_have_are_refused(backup: Backup, lags: common_pb2.Lags, text: str) -> None:
    answers = backup.open()
    backup.take(answers, begin=pb.ReplicateRequest.Begin(lsn=0))
    with pytest.raises(InvalidArgumentError, match=text):
        backup.take(answers, ZEROS.tobytes(), state=pb.ReplicateRequest.SliceState(slice=0, arrays=1, lags=lags))
