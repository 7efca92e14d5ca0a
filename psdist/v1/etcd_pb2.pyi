from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EtcdHeader(_message.Message):
    __slots__ = ("cluster_id", "member_id", "revision")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    cluster_id: int
    member_id: int
    revision: int
    def __init__(self, cluster_id: _Optional[int] = ..., member_id: _Optional[int] = ..., revision: _Optional[int] = ...) -> None: ...

class EtcdKeyValue(_message.Message):
    __slots__ = ("key", "create_revision", "mod_revision", "value", "lease")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CREATE_REVISION_FIELD_NUMBER: _ClassVar[int]
    MOD_REVISION_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    create_revision: int
    mod_revision: int
    value: bytes
    lease: int
    def __init__(self, key: _Optional[bytes] = ..., create_revision: _Optional[int] = ..., mod_revision: _Optional[int] = ..., value: _Optional[bytes] = ..., lease: _Optional[int] = ...) -> None: ...

class EtcdRangeRequest(_message.Message):
    __slots__ = ("key", "range_end", "limit", "revision")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RANGE_END_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    range_end: bytes
    limit: int
    revision: int
    def __init__(self, key: _Optional[bytes] = ..., range_end: _Optional[bytes] = ..., limit: _Optional[int] = ..., revision: _Optional[int] = ...) -> None: ...

class EtcdRangeResponse(_message.Message):
    __slots__ = ("header", "kvs", "more")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    KVS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    header: EtcdHeader
    kvs: _containers.RepeatedCompositeFieldContainer[EtcdKeyValue]
    more: bool
    def __init__(self, header: _Optional[_Union[EtcdHeader, _Mapping]] = ..., kvs: _Optional[_Iterable[_Union[EtcdKeyValue, _Mapping]]] = ..., more: _Optional[bool] = ...) -> None: ...

class EtcdPut(_message.Message):
    __slots__ = ("key", "value", "lease")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    value: bytes
    lease: int
    def __init__(self, key: _Optional[bytes] = ..., value: _Optional[bytes] = ..., lease: _Optional[int] = ...) -> None: ...

class EtcdDeleteRange(_message.Message):
    __slots__ = ("key", "range_end")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RANGE_END_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    range_end: bytes
    def __init__(self, key: _Optional[bytes] = ..., range_end: _Optional[bytes] = ...) -> None: ...

class EtcdOperation(_message.Message):
    __slots__ = ("put", "delete_range")
    PUT_FIELD_NUMBER: _ClassVar[int]
    DELETE_RANGE_FIELD_NUMBER: _ClassVar[int]
    put: EtcdPut
    delete_range: EtcdDeleteRange
    def __init__(self, put: _Optional[_Union[EtcdPut, _Mapping]] = ..., delete_range: _Optional[_Union[EtcdDeleteRange, _Mapping]] = ...) -> None: ...

class EtcdCompare(_message.Message):
    __slots__ = ("target", "key", "create_revision", "mod_revision")
    class Target(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TARGET_UNSPECIFIED: _ClassVar[EtcdCompare.Target]
        TARGET_CREATE_REVISION: _ClassVar[EtcdCompare.Target]
        TARGET_MOD_REVISION: _ClassVar[EtcdCompare.Target]
    TARGET_UNSPECIFIED: EtcdCompare.Target
    TARGET_CREATE_REVISION: EtcdCompare.Target
    TARGET_MOD_REVISION: EtcdCompare.Target
    TARGET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    CREATE_REVISION_FIELD_NUMBER: _ClassVar[int]
    MOD_REVISION_FIELD_NUMBER: _ClassVar[int]
    target: EtcdCompare.Target
    key: bytes
    create_revision: int
    mod_revision: int
    def __init__(self, target: _Optional[_Union[EtcdCompare.Target, str]] = ..., key: _Optional[bytes] = ..., create_revision: _Optional[int] = ..., mod_revision: _Optional[int] = ...) -> None: ...

class EtcdTxnRequest(_message.Message):
    __slots__ = ("compare", "success")
    COMPARE_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    compare: _containers.RepeatedCompositeFieldContainer[EtcdCompare]
    success: _containers.RepeatedCompositeFieldContainer[EtcdOperation]
    def __init__(self, compare: _Optional[_Iterable[_Union[EtcdCompare, _Mapping]]] = ..., success: _Optional[_Iterable[_Union[EtcdOperation, _Mapping]]] = ...) -> None: ...

class EtcdTxnResponse(_message.Message):
    __slots__ = ("header", "succeeded")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    header: EtcdHeader
    succeeded: bool
    def __init__(self, header: _Optional[_Union[EtcdHeader, _Mapping]] = ..., succeeded: _Optional[bool] = ...) -> None: ...

class EtcdLeaseGrantRequest(_message.Message):
    __slots__ = ("ttl",)
    TTL_FIELD_NUMBER: _ClassVar[int]
    ttl: int
    def __init__(self, ttl: _Optional[int] = ...) -> None: ...

class EtcdLeaseGrantResponse(_message.Message):
    __slots__ = ("id", "ttl")
    ID_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    id: int
    ttl: int
    def __init__(self, id: _Optional[int] = ..., ttl: _Optional[int] = ...) -> None: ...

class EtcdLeaseRevokeRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class EtcdLeaseRevokeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EtcdLeaseKeepAliveRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class EtcdLeaseKeepAliveResponse(_message.Message):
    __slots__ = ("id", "ttl")
    ID_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    id: int
    ttl: int
    def __init__(self, id: _Optional[int] = ..., ttl: _Optional[int] = ...) -> None: ...
