"""Conversion between the frozen dataclasses of the state machines and protobuf messages.

Each type has a pair of functions, ``x_to_proto`` and ``x_from_proto``. Fields have the same names on both sides.
Everything received is checked here: names, sizes and kinds out of range raise InvalidArgumentError or
LimitExceededError before other code sees them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
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


def _to_proto(message: type[M], value: Any, **converted: Any) -> M:
    """Build a message from the fields of a dataclass. ``converted`` overrides fields that have another type on the
    wire."""
    return message(**_plain(type(value), value, converted), **converted)


def _from_proto(cls: type[D], message: Message, **converted: Any) -> D:
    """Build a dataclass from the fields of a message. ``converted`` overrides fields that have another type on the
    wire."""
    read: Any = None if converted else _reader(cast(Any, cls))
    if read is not None:
        return cls(*read(message))
    return cls(**_plain(cls, message, converted), **converted)


def _plain(cls: Any, source: object, converted: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in _field_names(cls) if name not in converted}


@cache
def _field_names(cls: Any) -> tuple[str, ...]:
    """Return the names of a dataclass's fields."""
    return tuple(field.name for field in fields(cls))


@cache
def _reader(cls: Any) -> Callable[[object], tuple[Any, ...]] | None:
    """Return a function that returns the values of a dataclass's fields, or None for fewer than two fields. An entry
    is built in two thirds of the time that ``_plain`` takes, and a whole map has one for each worker."""
    names = _field_names(cls)
    return attrgetter(*names) if len(names) > 1 else None


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
    given = _plain(type(consistency), consistency, {})
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


def spec_to_proto(spec: ParametersSpec) -> pb.ParametersSpec:
    """Convert the settings of a parameter set."""
    return _to_proto(
        pb.ParametersSpec,
        spec,
        optimizer=optimizer_to_proto(spec.optimizer),
        consistency=consistency_to_proto(spec.consistency),
        non_finite=_NON_FINITE[spec.non_finite],
        dtype=_MASTER_TO_PROTO[spec.dtype],
    )


def spec_from_proto(message: pb.ParametersSpec) -> ParametersSpec:
    """Convert and check the settings of a parameter set."""
    data = message.SerializeToString(deterministic=True)
    return (_spec_from_bytes if len(data) <= _KEPT_BYTES else _spec_from_bytes.__wrapped__)(data)


@lru_cache(maxsize=_KEPT)
def _spec_from_bytes(data: bytes) -> ParametersSpec:
    message = pb.ParametersSpec.FromString(data)
    if message.pull_compression:
        pull_codec_from_text(message.pull_compression)
    if len(message.workers) > limits.WORLD_MAX:
        raise LimitExceededError(
            f"{len(message.workers)} workers of {message.name!r:.80} are more than the limit of {limits.WORLD_MAX}"
        )
    return _from_proto(
        ParametersSpec,
        message,
        optimizer=optimizer_from_proto(message.optimizer),
        consistency=consistency_from_proto(message.consistency),
        non_finite=_name_of(_NON_FINITE_FROM_PROTO, message.non_finite, "non_finite"),
        dtype=_name_of(_MASTER_FROM_PROTO, message.dtype, "dtype"),
        workers=tuple(message.workers),
    )


def member_to_proto(member: ParametersMember) -> pb.ParametersMember:
    """Convert a member."""
    return _to_proto(pb.ParametersMember, member)


def member_from_proto(message: pb.ParametersMember) -> ParametersMember:
    """Convert a member."""
    return _from_proto(ParametersMember, message)


def replica_to_proto(replica: Replica) -> pb.Replica:
    """Convert a server's id and incarnation."""
    return _to_proto(pb.Replica, replica)


def worker_to_proto(worker: WorkerEntry) -> pb.WorkerEntry:
    """Return the message of a worker."""
    return _to_proto(pb.WorkerEntry, worker)


def worker_from_proto(message: pb.WorkerEntry) -> WorkerEntry:
    """Return the worker of a message."""
    return _from_proto(WorkerEntry, message)


