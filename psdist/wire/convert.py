"""Between the frozen dataclasses of the machines and the protobuf messages of the wire.

There is one pair of functions per type, ``x_to_proto`` and ``x_from_proto``. What comes from the wire is checked here:
names, sizes and kinds that are out of range raise InvalidArgumentError or LimitExceededError before any other code sees
them.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Final, cast

from psdist.consistency import ASP, BSP, SSP, Consistency, ResizeLr, StalenessLr
from psdist.errors import DTypeMismatchError, InvalidArgumentError, LimitExceededError
from psdist.optim import Optimizer, Override, optimizer_from_values, schedule_from_values
from psdist.types import (
    WIRE_DTYPES,
    ClusterMap,
    DataPosition,
    DatasetSpec,
    DType,
    GroupRange,
    Identity,
    Layout,
    NonFinite,
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
    check_name,
)
from psdist.v1 import common_pb2 as pb
from psdist.v1 import scheduler_pb2, server_pb2
from psdist.wire import limits

_DTYPE_TO_PROTO: Final = {
    "float32": pb.DTYPE_FLOAT32,
    "float16": pb.DTYPE_FLOAT16,
    "bfloat16": pb.DTYPE_BFLOAT16,
    "float64": pb.DTYPE_FLOAT64,
}
_DTYPE_FROM_PROTO: Final = {number: name for name, number in _DTYPE_TO_PROTO.items()}
_STALENESS_LR: Final = {"none": pb.STALENESS_LR_NONE, "inverse": pb.STALENESS_LR_INVERSE}
_NON_FINITE: Final = {"reject": pb.NON_FINITE_POLICY_REJECT, "skip": pb.NON_FINITE_POLICY_SKIP}


def dtype_to_proto(dtype: str) -> pb.DType:
    """The enum value of ``dtype``. Raises DTypeMismatchError."""
    if dtype not in _DTYPE_TO_PROTO:
        raise DTypeMismatchError(f"dtype {dtype!r} is not supported: use one of {', '.join(_DTYPE_TO_PROTO)}")
    return _DTYPE_TO_PROTO[dtype]


def dtype_from_proto(value: int) -> DType:
    """The name of the enum value. Raises DTypeMismatchError."""
    if value not in _DTYPE_FROM_PROTO:
        raise DTypeMismatchError(f"DType {value} is unknown")
    return cast(DType, _DTYPE_FROM_PROTO[cast(pb.DType, value)])


def payload_dtype_from_proto(value: int) -> DType:
    """The name of a dtype that payloads may have. Raises DTypeMismatchError, InvalidArgumentError."""
    dtype = dtype_from_proto(value)
    if dtype not in WIRE_DTYPES:
        raise InvalidArgumentError(f"payloads cannot be {dtype}: use one of {', '.join(WIRE_DTYPES)}")
    return dtype


def layout_to_proto(layout: Layout) -> pb.Layout:
    """The table of tensors as a message."""
    return pb.Layout(
        tensors=[pb.Tensor(name=t.name, shape=t.shape, dtype=dtype_to_proto(t.dtype)) for t in layout.tensors]
    )


def layout_from_proto(message: pb.Layout) -> Layout:
    """The table of tensors, checked: names allowed and unique, at most TENSORS_MAX tensors, ELEMENTS_MAX elements."""
    if len(message.tensors) > limits.TENSORS_MAX:
        raise LimitExceededError(f"{len(message.tensors)} tensors are more than the limit of {limits.TENSORS_MAX}")
    layout = Layout(tuple(_tensor_from_proto(tensor) for tensor in message.tensors))
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
    return TensorSpec(check_name(message.name, "tensor name"), tuple(message.shape), dtype_from_proto(message.dtype))


def optimizer_to_proto(optimizer: Optimizer) -> pb.Optimizer:
    """An optimizer specification as kind and numbers."""
    schedule = optimizer.schedule
    numbers = {field.name: float(getattr(schedule, field.name)) for field in fields(schedule)}
    return pb.Optimizer(
        kind=optimizer.kind,
        values=optimizer.values(),
        schedule=pb.Schedule(kind=schedule.kind, values=numbers),
        max_grad_norm=optimizer.max_grad_norm,
        overrides=[pb.Override(pattern=item.pattern, values=dict(item.values)) for item in optimizer.overrides],
    )


def optimizer_from_proto(message: pb.Optimizer) -> Optimizer:
    """The specification, checked. A missing schedule is Constant."""
    overrides = [Override(item.pattern, tuple(sorted(item.values.items()))) for item in message.overrides]
    schedule = schedule_from_values(message.schedule.kind or "constant", message.schedule.values)
    return optimizer_from_values(message.kind, message.values, schedule, message.max_grad_norm, overrides)


def consistency_to_proto(consistency: Consistency) -> pb.Consistency:
    """A consistency as kind and numbers."""
    match consistency:
        case BSP(backup_workers, resize_lr):
            return pb.Consistency(kind="bsp", backup_workers=backup_workers, resize_lr=resize_lr)
        case SSP(staleness, staleness_lr):
            return pb.Consistency(kind="ssp", staleness=staleness, staleness_lr=_STALENESS_LR[staleness_lr])
        case ASP(staleness_lr):
            return pb.Consistency(kind="asp", staleness_lr=_STALENESS_LR[staleness_lr])


def consistency_from_proto(message: pb.Consistency) -> Consistency:
    """The consistency, checked."""
    inverse = message.staleness_lr == pb.STALENESS_LR_INVERSE
    staleness_lr: StalenessLr = "inverse" if inverse else "none"
    match message.kind:
        case "bsp":
            return BSP(message.backup_workers, cast(ResizeLr, message.resize_lr or "none"))
        case "ssp":
            return SSP(message.staleness, staleness_lr)
        case "asp":
            return ASP(staleness_lr)
    raise InvalidArgumentError(f"consistency kind {message.kind!r:.40} is unknown: use bsp, ssp or asp")


def spec_to_proto(spec: ParametersSpec) -> pb.ParametersSpec:
    """Settings of parameters as a message."""
    return pb.ParametersSpec(
        name=spec.name,
        optimizer=optimizer_to_proto(spec.optimizer),
        consistency=consistency_to_proto(spec.consistency),
        non_finite=_NON_FINITE[spec.non_finite],
        slice_elements=spec.slice_elements,
        reset_optimizer=spec.reset_optimizer,
    )


def spec_from_proto(message: pb.ParametersSpec) -> ParametersSpec:
    """Settings of parameters, checked."""
    skip = message.non_finite == pb.NON_FINITE_POLICY_SKIP
    non_finite: NonFinite = "skip" if skip else "reject"
    return ParametersSpec(
        name=message.name,
        optimizer=optimizer_from_proto(message.optimizer),
        consistency=consistency_from_proto(message.consistency),
        non_finite=non_finite,
        slice_elements=message.slice_elements,
        reset_optimizer=message.reset_optimizer,
    )


def member_to_proto(member: ParametersMember) -> pb.ParametersMember:
    """A member as a message."""
    return pb.ParametersMember(
        worker_id=member.worker_id,
        incarnation=member.incarnation,
        rank=member.rank,
        first_step=member.first_step,
        origin=member.origin,
        first_push=member.first_push,
    )


def member_from_proto(message: pb.ParametersMember) -> ParametersMember:
    """A member."""
    return ParametersMember(
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        rank=message.rank,
        first_step=message.first_step,
        origin=message.origin,
        first_push=message.first_push,
    )


def replica_to_proto(replica: Replica) -> pb.Replica:
    """A server and its incarnation as a message."""
    return pb.Replica(server_id=replica.server_id, incarnation=replica.incarnation)


def replica_from_proto(message: pb.Replica) -> Replica:
    """A server and its incarnation."""
    return Replica(message.server_id, message.incarnation)


def shard_to_proto(shard: Shard) -> pb.Shard:
    """Who holds a shard, as a message."""
    return pb.Shard(
        primary=replica_to_proto(shard.primary),
        term=shard.term,
        backups=[replica_to_proto(replica) for replica in shard.backups],
        filling=[replica_to_proto(replica) for replica in shard.filling],
        lost=shard.lost,
    )


def shard_from_proto(message: pb.Shard) -> Shard:
    """Who holds a shard."""
    return Shard(
        primary=replica_from_proto(message.primary),
        term=message.term,
        backups=tuple(replica_from_proto(replica) for replica in message.backups),
        filling=tuple(replica_from_proto(replica) for replica in message.filling),
        lost=message.lost,
    )


def entry_to_proto(entry: ParametersEntry) -> pb.ParametersEntry:
    """An entry of the cluster map as a message."""
    return pb.ParametersEntry(
        spec=spec_to_proto(entry.spec),
        total=entry.total,
        shards=[shard_to_proto(shard) for shard in entry.shards],
        members=[member_to_proto(member) for member in entry.members],
        ranges=[pb.GroupRange(start=r.start, stop=r.stop, group=r.group) for r in entry.ranges],
        ready=entry.ready,
        layout_digest=entry.layout_digest,
        reference_workers=entry.reference_workers,
        restore=restore_to_proto(entry.restore),
        generation=entry.generation,
        departed=[member_to_proto(member) for member in entry.departed],
        state_since=entry.state_since,
    )


def restore_to_proto(restore: Restore | None) -> pb.Restore | None:
    """Where values are loaded from, as a message."""
    if restore is None:
        return None
    return pb.Restore(
        directory=restore.directory, manifest_digest=restore.manifest_digest, weights_only=restore.weights_only
    )


def restore_from_proto(message: pb.Restore) -> Restore:
    """Where values are loaded from. Raises InvalidNameError for a directory that is no plain name."""
    return Restore(check_directory(message.directory), message.manifest_digest, message.weights_only)


def entry_from_proto(message: pb.ParametersEntry) -> ParametersEntry:
    """An entry of the cluster map."""
    return ParametersEntry(
        spec=spec_from_proto(message.spec),
        total=message.total,
        shards=tuple(shard_from_proto(shard) for shard in message.shards),
        members=tuple(member_from_proto(member) for member in message.members),
        ranges=tuple(GroupRange(r.start, r.stop, r.group) for r in message.ranges),
        ready=message.ready,
        layout_digest=message.layout_digest,
        reference_workers=message.reference_workers,
        restore=restore_from_proto(message.restore) if message.HasField("restore") else None,
        generation=message.generation,
        departed=tuple(member_from_proto(member) for member in message.departed),
        state_since=message.state_since,
    )


def map_to_proto(cluster: ClusterMap) -> pb.ClusterMap:
    """The cluster map as a message."""
    return pb.ClusterMap(
        run_id=cluster.run_id,
        epoch=cluster.epoch,
        servers=[
            pb.ServerEntry(server_id=s.server_id, incarnation=s.incarnation, address=s.address) for s in cluster.servers
        ],
        workers=[
            pb.WorkerEntry(worker_id=w.worker_id, incarnation=w.incarnation, rank=w.rank) for w in cluster.workers
        ],
        parameters=[entry_to_proto(entry) for entry in cluster.parameters],
        paused=cluster.paused,
    )


def map_from_proto(message: pb.ClusterMap) -> ClusterMap:
    """The cluster map."""
    return ClusterMap(
        run_id=message.run_id,
        epoch=message.epoch,
        servers=tuple(ServerEntry(s.server_id, s.incarnation, s.address) for s in message.servers),
        workers=tuple(WorkerEntry(w.worker_id, w.incarnation, w.rank) for w in message.workers),
        parameters=tuple(entry_from_proto(entry) for entry in message.parameters),
        paused=message.paused,
    )


def identity_to_proto(identity: Identity) -> server_pb2.Identity:
    """Who sends, as a message."""
    return server_pb2.Identity(
        run_id=identity.run_id,
        worker_id=identity.worker_id,
        incarnation=identity.incarnation,
        epoch=identity.epoch,
        parameters=identity.parameters,
    )


def identity_from_proto(message: server_pb2.Identity) -> Identity:
    """Who sends."""
    return Identity(message.run_id, message.worker_id, message.incarnation, message.epoch, message.parameters)


def dataset_to_proto(spec: DatasetSpec) -> scheduler_pb2.DatasetSpec:
    """Settings of a data set as a message."""
    return scheduler_pb2.DatasetSpec(
        name=spec.name,
        size=spec.size,
        range_size=spec.range_size,
        shuffle=spec.shuffle,
        seed=spec.seed,
        data_epochs=spec.data_epochs,
        retries_max=spec.retries_max,
    )


def dataset_from_proto(message: scheduler_pb2.DatasetSpec) -> DatasetSpec:
    """Settings of a data set, checked."""
    return DatasetSpec(
        name=message.name,
        size=message.size,
        range_size=message.range_size,
        shuffle=message.shuffle,
        seed=message.seed,
        data_epochs=message.data_epochs,
        retries_max=message.retries_max,
    )


def position_to_proto(position: DataPosition) -> scheduler_pb2.DataPosition:
    """Where a data set stands, as a message."""
    return scheduler_pb2.DataPosition(
        data_epoch=position.data_epoch,
        done=[scheduler_pb2.RangeSpan(first=first, count=count) for first, count in position.done],
        repeated_ranges=position.repeated_ranges,
        failed_ranges=position.failed_ranges,
    )


def position_from_proto(message: scheduler_pb2.DataPosition) -> DataPosition:
    """Where a data set stands. Whether that can be is for who knows the data set."""
    if len(message.done) > limits.SPANS_MAX:
        raise LimitExceededError(f"a position of {len(message.done)} stretches is over the limit: {limits.SPANS_MAX}")
    return DataPosition(
        data_epoch=message.data_epoch,
        done=tuple((span.first, span.count) for span in message.done),
        repeated_ranges=message.repeated_ranges,
        failed_ranges=message.failed_ranges,
    )
