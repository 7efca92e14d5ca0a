from psdist.v1 import common_pb2 as _common_pb2
from psdist.v1 import server_pb2 as _server_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_SERVER: _ClassVar[Role]
    ROLE_WORKER: _ClassVar[Role]

class SpanKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPAN_KIND_UNSPECIFIED: _ClassVar[SpanKind]
    SPAN_KIND_COMPUTE: _ClassVar[SpanKind]
    SPAN_KIND_PUSH: _ClassVar[SpanKind]
    SPAN_KIND_WAIT: _ClassVar[SpanKind]
    SPAN_KIND_PULL: _ClassVar[SpanKind]
    SPAN_KIND_STEP: _ClassVar[SpanKind]
    SPAN_KIND_GATHER: _ClassVar[SpanKind]
    SPAN_KIND_ENCODE: _ClassVar[SpanKind]
    SPAN_KIND_REQUEST: _ClassVar[SpanKind]
    SPAN_KIND_QUEUE: _ClassVar[SpanKind]
    SPAN_KIND_THREAD: _ClassVar[SpanKind]
    SPAN_KIND_COMBINE: _ClassVar[SpanKind]
    SPAN_KIND_APPLY: _ClassVar[SpanKind]
    SPAN_KIND_REPLICATE: _ClassVar[SpanKind]
ROLE_UNSPECIFIED: Role
ROLE_SERVER: Role
ROLE_WORKER: Role
SPAN_KIND_UNSPECIFIED: SpanKind
SPAN_KIND_COMPUTE: SpanKind
SPAN_KIND_PUSH: SpanKind
SPAN_KIND_WAIT: SpanKind
SPAN_KIND_PULL: SpanKind
SPAN_KIND_STEP: SpanKind
SPAN_KIND_GATHER: SpanKind
SPAN_KIND_ENCODE: SpanKind
SPAN_KIND_REQUEST: SpanKind
SPAN_KIND_QUEUE: SpanKind
SPAN_KIND_THREAD: SpanKind
SPAN_KIND_COMBINE: SpanKind
SPAN_KIND_APPLY: SpanKind
SPAN_KIND_REPLICATE: SpanKind

