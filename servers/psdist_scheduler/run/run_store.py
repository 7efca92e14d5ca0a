"""Interface of the store of a run's state, and the forms in which stores keep it.

A restarted scheduler needs the state, so it is made durable before anybody acts on it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, Final, get_type_hints

import msgspec
from google.protobuf.message import DecodeError

from psdist.errors import ConfigurationError
from psdist.v1 import common_pb2, scheduler_pb2
from psdist.wire import convert
from psdist_scheduler.decide.cluster_state import (
    DataLease,
    DatasetRecord,
    EndStep,
    EventRecord,
    ParametersRecord,
    StoredState,
)
from psdist_scheduler.decide.effects import Persist

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Store:
    """Interface of the store, and a store that keeps nothing. Calls block; only one is made at a time."""

    #: True if ``write_events`` keeps them.
    keeps_events = False

    def load(self) -> StoredState | None:
        """Return the stored state; None if there is none yet."""
        return None

    def write(self, changes: Persist) -> None:
        """Make the changes durable, all or none, before returning."""

    def load_events(self) -> list[EventRecord]:
        """Return the stored history of the run, oldest first."""
        return []

    def write_events(self, records: Sequence[EventRecord]) -> None:
        """Add to the history. A failure is only logged: the run does not depend on it."""

    def discard(self) -> None:
        """Delete the stored state and close the store, because the run has ended."""
        self.close()

    def close(self) -> None:
        """Release the store for another scheduler."""

    def check(self) -> None:
        """Return if this process may still write. Raises LeadershipLostError; does not block."""


def check_format(place: object, version: int, known: int, kind: str) -> None:
    """Raise ConfigurationError if the store at ``place`` has another format. kind: what such a store is in."""
    if version != known:
        raise ConfigurationError(
            f"--store {place} has format {version}, this release of psdist reads {known}: use the release that wrote "
            f"it, or another {kind}"
        )


def check_run(place: object, held: str, run_id: str, kind: str) -> None:
    """Raise ConfigurationError if the store at ``place`` holds another run. An empty ``run_id`` is any."""
    if run_id and held != run_id:
        raise ConfigurationError(
            f"--store {place} belongs to run {held!r}, not {run_id!r}: pass --run-id {held}, or another {kind}",
            run_id=held,
        )


# --- changes ----------------------------------------------------------------------------------------------------------
#
# MessagePack with a fixed form: the fields of ``Persist``, all required but ``ends``. Optimizers, layouts and settings
# are protobuf messages in it, as in the SQLite file. Content that does not parse is refused.


@dataclass(frozen=True, slots=True)
class _Parameters:
    entry: bytes
    layout: bytes
    uploader: str
    committed: bool


_ROWS: Final = {"parameters": tuple[_Parameters, ...], "datasets": tuple[tuple[str, bytes, str], ...]}
_REQUIRED: Final = {name: kind for name, kind in get_type_hints(Persist).items() if name != "ends"} | _ROWS
_Changes: Final[Any] = make_dataclass(
    "_Changes", [*_REQUIRED.items(), ("ends", tuple[EndStep, ...] | None, field(default=None))]
)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Changes)


def encode(changes: Persist) -> bytes:
    """Return the bytes of ``changes``."""
    rows = {
        "parameters": tuple(map(_parameters_row, changes.parameters)),
        "datasets": tuple(map(dataset_row, changes.datasets)),
    }
    return _ENCODER.encode(_fields(changes) | rows)


def decode(data: bytes) -> Persist:
    """Return the changes that ``data`` holds. Raises ValueError if it is not a change of this form."""
    try:
        read = _DECODER.decode(data)
        rows = {
            "parameters": tuple(parameters_of(p.entry, p.uploader, p.committed, p.layout) for p in read.parameters),
            "datasets": tuple(dataset_of(spec, text) for _, spec, text in read.datasets),
        }
        return Persist(**_fields(read) | rows)
    except (msgspec.MsgspecError, DecodeError, LookupError, TypeError) as error:
        raise ValueError(f"it is not a change of the scheduler's state: {error}") from None


def whole(state: StoredState, forgotten: Sequence[str] = ()) -> Persist:
    """Return ``state`` as one change of nothing."""
    values = _fields(state)
    del values["run_id"]
    return Persist(**values, forgotten=tuple(forgotten))


def _fields(value: DataclassInstance) -> dict[str, Any]:
    return {one.name: getattr(value, one.name) for one in fields(value)}


def _parameters_row(record: ParametersRecord) -> _Parameters:
    layout = convert.layout_to_proto(record.layout).SerializeToString()
    return _Parameters(entry_bytes(record), layout, record.uploader, record.committed)


# --- rows -------------------------------------------------------------------------------------------------------------


def dataset_row(record: DatasetRecord) -> tuple[str, bytes, str]:
    """Return a data set's name, its settings as a protobuf message, and its state as JSON."""
    spec = convert.dataset_to_proto(record.spec).SerializeToString()
    names = [one.name for one in fields(record)]
    state = dict(zip(names, astuple(record), strict=True))
    del state["spec"]
    return record.spec.name, spec, json.dumps(state, separators=(",", ":"))


def dataset_of(spec: bytes, text: str) -> DatasetRecord:
    """Return the data set of a row. Raises DecodeError, ValueError, LookupError or TypeError if it is none."""
    state = json.loads(text)
    stretches = {name: tuple((first, second) for first, second in state[name]) for name in ("free", "attempts")}
    leases = tuple(DataLease(*lease) for lease in state["leases"])
    settings = convert.dataset_from_proto(scheduler_pb2.DatasetSpec.FromString(spec))
    return DatasetRecord(settings, **state | stretches | {"leases": leases})


def entry_bytes(record: ParametersRecord) -> bytes:
    """Return the map entry of a parameter set as a protobuf message."""
    return convert.entry_to_proto(record.entry).SerializeToString()


def parameters_of(entry: bytes, uploader: str, committed: int, layout: bytes) -> ParametersRecord:
    """Return the parameter set of a row. Raises DecodeError if it is none."""
    return ParametersRecord(
        entry=convert.entry_from_proto(common_pb2.ParametersEntry.FromString(entry)),
        layout=convert.layout_from_proto(common_pb2.Layout.FromString(layout)),
        uploader=uploader,
        committed=bool(committed),
    )
