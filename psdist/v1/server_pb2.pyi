from psdist.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reading(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    READING_UNSPECIFIED: _ClassVar[Reading]
    READING_HELD: _ClassVar[Reading]
    READING_RESUMED: _ClassVar[Reading]
    READING_COMPLETE: _ClassVar[Reading]
READING_UNSPECIFIED: Reading
READING_HELD: Reading
READING_RESUMED: Reading
READING_COMPLETE: Reading

class Identity(_message.Message):
    __slots__ = ("run_id", "worker_id", "incarnation", "epoch", "parameters")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    worker_id: str
    incarnation: int
    epoch: int
    parameters: str
    def __init__(self, run_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., parameters: _Optional[str] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("identity", "step", "codec", "dtype", "pull_dtype", "abstain", "grad_norm", "mark", "held", "weight", "difference", "lr_factor", "written", "settings", "absent", "follows_writes", "attempt", "withdraws", "reports_reading")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PULL_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ABSTAIN_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    LR_FACTOR_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_WRITES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWS_FIELD_NUMBER: _ClassVar[int]
    REPORTS_READING_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    step: int
    codec: _common_pb2.Codec
    dtype: _common_pb2.DType
    pull_dtype: _common_pb2.DType
    abstain: bool
    grad_norm: float
    mark: int
    held: HeldWeights
    weight: float
    difference: GradientDifference
    lr_factor: float
    written: bytes
    settings: GroupSettings
    absent: ElementRanges
    follows_writes: bool
    attempt: int
    withdraws: bool
    reports_reading: bool
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., step: _Optional[int] = ..., codec: _Optional[_Union[_common_pb2.Codec, str]] = ..., dtype: _Optional[_Union[_common_pb2.DType, str]] = ..., pull_dtype: _Optional[_Union[_common_pb2.DType, str]] = ..., abstain: _Optional[bool] = ..., grad_norm: _Optional[float] = ..., mark: _Optional[int] = ..., held: _Optional[_Union[HeldWeights, _Mapping]] = ..., weight: _Optional[float] = ..., difference: _Optional[_Union[GradientDifference, _Mapping]] = ..., lr_factor: _Optional[float] = ..., written: _Optional[bytes] = ..., settings: _Optional[_Union[GroupSettings, _Mapping]] = ..., absent: _Optional[_Union[ElementRanges, _Mapping]] = ..., follows_writes: _Optional[bool] = ..., attempt: _Optional[int] = ..., withdraws: _Optional[bool] = ..., reports_reading: _Optional[bool] = ...) -> None: ...

class GroupSettings(_message.Message):
    __slots__ = ("settings",)
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    settings: _containers.RepeatedCompositeFieldContainer[GroupSetting]
    def __init__(self, settings: _Optional[_Iterable[_Union[GroupSetting, _Mapping]]] = ...) -> None: ...

class GroupSetting(_message.Message):
    __slots__ = ("group", "name", "value")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    group: int
    name: str
    value: float
    def __init__(self, group: _Optional[int] = ..., name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class ElementRanges(_message.Message):
    __slots__ = ("starts", "sizes")
    STARTS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, starts: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class Written(_message.Message):
    __slots__ = ("starts", "sizes", "values")
    STARTS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    values: bytes
    def __init__(self, starts: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ..., values: _Optional[bytes] = ...) -> None: ...

class GradientDifference(_message.Message):
    __slots__ = ("number", "from_zeros")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FROM_ZEROS_FIELD_NUMBER: _ClassVar[int]
    number: int
    from_zeros: bool
    def __init__(self, number: _Optional[int] = ..., from_zeros: _Optional[bool] = ...) -> None: ...

class HeldWeights(_message.Message):
    __slots__ = ("generation", "slices", "versions")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    slices: _containers.RepeatedScalarFieldContainer[int]
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, generation: _Optional[int] = ..., slices: _Optional[_Iterable[int]] = ..., versions: _Optional[_Iterable[int]] = ...) -> None: ...

class Differences(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class InstallRequest(_message.Message):
    __slots__ = ("identity", "slice", "padding", "payload")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    slice: int
    padding: bytes
    payload: bytes
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., slice: _Optional[int] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class InstallResponse(_message.Message):
    __slots__ = ("slices",)
    SLICES_FIELD_NUMBER: _ClassVar[int]
    slices: int
    def __init__(self, slices: _Optional[int] = ...) -> None: ...

class PushPullRequest(_message.Message):
    __slots__ = ("header", "slice", "base_version", "written", "padding", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    slice: int
    base_version: int
    written: Written
    padding: bytes
    payload: bytes
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., slice: _Optional[int] = ..., base_version: _Optional[int] = ..., written: _Optional[_Union[Written, _Mapping]] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PushPullResponse(_message.Message):
    __slots__ = ("slice", "version", "ignored", "staleness", "waiting_for", "differences", "reading", "padding", "payload")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IGNORED_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    slice: int
    version: int
    ignored: bool
    staleness: int
    waiting_for: str
    differences: Differences
    reading: Reading
    padding: bytes
    payload: bytes
    def __init__(self, slice: _Optional[int] = ..., version: _Optional[int] = ..., ignored: _Optional[bool] = ..., staleness: _Optional[int] = ..., waiting_for: _Optional[str] = ..., differences: _Optional[_Union[Differences, _Mapping]] = ..., reading: _Optional[_Union[Reading, str]] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("header", "slice", "base_version", "written", "padding", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    slice: int
    base_version: int
    written: Written
    padding: bytes
    payload: bytes
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., slice: _Optional[int] = ..., base_version: _Optional[int] = ..., written: _Optional[_Union[Written, _Mapping]] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("slice", "version", "ignored", "staleness", "waiting_for", "reading")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IGNORED_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    slice: int
    version: int
    ignored: bool
    staleness: int
    waiting_for: str
    reading: Reading
    def __init__(self, slice: _Optional[int] = ..., version: _Optional[int] = ..., ignored: _Optional[bool] = ..., staleness: _Optional[int] = ..., waiting_for: _Optional[str] = ..., reading: _Optional[_Union[Reading, str]] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("identity", "dtype", "min_version", "slices", "held")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    dtype: _common_pb2.DType
    min_version: int
    slices: _containers.RepeatedScalarFieldContainer[int]
    held: HeldWeights
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., dtype: _Optional[_Union[_common_pb2.DType, str]] = ..., min_version: _Optional[int] = ..., slices: _Optional[_Iterable[int]] = ..., held: _Optional[_Union[HeldWeights, _Mapping]] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("slice", "version", "waiting_for", "differences", "padding", "payload")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    slice: int
    version: int
    waiting_for: str
    differences: Differences
    padding: bytes
    payload: bytes
    def __init__(self, slice: _Optional[int] = ..., version: _Optional[int] = ..., waiting_for: _Optional[str] = ..., differences: _Optional[_Union[Differences, _Mapping]] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ShareRequest(_message.Message):
    __slots__ = ("call_id", "attach", "push", "pull", "cancel", "open", "slice")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    attach: Attach
    push: SharedPush
    pull: SharedPull
    cancel: SharedCancel
    open: OpenConnection
    slice: SliceHeader
    def __init__(self, call_id: _Optional[int] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., push: _Optional[_Union[SharedPush, _Mapping]] = ..., pull: _Optional[_Union[SharedPull, _Mapping]] = ..., cancel: _Optional[_Union[SharedCancel, _Mapping]] = ..., open: _Optional[_Union[OpenConnection, _Mapping]] = ..., slice: _Optional[_Union[SliceHeader, _Mapping]] = ...) -> None: ...

class OpenConnection(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class SliceHeader(_message.Message):
    __slots__ = ("slice",)
    SLICE_FIELD_NUMBER: _ClassVar[int]
    slice: int
    def __init__(self, slice: _Optional[int] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("identity", "socket", "dtype")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    socket: str
    dtype: _common_pb2.DType
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., socket: _Optional[str] = ..., dtype: _Optional[_Union[_common_pb2.DType, str]] = ...) -> None: ...

class SharedPush(_message.Message):
    __slots__ = ("header", "wants_weights", "slices", "base_versions")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    WANTS_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    wants_weights: bool
    slices: _containers.RepeatedScalarFieldContainer[int]
    base_versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., wants_weights: _Optional[bool] = ..., slices: _Optional[_Iterable[int]] = ..., base_versions: _Optional[_Iterable[int]] = ...) -> None: ...

class SharedPull(_message.Message):
    __slots__ = ("identity", "min_version", "slices", "dtype", "held")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    min_version: int
    slices: _containers.RepeatedScalarFieldContainer[int]
    dtype: _common_pb2.DType
    held: HeldWeights
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., min_version: _Optional[int] = ..., slices: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Union[_common_pb2.DType, str]] = ..., held: _Optional[_Union[HeldWeights, _Mapping]] = ...) -> None: ...

class SharedCancel(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShareResponse(_message.Message):
    __slots__ = ("call_id", "attached", "answers", "waiting_for", "error", "opened", "slice", "taken")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    attached: Attached
    answers: SharedAnswers
    waiting_for: str
    error: _common_pb2.ErrorDetail
    opened: Opened
    slice: SliceResult
    taken: int
    def __init__(self, call_id: _Optional[int] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., answers: _Optional[_Union[SharedAnswers, _Mapping]] = ..., waiting_for: _Optional[str] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., slice: _Optional[_Union[SliceResult, _Mapping]] = ..., taken: _Optional[int] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SliceResult(_message.Message):
    __slots__ = ("slice", "version", "ignored", "staleness", "differences")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IGNORED_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    slice: int
    version: int
    ignored: bool
    staleness: int
    differences: Differences
    def __init__(self, slice: _Optional[int] = ..., version: _Optional[int] = ..., ignored: _Optional[bool] = ..., staleness: _Optional[int] = ..., differences: _Optional[_Union[Differences, _Mapping]] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("identity",)
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("port", "nonce")
    PORT_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    port: int
    nonce: bytes
    def __init__(self, port: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("nonce", "weights_nonce")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    weights_nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ..., weights_nonce: _Optional[bytes] = ...) -> None: ...

class SharedAnswers(_message.Message):
    __slots__ = ("slices", "versions", "ignored", "staleness")
    SLICES_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    IGNORED_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    slices: _containers.RepeatedScalarFieldContainer[int]
    versions: _containers.RepeatedScalarFieldContainer[int]
    ignored: _containers.RepeatedScalarFieldContainer[int]
    staleness: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slices: _Optional[_Iterable[int]] = ..., versions: _Optional[_Iterable[int]] = ..., ignored: _Optional[_Iterable[int]] = ..., staleness: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchNormsRequest(_message.Message):
    __slots__ = ("run_id", "epoch", "parameters", "step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    parameters: str
    step: int
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., parameters: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class FetchNormsResponse(_message.Message):
    __slots__ = ("slices", "squares")
    SLICES_FIELD_NUMBER: _ClassVar[int]
    SQUARES_FIELD_NUMBER: _ClassVar[int]
    slices: _containers.RepeatedScalarFieldContainer[int]
    squares: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, slices: _Optional[_Iterable[int]] = ..., squares: _Optional[_Iterable[float]] = ...) -> None: ...

class Life(_message.Message):
    __slots__ = ("worker_id", "incarnation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class ReplicateRequest(_message.Message):
    __slots__ = ("shard", "term", "hello", "begin", "state", "end", "update", "digest", "confirm", "assign", "offset", "padding", "payload")
    class Hello(_message.Message):
        __slots__ = ("run_id", "server_id", "incarnation", "epoch", "parameters", "socket", "arena_elements", "tcp")
        RUN_ID_FIELD_NUMBER: _ClassVar[int]
        SERVER_ID_FIELD_NUMBER: _ClassVar[int]
        INCARNATION_FIELD_NUMBER: _ClassVar[int]
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        PARAMETERS_FIELD_NUMBER: _ClassVar[int]
        SOCKET_FIELD_NUMBER: _ClassVar[int]
        ARENA_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
        TCP_FIELD_NUMBER: _ClassVar[int]
        run_id: str
        server_id: str
        incarnation: int
        epoch: int
        parameters: str
        socket: str
        arena_elements: int
        tcp: bool
        def __init__(self, run_id: _Optional[str] = ..., server_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., parameters: _Optional[str] = ..., socket: _Optional[str] = ..., arena_elements: _Optional[int] = ..., tcp: _Optional[bool] = ...) -> None: ...
    class Begin(_message.Message):
        __slots__ = ("lsn", "fill", "copy")
        LSN_FIELD_NUMBER: _ClassVar[int]
        FILL_FIELD_NUMBER: _ClassVar[int]
        COPY_FIELD_NUMBER: _ClassVar[int]
        lsn: int
        fill: int
        copy: int
        def __init__(self, lsn: _Optional[int] = ..., fill: _Optional[int] = ..., copy: _Optional[int] = ...) -> None: ...
    class SliceState(_message.Message):
        __slots__ = ("slice", "array", "arrays", "version", "contributors", "producers", "square", "lags")
        SLICE_FIELD_NUMBER: _ClassVar[int]
        ARRAY_FIELD_NUMBER: _ClassVar[int]
        ARRAYS_FIELD_NUMBER: _ClassVar[int]
        VERSION_FIELD_NUMBER: _ClassVar[int]
        CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
        PRODUCERS_FIELD_NUMBER: _ClassVar[int]
        SQUARE_FIELD_NUMBER: _ClassVar[int]
        LAGS_FIELD_NUMBER: _ClassVar[int]
        slice: int
        array: int
        arrays: int
        version: int
        contributors: _containers.RepeatedCompositeFieldContainer[Life]
        producers: _containers.RepeatedCompositeFieldContainer[ReplicateRequest.Producer]
        square: float
        lags: _common_pb2.Lags
        def __init__(self, slice: _Optional[int] = ..., array: _Optional[int] = ..., arrays: _Optional[int] = ..., version: _Optional[int] = ..., contributors: _Optional[_Iterable[_Union[Life, _Mapping]]] = ..., producers: _Optional[_Iterable[_Union[ReplicateRequest.Producer, _Mapping]]] = ..., square: _Optional[float] = ..., lags: _Optional[_Union[_common_pb2.Lags, _Mapping]] = ...) -> None: ...
    class Producer(_message.Message):
        __slots__ = ("life", "next")
        LIFE_FIELD_NUMBER: _ClassVar[int]
        NEXT_FIELD_NUMBER: _ClassVar[int]
        life: Life
        next: int
        def __init__(self, life: _Optional[_Union[Life, _Mapping]] = ..., next: _Optional[int] = ...) -> None: ...
    class End(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Update(_message.Message):
        __slots__ = ("lsn", "slice", "version", "dtype", "has_gradient", "lr_scale", "factor", "contributors", "sequence", "square", "assigned", "settings", "absent")
        LSN_FIELD_NUMBER: _ClassVar[int]
        SLICE_FIELD_NUMBER: _ClassVar[int]
        VERSION_FIELD_NUMBER: _ClassVar[int]
        DTYPE_FIELD_NUMBER: _ClassVar[int]
        HAS_GRADIENT_FIELD_NUMBER: _ClassVar[int]
        LR_SCALE_FIELD_NUMBER: _ClassVar[int]
        FACTOR_FIELD_NUMBER: _ClassVar[int]
        CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
        SEQUENCE_FIELD_NUMBER: _ClassVar[int]
        SQUARE_FIELD_NUMBER: _ClassVar[int]
        ASSIGNED_FIELD_NUMBER: _ClassVar[int]
        SETTINGS_FIELD_NUMBER: _ClassVar[int]
        ABSENT_FIELD_NUMBER: _ClassVar[int]
        lsn: int
        slice: int
        version: int
        dtype: _common_pb2.DType
        has_gradient: bool
        lr_scale: float
        factor: float
        contributors: _containers.RepeatedCompositeFieldContainer[Life]
        sequence: int
        square: float
        assigned: bool
        settings: _containers.RepeatedCompositeFieldContainer[GroupSetting]
        absent: ElementRanges
        def __init__(self, lsn: _Optional[int] = ..., slice: _Optional[int] = ..., version: _Optional[int] = ..., dtype: _Optional[_Union[_common_pb2.DType, str]] = ..., has_gradient: _Optional[bool] = ..., lr_scale: _Optional[float] = ..., factor: _Optional[float] = ..., contributors: _Optional[_Iterable[_Union[Life, _Mapping]]] = ..., sequence: _Optional[int] = ..., square: _Optional[float] = ..., assigned: _Optional[bool] = ..., settings: _Optional[_Iterable[_Union[GroupSetting, _Mapping]]] = ..., absent: _Optional[_Union[ElementRanges, _Mapping]] = ...) -> None: ...
    class Assign(_message.Message):
        __slots__ = ("lsn", "slice")
        LSN_FIELD_NUMBER: _ClassVar[int]
        SLICE_FIELD_NUMBER: _ClassVar[int]
        lsn: int
        slice: int
        def __init__(self, lsn: _Optional[int] = ..., slice: _Optional[int] = ...) -> None: ...
    class Digest(_message.Message):
        __slots__ = ("slice", "version", "digest")
        SLICE_FIELD_NUMBER: _ClassVar[int]
        VERSION_FIELD_NUMBER: _ClassVar[int]
        DIGEST_FIELD_NUMBER: _ClassVar[int]
        slice: int
        version: int
        digest: bytes
        def __init__(self, slice: _Optional[int] = ..., version: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...
    class Confirm(_message.Message):
        __slots__ = ("number", "shards", "terms")
        NUMBER_FIELD_NUMBER: _ClassVar[int]
        SHARDS_FIELD_NUMBER: _ClassVar[int]
        TERMS_FIELD_NUMBER: _ClassVar[int]
        number: int
        shards: _containers.RepeatedScalarFieldContainer[int]
        terms: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, number: _Optional[int] = ..., shards: _Optional[_Iterable[int]] = ..., terms: _Optional[_Iterable[int]] = ...) -> None: ...
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    shard: int
    term: int
    hello: ReplicateRequest.Hello
    begin: ReplicateRequest.Begin
    state: ReplicateRequest.SliceState
    end: ReplicateRequest.End
    update: ReplicateRequest.Update
    digest: ReplicateRequest.Digest
    confirm: ReplicateRequest.Confirm
    assign: ReplicateRequest.Assign
    offset: int
    padding: bytes
    payload: bytes
    def __init__(self, shard: _Optional[int] = ..., term: _Optional[int] = ..., hello: _Optional[_Union[ReplicateRequest.Hello, _Mapping]] = ..., begin: _Optional[_Union[ReplicateRequest.Begin, _Mapping]] = ..., state: _Optional[_Union[ReplicateRequest.SliceState, _Mapping]] = ..., end: _Optional[_Union[ReplicateRequest.End, _Mapping]] = ..., update: _Optional[_Union[ReplicateRequest.Update, _Mapping]] = ..., digest: _Optional[_Union[ReplicateRequest.Digest, _Mapping]] = ..., confirm: _Optional[_Union[ReplicateRequest.Confirm, _Mapping]] = ..., assign: _Optional[_Union[ReplicateRequest.Assign, _Mapping]] = ..., offset: _Optional[int] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ReplicateResponse(_message.Message):
    __slots__ = ("welcome", "ack", "filled", "confirmed", "refused", "opened")
    class Welcome(_message.Message):
        __slots__ = ("held", "arena_nonce", "port", "nonce", "reason")
        HELD_FIELD_NUMBER: _ClassVar[int]
        ARENA_NONCE_FIELD_NUMBER: _ClassVar[int]
        PORT_FIELD_NUMBER: _ClassVar[int]
        NONCE_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        held: _containers.RepeatedCompositeFieldContainer[ReplicateResponse.Held]
        arena_nonce: bytes
        port: int
        nonce: bytes
        reason: str
        def __init__(self, held: _Optional[_Iterable[_Union[ReplicateResponse.Held, _Mapping]]] = ..., arena_nonce: _Optional[bytes] = ..., port: _Optional[int] = ..., nonce: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...
    class Held(_message.Message):
        __slots__ = ("shard", "term", "lsn", "complete", "fill")
        SHARD_FIELD_NUMBER: _ClassVar[int]
        TERM_FIELD_NUMBER: _ClassVar[int]
        LSN_FIELD_NUMBER: _ClassVar[int]
        COMPLETE_FIELD_NUMBER: _ClassVar[int]
        FILL_FIELD_NUMBER: _ClassVar[int]
        shard: int
        term: int
        lsn: int
        complete: bool
        fill: int
        def __init__(self, shard: _Optional[int] = ..., term: _Optional[int] = ..., lsn: _Optional[int] = ..., complete: _Optional[bool] = ..., fill: _Optional[int] = ...) -> None: ...
    class Ack(_message.Message):
        __slots__ = ("shard", "term", "lsn")
        SHARD_FIELD_NUMBER: _ClassVar[int]
        TERM_FIELD_NUMBER: _ClassVar[int]
        LSN_FIELD_NUMBER: _ClassVar[int]
        shard: int
        term: int
        lsn: int
        def __init__(self, shard: _Optional[int] = ..., term: _Optional[int] = ..., lsn: _Optional[int] = ...) -> None: ...
    class Filled(_message.Message):
        __slots__ = ("shard", "term", "copy")
        SHARD_FIELD_NUMBER: _ClassVar[int]
        TERM_FIELD_NUMBER: _ClassVar[int]
        COPY_FIELD_NUMBER: _ClassVar[int]
        shard: int
        term: int
        copy: int
        def __init__(self, shard: _Optional[int] = ..., term: _Optional[int] = ..., copy: _Optional[int] = ...) -> None: ...
    class Confirmed(_message.Message):
        __slots__ = ("number",)
        NUMBER_FIELD_NUMBER: _ClassVar[int]
        number: int
        def __init__(self, number: _Optional[int] = ...) -> None: ...
    class Refused(_message.Message):
        __slots__ = ("shard", "term", "error")
        SHARD_FIELD_NUMBER: _ClassVar[int]
        TERM_FIELD_NUMBER: _ClassVar[int]
        ERROR_FIELD_NUMBER: _ClassVar[int]
        shard: int
        term: int
        error: _common_pb2.ErrorDetail
        def __init__(self, shard: _Optional[int] = ..., term: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    FILLED_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    welcome: ReplicateResponse.Welcome
    ack: ReplicateResponse.Ack
    filled: ReplicateResponse.Filled
    confirmed: ReplicateResponse.Confirmed
    refused: ReplicateResponse.Refused
    opened: Opened
    def __init__(self, welcome: _Optional[_Union[ReplicateResponse.Welcome, _Mapping]] = ..., ack: _Optional[_Union[ReplicateResponse.Ack, _Mapping]] = ..., filled: _Optional[_Union[ReplicateResponse.Filled, _Mapping]] = ..., confirmed: _Optional[_Union[ReplicateResponse.Confirmed, _Mapping]] = ..., refused: _Optional[_Union[ReplicateResponse.Refused, _Mapping]] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ...) -> None: ...

class GetStatisticsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatistics(_message.Message):
    __slots__ = ("worker_id", "pushes", "pulls", "push_bytes", "pull_bytes", "late", "duplicates", "non_finite", "rejected", "staleness_sum", "staleness_max", "saved_bytes")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    PUSH_BYTES_FIELD_NUMBER: _ClassVar[int]
    PULL_BYTES_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    NON_FINITE_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    STALENESS_SUM_FIELD_NUMBER: _ClassVar[int]
    STALENESS_MAX_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pushes: int
    pulls: int
    push_bytes: int
    pull_bytes: int
    late: int
    duplicates: int
    non_finite: int
    rejected: int
    staleness_sum: int
    staleness_max: int
    saved_bytes: int
    def __init__(self, worker_id: _Optional[str] = ..., pushes: _Optional[int] = ..., pulls: _Optional[int] = ..., push_bytes: _Optional[int] = ..., pull_bytes: _Optional[int] = ..., late: _Optional[int] = ..., duplicates: _Optional[int] = ..., non_finite: _Optional[int] = ..., rejected: _Optional[int] = ..., staleness_sum: _Optional[int] = ..., staleness_max: _Optional[int] = ..., saved_bytes: _Optional[int] = ...) -> None: ...

class ReplicaStatistics(_message.Message):
    __slots__ = ("shard", "server_id", "state", "lag_updates", "lag_bytes", "slices_filled", "slices", "digests", "carrier")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAG_UPDATES_FIELD_NUMBER: _ClassVar[int]
    LAG_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLICES_FILLED_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    CARRIER_FIELD_NUMBER: _ClassVar[int]
    shard: int
    server_id: str
    state: str
    lag_updates: int
    lag_bytes: int
    slices_filled: int
    slices: int
    digests: int
    carrier: str
    def __init__(self, shard: _Optional[int] = ..., server_id: _Optional[str] = ..., state: _Optional[str] = ..., lag_updates: _Optional[int] = ..., lag_bytes: _Optional[int] = ..., slices_filled: _Optional[int] = ..., slices: _Optional[int] = ..., digests: _Optional[int] = ..., carrier: _Optional[str] = ...) -> None: ...

class ParametersStatistics(_message.Message):
    __slots__ = ("parameters", "version_min", "version_max", "applied_slices", "apply_seconds", "bytes_held", "workers", "waiting_for", "replicas", "primary_of", "backup_of", "estimate_bytes")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    APPLIED_SLICES_FIELD_NUMBER: _ClassVar[int]
    APPLY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_HELD_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_OF_FIELD_NUMBER: _ClassVar[int]
    BACKUP_OF_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    parameters: str
    version_min: int
    version_max: int
    applied_slices: int
    apply_seconds: float
    bytes_held: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatistics]
    waiting_for: _containers.RepeatedScalarFieldContainer[str]
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatistics]
    primary_of: _containers.RepeatedScalarFieldContainer[int]
    backup_of: _containers.RepeatedScalarFieldContainer[int]
    estimate_bytes: int
    def __init__(self, parameters: _Optional[str] = ..., version_min: _Optional[int] = ..., version_max: _Optional[int] = ..., applied_slices: _Optional[int] = ..., apply_seconds: _Optional[float] = ..., bytes_held: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatistics, _Mapping]]] = ..., waiting_for: _Optional[_Iterable[str]] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStatistics, _Mapping]]] = ..., primary_of: _Optional[_Iterable[int]] = ..., backup_of: _Optional[_Iterable[int]] = ..., estimate_bytes: _Optional[int] = ...) -> None: ...

class GetStatisticsResponse(_message.Message):
    __slots__ = ("server_id", "epoch", "resident_bytes", "parameters", "device", "device_bytes", "kernel_threads", "cores", "idle_cores")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KERNEL_THREADS_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    IDLE_CORES_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    epoch: int
    resident_bytes: int
    parameters: _containers.RepeatedCompositeFieldContainer[ParametersStatistics]
    device: str
    device_bytes: int
    kernel_threads: int
    cores: int
    idle_cores: float
    def __init__(self, server_id: _Optional[str] = ..., epoch: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., parameters: _Optional[_Iterable[_Union[ParametersStatistics, _Mapping]]] = ..., device: _Optional[str] = ..., device_bytes: _Optional[int] = ..., kernel_threads: _Optional[int] = ..., cores: _Optional[int] = ..., idle_cores: _Optional[float] = ...) -> None: ...