class RegisterRequest(_message.Message):
    __slots__ = ("protocol_version", "psdist_version", "run_id", "role", "member_id", "rank", "world_size", "address", "host", "pid", "oldest_protocol")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PSDIST_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    psdist_version: str
    run_id: str
    role: Role
    member_id: str
    rank: int
    world_size: int
    address: str
    host: str
    pid: int
    oldest_protocol: int
    def __init__(self, protocol_version: _Optional[int] = ..., psdist_version: _Optional[str] = ..., run_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., member_id: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., address: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., oldest_protocol: _Optional[int] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("run_id", "member_id", "incarnation", "rank", "world_size", "lease_seconds", "map", "psdist_version", "storage", "heartbeat_seconds", "silence_seconds", "takes_changes", "peer_key", "protocol_version", "time_limits_suspended")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    PSDIST_VERSION_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TAKES_CHANGES_FIELD_NUMBER: _ClassVar[int]
    PEER_KEY_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMITS_SUSPENDED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    member_id: str
    incarnation: int
    rank: int
    world_size: int
    lease_seconds: float
    map: _common_pb2.ClusterMap
    psdist_version: str
    storage: str
    heartbeat_seconds: float
    silence_seconds: float
    takes_changes: bool
    peer_key: bytes
    protocol_version: int
    time_limits_suspended: bool
    def __init__(self, run_id: _Optional[str] = ..., member_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., map: _Optional[_Union[_common_pb2.ClusterMap, _Mapping]] = ..., psdist_version: _Optional[str] = ..., storage: _Optional[str] = ..., heartbeat_seconds: _Optional[float] = ..., silence_seconds: _Optional[float] = ..., takes_changes: _Optional[bool] = ..., peer_key: _Optional[bytes] = ..., protocol_version: _Optional[int] = ..., time_limits_suspended: _Optional[bool] = ...) -> None: ...

class SnapshotCommand(_message.Message):
    __slots__ = ("attempt", "prepare", "mark", "cut", "end")
    class Prepare(_message.Message):
        __slots__ = ("parameters", "directory")
        class Parameters(_message.Message):
            __slots__ = ("parameters", "step")
            PARAMETERS_FIELD_NUMBER: _ClassVar[int]
            STEP_FIELD_NUMBER: _ClassVar[int]
            parameters: str
            step: int
            def __init__(self, parameters: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...
        PARAMETERS_FIELD_NUMBER: _ClassVar[int]
        DIRECTORY_FIELD_NUMBER: _ClassVar[int]
        parameters: _containers.RepeatedCompositeFieldContainer[SnapshotCommand.Prepare.Parameters]
        directory: str
        def __init__(self, parameters: _Optional[_Iterable[_Union[SnapshotCommand.Prepare.Parameters, _Mapping]]] = ..., directory: _Optional[str] = ...) -> None: ...
    class Mark(_message.Message):
        __slots__ = ("steps",)
        class StepsEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: int
            def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
        STEPS_FIELD_NUMBER: _ClassVar[int]
        steps: _containers.ScalarMap[str, int]
        def __init__(self, steps: _Optional[_Mapping[str, int]] = ...) -> None: ...
    class Cut(_message.Message):
        __slots__ = ("parameters",)
        class Parameters(_message.Message):
            __slots__ = ("parameters", "producers", "final_step")
            PARAMETERS_FIELD_NUMBER: _ClassVar[int]
            PRODUCERS_FIELD_NUMBER: _ClassVar[int]
            FINAL_STEP_FIELD_NUMBER: _ClassVar[int]
            parameters: str
            producers: _containers.RepeatedCompositeFieldContainer[_server_pb2.ReplicateRequest.Producer]
            final_step: int
            def __init__(self, parameters: _Optional[str] = ..., producers: _Optional[_Iterable[_Union[_server_pb2.ReplicateRequest.Producer, _Mapping]]] = ..., final_step: _Optional[int] = ...) -> None: ...
        PARAMETERS_FIELD_NUMBER: _ClassVar[int]
        parameters: _containers.RepeatedCompositeFieldContainer[SnapshotCommand.Cut.Parameters]
        def __init__(self, parameters: _Optional[_Iterable[_Union[SnapshotCommand.Cut.Parameters, _Mapping]]] = ...) -> None: ...
    class End(_message.Message):
        __slots__ = ("committed", "reason")
        COMMITTED_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        committed: bool
        reason: str
        def __init__(self, committed: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    prepare: SnapshotCommand.Prepare
    mark: SnapshotCommand.Mark
    cut: SnapshotCommand.Cut
    end: SnapshotCommand.End
    def __init__(self, attempt: _Optional[int] = ..., prepare: _Optional[_Union[SnapshotCommand.Prepare, _Mapping]] = ..., mark: _Optional[_Union[SnapshotCommand.Mark, _Mapping]] = ..., cut: _Optional[_Union[SnapshotCommand.Cut, _Mapping]] = ..., end: _Optional[_Union[SnapshotCommand.End, _Mapping]] = ...) -> None: ...

class SnapshotReport(_message.Message):
    __slots__ = ("attempt", "prepared", "marked", "written", "failed", "loaded", "load_failed", "keeps")
    class Prepared(_message.Message):
        __slots__ = ("accepted", "steps_next")
        class StepsNextEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: int
            def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
        ACCEPTED_FIELD_NUMBER: _ClassVar[int]
        STEPS_NEXT_FIELD_NUMBER: _ClassVar[int]
        accepted: bool
        steps_next: _containers.ScalarMap[str, int]
        def __init__(self, accepted: _Optional[bool] = ..., steps_next: _Optional[_Mapping[str, int]] = ...) -> None: ...
    class Marked(_message.Message):
        __slots__ = ("next", "keeps")
        class NextEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: int
            def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
        class KeepsEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: int
            def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
        NEXT_FIELD_NUMBER: _ClassVar[int]
        KEEPS_FIELD_NUMBER: _ClassVar[int]
        next: _containers.ScalarMap[str, int]
        keeps: _containers.ScalarMap[str, int]
        def __init__(self, next: _Optional[_Mapping[str, int]] = ..., keeps: _Optional[_Mapping[str, int]] = ...) -> None: ...
    class Keeps(_message.Message):
        __slots__ = ("parameters",)
        PARAMETERS_FIELD_NUMBER: _ClassVar[int]
        parameters: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, parameters: _Optional[_Iterable[str]] = ...) -> None: ...
    class Written(_message.Message):
        __slots__ = ("parameters", "shard", "term", "file", "length", "digest", "versions", "digests", "state_names", "lags")
        PARAMETERS_FIELD_NUMBER: _ClassVar[int]
        SHARD_FIELD_NUMBER: _ClassVar[int]
        TERM_FIELD_NUMBER: _ClassVar[int]
        FILE_FIELD_NUMBER: _ClassVar[int]
        LENGTH_FIELD_NUMBER: _ClassVar[int]
        DIGEST_FIELD_NUMBER: _ClassVar[int]
        VERSIONS_FIELD_NUMBER: _ClassVar[int]
        DIGESTS_FIELD_NUMBER: _ClassVar[int]
        STATE_NAMES_FIELD_NUMBER: _ClassVar[int]
        LAGS_FIELD_NUMBER: _ClassVar[int]
        parameters: str
        shard: int
        term: int
        file: str
        length: int
        digest: bytes
        versions: _containers.RepeatedScalarFieldContainer[int]
        digests: bytes
        state_names: _containers.RepeatedScalarFieldContainer[str]
        lags: _common_pb2.Lags
        def __init__(self, parameters: _Optional[str] = ..., shard: _Optional[int] = ..., term: _Optional[int] = ..., file: _Optional[str] = ..., length: _Optional[int] = ..., digest: _Optional[bytes] = ..., versions: _Optional[_Iterable[int]] = ..., digests: _Optional[bytes] = ..., state_names: _Optional[_Iterable[str]] = ..., lags: _Optional[_Union[_common_pb2.Lags, _Mapping]] = ...) -> None: ...
    class Failed(_message.Message):
        __slots__ = ("error",)
        ERROR_FIELD_NUMBER: _ClassVar[int]
        error: _common_pb2.ErrorDetail
        def __init__(self, error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...
    class Loaded(_message.Message):
        __slots__ = ("parameters", "generation", "shards", "terms")
        PARAMETERS_FIELD_NUMBER: _ClassVar[int]
        GENERATION_FIELD_NUMBER: _ClassVar[int]
        SHARDS_FIELD_NUMBER: _ClassVar[int]
        TERMS_FIELD_NUMBER: _ClassVar[int]
        parameters: str
        generation: int
        shards: _containers.RepeatedScalarFieldContainer[int]
        terms: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, parameters: _Optional[str] = ..., generation: _Optional[int] = ..., shards: _Optional[_Iterable[int]] = ..., terms: _Optional[_Iterable[int]] = ...) -> None: ...
    class LoadFailed(_message.Message):
        __slots__ = ("parameters", "generation", "restore", "error")
        PARAMETERS_FIELD_NUMBER: _ClassVar[int]
        GENERATION_FIELD_NUMBER: _ClassVar[int]
        RESTORE_FIELD_NUMBER: _ClassVar[int]
        ERROR_FIELD_NUMBER: _ClassVar[int]
        parameters: str
        generation: int
        restore: _common_pb2.Restore
        error: _common_pb2.ErrorDetail
        def __init__(self, parameters: _Optional[str] = ..., generation: _Optional[int] = ..., restore: _Optional[_Union[_common_pb2.Restore, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    MARKED_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FAILED_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    prepared: SnapshotReport.Prepared
    marked: SnapshotReport.Marked
    written: SnapshotReport.Written
    failed: SnapshotReport.Failed
    loaded: SnapshotReport.Loaded
    load_failed: SnapshotReport.LoadFailed
    keeps: SnapshotReport.Keeps
    def __init__(self, attempt: _Optional[int] = ..., prepared: _Optional[_Union[SnapshotReport.Prepared, _Mapping]] = ..., marked: _Optional[_Union[SnapshotReport.Marked, _Mapping]] = ..., written: _Optional[_Union[SnapshotReport.Written, _Mapping]] = ..., failed: _Optional[_Union[SnapshotReport.Failed, _Mapping]] = ..., loaded: _Optional[_Union[SnapshotReport.Loaded, _Mapping]] = ..., load_failed: _Optional[_Union[SnapshotReport.LoadFailed, _Mapping]] = ..., keeps: _Optional[_Union[SnapshotReport.Keeps, _Mapping]] = ...) -> None: ...

class SnapshotProgress(_message.Message):
    __slots__ = ("attempt", "bytes_done", "bytes", "bytes_aside", "waiting_for", "loading")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_ASIDE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    bytes_done: int
    bytes: int
    bytes_aside: int
    waiting_for: str
    loading: bool
    def __init__(self, attempt: _Optional[int] = ..., bytes_done: _Optional[int] = ..., bytes: _Optional[int] = ..., bytes_aside: _Optional[int] = ..., waiting_for: _Optional[str] = ..., loading: _Optional[bool] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("hello", "heartbeat", "join_answer", "replica_filled", "replica_unreachable", "snapshot", "stop", "values_answer", "server_checked", "align", "equal_contributions", "trace", "call_checked")
    class Hello(_message.Message):
        __slots__ = ("member_id", "incarnation", "takes_differences", "epoch", "scheduler_id")
        MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
        INCARNATION_FIELD_NUMBER: _ClassVar[int]
        TAKES_DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
        member_id: str
        incarnation: int
        takes_differences: bool
        epoch: int
        scheduler_id: str
        def __init__(self, member_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., takes_differences: _Optional[bool] = ..., epoch: _Optional[int] = ..., scheduler_id: _Optional[str] = ...) -> None: ...
    class Heartbeat(_message.Message):
        __slots__ = ("epoch", "statistics", "waiting_for", "connections", "snapshot", "heard", "activity", "rates", "totals", "unreachable", "changed_only", "metrics_address", "certificate_not_after")
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        STATISTICS_FIELD_NUMBER: _ClassVar[int]
        WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
        CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
        SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
        HEARD_FIELD_NUMBER: _ClassVar[int]
        ACTIVITY_FIELD_NUMBER: _ClassVar[int]
        RATES_FIELD_NUMBER: _ClassVar[int]
        TOTALS_FIELD_NUMBER: _ClassVar[int]
        UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
        CHANGED_ONLY_FIELD_NUMBER: _ClassVar[int]
        METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
        CERTIFICATE_NOT_AFTER_FIELD_NUMBER: _ClassVar[int]
        epoch: int
        statistics: _server_pb2.GetStatisticsResponse
        waiting_for: _containers.RepeatedScalarFieldContainer[str]
        connections: Connections
        snapshot: SnapshotProgress
        heard: _containers.RepeatedCompositeFieldContainer[_common_pb2.WorkerIncarnation]
        activity: Activity
        rates: WorkerRates
        totals: WorkerTotals
        unreachable: _containers.RepeatedCompositeFieldContainer[UnreachableServer]
        changed_only: bool
        metrics_address: str
        certificate_not_after: float
        def __init__(self, epoch: _Optional[int] = ..., statistics: _Optional[_Union[_server_pb2.GetStatisticsResponse, _Mapping]] = ..., waiting_for: _Optional[_Iterable[str]] = ..., connections: _Optional[_Union[Connections, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotProgress, _Mapping]] = ..., heard: _Optional[_Iterable[_Union[_common_pb2.WorkerIncarnation, _Mapping]]] = ..., activity: _Optional[_Union[Activity, _Mapping]] = ..., rates: _Optional[_Union[WorkerRates, _Mapping]] = ..., totals: _Optional[_Union[WorkerTotals, _Mapping]] = ..., unreachable: _Optional[_Iterable[_Union[UnreachableServer, _Mapping]]] = ..., changed_only: _Optional[bool] = ..., metrics_address: _Optional[str] = ..., certificate_not_after: _Optional[float] = ...) -> None: ...
    class JoinAnswer(_message.Message):
        __slots__ = ("proposal_id", "accepted", "version_max")
        PROPOSAL_ID_FIELD_NUMBER: _ClassVar[int]
        ACCEPTED_FIELD_NUMBER: _ClassVar[int]
        VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
        proposal_id: int
        accepted: bool
        version_max: int
        def __init__(self, proposal_id: _Optional[int] = ..., accepted: _Optional[bool] = ..., version_max: _Optional[int] = ...) -> None: ...
    class ValuesAnswer(_message.Message):
        __slots__ = ("number", "installed")
        NUMBER_FIELD_NUMBER: _ClassVar[int]
        INSTALLED_FIELD_NUMBER: _ClassVar[int]
        number: int
        installed: int
        def __init__(self, number: _Optional[int] = ..., installed: _Optional[int] = ...) -> None: ...
    class EqualContributions(_message.Message):
        __slots__ = ("parameters", "worker_ids", "step")
        PARAMETERS_FIELD_NUMBER: _ClassVar[int]
        WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
        STEP_FIELD_NUMBER: _ClassVar[int]
        parameters: str
        worker_ids: _containers.RepeatedScalarFieldContainer[str]
        step: int
        def __init__(self, parameters: _Optional[str] = ..., worker_ids: _Optional[_Iterable[str]] = ..., step: _Optional[int] = ...) -> None: ...
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    JOIN_ANSWER_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FILLED_FIELD_NUMBER: _ClassVar[int]
    REPLICA_UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    VALUES_ANSWER_FIELD_NUMBER: _ClassVar[int]
    SERVER_CHECKED_FIELD_NUMBER: _ClassVar[int]
    ALIGN_FIELD_NUMBER: _ClassVar[int]
    EQUAL_CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    CALL_CHECKED_FIELD_NUMBER: _ClassVar[int]
    hello: SessionRequest.Hello
    heartbeat: SessionRequest.Heartbeat
    join_answer: SessionRequest.JoinAnswer
    replica_filled: ReplicaFilled
    replica_unreachable: ReplicaUnreachable
    snapshot: SnapshotReport
    stop: StopReport
    values_answer: SessionRequest.ValuesAnswer
    server_checked: ServerChecked
    align: AlignReport
    equal_contributions: SessionRequest.EqualContributions
    trace: TraceReport
    call_checked: CheckCall
    def __init__(self, hello: _Optional[_Union[SessionRequest.Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[SessionRequest.Heartbeat, _Mapping]] = ..., join_answer: _Optional[_Union[SessionRequest.JoinAnswer, _Mapping]] = ..., replica_filled: _Optional[_Union[ReplicaFilled, _Mapping]] = ..., replica_unreachable: _Optional[_Union[ReplicaUnreachable, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotReport, _Mapping]] = ..., stop: _Optional[_Union[StopReport, _Mapping]] = ..., values_answer: _Optional[_Union[SessionRequest.ValuesAnswer, _Mapping]] = ..., server_checked: _Optional[_Union[ServerChecked, _Mapping]] = ..., align: _Optional[_Union[AlignReport, _Mapping]] = ..., equal_contributions: _Optional[_Union[SessionRequest.EqualContributions, _Mapping]] = ..., trace: _Optional[_Union[TraceReport, _Mapping]] = ..., call_checked: _Optional[_Union[CheckCall, _Mapping]] = ...) -> None: ...

class UnreachableServer(_message.Message):
    __slots__ = ("server", "seconds", "reason")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    server: _common_pb2.Replica
    seconds: float
    reason: str
    def __init__(self, server: _Optional[_Union[_common_pb2.Replica, _Mapping]] = ..., seconds: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class ServerChecked(_message.Message):
    __slots__ = ("server", "reached")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    server: _common_pb2.Replica
    reached: bool
    def __init__(self, server: _Optional[_Union[_common_pb2.Replica, _Mapping]] = ..., reached: _Optional[bool] = ...) -> None: ...

class WorkerRates(_message.Message):
    __slots__ = ("seconds", "waiting_seconds", "pushes")
    class PushesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    waiting_seconds: float
    pushes: _containers.ScalarMap[str, int]
    def __init__(self, seconds: _Optional[float] = ..., waiting_seconds: _Optional[float] = ..., pushes: _Optional[_Mapping[str, int]] = ...) -> None: ...

class WorkerTotals(_message.Message):
    __slots__ = ("compute_seconds", "push_seconds", "wait_seconds", "pull_seconds", "pushes", "traffic", "dropped", "staleness", "reported", "reported_step", "samples_per_second", "abstained")
    class Traffic(_message.Message):
        __slots__ = ("transport", "push_codec", "pull_codec", "push_bytes", "pull_bytes")
        TRANSPORT_FIELD_NUMBER: _ClassVar[int]
        PUSH_CODEC_FIELD_NUMBER: _ClassVar[int]
        PULL_CODEC_FIELD_NUMBER: _ClassVar[int]
        PUSH_BYTES_FIELD_NUMBER: _ClassVar[int]
        PULL_BYTES_FIELD_NUMBER: _ClassVar[int]
        transport: str
        push_codec: str
        pull_codec: str
        push_bytes: int
        pull_bytes: int
        def __init__(self, transport: _Optional[str] = ..., push_codec: _Optional[str] = ..., pull_codec: _Optional[str] = ..., push_bytes: _Optional[int] = ..., pull_bytes: _Optional[int] = ...) -> None: ...
    class PushesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ReportedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PUSH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PULL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    REPORTED_STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ABSTAINED_FIELD_NUMBER: _ClassVar[int]
    compute_seconds: float
    push_seconds: float
    wait_seconds: float
    pull_seconds: float
    pushes: _containers.ScalarMap[str, int]
    traffic: _containers.RepeatedCompositeFieldContainer[WorkerTotals.Traffic]
    dropped: int
    staleness: int
    reported: _containers.ScalarMap[str, float]
    reported_step: int
    samples_per_second: float
    abstained: int
    def __init__(self, compute_seconds: _Optional[float] = ..., push_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., pull_seconds: _Optional[float] = ..., pushes: _Optional[_Mapping[str, int]] = ..., traffic: _Optional[_Iterable[_Union[WorkerTotals.Traffic, _Mapping]]] = ..., dropped: _Optional[int] = ..., staleness: _Optional[int] = ..., reported: _Optional[_Mapping[str, float]] = ..., reported_step: _Optional[int] = ..., samples_per_second: _Optional[float] = ..., abstained: _Optional[int] = ...) -> None: ...

class Activity(_message.Message):
    __slots__ = ("sequence", "next", "partial", "step", "clock", "call", "group")
    class Step(_message.Message):
        __slots__ = ("parameters", "step")
        PARAMETERS_FIELD_NUMBER: _ClassVar[int]
        STEP_FIELD_NUMBER: _ClassVar[int]
        parameters: str
        step: int
        def __init__(self, parameters: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...
    class GroupCall(_message.Message):
        __slots__ = ("group", "message", "number", "awaited", "text", "sources", "next")
        class Source(_message.Message):
            __slots__ = ("worker", "number", "next")
            WORKER_FIELD_NUMBER: _ClassVar[int]
            NUMBER_FIELD_NUMBER: _ClassVar[int]
            NEXT_FIELD_NUMBER: _ClassVar[int]
            worker: _common_pb2.WorkerIncarnation
            number: int
            next: int
            def __init__(self, worker: _Optional[_Union[_common_pb2.WorkerIncarnation, _Mapping]] = ..., number: _Optional[int] = ..., next: _Optional[int] = ...) -> None: ...
        GROUP_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        NUMBER_FIELD_NUMBER: _ClassVar[int]
        AWAITED_FIELD_NUMBER: _ClassVar[int]
        TEXT_FIELD_NUMBER: _ClassVar[int]
        SOURCES_FIELD_NUMBER: _ClassVar[int]
        NEXT_FIELD_NUMBER: _ClassVar[int]
        group: bytes
        message: bool
        number: int
        awaited: _containers.RepeatedCompositeFieldContainer[_common_pb2.WorkerIncarnation]
        text: str
        sources: _containers.RepeatedCompositeFieldContainer[Activity.GroupCall.Source]
        next: int
        def __init__(self, group: _Optional[bytes] = ..., message: _Optional[bool] = ..., number: _Optional[int] = ..., awaited: _Optional[_Iterable[_Union[_common_pb2.WorkerIncarnation, _Mapping]]] = ..., text: _Optional[str] = ..., sources: _Optional[_Iterable[_Union[Activity.GroupCall.Source, _Mapping]]] = ..., next: _Optional[int] = ...) -> None: ...
    class NextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    next: _containers.ScalarMap[str, int]
    partial: _containers.RepeatedScalarFieldContainer[str]
    step: Activity.Step
    clock: Activity.Step
    call: bool
    group: Activity.GroupCall
    def __init__(self, sequence: _Optional[int] = ..., next: _Optional[_Mapping[str, int]] = ..., partial: _Optional[_Iterable[str]] = ..., step: _Optional[_Union[Activity.Step, _Mapping]] = ..., clock: _Optional[_Union[Activity.Step, _Mapping]] = ..., call: _Optional[bool] = ..., group: _Optional[_Union[Activity.GroupCall, _Mapping]] = ...) -> None: ...

class CheckCall(_message.Message):
    __slots__ = ("sequence", "worker_id", "incarnation", "waiting", "group", "message", "number", "next")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    worker_id: str
    incarnation: int
    waiting: int
    group: bytes
    message: bool
    number: int
    next: int
    def __init__(self, sequence: _Optional[int] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., waiting: _Optional[int] = ..., group: _Optional[bytes] = ..., message: _Optional[bool] = ..., number: _Optional[int] = ..., next: _Optional[int] = ...) -> None: ...

class StopReport(_message.Message):
    __slots__ = ("number", "stopping", "holding", "next")
    class NextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    number: int
    stopping: bool
    holding: bool
    next: _containers.ScalarMap[str, int]
    def __init__(self, number: _Optional[int] = ..., stopping: _Optional[bool] = ..., holding: _Optional[bool] = ..., next: _Optional[_Mapping[str, int]] = ...) -> None: ...

class StopCommand(_message.Message):
    __slots__ = ("number", "ask", "hold", "leave")
    class Leave(_message.Message):
        __slots__ = ("next",)
        class NextEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: int
            def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
        NEXT_FIELD_NUMBER: _ClassVar[int]
        next: _containers.ScalarMap[str, int]
        def __init__(self, next: _Optional[_Mapping[str, int]] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    number: int
    ask: bool
    hold: bool
    leave: StopCommand.Leave
    def __init__(self, number: _Optional[int] = ..., ask: _Optional[bool] = ..., hold: _Optional[bool] = ..., leave: _Optional[_Union[StopCommand.Leave, _Mapping]] = ...) -> None: ...

class AlignReport(_message.Message):
    __slots__ = ("number", "position", "start", "period", "declared", "next")
    class NextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    DECLARED_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    number: int
    position: int
    start: int
    period: int
    declared: bool
    next: _containers.ScalarMap[str, int]
    def __init__(self, number: _Optional[int] = ..., position: _Optional[int] = ..., start: _Optional[int] = ..., period: _Optional[int] = ..., declared: _Optional[bool] = ..., next: _Optional[_Mapping[str, int]] = ...) -> None: ...

class AlignCommand(_message.Message):
    __slots__ = ("number", "hold", "release", "until")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    number: int
    hold: bool
    release: bool
    until: int
    def __init__(self, number: _Optional[int] = ..., hold: _Optional[bool] = ..., release: _Optional[bool] = ..., until: _Optional[int] = ...) -> None: ...

class ReplicaFilled(_message.Message):
    __slots__ = ("parameters", "shard", "term", "replica", "fill")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    parameters: str
    shard: int
    term: int
    replica: _common_pb2.Replica
    fill: int
    def __init__(self, parameters: _Optional[str] = ..., shard: _Optional[int] = ..., term: _Optional[int] = ..., replica: _Optional[_Union[_common_pb2.Replica, _Mapping]] = ..., fill: _Optional[int] = ...) -> None: ...

class ReplicaUnreachable(_message.Message):
    __slots__ = ("parameters", "shard", "term", "replica", "reason", "fill")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    parameters: str
    shard: int
    term: int
    replica: _common_pb2.Replica
    reason: str
    fill: int
    def __init__(self, parameters: _Optional[str] = ..., shard: _Optional[int] = ..., term: _Optional[int] = ..., replica: _Optional[_Union[_common_pb2.Replica, _Mapping]] = ..., reason: _Optional[str] = ..., fill: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("map", "join_proposal", "join_withdrawn", "member_lost", "shards_lost", "snapshot", "rolled_back", "stop", "mutual_wait", "check_values", "run_ended", "map_difference", "check_server", "align", "notice", "trace", "check_call")
    class JoinProposal(_message.Message):
        __slots__ = ("proposal_id", "parameters", "member")
        PROPOSAL_ID_FIELD_NUMBER: _ClassVar[int]
        PARAMETERS_FIELD_NUMBER: _ClassVar[int]
        MEMBER_FIELD_NUMBER: _ClassVar[int]
        proposal_id: int
        parameters: str
        member: _common_pb2.ParametersMember
        def __init__(self, proposal_id: _Optional[int] = ..., parameters: _Optional[str] = ..., member: _Optional[_Union[_common_pb2.ParametersMember, _Mapping]] = ...) -> None: ...
    class JoinWithdrawn(_message.Message):
        __slots__ = ("proposal_id", "parameters", "worker_id")
        PROPOSAL_ID_FIELD_NUMBER: _ClassVar[int]
        PARAMETERS_FIELD_NUMBER: _ClassVar[int]
        WORKER_ID_FIELD_NUMBER: _ClassVar[int]
        proposal_id: int
        parameters: str
        worker_id: str
        def __init__(self, proposal_id: _Optional[int] = ..., parameters: _Optional[str] = ..., worker_id: _Optional[str] = ...) -> None: ...
    class CheckValues(_message.Message):
        __slots__ = ("number", "parameters")
        NUMBER_FIELD_NUMBER: _ClassVar[int]
        PARAMETERS_FIELD_NUMBER: _ClassVar[int]
        number: int
        parameters: str
        def __init__(self, number: _Optional[int] = ..., parameters: _Optional[str] = ...) -> None: ...
    class MemberLost(_message.Message):
        __slots__ = ("member_id", "role", "reason")
        MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
        ROLE_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        member_id: str
        role: Role
        reason: str
        def __init__(self, member_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., reason: _Optional[str] = ...) -> None: ...
    class ShardsLost(_message.Message):
        __slots__ = ("parameters", "shards", "server_id", "version", "text")
        PARAMETERS_FIELD_NUMBER: _ClassVar[int]
        SHARDS_FIELD_NUMBER: _ClassVar[int]
        SERVER_ID_FIELD_NUMBER: _ClassVar[int]
        VERSION_FIELD_NUMBER: _ClassVar[int]
        TEXT_FIELD_NUMBER: _ClassVar[int]
        parameters: str
        shards: _containers.RepeatedScalarFieldContainer[int]
        server_id: str
        version: int
        text: str
        def __init__(self, parameters: _Optional[str] = ..., shards: _Optional[_Iterable[int]] = ..., server_id: _Optional[str] = ..., version: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...
    class RolledBack(_message.Message):
        __slots__ = ("directory", "lost", "text")
        class Lost(_message.Message):
            __slots__ = ("parameters", "until")
            PARAMETERS_FIELD_NUMBER: _ClassVar[int]
            FROM_FIELD_NUMBER: _ClassVar[int]
            UNTIL_FIELD_NUMBER: _ClassVar[int]
            parameters: str
            until: int
            def __init__(self, parameters: _Optional[str] = ..., until: _Optional[int] = ..., **kwargs) -> None: ...
        DIRECTORY_FIELD_NUMBER: _ClassVar[int]
        LOST_FIELD_NUMBER: _ClassVar[int]
        TEXT_FIELD_NUMBER: _ClassVar[int]
        directory: str
        lost: _containers.RepeatedCompositeFieldContainer[SessionResponse.RolledBack.Lost]
        text: str
        def __init__(self, directory: _Optional[str] = ..., lost: _Optional[_Iterable[_Union[SessionResponse.RolledBack.Lost, _Mapping]]] = ..., text: _Optional[str] = ...) -> None: ...
    class Notice(_message.Message):
        __slots__ = ("text",)
        TEXT_FIELD_NUMBER: _ClassVar[int]
        text: str
        def __init__(self, text: _Optional[str] = ...) -> None: ...
    class RunEnded(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    MAP_FIELD_NUMBER: _ClassVar[int]
    JOIN_PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    JOIN_WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    MEMBER_LOST_FIELD_NUMBER: _ClassVar[int]
    SHARDS_LOST_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    ROLLED_BACK_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MUTUAL_WAIT_FIELD_NUMBER: _ClassVar[int]
    CHECK_VALUES_FIELD_NUMBER: _ClassVar[int]
    RUN_ENDED_FIELD_NUMBER: _ClassVar[int]
    MAP_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    CHECK_SERVER_FIELD_NUMBER: _ClassVar[int]
    ALIGN_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    CHECK_CALL_FIELD_NUMBER: _ClassVar[int]
    map: _common_pb2.ClusterMap
    join_proposal: SessionResponse.JoinProposal
    join_withdrawn: SessionResponse.JoinWithdrawn
    member_lost: SessionResponse.MemberLost
    shards_lost: SessionResponse.ShardsLost
    snapshot: SnapshotCommand
    rolled_back: SessionResponse.RolledBack
    stop: StopCommand
    mutual_wait: MutualWait
    check_values: SessionResponse.CheckValues
    run_ended: SessionResponse.RunEnded
    map_difference: _common_pb2.ClusterMapDifference
    check_server: _common_pb2.Replica
    align: AlignCommand
    notice: SessionResponse.Notice
    trace: TraceCommand
    check_call: CheckCall
    def __init__(self, map: _Optional[_Union[_common_pb2.ClusterMap, _Mapping]] = ..., join_proposal: _Optional[_Union[SessionResponse.JoinProposal, _Mapping]] = ..., join_withdrawn: _Optional[_Union[SessionResponse.JoinWithdrawn, _Mapping]] = ..., member_lost: _Optional[_Union[SessionResponse.MemberLost, _Mapping]] = ..., shards_lost: _Optional[_Union[SessionResponse.ShardsLost, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotCommand, _Mapping]] = ..., rolled_back: _Optional[_Union[SessionResponse.RolledBack, _Mapping]] = ..., stop: _Optional[_Union[StopCommand, _Mapping]] = ..., mutual_wait: _Optional[_Union[MutualWait, _Mapping]] = ..., check_values: _Optional[_Union[SessionResponse.CheckValues, _Mapping]] = ..., run_ended: _Optional[_Union[SessionResponse.RunEnded, _Mapping]] = ..., map_difference: _Optional[_Union[_common_pb2.ClusterMapDifference, _Mapping]] = ..., check_server: _Optional[_Union[_common_pb2.Replica, _Mapping]] = ..., align: _Optional[_Union[AlignCommand, _Mapping]] = ..., notice: _Optional[_Union[SessionResponse.Notice, _Mapping]] = ..., trace: _Optional[_Union[TraceCommand, _Mapping]] = ..., check_call: _Optional[_Union[CheckCall, _Mapping]] = ...) -> None: ...

class MutualWait(_message.Message):
    __slots__ = ("sequence", "error")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    error: _common_pb2.ErrorDetail
    def __init__(self, sequence: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("member_id", "incarnation", "reason", "totals")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    incarnation: int
    reason: str
    totals: WorkerTotals
    def __init__(self, member_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., reason: _Optional[str] = ..., totals: _Optional[_Union[WorkerTotals, _Mapping]] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CreateParametersRequest(_message.Message):
    __slots__ = ("run_id", "worker_id", "incarnation", "spec", "layout", "resume", "activity")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    worker_id: str
    incarnation: int
    spec: _common_pb2.ParametersSpec
    layout: _common_pb2.Layout
    resume: ResumePush
    activity: Activity
    def __init__(self, run_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., spec: _Optional[_Union[_common_pb2.ParametersSpec, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.Layout, _Mapping]] = ..., resume: _Optional[_Union[ResumePush, _Mapping]] = ..., activity: _Optional[_Union[Activity, _Mapping]] = ...) -> None: ...

class ResumePush(_message.Message):
    __slots__ = ("origin", "number", "generation")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    origin: int
    number: int
    generation: int
    def __init__(self, origin: _Optional[int] = ..., number: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class CreateParametersResponse(_message.Message):
    __slots__ = ("state", "waiting_for", "map", "first_step", "resumed", "notice")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[CreateParametersResponse.State]
        STATE_WAITING: _ClassVar[CreateParametersResponse.State]
        STATE_UPLOAD: _ClassVar[CreateParametersResponse.State]
        STATE_READY: _ClassVar[CreateParametersResponse.State]
    STATE_UNSPECIFIED: CreateParametersResponse.State
    STATE_WAITING: CreateParametersResponse.State
    STATE_UPLOAD: CreateParametersResponse.State
    STATE_READY: CreateParametersResponse.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    state: CreateParametersResponse.State
    waiting_for: str
    map: _common_pb2.ClusterMap
    first_step: int
    resumed: bool
    notice: str
    def __init__(self, state: _Optional[_Union[CreateParametersResponse.State, str]] = ..., waiting_for: _Optional[str] = ..., map: _Optional[_Union[_common_pb2.ClusterMap, _Mapping]] = ..., first_step: _Optional[int] = ..., resumed: _Optional[bool] = ..., notice: _Optional[str] = ...) -> None: ...

class CommitParametersRequest(_message.Message):
    __slots__ = ("run_id", "worker_id", "incarnation", "parameters", "epoch")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    worker_id: str
    incarnation: int
    parameters: str
    epoch: int
    def __init__(self, run_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., parameters: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class CommitParametersResponse(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class DescribeParametersRequest(_message.Message):
    __slots__ = ("run_id", "worker_id", "incarnation", "parameters")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    worker_id: str
    incarnation: int
    parameters: str
    def __init__(self, run_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., parameters: _Optional[str] = ...) -> None: ...

class DescribeParametersResponse(_message.Message):
    __slots__ = ("waiting_for", "spec", "layout", "map")
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    waiting_for: str
    spec: _common_pb2.ParametersSpec
    layout: _common_pb2.Layout
    map: _common_pb2.ClusterMap
    def __init__(self, waiting_for: _Optional[str] = ..., spec: _Optional[_Union[_common_pb2.ParametersSpec, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.Layout, _Mapping]] = ..., map: _Optional[_Union[_common_pb2.ClusterMap, _Mapping]] = ...) -> None: ...

class GetClusterMapRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GetClusterMapResponse(_message.Message):
    __slots__ = ("map",)
    MAP_FIELD_NUMBER: _ClassVar[int]
    map: _common_pb2.ClusterMap
    def __init__(self, map: _Optional[_Union[_common_pb2.ClusterMap, _Mapping]] = ...) -> None: ...

class BarrierRequest(_message.Message):
    __slots__ = ("run_id", "worker_id", "incarnation", "name", "passed", "origin", "withdraw", "activity", "attempt")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    worker_id: str
    incarnation: int
    name: str
    passed: int
    origin: int
    withdraw: bool
    activity: Activity
    attempt: int
    def __init__(self, run_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., name: _Optional[str] = ..., passed: _Optional[int] = ..., origin: _Optional[int] = ..., withdraw: _Optional[bool] = ..., activity: _Optional[_Union[Activity, _Mapping]] = ..., attempt: _Optional[int] = ...) -> None: ...

class BarrierResponse(_message.Message):
    __slots__ = ("waiting_for", "released", "withdrawn")
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    waiting_for: str
    released: bool
    withdrawn: bool
    def __init__(self, waiting_for: _Optional[str] = ..., released: _Optional[bool] = ..., withdrawn: _Optional[bool] = ...) -> None: ...

class FormGroupRequest(_message.Message):
    __slots__ = ("run_id", "worker_id", "incarnation", "name", "ticket", "epoch", "members", "unreachable", "closed", "admits", "size", "size_min", "finishes")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    ADMITS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SIZE_MIN_FIELD_NUMBER: _ClassVar[int]
    FINISHES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    worker_id: str
    incarnation: int
    name: str
    ticket: int
    epoch: int
    members: _containers.RepeatedCompositeFieldContainer[_common_pb2.WorkerEntry]
    unreachable: _containers.RepeatedScalarFieldContainer[int]
    closed: _containers.RepeatedScalarFieldContainer[int]
    admits: bool
    size: int
    size_min: int
    finishes: bool
    def __init__(self, run_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., name: _Optional[str] = ..., ticket: _Optional[int] = ..., epoch: _Optional[int] = ..., members: _Optional[_Iterable[_Union[_common_pb2.WorkerEntry, _Mapping]]] = ..., unreachable: _Optional[_Iterable[int]] = ..., closed: _Optional[_Iterable[int]] = ..., admits: _Optional[bool] = ..., size: _Optional[int] = ..., size_min: _Optional[int] = ..., finishes: _Optional[bool] = ...) -> None: ...

class FormGroupResponse(_message.Message):
    __slots__ = ("epoch", "members", "formed", "waiting_for", "newcomers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    FORMED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    NEWCOMERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    members: _containers.RepeatedCompositeFieldContainer[_common_pb2.WorkerEntry]
    formed: bool
    waiting_for: str
    newcomers: int
    def __init__(self, epoch: _Optional[int] = ..., members: _Optional[_Iterable[_Union[_common_pb2.WorkerEntry, _Mapping]]] = ..., formed: _Optional[bool] = ..., waiting_for: _Optional[str] = ..., newcomers: _Optional[int] = ...) -> None: ...

class RendezvousRequest(_message.Message):
    __slots__ = ("run_id", "agent_id", "processes", "nodes_min", "nodes_max", "host", "master_address", "gave_up")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    NODES_MIN_FIELD_NUMBER: _ClassVar[int]
    NODES_MAX_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    MASTER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GAVE_UP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    agent_id: str
    processes: int
    nodes_min: int
    nodes_max: int
    host: str
    master_address: str
    gave_up: str
    def __init__(self, run_id: _Optional[str] = ..., agent_id: _Optional[str] = ..., processes: _Optional[int] = ..., nodes_min: _Optional[int] = ..., nodes_max: _Optional[int] = ..., host: _Optional[str] = ..., master_address: _Optional[str] = ..., gave_up: _Optional[str] = ...) -> None: ...

class RendezvousResponse(_message.Message):
    __slots__ = ("waiting_for", "formed", "node_rank", "nodes", "first_rank", "world_size", "master_address", "run_id")
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    FORMED_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MASTER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    waiting_for: str
    formed: bool
    node_rank: int
    nodes: int
    first_rank: int
    world_size: int
    master_address: str
    run_id: str
    def __init__(self, waiting_for: _Optional[str] = ..., formed: _Optional[bool] = ..., node_rank: _Optional[int] = ..., nodes: _Optional[int] = ..., first_rank: _Optional[int] = ..., world_size: _Optional[int] = ..., master_address: _Optional[str] = ..., run_id: _Optional[str] = ...) -> None: ...

class Connection(_message.Message):
    __slots__ = ("server_id", "parameters", "transport", "reason", "compression")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    parameters: str
    transport: str
    reason: str
    compression: str
    def __init__(self, server_id: _Optional[str] = ..., parameters: _Optional[str] = ..., transport: _Optional[str] = ..., reason: _Optional[str] = ..., compression: _Optional[str] = ...) -> None: ...

class Connections(_message.Message):
    __slots__ = ("connections",)
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    connections: _containers.RepeatedCompositeFieldContainer[Connection]
    def __init__(self, connections: _Optional[_Iterable[_Union[Connection, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("run_id", "server_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    server_id: str
    def __init__(self, run_id: _Optional[str] = ..., server_id: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("waiting_for", "shards_left", "shards_total", "drained")
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    SHARDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    waiting_for: str
    shards_left: int
    shards_total: int
    drained: bool
    def __init__(self, waiting_for: _Optional[str] = ..., shards_left: _Optional[int] = ..., shards_total: _Optional[int] = ..., drained: _Optional[bool] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("run_id", "servers", "workers")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    servers: int
    workers: int
    def __init__(self, run_id: _Optional[str] = ..., servers: _Optional[int] = ..., workers: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("servers_before", "drained", "missing", "launchers", "workers_before")
    SERVERS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    LAUNCHERS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    servers_before: int
    drained: _containers.RepeatedScalarFieldContainer[str]
    missing: int
    launchers: int
    workers_before: int
    def __init__(self, servers_before: _Optional[int] = ..., drained: _Optional[_Iterable[str]] = ..., missing: _Optional[int] = ..., launchers: _Optional[int] = ..., workers_before: _Optional[int] = ...) -> None: ...

class WatchScaleRequest(_message.Message):
    __slots__ = ("run_id", "workers_wanted")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKERS_WANTED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    workers_wanted: int
    def __init__(self, run_id: _Optional[str] = ..., workers_wanted: _Optional[int] = ...) -> None: ...

class WatchScaleResponse(_message.Message):
    __slots__ = ("servers_wanted", "stop", "lost", "draining", "workers_wanted", "next_rank")
    SERVERS_WANTED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    WORKERS_WANTED_FIELD_NUMBER: _ClassVar[int]
    NEXT_RANK_FIELD_NUMBER: _ClassVar[int]
    servers_wanted: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    lost: str
    draining: _containers.RepeatedScalarFieldContainer[str]
    workers_wanted: int
    next_rank: int
    def __init__(self, servers_wanted: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., lost: _Optional[str] = ..., draining: _Optional[_Iterable[str]] = ..., workers_wanted: _Optional[int] = ..., next_rank: _Optional[int] = ...) -> None: ...

class OpenDatasetRequest(_message.Message):
    __slots__ = ("run_id", "worker_id", "incarnation", "spec")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    worker_id: str
    incarnation: int
    spec: DatasetSpec
    def __init__(self, run_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., spec: _Optional[_Union[DatasetSpec, _Mapping]] = ...) -> None: ...

class DatasetSpec(_message.Message):
    __slots__ = ("name", "size", "range_size", "shuffle", "seed", "data_epochs", "retries_max")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    RANGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHUFFLE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    DATA_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    RETRIES_MAX_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    range_size: int
    shuffle: bool
    seed: int
    data_epochs: int
    retries_max: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., range_size: _Optional[int] = ..., shuffle: _Optional[bool] = ..., seed: _Optional[int] = ..., data_epochs: _Optional[int] = ..., retries_max: _Optional[int] = ...) -> None: ...

class RangeSpan(_message.Message):
    __slots__ = ("first", "count")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class DataPosition(_message.Message):
    __slots__ = ("data_epoch", "done", "repeated_ranges", "failed_ranges")
    DATA_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    REPEATED_RANGES_FIELD_NUMBER: _ClassVar[int]
    FAILED_RANGES_FIELD_NUMBER: _ClassVar[int]
    data_epoch: int
    done: _containers.RepeatedCompositeFieldContainer[RangeSpan]
    repeated_ranges: int
    failed_ranges: int
    def __init__(self, data_epoch: _Optional[int] = ..., done: _Optional[_Iterable[_Union[RangeSpan, _Mapping]]] = ..., repeated_ranges: _Optional[int] = ..., failed_ranges: _Optional[int] = ...) -> None: ...

class OpenDatasetResponse(_message.Message):
    __slots__ = ("spec", "position")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    spec: DatasetSpec
    position: DataPosition
    def __init__(self, spec: _Optional[_Union[DatasetSpec, _Mapping]] = ..., position: _Optional[_Union[DataPosition, _Mapping]] = ...) -> None: ...

class LeaseRangeRequest(_message.Message):
    __slots__ = ("run_id", "worker_id", "incarnation", "dataset", "done", "held", "done_at", "now")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    DONE_AT_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    worker_id: str
    incarnation: int
    dataset: str
    done: _containers.RepeatedScalarFieldContainer[int]
    held: _containers.RepeatedScalarFieldContainer[int]
    done_at: _containers.RepeatedCompositeFieldContainer[NextPushes]
    now: NextPushes
    def __init__(self, run_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., dataset: _Optional[str] = ..., done: _Optional[_Iterable[int]] = ..., held: _Optional[_Iterable[int]] = ..., done_at: _Optional[_Iterable[_Union[NextPushes, _Mapping]]] = ..., now: _Optional[_Union[NextPushes, _Mapping]] = ...) -> None: ...

class NextPushes(_message.Message):
    __slots__ = ("next",)
    class NextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NEXT_FIELD_NUMBER: _ClassVar[int]
    next: _containers.ScalarMap[str, int]
    def __init__(self, next: _Optional[_Mapping[str, int]] = ...) -> None: ...

class LeaseRangeResponse(_message.Message):
    __slots__ = ("waiting_for", "lease_id", "data_epoch", "range", "attempt", "finished", "repeated_ranges", "failed_ranges")
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    REPEATED_RANGES_FIELD_NUMBER: _ClassVar[int]
    FAILED_RANGES_FIELD_NUMBER: _ClassVar[int]
    waiting_for: str
    lease_id: int
    data_epoch: int
    range: int
    attempt: int
    finished: bool
    repeated_ranges: int
    failed_ranges: int
    def __init__(self, waiting_for: _Optional[str] = ..., lease_id: _Optional[int] = ..., data_epoch: _Optional[int] = ..., range: _Optional[int] = ..., attempt: _Optional[int] = ..., finished: _Optional[bool] = ..., repeated_ranges: _Optional[int] = ..., failed_ranges: _Optional[int] = ...) -> None: ...

class EndRangesRequest(_message.Message):
    __slots__ = ("run_id", "worker_id", "incarnation", "dataset", "done", "returned", "done_at", "now", "used")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    DONE_AT_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    worker_id: str
    incarnation: int
    dataset: str
    done: _containers.RepeatedScalarFieldContainer[int]
    returned: _containers.RepeatedScalarFieldContainer[int]
    done_at: _containers.RepeatedCompositeFieldContainer[NextPushes]
    now: NextPushes
    used: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., dataset: _Optional[str] = ..., done: _Optional[_Iterable[int]] = ..., returned: _Optional[_Iterable[int]] = ..., done_at: _Optional[_Iterable[_Union[NextPushes, _Mapping]]] = ..., now: _Optional[_Union[NextPushes, _Mapping]] = ..., used: _Optional[_Iterable[int]] = ...) -> None: ...

class EndRangesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveSnapshotRequest(_message.Message):
    __slots__ = ("run_id", "worker_id", "incarnation", "next", "reason")
    class NextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    worker_id: str
    incarnation: int
    next: _containers.ScalarMap[str, int]
    reason: str
    def __init__(self, run_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., next: _Optional[_Mapping[str, int]] = ..., reason: _Optional[str] = ...) -> None: ...

class SaveSnapshotResponse(_message.Message):
    __slots__ = ("waiting_for", "bytes_done", "bytes", "committed", "unchanged")
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    waiting_for: str
    bytes_done: int
    bytes: int
    committed: SnapshotInfo
    unchanged: bool
    def __init__(self, waiting_for: _Optional[str] = ..., bytes_done: _Optional[int] = ..., bytes: _Optional[int] = ..., committed: _Optional[_Union[SnapshotInfo, _Mapping]] = ..., unchanged: _Optional[bool] = ...) -> None: ...

class HandInStateRequest(_message.Message):
    __slots__ = ("header", "part")
    class Header(_message.Message):
        __slots__ = ("run_id", "worker_id", "incarnation", "attempt", "parameters", "next", "length", "digest")
        RUN_ID_FIELD_NUMBER: _ClassVar[int]
        WORKER_ID_FIELD_NUMBER: _ClassVar[int]
        INCARNATION_FIELD_NUMBER: _ClassVar[int]
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        PARAMETERS_FIELD_NUMBER: _ClassVar[int]
        NEXT_FIELD_NUMBER: _ClassVar[int]
        LENGTH_FIELD_NUMBER: _ClassVar[int]
        DIGEST_FIELD_NUMBER: _ClassVar[int]
        run_id: str
        worker_id: str
        incarnation: int
        attempt: int
        parameters: str
        next: int
        length: int
        digest: bytes
        def __init__(self, run_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., attempt: _Optional[int] = ..., parameters: _Optional[str] = ..., next: _Optional[int] = ..., length: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    header: HandInStateRequest.Header
    part: bytes
    def __init__(self, header: _Optional[_Union[HandInStateRequest.Header, _Mapping]] = ..., part: _Optional[bytes] = ...) -> None: ...

class HandInStateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStateRequest(_message.Message):
    __slots__ = ("run_id", "worker_id", "incarnation", "parameters")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    worker_id: str
    incarnation: int
    parameters: str
    def __init__(self, run_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., parameters: _Optional[str] = ...) -> None: ...

class GetStateResponse(_message.Message):
    __slots__ = ("length", "digest", "next", "part")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    length: int
    digest: bytes
    next: int
    part: bytes
    def __init__(self, length: _Optional[int] = ..., digest: _Optional[bytes] = ..., next: _Optional[int] = ..., part: _Optional[bytes] = ...) -> None: ...

class SnapshotInfo(_message.Message):
    __slots__ = ("directory", "sequence", "steps", "bytes", "time", "seconds", "reason")
    class StepsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    directory: str
    sequence: int
    steps: _containers.ScalarMap[str, int]
    bytes: int
    time: float
    seconds: float
    reason: str
    def __init__(self, directory: _Optional[str] = ..., sequence: _Optional[int] = ..., steps: _Optional[_Mapping[str, int]] = ..., bytes: _Optional[int] = ..., time: _Optional[float] = ..., seconds: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class SnapshotsStatus(_message.Message):
    __slots__ = ("storage", "policy", "committed", "attempt", "phase", "waiting_for", "bytes_done", "bytes", "failed", "last_failure", "last_failure_time", "restored")
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILURE_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILURE_TIME_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    storage: str
    policy: str
    committed: _containers.RepeatedCompositeFieldContainer[SnapshotInfo]
    attempt: int
    phase: str
    waiting_for: str
    bytes_done: int
    bytes: int
    failed: int
    last_failure: str
    last_failure_time: float
    restored: SnapshotInfo
    def __init__(self, storage: _Optional[str] = ..., policy: _Optional[str] = ..., committed: _Optional[_Iterable[_Union[SnapshotInfo, _Mapping]]] = ..., attempt: _Optional[int] = ..., phase: _Optional[str] = ..., waiting_for: _Optional[str] = ..., bytes_done: _Optional[int] = ..., bytes: _Optional[int] = ..., failed: _Optional[int] = ..., last_failure: _Optional[str] = ..., last_failure_time: _Optional[float] = ..., restored: _Optional[_Union[SnapshotInfo, _Mapping]] = ...) -> None: ...

class GetDataPositionRequest(_message.Message):
    __slots__ = ("run_id", "dataset")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    dataset: str
    def __init__(self, run_id: _Optional[str] = ..., dataset: _Optional[str] = ...) -> None: ...

class GetDataPositionResponse(_message.Message):
    __slots__ = ("spec", "position", "leased")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    spec: DatasetSpec
    position: DataPosition
    leased: int
    def __init__(self, spec: _Optional[_Union[DatasetSpec, _Mapping]] = ..., position: _Optional[_Union[DataPosition, _Mapping]] = ..., leased: _Optional[int] = ...) -> None: ...

class SetDataPositionRequest(_message.Message):
    __slots__ = ("run_id", "worker_id", "incarnation", "dataset", "position")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    worker_id: str
    incarnation: int
    dataset: str
    position: DataPosition
    def __init__(self, run_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., dataset: _Optional[str] = ..., position: _Optional[_Union[DataPosition, _Mapping]] = ...) -> None: ...

class SetDataPositionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DatasetStatus(_message.Message):
    __slots__ = ("spec", "position", "leased")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    spec: DatasetSpec
    position: DataPosition
    leased: int
    def __init__(self, spec: _Optional[_Union[DatasetSpec, _Mapping]] = ..., position: _Optional[_Union[DataPosition, _Mapping]] = ..., leased: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("member_id", "role", "incarnation", "rank", "address", "host", "pid", "state", "reason", "heartbeat_age_seconds", "epoch", "statistics", "waiting_for", "connections", "draining", "rates", "metrics_address", "certificate_not_after")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_NOT_AFTER_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    role: Role
    incarnation: int
    rank: int
    address: str
    host: str
    pid: int
    state: str
    reason: str
    heartbeat_age_seconds: float
    epoch: int
    statistics: _server_pb2.GetStatisticsResponse
    waiting_for: _containers.RepeatedScalarFieldContainer[str]
    connections: _containers.RepeatedCompositeFieldContainer[Connection]
    draining: bool
    rates: WorkerRates
    metrics_address: str
    certificate_not_after: float
    def __init__(self, member_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., incarnation: _Optional[int] = ..., rank: _Optional[int] = ..., address: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., heartbeat_age_seconds: _Optional[float] = ..., epoch: _Optional[int] = ..., statistics: _Optional[_Union[_server_pb2.GetStatisticsResponse, _Mapping]] = ..., waiting_for: _Optional[_Iterable[str]] = ..., connections: _Optional[_Iterable[_Union[Connection, _Mapping]]] = ..., draining: _Optional[bool] = ..., rates: _Optional[_Union[WorkerRates, _Mapping]] = ..., metrics_address: _Optional[str] = ..., certificate_not_after: _Optional[float] = ...) -> None: ...

class ParametersStatus(_message.Message):
    __slots__ = ("entry", "state", "tensors")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    entry: _common_pb2.ParametersEntry
    state: str
    tensors: int
    def __init__(self, entry: _Optional[_Union[_common_pb2.ParametersEntry, _Mapping]] = ..., state: _Optional[str] = ..., tensors: _Optional[int] = ...) -> None: ...

class EventStatus(_message.Message):
    __slots__ = ("time", "text", "number", "kind", "warning")
    TIME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    time: float
    text: str
    number: int
    kind: str
    warning: bool
    def __init__(self, time: _Optional[float] = ..., text: _Optional[str] = ..., number: _Optional[int] = ..., kind: _Optional[str] = ..., warning: _Optional[bool] = ...) -> None: ...

class ProblemStatus(_message.Message):
    __slots__ = ("who", "kind", "text")
    WHO_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    who: str
    kind: str
    text: str
    def __init__(self, who: _Optional[str] = ..., kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("after", "follow")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    after: int
    follow: bool
    def __init__(self, after: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[EventStatus]
    def __init__(self, events: _Optional[_Iterable[_Union[EventStatus, _Mapping]]] = ...) -> None: ...

class GetSamplesRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: int
    def __init__(self, after: _Optional[int] = ...) -> None: ...

class WorkerSample(_message.Message):
    __slots__ = ("worker_id", "seconds", "compute_seconds", "push_seconds", "wait_seconds", "pull_seconds", "pushes", "traffic", "dropped", "staleness", "reported", "reported_step", "samples_per_second", "abstained")
    class PushesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ReportedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PUSH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PULL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    REPORTED_STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ABSTAINED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    seconds: float
    compute_seconds: float
    push_seconds: float
    wait_seconds: float
    pull_seconds: float
    pushes: _containers.ScalarMap[str, int]
    traffic: _containers.RepeatedCompositeFieldContainer[WorkerTotals.Traffic]
    dropped: int
    staleness: int
    reported: _containers.ScalarMap[str, float]
    reported_step: int
    samples_per_second: float
    abstained: int
    def __init__(self, worker_id: _Optional[str] = ..., seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., push_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., pull_seconds: _Optional[float] = ..., pushes: _Optional[_Mapping[str, int]] = ..., traffic: _Optional[_Iterable[_Union[WorkerTotals.Traffic, _Mapping]]] = ..., dropped: _Optional[int] = ..., staleness: _Optional[int] = ..., reported: _Optional[_Mapping[str, float]] = ..., reported_step: _Optional[int] = ..., samples_per_second: _Optional[float] = ..., abstained: _Optional[int] = ...) -> None: ...

class ServerSample(_message.Message):
    __slots__ = ("server_id", "seconds", "slices_applied", "apply_seconds", "waiting_bytes", "resident_bytes", "lag_updates", "idle_cores")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SLICES_APPLIED_FIELD_NUMBER: _ClassVar[int]
    APPLY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITING_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAG_UPDATES_FIELD_NUMBER: _ClassVar[int]
    IDLE_CORES_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    seconds: float
    slices_applied: int
    apply_seconds: float
    waiting_bytes: int
    resident_bytes: int
    lag_updates: int
    idle_cores: float
    def __init__(self, server_id: _Optional[str] = ..., seconds: _Optional[float] = ..., slices_applied: _Optional[int] = ..., apply_seconds: _Optional[float] = ..., waiting_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., lag_updates: _Optional[int] = ..., idle_cores: _Optional[float] = ...) -> None: ...

class RunSample(_message.Message):
    __slots__ = ("number", "time", "workers", "servers")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    number: int
    time: float
    workers: _containers.RepeatedCompositeFieldContainer[WorkerSample]
    servers: _containers.RepeatedCompositeFieldContainer[ServerSample]
    def __init__(self, number: _Optional[int] = ..., time: _Optional[float] = ..., workers: _Optional[_Iterable[_Union[WorkerSample, _Mapping]]] = ..., servers: _Optional[_Iterable[_Union[ServerSample, _Mapping]]] = ...) -> None: ...

class GetSamplesResponse(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[RunSample]
    def __init__(self, samples: _Optional[_Iterable[_Union[RunSample, _Mapping]]] = ...) -> None: ...

class GetSummaryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSummaryResponse(_message.Message):
    __slots__ = ("summary",)
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    summary: bytes
    def __init__(self, summary: _Optional[bytes] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("run_id", "psdist_version", "epoch", "phase", "uptime_seconds", "workers_min", "servers_min", "members", "parameters", "waiting_for", "events", "replicas", "servers_wanted", "datasets", "snapshots", "metrics_address", "time", "dashboard_address", "certificate_not_after", "problems")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PSDIST_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_MIN_FIELD_NUMBER: _ClassVar[int]
    SERVERS_MIN_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_WANTED_FIELD_NUMBER: _ClassVar[int]
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    DASHBOARD_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_NOT_AFTER_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    psdist_version: str
    epoch: int
    phase: str
    uptime_seconds: float
    workers_min: int
    servers_min: int
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    parameters: _containers.RepeatedCompositeFieldContainer[ParametersStatus]
    waiting_for: _containers.RepeatedScalarFieldContainer[str]
    events: _containers.RepeatedCompositeFieldContainer[EventStatus]
    replicas: int
    servers_wanted: int
    datasets: _containers.RepeatedCompositeFieldContainer[DatasetStatus]
    snapshots: SnapshotsStatus
    metrics_address: str
    time: float
    dashboard_address: str
    certificate_not_after: float
    problems: _containers.RepeatedCompositeFieldContainer[ProblemStatus]
    def __init__(self, run_id: _Optional[str] = ..., psdist_version: _Optional[str] = ..., epoch: _Optional[int] = ..., phase: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., workers_min: _Optional[int] = ..., servers_min: _Optional[int] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., parameters: _Optional[_Iterable[_Union[ParametersStatus, _Mapping]]] = ..., waiting_for: _Optional[_Iterable[str]] = ..., events: _Optional[_Iterable[_Union[EventStatus, _Mapping]]] = ..., replicas: _Optional[int] = ..., servers_wanted: _Optional[int] = ..., datasets: _Optional[_Iterable[_Union[DatasetStatus, _Mapping]]] = ..., snapshots: _Optional[_Union[SnapshotsStatus, _Mapping]] = ..., metrics_address: _Optional[str] = ..., time: _Optional[float] = ..., dashboard_address: _Optional[str] = ..., certificate_not_after: _Optional[float] = ..., problems: _Optional[_Iterable[_Union[ProblemStatus, _Mapping]]] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("run_id", "steps")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    steps: int
    def __init__(self, run_id: _Optional[str] = ..., steps: _Optional[int] = ...) -> None: ...

class TraceResponse(_message.Message):
    __slots__ = ("member_id", "spans", "member", "waiting_for", "reason", "ended")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    spans: TraceSpans
    member: TraceMember
    waiting_for: str
    reason: str
    ended: bool
    def __init__(self, member_id: _Optional[str] = ..., spans: _Optional[_Union[TraceSpans, _Mapping]] = ..., member: _Optional[_Union[TraceMember, _Mapping]] = ..., waiting_for: _Optional[str] = ..., reason: _Optional[str] = ..., ended: _Optional[bool] = ...) -> None: ...

class TraceMember(_message.Message):
    __slots__ = ("member_id", "role", "incarnation", "host", "rank", "pid", "offset_ns", "uncertainty_ns", "clock_id", "recorded", "steps", "done", "missing")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_NS_FIELD_NUMBER: _ClassVar[int]
    UNCERTAINTY_NS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    RECORDED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    role: Role
    incarnation: int
    host: str
    rank: int
    pid: int
    offset_ns: int
    uncertainty_ns: int
    clock_id: str
    recorded: int
    steps: int
    done: bool
    missing: str
    def __init__(self, member_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., incarnation: _Optional[int] = ..., host: _Optional[str] = ..., rank: _Optional[int] = ..., pid: _Optional[int] = ..., offset_ns: _Optional[int] = ..., uncertainty_ns: _Optional[int] = ..., clock_id: _Optional[str] = ..., recorded: _Optional[int] = ..., steps: _Optional[int] = ..., done: _Optional[bool] = ..., missing: _Optional[str] = ...) -> None: ...

class TraceCommand(_message.Message):
    __slots__ = ("number", "start_steps", "end", "clock_ns", "stacks")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    START_STEPS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CLOCK_NS_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    number: int
    start_steps: int
    end: bool
    clock_ns: int
    stacks: bool
    def __init__(self, number: _Optional[int] = ..., start_steps: _Optional[int] = ..., end: _Optional[bool] = ..., clock_ns: _Optional[int] = ..., stacks: _Optional[bool] = ...) -> None: ...

class TraceReport(_message.Message):
    __slots__ = ("number", "clock", "spans", "stacks")
    class Clock(_message.Message):
        __slots__ = ("clock_ns", "member_ns", "clock_id")
        CLOCK_NS_FIELD_NUMBER: _ClassVar[int]
        MEMBER_NS_FIELD_NUMBER: _ClassVar[int]
        CLOCK_ID_FIELD_NUMBER: _ClassVar[int]
        clock_ns: int
        member_ns: int
        clock_id: str
        def __init__(self, clock_ns: _Optional[int] = ..., member_ns: _Optional[int] = ..., clock_id: _Optional[str] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    number: int
    clock: TraceReport.Clock
    spans: TraceSpans
    stacks: str
    def __init__(self, number: _Optional[int] = ..., clock: _Optional[_Union[TraceReport.Clock, _Mapping]] = ..., spans: _Optional[_Union[TraceSpans, _Mapping]] = ..., stacks: _Optional[str] = ...) -> None: ...

class GetStacksRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GetStacksResponse(_message.Message):
    __slots__ = ("member", "stacks", "ended", "run_id")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    member: TraceMember
    stacks: str
    ended: bool
    run_id: str
    def __init__(self, member: _Optional[_Union[TraceMember, _Mapping]] = ..., stacks: _Optional[str] = ..., ended: _Optional[bool] = ..., run_id: _Optional[str] = ...) -> None: ...

class TraceSpans(_message.Message):
    __slots__ = ("origin_ns", "kinds", "starts", "durations", "steps", "slices", "parameters", "peers", "names", "recorded", "steps_done", "done")
    ORIGIN_NS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    DURATIONS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    RECORDED_FIELD_NUMBER: _ClassVar[int]
    STEPS_DONE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    origin_ns: int
    kinds: _containers.RepeatedScalarFieldContainer[SpanKind]
    starts: _containers.RepeatedScalarFieldContainer[int]
    durations: _containers.RepeatedScalarFieldContainer[int]
    steps: _containers.RepeatedScalarFieldContainer[int]
    slices: _containers.RepeatedScalarFieldContainer[int]
    parameters: _containers.RepeatedScalarFieldContainer[int]
    peers: _containers.RepeatedScalarFieldContainer[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    recorded: int
    steps_done: int
    done: bool
    def __init__(self, origin_ns: _Optional[int] = ..., kinds: _Optional[_Iterable[_Union[SpanKind, str]]] = ..., starts: _Optional[_Iterable[int]] = ..., durations: _Optional[_Iterable[int]] = ..., steps: _Optional[_Iterable[int]] = ..., slices: _Optional[_Iterable[int]] = ..., parameters: _Optional[_Iterable[int]] = ..., peers: _Optional[_Iterable[int]] = ..., names: _Optional[_Iterable[str]] = ..., recorded: _Optional[int] = ..., steps_done: _Optional[int] = ..., done: _Optional[bool] = ...) -> None: ...
