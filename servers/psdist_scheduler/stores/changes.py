"""Bytes of a change to the scheduler's state (``Persist``), for stores that keep a log of changes.

MessagePack with a fixed form: the fields of ``_Changes``. Optimizers, layouts and settings are protobuf messages in it,
as in the SQLite file. Content that does not parse is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import msgspec
from google.protobuf.message import DecodeError

from psdist.v1 import common_pb2
from psdist.wire import convert
from psdist_scheduler.events.cluster_events import Persist
from psdist_scheduler.events.cluster_state import (
    BarrierRecord,
    Member,
    Node,
    ParametersRecord,
    RestorePoint,
    SchedulerProcess,
    StoredState,
)
from psdist_scheduler.stores.dataset_rows import dataset_of, dataset_row


@dataclass(frozen=True, slots=True)
class _Parameters:
    entry: bytes
    layout: bytes
    uploader: str
    committed: bool


@dataclass(frozen=True, slots=True)
class _Changes:
    epoch: int
    members: tuple[Member, ...]
    parameters: tuple[_Parameters, ...]
    nodes: tuple[Node, ...]
    servers_wanted: int | None
    datasets: tuple[tuple[str, bytes, str], ...]
    forgotten: tuple[str, ...]
    base: RestorePoint | None
    barriers: tuple[BarrierRecord, ...]
    schedulers: tuple[SchedulerProcess, ...]
    run_lost: str


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Changes)


def encode(changes: Persist) -> bytes:
    """Return the bytes of ``changes``."""
    same = {field.name: getattr(changes, field.name) for field in fields(_Changes)}
    return _ENCODER.encode(
        _Changes(
            **same
            | {
                "parameters": tuple(map(_parameters_row, changes.parameters)),
                "datasets": tuple(map(dataset_row, changes.datasets)),
            }
        )
    )


def decode(data: bytes) -> Persist:
    """Return the changes that ``data`` holds. Raises ValueError if it is not a change of this form."""
    try:
        read = _DECODER.decode(data)
        same = {field.name: getattr(read, field.name) for field in fields(_Changes)}
        return Persist(
            **same
            | {
                "parameters": tuple(map(_parameters, read.parameters)),
                "datasets": tuple(dataset_of(spec, text) for _, spec, text in read.datasets),
            }
        )
    except (msgspec.MsgspecError, DecodeError, LookupError, TypeError) as error:
        raise ValueError(f"it is not a change of the scheduler's state: {error}") from None


def whole(state: StoredState, forgotten: Sequence[str] = ()) -> Persist:
    """Return ``state`` as one change of nothing."""
    return Persist(
        state.epoch, state.members, state.parameters, state.nodes, state.servers_wanted, state.datasets,
        tuple(forgotten), state.base, state.barriers, state.schedulers, state.run_lost,
    )  # fmt: skip


def _parameters_row(record: ParametersRecord) -> _Parameters:
    return _Parameters(
        convert.entry_to_proto(record.entry).SerializeToString(),
        convert.layout_to_proto(record.layout).SerializeToString(),
        record.uploader,
        record.committed,
    )


def _parameters(row: _Parameters) -> ParametersRecord:
    return ParametersRecord(
        entry=convert.entry_from_proto(common_pb2.ParametersEntry.FromString(row.entry)),
        layout=convert.layout_from_proto(common_pb2.Layout.FromString(row.layout)),
        uploader=row.uploader,
        committed=row.committed,
    )
