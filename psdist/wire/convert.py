"""Conversion between the frozen dataclasses of the state machines and protobuf messages.

Each type has a pair of functions, ``x_to_proto`` and ``x_from_proto``. Fields have the same names on both sides, so
``pair`` makes both functions from the two types; only differences are written out. Everything received is checked here:
names, sizes and kinds out of range raise InvalidArgumentError or LimitExceededError before other code sees them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, Final, TypeVar, cast

from google.protobuf.message import Message

from psdist.compression.specifications import pull_codec_from_text
from psdist.consistency import ASP, BSP, SSP, Consistency, Reduction, ResizeLr, StalenessLr, kind_of
from psdist.errors import DTypeMismatchError, InvalidArgumentError, LimitExceededError
from psdist.hyperparameters import Setting, Settings
from psdist.map_difference import MapDifference
from psdist.optim import Constant, Optimizer, Override, optimizer_from_values, schedule_from_values
from psdist.types import (
    WIRE_DTYPES,
    ClusterMap,
    DataPosition,
    DatasetSpec,
    DType,
    GroupRange,
    Identity,
    Layout,
    ParametersEntry,
    ParametersMember,
    ParametersSpec,
    Replica,
    Restore,
    ServerEntry,
    Shard,
    TensorSpec,
    WorkerEntry,
    check_directory,
    check_tensor_name,
)
from psdist.v1 import common_pb2 as pb
from psdist.v1 import scheduler_pb2, server_pb2
from psdist.wire import limits

M = TypeVar("M", bound=Message)
D = TypeVar("D")
_Convert = Callable[[Any], Any]
#: To the wire, and back. None if the value is the same there, or does not travel that way.
_Conversions = tuple[_Convert | None, _Convert | None]
#: Messages of ServerService that carry the sender's identity.
HasIdentity = (
    server_pb2.PushHeader
    | server_pb2.InstallRequest
    | server_pb2.PullRequest
    | server_pb2.Attach
    | server_pb2.ConnectRequest
)

#: Cache size for settings and shards: most are unchanged from one epoch's map to the next.
_KEPT: Final = 512
#: Larger messages are not cached. Unknown fields count, and a peer may send many of them.
_KEPT_BYTES: Final = 1 << 14
#: Number of parameter sets whose ranges are cached. Very large tables are not cached, nor are tables too small to be
#: worth it.
_KEPT_RANGES: Final = 8
_KEPT_RANGES_BYTES: Final = 1 << 21
_MANY_RANGES: Final = 64
_kept_ranges: deque[tuple[tuple[GroupRange, ...], Sequence[pb.GroupRange]]] = deque(maxlen=_KEPT_RANGES)
#: Step, or number of a push, by parameter set: a map on the wire.
Numbers = tuple[tuple[str, int], ...]
_DTYPE_TO_PROTO: Final = {
    "float32": pb.DTYPE_FLOAT32,
    "float16": pb.DTYPE_FLOAT16,
    "bfloat16": pb.DTYPE_BFLOAT16,
    "float64": pb.DTYPE_FLOAT64,
}
_DTYPE_FROM_PROTO: Final = {number: name for name, number in _DTYPE_TO_PROTO.items()}
#: Dtypes in which servers compute. Unset is float32, as in messages of earlier versions.
_MASTER_TO_PROTO: Final = {"float32": pb.DTYPE_UNSPECIFIED, "float64": pb.DTYPE_FLOAT64}
_MASTER_FROM_PROTO: Final = {number: name for name, number in _MASTER_TO_PROTO.items()}
_STALENESS_LR: Final = {"none": pb.STALENESS_LR_NONE, "inverse": pb.STALENESS_LR_INVERSE}
_NON_FINITE: Final = {"reject": pb.NON_FINITE_POLICY_REJECT, "skip": pb.NON_FINITE_POLICY_SKIP}
#: Reverse tables; an unset value reads as the default.
_STALENESS_LR_FROM_PROTO: Final = {pb.STALENESS_LR_UNSPECIFIED: "none"} | {n: name for name, n in _STALENESS_LR.items()}
_NON_FINITE_FROM_PROTO: Final = {pb.NON_FINITE_POLICY_UNSPECIFIED: "reject"} | {
    number: name for name, number in _NON_FINITE.items()
}


# --- fields of the same name ------------------------------------------------------------------------------------------


#: Conversions of values that are fields of messages, to the wire and back, by the full name of their type on the wire.
_TYPES: Final[dict[str, _Conversions]] = {}


def register(kind: Any, to_proto: _Convert | None, from_proto: _Convert | None) -> None:
    """Convert fields whose type is this message or enum by these functions. None: it does not travel that way."""
    _TYPES[kind.DESCRIPTOR.full_name] = to_proto, from_proto


def pair(cls: type[D], message: type[M], **others: _Conversions) -> tuple[Callable[[D], M], Callable[[M], D]]:
    """Return the conversions of a dataclass to the message with the same fields, and back. Register them.

    others: conversions of fields that differ, to the wire and back.
    """
    names = [field.name for field in fields(cast(Any, cls))]
    assert {*names} == {*message.DESCRIPTOR.fields_by_name}, f"the fields of {cls.__name__} and of its message differ"
    attributes, values = _field_writers(cls, message, others).items(), field_readers(cls, message, others)
    is_copied = len(names) > 1 and all(isinstance(read, attrgetter) for read in values.values())
    copy, reads = attrgetter(*names), [values[name] for name in names]

    def to_proto(value: D) -> M:
        return message(**{name: write(value) for name, write in attributes})

    def from_proto(received: M) -> D:
        return cls(*[read(received) for read in reads])

    def from_copied(received: M) -> D:  # A cluster map has an entry for each worker.
        return cls(*copy(received))

    conversions = to_proto, from_copied if is_copied else from_proto
    register(message, *conversions)
    return conversions


def make_message(message: type[M], value: Any, **others: Any) -> M:
    """Return a message with those attributes of an object that have the names of its fields, and ``others``."""
    writers = _kept_writers(cast(Any, type(value)), cast(Any, message))
    return message(**{name: write(value) for name, write in writers.items() if name not in others}, **others)


def _field_writers(cls: type, message: type[Message], others: Mapping[str, _Conversions]) -> dict[str, _Convert]:
    """Return functions of an object for the fields of a message for which the class has attributes of the same name."""
    known = {field.name for field in fields(cast(Any, cls))}
    return {
        name: _then(attrgetter(name), others[name][0] if name in others else _conversion(wired, 0))
        for name, wired in message.DESCRIPTOR.fields_by_name.items()
        if name in known or hasattr(cls, name)
    }


@cache
def _kept_writers(cls: type, message: type[Message]) -> dict[str, _Convert]:
    return _field_writers(cls, message, {})


def field_readers(cls: type, message: type[Message], others: Mapping[str, _Conversions]) -> dict[str, _Convert]:
    """Return functions of a message for the fields of a dataclass that the message has, too.

    A field with presence that is absent has its default; without a default it is read as an empty message.
    """
    found: dict[str, _Convert] = {}
    for field in fields(cast(Any, cls)):
        name = field.name
        if (wired := message.DESCRIPTOR.fields_by_name.get(name)) is not None:
            read = _then(attrgetter(name), others[name][1] if name in others else _conversion(wired, 1))
            is_optional = wired.has_presence and field.default is not MISSING
            found[name] = _if_present(name, read, field.default) if is_optional else read
    return found


def _then(get: _Convert, convert: _Convert | None) -> _Convert:
    if convert is None:
        return get
    return lambda source: None if (value := get(source)) is None else convert(value)


def _if_present(name: str, read: _Convert, default: Any) -> _Convert:
    return lambda received: read(received) if received.HasField(name) else default


def _conversion(field: Any, way: int) -> _Convert | None:
    """Return the conversion of a field's value; None if it is the same on both sides. way: 0 to the wire, 1 back."""
    kind = field.message_type or field.enum_type
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return (dict, numbers_from_proto)[way]
    one = _TYPES[kind.full_name][way] if kind is not None else None
    if not field.is_repeated:
        return one
    if one is None:
        return (None, tuple)[way]
    return lambda values: tuple(map(one, values))