def replica_from_proto(message: pb.Replica) -> Replica:
    """Convert a server's id and incarnation."""
    return _from_proto(Replica, message)


def _shard_to_proto(shard: Shard) -> pb.Shard:
    return _to_proto(
        pb.Shard,
        shard,
        primary=replica_to_proto(shard.primary),
        backups=map(replica_to_proto, shard.backups),
        filling=map(replica_to_proto, shard.filling),
    )


def _shard_from_proto(message: pb.Shard) -> Shard:
    data = message.SerializeToString(deterministic=True)
    return (_shard_from_bytes if len(data) <= _KEPT_BYTES else _shard_from_bytes.__wrapped__)(data)


@lru_cache(maxsize=_KEPT)
def _shard_from_bytes(data: bytes) -> Shard:
    message = pb.Shard.FromString(data)
    return _from_proto(
        Shard,
        message,
        primary=replica_from_proto(message.primary),
        backups=tuple(map(replica_from_proto, message.backups)),
        filling=tuple(map(replica_from_proto, message.filling)),
        fills=tuple(message.fills),
    )


def restore_to_proto(restore: Restore | None) -> pb.Restore | None:
    """Convert the snapshot that values are loaded from."""
    return None if restore is None else _to_proto(pb.Restore, restore)


def restore_from_proto(message: pb.Restore) -> Restore:
    """Convert the snapshot that values are loaded from. Raises InvalidNameError if the directory is no plain name."""
    return _from_proto(Restore, message, directory=check_directory(message.directory))


#: Cached messages. They are copied into others and never modified.
_kept_spec: Final = lru_cache(maxsize=_KEPT)(spec_to_proto)
_kept_shard: Final = lru_cache(maxsize=_KEPT)(_shard_to_proto)


def _ranges_to_proto(ranges: tuple[GroupRange, ...]) -> Sequence[pb.GroupRange]:
    """Convert ranges, reusing the conversions of the latest few tuples: a parameter set has up to one range per tensor,
    and they rarely change between epochs."""
    for known, messages in _kept_ranges:
        if known is ranges:
            return messages
    messages = [pb.GroupRange(start=one.start, stop=one.stop, group=one.group) for one in ranges]
    if ranges:
        _kept_ranges.append((ranges, messages))
    return messages


def _ranges_from_proto(message: pb.ParametersEntry) -> tuple[GroupRange, ...]:
    if len(message.ranges) < _MANY_RANGES:
        return _ranges(message)
    data = pb.ParametersEntry(ranges=message.ranges).SerializeToString()
    return _ranges_from_bytes(data) if len(data) <= _KEPT_RANGES_BYTES else _ranges(message)


def _ranges(message: pb.ParametersEntry) -> tuple[GroupRange, ...]:
    return tuple(GroupRange(one.start, one.stop, one.group) for one in message.ranges)


@lru_cache(maxsize=_KEPT_RANGES)
def _ranges_from_bytes(data: bytes) -> tuple[GroupRange, ...]:
    return _ranges(pb.ParametersEntry.FromString(data))


def entry_to_proto(entry: ParametersEntry) -> pb.ParametersEntry:
    """Convert an entry of the cluster map."""
    return _to_proto(
        pb.ParametersEntry,
        entry,
        spec=_kept_spec(entry.spec),
        shards=map(_kept_shard, entry.shards),
        members=map(member_to_proto, entry.members),
        ranges=_ranges_to_proto(entry.ranges),
        restore=restore_to_proto(entry.restore),
        departed=map(member_to_proto, entry.departed),
    )


def entry_from_proto(message: pb.ParametersEntry) -> ParametersEntry:
    """Convert an entry of the cluster map."""
    return _from_proto(
        ParametersEntry,
        message,
        spec=spec_from_proto(message.spec),
        shards=tuple(map(_shard_from_proto, message.shards)),
        members=tuple(map(member_from_proto, message.members)),
        ranges=_ranges_from_proto(message),
        restore=restore_from_proto(message.restore) if message.HasField("restore") else None,
        departed=tuple(map(member_from_proto, message.departed)),
    )


