from psdist.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerFrame(_message.Message):
    __slots__ = ("hello", "welcome", "call", "part", "failure", "offer", "taken", "ping", "released", "memory", "shared")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    hello: PeerHello
    welcome: bool
    call: CollectiveCall
    part: CollectivePart
    failure: CollectiveFailure
    offer: str
    taken: bytes
    ping: bool
    released: int
    memory: GroupMemory
    shared: SharedPayload
    def __init__(self, hello: _Optional[_Union[PeerHello, _Mapping]] = ..., welcome: _Optional[bool] = ..., call: _Optional[_Union[CollectiveCall, _Mapping]] = ..., part: _Optional[_Union[CollectivePart, _Mapping]] = ..., failure: _Optional[_Union[CollectiveFailure, _Mapping]] = ..., offer: _Optional[str] = ..., taken: _Optional[bytes] = ..., ping: _Optional[bool] = ..., released: _Optional[int] = ..., memory: _Optional[_Union[GroupMemory, _Mapping]] = ..., shared: _Optional[_Union[SharedPayload, _Mapping]] = ...) -> None: ...

class SharedPayload(_message.Message):
    __slots__ = ("place", "size")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    place: int
    size: int
    def __init__(self, place: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class GroupMemory(_message.Message):
    __slots__ = ("group", "name", "nonce", "buffer")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    group: bytes
    name: str
    nonce: bytes
    buffer: int
    def __init__(self, group: _Optional[bytes] = ..., name: _Optional[str] = ..., nonce: _Optional[bytes] = ..., buffer: _Optional[int] = ...) -> None: ...

class PeerHello(_message.Message):
    __slots__ = ("token", "run_id", "sender", "receiver", "pid", "pid_scope")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PID_SCOPE_FIELD_NUMBER: _ClassVar[int]
    token: str
    run_id: str
    sender: _common_pb2.WorkerEntry
    receiver: _common_pb2.WorkerEntry
    pid: int
    pid_scope: str
    def __init__(self, token: _Optional[str] = ..., run_id: _Optional[str] = ..., sender: _Optional[_Union[_common_pb2.WorkerEntry, _Mapping]] = ..., receiver: _Optional[_Union[_common_pb2.WorkerEntry, _Mapping]] = ..., pid: _Optional[int] = ..., pid_scope: _Optional[str] = ...) -> None: ...

class CollectiveLane(_message.Message):
    __slots__ = ("group", "source", "tag", "number")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    group: bytes
    source: int
    tag: int
    number: int
    def __init__(self, group: _Optional[bytes] = ..., source: _Optional[int] = ..., tag: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class CollectiveCall(_message.Message):
    __slots__ = ("lane", "kind", "op", "dtype", "shape", "root", "gives", "takes", "shares", "buffer", "offset")
    LANE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    GIVES_FIELD_NUMBER: _ClassVar[int]
    TAKES_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    lane: CollectiveLane
    kind: str
    op: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    root: int
    gives: int
    takes: int
    shares: bool
    buffer: int
    offset: int
    def __init__(self, lane: _Optional[_Union[CollectiveLane, _Mapping]] = ..., kind: _Optional[str] = ..., op: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., root: _Optional[int] = ..., gives: _Optional[int] = ..., takes: _Optional[int] = ..., shares: _Optional[bool] = ..., buffer: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class CollectivePart(_message.Message):
    __slots__ = ("lane", "part")
    LANE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    lane: CollectiveLane
    part: int
    def __init__(self, lane: _Optional[_Union[CollectiveLane, _Mapping]] = ..., part: _Optional[int] = ...) -> None: ...

class CollectiveFailure(_message.Message):
    __slots__ = ("group", "error", "completed")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    group: bytes
    error: _common_pb2.ErrorDetail
    completed: int
    def __init__(self, group: _Optional[bytes] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., completed: _Optional[int] = ...) -> None: ...