def numbers_from_proto(numbers: Mapping[str, int]) -> Numbers:
    """Convert a map, in order of its names. Raises LimitExceededError."""
    if len(numbers) > limits.NAMES_MAX:
        raise LimitExceededError(f"{len(numbers)} parameters in one message are over the limit of {limits.NAMES_MAX}")
    return tuple(sorted(numbers.items()))


# --- enums and dtypes -------------------------------------------------------------------------------------------------


def _name_of(names: Mapping[Any, str], number: int, field: str) -> Any:
    """Return the name of an enum's ``number``. Raises InvalidArgumentError."""
    if number not in names:
        raise InvalidArgumentError(f"{field} {number} is unknown: use one of {', '.join(map(str, names))}")
    return names[number]


def dtype_to_proto(dtype: str) -> pb.DType:
    """Return the enum value of ``dtype``. Raises DTypeMismatchError."""
    if dtype not in _DTYPE_TO_PROTO:
        raise DTypeMismatchError(f"dtype {dtype!r} is not supported: use one of {', '.join(_DTYPE_TO_PROTO)}")
    return _DTYPE_TO_PROTO[dtype]


def dtype_from_proto(value: int) -> DType:
    """Return the name of the enum value. Raises DTypeMismatchError."""
    if value not in _DTYPE_FROM_PROTO:
        raise DTypeMismatchError(f"DType {value} is unknown")
    return cast(DType, _DTYPE_FROM_PROTO[cast(pb.DType, value)])