def map_to_proto(cluster: ClusterMap) -> pb.ClusterMap:
    """Convert the cluster map."""
    return _to_proto(
        pb.ClusterMap,
        cluster,
        servers=[_to_proto(pb.ServerEntry, server) for server in cluster.servers],
        workers=[_to_proto(pb.WorkerEntry, worker) for worker in cluster.workers],
        parameters=map(entry_to_proto, cluster.parameters),
    )


def map_from_proto(message: pb.ClusterMap) -> ClusterMap:
    """Convert the cluster map."""
    return _from_proto(
        ClusterMap,
        message,
        servers=tuple(_from_proto(ServerEntry, server) for server in message.servers),
        workers=tuple(_from_proto(WorkerEntry, worker) for worker in message.workers),
        parameters=tuple(map(entry_from_proto, message.parameters)),
        ranks_done=tuple(message.ranks_done),
    )


def difference_to_proto(change: MapDifference) -> pb.ClusterMapDifference:
    """Convert the difference between two cluster maps."""
    return _to_proto(
        pb.ClusterMapDifference,
        change,
        servers=[_to_proto(pb.ServerEntry, server) for server in change.servers],
        workers=[_to_proto(pb.WorkerEntry, worker) for worker in change.workers],
        parameters=map(entry_to_proto, change.parameters),
    )


def difference_from_proto(message: pb.ClusterMapDifference) -> MapDifference:
    """Convert the difference between two cluster maps."""
    return _from_proto(
        MapDifference,
        message,
        servers_gone=tuple(message.servers_gone),
        servers=tuple(_from_proto(ServerEntry, server) for server in message.servers),
        workers_gone=tuple(message.workers_gone),
        workers=tuple(_from_proto(WorkerEntry, worker) for worker in message.workers),
        parameters_gone=tuple(message.parameters_gone),
        parameters=tuple(map(entry_from_proto, message.parameters)),
        ranks_done=tuple(message.ranks_done),
    )


def identity_to_proto(identity: Identity) -> server_pb2.Identity:
    """Convert a sender's identity."""
    return _to_proto(server_pb2.Identity, identity)


def identity_from_proto(message: server_pb2.Identity) -> Identity:
    """Convert a sender's identity."""
    return Identity(message.run_id, message.worker_id, message.incarnation, message.epoch, message.parameters)


def sender_from_proto(message: HasIdentity) -> Identity:
    """Return the identity of the sender of ``message``. Raises InvalidArgumentError if it has none."""
    if not message.HasField("identity"):
        raise InvalidArgumentError(
            f"{message.DESCRIPTOR.name} without an identity: the first message of a call must name its sender and "
            "map epoch"
        )
    return identity_from_proto(message.identity)


def dataset_to_proto(spec: DatasetSpec) -> scheduler_pb2.DatasetSpec:
    """Convert the settings of a data set."""
    return _to_proto(scheduler_pb2.DatasetSpec, spec)


def dataset_from_proto(message: scheduler_pb2.DatasetSpec) -> DatasetSpec:
    """Convert and check the settings of a data set."""
    return _from_proto(DatasetSpec, message)


def position_to_proto(position: DataPosition) -> scheduler_pb2.DataPosition:
    """Convert a data set's position."""
    done = [scheduler_pb2.RangeSpan(first=first, count=count) for first, count in position.done]
    return _to_proto(scheduler_pb2.DataPosition, position, done=done)


def position_from_proto(message: scheduler_pb2.DataPosition) -> DataPosition:
    """Convert a data set's position. Callers that know the data set check that the position is possible."""
    if len(message.done) > limits.SPANS_MAX:
        raise LimitExceededError(f"a position of {len(message.done)} spans is over the limit of {limits.SPANS_MAX}")
    done = tuple((span.first, span.count) for span in message.done)
    return _from_proto(DataPosition, message, done=done)


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
