from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]
    DTYPE_FLOAT64: _ClassVar[DType]

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    CODEC_RAW: _ClassVar[Codec]
    CODEC_SEGMENTS: _ClassVar[Codec]

class NonFinitePolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NON_FINITE_POLICY_UNSPECIFIED: _ClassVar[NonFinitePolicy]
    NON_FINITE_POLICY_REJECT: _ClassVar[NonFinitePolicy]
    NON_FINITE_POLICY_SKIP: _ClassVar[NonFinitePolicy]

class StalenessLr(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STALENESS_LR_UNSPECIFIED: _ClassVar[StalenessLr]
    STALENESS_LR_NONE: _ClassVar[StalenessLr]
    STALENESS_LR_INVERSE: _ClassVar[StalenessLr]
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_FLOAT16: DType
DTYPE_BFLOAT16: DType
DTYPE_FLOAT64: DType
CODEC_UNSPECIFIED: Codec
CODEC_RAW: Codec
CODEC_SEGMENTS: Codec
NON_FINITE_POLICY_UNSPECIFIED: NonFinitePolicy
NON_FINITE_POLICY_REJECT: NonFinitePolicy
NON_FINITE_POLICY_SKIP: NonFinitePolicy
STALENESS_LR_UNSPECIFIED: StalenessLr
STALENESS_LR_NONE: StalenessLr
STALENESS_LR_INVERSE: StalenessLr

class Tensor(_message.Message):
    __slots__ = ("name", "shape", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: DType
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Union[DType, str]] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("tensors", "dtype")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    dtype: DType
    def __init__(self, tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., dtype: _Optional[_Union[DType, str]] = ...) -> None: ...

class Schedule(_message.Message):
    __slots__ = ("kind", "values")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    values: _containers.ScalarMap[str, float]
    def __init__(self, kind: _Optional[str] = ..., values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Override(_message.Message):
    __slots__ = ("pattern", "values")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    pattern: str
    values: _containers.ScalarMap[str, float]
    def __init__(self, pattern: _Optional[str] = ..., values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Optimizer(_message.Message):
    __slots__ = ("kind", "values", "schedule", "max_grad_norm", "overrides")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    MAX_GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    values: _containers.ScalarMap[str, float]
    schedule: Schedule
    max_grad_norm: float
    overrides: _containers.RepeatedCompositeFieldContainer[Override]
    def __init__(self, kind: _Optional[str] = ..., values: _Optional[_Mapping[str, float]] = ..., schedule: _Optional[_Union[Schedule, _Mapping]] = ..., max_grad_norm: _Optional[float] = ..., overrides: _Optional[_Iterable[_Union[Override, _Mapping]]] = ...) -> None: ...

class Consistency(_message.Message):
    __slots__ = ("kind", "backup_workers", "staleness", "staleness_lr", "resize_lr", "reduction")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BACKUP_WORKERS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_LR_FIELD_NUMBER: _ClassVar[int]
    RESIZE_LR_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_FIELD_NUMBER: _ClassVar[int]
    kind: str
    backup_workers: int
    staleness: int
    staleness_lr: StalenessLr
    resize_lr: str
    reduction: str
    def __init__(self, kind: _Optional[str] = ..., backup_workers: _Optional[int] = ..., staleness: _Optional[int] = ..., staleness_lr: _Optional[_Union[StalenessLr, str]] = ..., resize_lr: _Optional[str] = ..., reduction: _Optional[str] = ...) -> None: ...

class ParametersSpec(_message.Message):
    __slots__ = ("name", "optimizer", "consistency", "non_finite", "slice_elements", "reset_optimizer", "pull_compression", "dtype", "workers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    NON_FINITE_FIELD_NUMBER: _ClassVar[int]
    SLICE_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    RESET_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    PULL_COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    optimizer: Optimizer
    consistency: Consistency
    non_finite: NonFinitePolicy
    slice_elements: int
    reset_optimizer: bool
    pull_compression: str
    dtype: DType
    workers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., optimizer: _Optional[_Union[Optimizer, _Mapping]] = ..., consistency: _Optional[_Union[Consistency, _Mapping]] = ..., non_finite: _Optional[_Union[NonFinitePolicy, str]] = ..., slice_elements: _Optional[int] = ..., reset_optimizer: _Optional[bool] = ..., pull_compression: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., workers: _Optional[_Iterable[int]] = ...) -> None: ...

class ParametersMember(_message.Message):
    __slots__ = ("worker_id", "incarnation", "rank", "first_step", "origin", "first_push")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    FIRST_PUSH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    rank: int
    first_step: int
    origin: int
    first_push: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., rank: _Optional[int] = ..., first_step: _Optional[int] = ..., origin: _Optional[int] = ..., first_push: _Optional[int] = ...) -> None: ...

class GroupRange(_message.Message):
    __slots__ = ("start", "stop", "group")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    group: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ..., group: _Optional[int] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("server_id", "incarnation")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    incarnation: int
    def __init__(self, server_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("primary", "term", "backups", "filling", "lost", "fills")
    PRIMARY_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    BACKUPS_FIELD_NUMBER: _ClassVar[int]
    FILLING_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    FILLS_FIELD_NUMBER: _ClassVar[int]
    primary: Replica
    term: int
    backups: _containers.RepeatedCompositeFieldContainer[Replica]
    filling: _containers.RepeatedCompositeFieldContainer[Replica]
    lost: bool
    fills: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, primary: _Optional[_Union[Replica, _Mapping]] = ..., term: _Optional[int] = ..., backups: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., filling: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., lost: _Optional[bool] = ..., fills: _Optional[_Iterable[int]] = ...) -> None: ...

class Restore(_message.Message):
    __slots__ = ("directory", "manifest_digest", "weights_only")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ONLY_FIELD_NUMBER: _ClassVar[int]
    directory: str
    manifest_digest: bytes
    weights_only: bool
    def __init__(self, directory: _Optional[str] = ..., manifest_digest: _Optional[bytes] = ..., weights_only: _Optional[bool] = ...) -> None: ...

class ParametersEntry(_message.Message):
    __slots__ = ("spec", "total", "shards", "members", "ranges", "ready", "layout_digest", "reference_workers", "restore", "generation", "departed", "state_since")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DEPARTED_FIELD_NUMBER: _ClassVar[int]
    STATE_SINCE_FIELD_NUMBER: _ClassVar[int]
    spec: ParametersSpec
    total: int
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    members: _containers.RepeatedCompositeFieldContainer[ParametersMember]
    ranges: _containers.RepeatedCompositeFieldContainer[GroupRange]
    ready: bool
    layout_digest: bytes
    reference_workers: int
    restore: Restore
    generation: int
    departed: _containers.RepeatedCompositeFieldContainer[ParametersMember]
    state_since: int
    def __init__(self, spec: _Optional[_Union[ParametersSpec, _Mapping]] = ..., total: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ..., members: _Optional[_Iterable[_Union[ParametersMember, _Mapping]]] = ..., ranges: _Optional[_Iterable[_Union[GroupRange, _Mapping]]] = ..., ready: _Optional[bool] = ..., layout_digest: _Optional[bytes] = ..., reference_workers: _Optional[int] = ..., restore: _Optional[_Union[Restore, _Mapping]] = ..., generation: _Optional[int] = ..., departed: _Optional[_Iterable[_Union[ParametersMember, _Mapping]]] = ..., state_since: _Optional[int] = ...) -> None: ...

class WorkerIncarnation(_message.Message):
    __slots__ = ("worker_id", "incarnation", "age_seconds")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    age_seconds: float
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., age_seconds: _Optional[float] = ...) -> None: ...

class ServerEntry(_message.Message):
    __slots__ = ("server_id", "incarnation", "address")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    incarnation: int
    address: str
    def __init__(self, server_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class WorkerEntry(_message.Message):
    __slots__ = ("worker_id", "incarnation", "rank", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    rank: int
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., rank: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class ClusterMap(_message.Message):
    __slots__ = ("run_id", "epoch", "servers", "parameters", "workers", "paused", "scheduler_id", "ranks_done")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    RANKS_DONE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    servers: _containers.RepeatedCompositeFieldContainer[ServerEntry]
    parameters: _containers.RepeatedCompositeFieldContainer[ParametersEntry]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerEntry]
    paused: str
    scheduler_id: str
    ranks_done: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., servers: _Optional[_Iterable[_Union[ServerEntry, _Mapping]]] = ..., parameters: _Optional[_Iterable[_Union[ParametersEntry, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerEntry, _Mapping]]] = ..., paused: _Optional[str] = ..., scheduler_id: _Optional[str] = ..., ranks_done: _Optional[_Iterable[int]] = ...) -> None: ...

class ClusterMapDifference(_message.Message):
    __slots__ = ("base", "epoch", "servers_gone", "servers", "workers_gone", "workers", "parameters_gone", "parameters", "paused", "ranks_done")
    BASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SERVERS_GONE_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_GONE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_GONE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    RANKS_DONE_FIELD_NUMBER: _ClassVar[int]
    base: int
    epoch: int
    servers_gone: _containers.RepeatedScalarFieldContainer[str]
    servers: _containers.RepeatedCompositeFieldContainer[ServerEntry]
    workers_gone: _containers.RepeatedScalarFieldContainer[str]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerEntry]
    parameters_gone: _containers.RepeatedScalarFieldContainer[str]
    parameters: _containers.RepeatedCompositeFieldContainer[ParametersEntry]
    paused: str
    ranks_done: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, base: _Optional[int] = ..., epoch: _Optional[int] = ..., servers_gone: _Optional[_Iterable[str]] = ..., servers: _Optional[_Iterable[_Union[ServerEntry, _Mapping]]] = ..., workers_gone: _Optional[_Iterable[str]] = ..., workers: _Optional[_Iterable[_Union[WorkerEntry, _Mapping]]] = ..., parameters_gone: _Optional[_Iterable[str]] = ..., parameters: _Optional[_Iterable[_Union[ParametersEntry, _Mapping]]] = ..., paused: _Optional[str] = ..., ranks_done: _Optional[_Iterable[int]] = ...) -> None: ...

class Lags(_message.Message):
    __slots__ = ("slices", "starts", "sizes", "updates")
    SLICES_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    slices: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    updates: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slices: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ..., updates: _Optional[_Iterable[int]] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("code", "message", "details")
    class DetailsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    details: _containers.ScalarMap[str, str]
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., details: _Optional[_Mapping[str, str]] = ...) -> None: ...