@cache  # Each header of a push names two.
def payload_dtype_from_proto(value: int) -> DType:
    """Return the name of a dtype allowed in payloads. Raises DTypeMismatchError, InvalidArgumentError."""
    dtype = dtype_from_proto(value)
    if dtype not in WIRE_DTYPES:
        raise InvalidArgumentError(f"payloads cannot be {dtype}: use one of {', '.join(WIRE_DTYPES)}")
    return dtype


# --- tensors, settings and placement ----------------------------------------------------------------------------------


def layout_to_proto(layout: Layout) -> pb.Layout:
    """Convert the table of tensors."""
    return pb.Layout(
        tensors=[pb.Tensor(name=t.name, shape=t.shape, dtype=dtype_to_proto(t.dtype)) for t in layout.tensors],
        dtype=_MASTER_TO_PROTO[layout.dtype],
    )


def layout_from_proto(message: pb.Layout) -> Layout:
    """Convert and check the table of tensors: valid unique names, at most TENSORS_MAX tensors and ELEMENTS_MAX
    elements."""
    if len(message.tensors) > limits.TENSORS_MAX:
        raise LimitExceededError(f"{len(message.tensors)} tensors are more than the limit of {limits.TENSORS_MAX}")
    master = _name_of(_MASTER_FROM_PROTO, message.dtype, "dtype of the masters")
    layout = Layout(tuple(_tensor_from_proto(tensor) for tensor in message.tensors), master)
    if len({tensor.name for tensor in layout.tensors}) != len(layout.tensors):
        raise InvalidArgumentError("two tensors have the same name")
    if layout.total > limits.ELEMENTS_MAX:
        raise LimitExceededError(f"{layout.total} elements are more than the limit of {limits.ELEMENTS_MAX}")
    return layout


def _tensor_from_proto(message: pb.Tensor) -> TensorSpec:
    if len(message.shape) > limits.DIMENSIONS_MAX:
        raise LimitExceededError(
            f"tensor {message.name!r:.80} has {len(message.shape)} dimensions, more than {limits.DIMENSIONS_MAX}"
        )
    return TensorSpec(check_tensor_name(message.name), tuple(message.shape), dtype_from_proto(message.dtype))


def optimizer_to_proto(optimizer: Optimizer) -> pb.Optimizer:
    """Convert an optimizer specification to kind and numbers."""
    schedule = optimizer.schedule
    numbers = {field.name: float(getattr(schedule, field.name)) for field in fields(schedule)}
    return pb.Optimizer(
        kind=optimizer.kind,
        values=optimizer.stated_values(),
        schedule=pb.Schedule(kind=schedule.kind, values=numbers),
        max_grad_norm=optimizer.max_grad_norm,
        overrides=[pb.Override(pattern=item.pattern, values=dict(item.values)) for item in optimizer.overrides],
    )


def optimizer_from_proto(message: pb.Optimizer) -> Optimizer:
    """Convert and check an optimizer specification. A missing schedule reads as Constant; a present one must be
    complete."""
    overrides = [Override(item.pattern, tuple(sorted(item.values.items()))) for item in message.overrides]
    given = message.schedule
    schedule = schedule_from_values(given.kind, given.values) if message.HasField("schedule") else Constant()
    return optimizer_from_values(message.kind, message.values, schedule, message.max_grad_norm, overrides)


def settings_to_proto(settings: Settings) -> list[server_pb2.GroupSetting]:
    """Return the messages for hyperparameters that an update sets."""
    return [server_pb2.GroupSetting(group=one.group, name=one.name, value=one.value) for one in settings]


def settings_from_proto(messages: Sequence[server_pb2.GroupSetting]) -> Settings:
    """Return hyperparameters as received, unchecked. Raises LimitExceededError for more than any optimizer has."""
    if len(messages) > limits.GROUP_SETTINGS_MAX:
        raise LimitExceededError(
            f"{len(messages)} settings in one message: send those that differ from the specification, at most "
            f"{limits.GROUP_SETTINGS_MAX}"
        )
    return tuple(Setting(one.group, one.name, one.value) for one in messages)


def consistency_to_proto(consistency: Consistency) -> pb.Consistency:
    """Convert a consistency to kind and numbers."""
    given = {field.name: getattr(consistency, field.name) for field in fields(consistency)}
    if "staleness_lr" in given:
        given["staleness_lr"] = _STALENESS_LR[given["staleness_lr"]]
    return pb.Consistency(kind=kind_of(consistency), **given)


def consistency_from_proto(message: pb.Consistency) -> Consistency:
    """Convert and check a consistency."""
    staleness_lr: StalenessLr = _name_of(_STALENESS_LR_FROM_PROTO, message.staleness_lr, "staleness_lr")
    match message.kind:
        case "bsp":
            resize_lr, reduction = cast(ResizeLr, message.resize_lr or "none"), message.reduction or "mean"
            return BSP(message.backup_workers, resize_lr, cast(Reduction, reduction))
        case "ssp":
            return SSP(message.staleness, staleness_lr)
        case "asp":
            return ASP(staleness_lr)
    raise InvalidArgumentError(f"consistency kind {message.kind!r:.40} is unknown: use bsp, ssp or asp")


def _kept(message: type[M], from_proto: Callable[[M], D]) -> tuple[Callable[[M], D], Any]:
    """Return a conversion that keeps its newest results, and its cache. Most settings and shards are unchanged from one
    epoch's map to the next."""

    @lru_cache(maxsize=_KEPT)
    def from_bytes(data: bytes) -> D:
        return from_proto(message.FromString(data))

    def from_kept(received: M) -> D:
        data = received.SerializeToString(deterministic=True)
        return (from_bytes if len(data) <= _KEPT_BYTES else from_bytes.__wrapped__)(data)

    return from_kept, from_bytes


register(pb.Layout, layout_to_proto, layout_from_proto)
register(pb.Optimizer, optimizer_to_proto, optimizer_from_proto)
register(pb.Consistency, consistency_to_proto, consistency_from_proto)
register(
    pb.NonFinitePolicy,
    _NON_FINITE.__getitem__,
    lambda number: _name_of(_NON_FINITE_FROM_PROTO, number, "non_finite"),
)

spec_to_proto, _spec_from_proto = pair(
    ParametersSpec,
    pb.ParametersSpec,
    dtype=(_MASTER_TO_PROTO.__getitem__, lambda number: _name_of(_MASTER_FROM_PROTO, number, "dtype")),
)
replica_to_proto, replica_from_proto = pair(Replica, pb.Replica)
_shard_to_proto, _shard_from_proto = pair(Shard, pb.Shard)
member_to_proto, member_from_proto = pair(ParametersMember, pb.ParametersMember)
worker_to_proto, worker_from_proto = pair(WorkerEntry, pb.WorkerEntry)
pair(ServerEntry, pb.ServerEntry)
#: The name of the directory is checked.
pair(Restore, pb.Restore, directory=(None, check_directory))
_range_to_proto, _range_from_proto = pair(GroupRange, pb.GroupRange)


def _checked_spec(message: pb.ParametersSpec) -> ParametersSpec:
    if message.pull_compression:
        pull_codec_from_text(message.pull_compression)
    if len(message.workers) > limits.WORLD_MAX:
        raise LimitExceededError(
            f"{len(message.workers)} workers of {message.name!r:.80} are more than the limit of {limits.WORLD_MAX}"
        )
    return _spec_from_proto(message)


spec_from_proto, _spec_from_bytes = _kept(pb.ParametersSpec, _checked_spec)
_kept_shard_from_proto, _shard_from_bytes = _kept(pb.Shard, _shard_from_proto)
#: Cached messages. They are copied into others and never modified.
_kept_spec: Final = lru_cache(maxsize=_KEPT)(spec_to_proto)
_kept_shard: Final = lru_cache(maxsize=_KEPT)(_shard_to_proto)


def _ranges_to_proto(ranges: tuple[GroupRange, ...]) -> Sequence[pb.GroupRange]:
    """Convert ranges, reusing the conversions of the latest few tuples: a parameter set has up to one range per tensor,
    and they rarely change between epochs."""
    for known, messages in _kept_ranges:
        if known is ranges:
            return messages
    messages = [*map(_range_to_proto, ranges)]
    if ranges:
        _kept_ranges.append((ranges, messages))
    return messages


def _ranges_from_proto(ranges: Sequence[pb.GroupRange]) -> tuple[GroupRange, ...]:
    if len(ranges) >= _MANY_RANGES:
        data = pb.ParametersEntry(ranges=ranges).SerializeToString()
        if len(data) <= _KEPT_RANGES_BYTES:
            return _ranges_from_bytes(data)
    return tuple(map(_range_from_proto, ranges))


@lru_cache(maxsize=_KEPT_RANGES)
def _ranges_from_bytes(data: bytes) -> tuple[GroupRange, ...]:
    return tuple(map(_range_from_proto, pb.ParametersEntry.FromString(data).ranges))


register(pb.ParametersSpec, _kept_spec, spec_from_proto)
register(pb.Shard, _kept_shard, _kept_shard_from_proto)
entry_to_proto, entry_from_proto = pair(
    ParametersEntry, pb.ParametersEntry, ranges=(_ranges_to_proto, _ranges_from_proto)
)
map_to_proto, map_from_proto = pair(ClusterMap, pb.ClusterMap)
difference_to_proto, difference_from_proto = pair(MapDifference, pb.ClusterMapDifference)

# --- senders, data sets and lags --------------------------------------------------------------------------------------

identity_to_proto, _ = pair(Identity, server_pb2.Identity)


def identity_from_proto(message: server_pb2.Identity) -> Identity:
    """Convert a sender's identity. Written out, because each push has one."""
    return Identity(message.run_id, message.worker_id, message.incarnation, message.epoch, message.parameters)


def sender_from_proto(message: HasIdentity) -> Identity:
    """Return the identity of the sender of ``message``. Raises InvalidArgumentError if it has none."""
    if not message.HasField("identity"):
        raise InvalidArgumentError(
            f"{message.DESCRIPTOR.name} without an identity: the first message of a call must name its sender and "
            "map epoch"
        )
    return identity_from_proto(message.identity)


def _done_to_proto(done: Sequence[tuple[int, int]]) -> list[scheduler_pb2.RangeSpan]:
    return [scheduler_pb2.RangeSpan(first=first, count=count) for first, count in done]


def _done_from_proto(spans: Sequence[scheduler_pb2.RangeSpan]) -> tuple[tuple[int, int], ...]:
    if len(spans) > limits.SPANS_MAX:
        raise LimitExceededError(f"a position of {len(spans)} spans is over the limit of {limits.SPANS_MAX}")
    return tuple((span.first, span.count) for span in spans)


dataset_to_proto, dataset_from_proto = pair(DatasetSpec, scheduler_pb2.DatasetSpec)
#: Callers that know the data set check that the position is possible.
position_to_proto, position_from_proto = pair(
    DataPosition, scheduler_pb2.DataPosition, done=(_done_to_proto, _done_from_proto)
)


def lags_to_proto(rows: Sequence[tuple[int, int, int, int]]) -> pb.Lags:
    """Convert lags of slices, in rows of (slice, start, stop, number of updates)."""
    return pb.Lags(
        slices=[row[0] for row in rows],
        starts=[row[1] for row in rows],
        sizes=[row[2] - row[1] for row in rows],
        updates=[row[3] for row in rows],
    )


def lags_from_proto(message: pb.Lags) -> tuple[tuple[int, int, int, int], ...]:
    """Convert lags of slices. Callers that know the slices check that the lags are possible. Raises
    InvalidArgumentError unless each row has all of its numbers."""
    columns = (message.slices, message.starts, message.sizes, message.updates)
    if len({len(column) for column in columns}) > 1:
        raise InvalidArgumentError(f"lags with columns of {', '.join(str(len(column)) for column in columns)} numbers")
    return tuple((index, start, start + size, updates) for index, start, size, updates in zip(*columns, strict=True))


#: Functions with bounded caches.
CACHED: Final = (_spec_from_bytes, _shard_from_bytes, _kept_spec, _kept_shard, _ranges_from_bytes)
