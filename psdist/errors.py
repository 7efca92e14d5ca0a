"""All errors that psdist raises, one class per case.

A class has a stable ``code``, which crosses the wire (see ``psdist.wire.status``), and the name of its gRPC status.
Messages name the offending value, the limit, and the remedy. An operation that raises one of these errors has changed
nothing, unless the class says otherwise.

If servers reject some slices of a push, the push keeps its number: slices that were accepted count once, and repeating
the push delivers the others.
"""

from __future__ import annotations

from typing import ClassVar, Final

#: Error classes by their code.
BY_CODE: dict[str, type[PsdistError]] = {}


class PsdistError(RuntimeError):
    """Base of all errors of psdist. A RuntimeError, which is what scripts of torch.distributed catch.

    message: text for the user.
    details: the offending values, as text.
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[str] = "INTERNAL"

    def __init_subclass__(cls, code: str = "", status: str = "") -> None:
        """Register the class under ``code``. Without ``code`` or ``status``, a class inherits that of its base."""
        super().__init_subclass__()
        cls.code, cls.status = code or cls.code, status or cls.status
        if code:
            BY_CODE[code] = cls

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details = {key: str(value) for key, value in details.items()}


def copy_error(error: PsdistError) -> PsdistError:
    """Return a copy of ``error`` to raise: one error may end many calls, each with its own traceback."""
    return type(error)(error.message, **error.details)


# --- wrong input ------------------------------------------------------------------------------------------------------


class InvalidArgumentError(PsdistError, ValueError, code="invalid_argument", status="INVALID_ARGUMENT"):
    """A value is malformed, out of range, or not supported."""


class ConfigurationError(InvalidArgumentError, code="configuration"):
    """A flag, environment variable or file that configures a process is wrong."""


class InvalidNameError(InvalidArgumentError, code="invalid_name"):
    """A name does not consist of 1 to 256 of the characters ``A-Z a-z 0-9 . _ / -``. The name of a tensor may be any
    printable text of 1 to 256 bytes in UTF-8."""


class UnknownTensorError(InvalidArgumentError, code="unknown_tensor"):
    """The parameter set has no tensor with this name."""


class MissingTensorError(InvalidArgumentError, code="missing_tensor"):
    """A tensor of the parameter set is missing from the input."""


class ShapeMismatchError(InvalidArgumentError, code="shape_mismatch"):
    """A tensor does not have the declared shape."""


class DTypeMismatchError(InvalidArgumentError, code="dtype_mismatch"):
    """A tensor has an element type that cannot be used here."""


class NonFiniteGradientError(InvalidArgumentError, code="non_finite_gradient"):
    """A gradient contains NaN or Inf, and ``non_finite`` is "reject"."""


class UnknownCodecError(InvalidArgumentError, code="unknown_codec"):
    """No codec has this name, or the codec cannot be used here."""


class MalformedPayloadError(InvalidArgumentError, code="malformed_payload"):
    """An encoded payload is not a valid encoding of exactly the expected elements. The message says where and why."""


class LimitExceededError(PsdistError, code="limit_exceeded", status="RESOURCE_EXHAUSTED"):
    """A limit was reached: on the resources that one peer may claim from another, or on the memory of a device."""


# --- members and their rights -----------------------------------------------------------------------------------------


class UnauthenticatedError(PsdistError, code="unauthenticated", status="UNAUTHENTICATED"):
    """The token is missing or wrong, or has expired."""


class PermissionDeniedError(PsdistError, PermissionError, code="permission_denied", status="PERMISSION_DENIED"):
    """The caller's role may not do this. The message names the role, and those that may."""


class InsecureBindError(InvalidArgumentError, code="insecure_bind"):
    """A process was to listen beyond loopback without TLS and without ``--insecure``."""


class InsecureConnectError(ConfigurationError, code="insecure_connect"):
    """The token was to be sent to another machine without TLS and without ``--insecure``."""


class TlsHandshakeError(ConfigurationError, code="tls_handshake"):
    """TLS with a peer fails: one side refuses the other's certificate, or uses plaintext."""


class ProtocolMismatchError(PsdistError, code="protocol_mismatch", status="FAILED_PRECONDITION"):
    """The two sides have no protocol version in common."""


class WrongRunError(PsdistError, code="wrong_run", status="FAILED_PRECONDITION"):
    """The request names a different run than the one served here."""


class DuplicateMemberError(PsdistError, code="duplicate_member", status="ALREADY_EXISTS"):
    """A live member already has this id."""


class FencedError(PsdistError, code="fenced", status="FAILED_PRECONDITION"):
    """The incarnation was replaced or expelled. Its requests no longer count."""


class NotMemberError(PsdistError, code="not_member", status="FAILED_PRECONDITION"):
    """The worker is not a member of this parameter set."""


# --- parameter sets and steps -----------------------------------------------------------------------------------------


class UnknownParametersError(PsdistError, code="unknown_parameters", status="NOT_FOUND"):
    """No parameter set has this name, or this server stores no slice of it."""


class UnknownDatasetError(PsdistError, code="unknown_dataset", status="NOT_FOUND"):
    """No data set with this name was opened."""


class LayoutMismatchError(PsdistError, code="layout_mismatch", status="FAILED_PRECONDITION"):
    """A parameter set with this name exists, with different tensors."""


class SettingsMismatchError(PsdistError, code="settings_mismatch", status="FAILED_PRECONDITION"):
    """A parameter set or data set with this name exists, with different settings."""


class StaleEpochError(PsdistError, code="stale_epoch", status="ABORTED"):
    """The request was routed by an outdated cluster map. The client fetches the new map and retries."""


class StaleEstimateError(PsdistError, code="stale_estimate", status="ABORTED"):
    """A push contains differences to an estimate that the server does not hold. The client sends the whole gradient."""


class FutureStepError(PsdistError, code="future_step", status="FAILED_PRECONDITION"):
    """A push names a step that has not started."""


class WrittenWeightsError(PsdistError, code="written_weights", status="FAILED_PRECONDITION"):
    """The workers of a step wrote different values to its weights. Nothing of the step is applied, and nothing of this
    worker's push is left on the servers."""


class SequenceGapError(PsdistError, code="sequence_gap", status="FAILED_PRECONDITION"):
    """A push's sequence number skips one that has not arrived."""


# --- reaching each other ----------------------------------------------------------------------------------------------


class SchedulerUnreachableError(PsdistError, ConnectionError, code="scheduler_unreachable", status="UNAVAILABLE"):
    """No scheduler answers at the address. The message says what was tried."""


class ServerUnreachableError(PsdistError, ConnectionError, code="server_unreachable", status="UNAVAILABLE"):
    """A server does not answer. Unacknowledged pushes may or may not have been applied."""


class PeerUnreachableError(PsdistError, ConnectionError, code="peer_unreachable", status="UNAVAILABLE"):
    """Another worker does not answer, or has no connection for collectives."""


class WorkerLostError(PsdistError, ConnectionError, code="worker_lost", status="UNAVAILABLE"):
    """A worker of a group of collectives is gone. The message names its rank. The group can make no more calls."""


class ExcludedError(PsdistError, code="excluded", status="FAILED_PRECONDITION"):
    """A group of collectives was reconfigured without this worker, which the others could not reach, or which did not
    answer in time. It may join the group again."""


class CollectiveMismatchError(PsdistError, code="collective_mismatch", status="FAILED_PRECONDITION"):
    """The workers of a group made different calls: in another order, or with another operation, dtype, shape or root.
    The message has both calls. The group can make no more calls."""


class SharingUnavailableError(PsdistError, code="sharing_unavailable", status="FAILED_PRECONDITION"):
    """A worker and a server cannot share memory; the message says why. The data is intact."""


class TcpUnavailableError(PsdistError, code="tcp_unavailable", status="FAILED_PRECONDITION"):
    """A worker cannot open a TCP connection to a server; the message says why. The data is intact."""


class DeviceUnavailableError(PsdistError, code="device_unavailable", status="FAILED_PRECONDITION"):
    """A CUDA device was requested, but something that it needs is missing.

    ``details["missing"]`` is one of "cupy", "nvrtc", "headers", "driver", "device", "memory".
    """


class DeviceLostError(PsdistError, code="device_lost", status="DATA_LOSS"):
    """A CUDA device failed while it was in use. Its content is lost."""


class StaleTermError(PsdistError, code="stale_term", status="ABORTED"):
    """A server acted as the primary of a shard that has a newer primary."""


class ReplicaMismatchError(PsdistError, code="replica_mismatch", status="DATA_LOSS"):
    """Two copies of a slice differ, and nothing tells which one is right. The shard is stopped."""


class StaleCopyError(PsdistError, code="stale_copy", status="FAILED_PRECONDITION"):
    """A replica received an update that does not fit its copy of a slice. The copy must be filled again."""


class ServerLostError(PsdistError, code="server_lost", status="DATA_LOSS"):
    """A server is gone that held the only copy of some shards."""


class RunLostError(PsdistError, code="run_lost", status="DATA_LOSS"):
    """The scheduler's record of the run is gone, or older than the members' state. The run cannot continue."""


class RunNotStartedError(PsdistError, code="run_not_started", status="FAILED_PRECONDITION"):
    """The run ended before training started: required workers or servers did not join."""


class StorageError(PsdistError, code="storage", status="UNAVAILABLE"):
    """The storage for a run's snapshots, or the scheduler's store, cannot be read or written. The message says what
    failed, and why."""


class LeadershipLostError(PsdistError, code="leadership_lost", status="UNAVAILABLE"):
    """A scheduler does not lead its run any more, because its lease in etcd has ended. Another one may lead it."""


class NoStorageError(PsdistError, code="no_storage", status="FAILED_PRECONDITION"):
    """The run has no storage for snapshots."""


class SnapshotCorruptError(PsdistError, code="snapshot_corrupt", status="DATA_LOSS"):
    """A snapshot file differs from what was written; the message names it. No value of it was used."""


class UnknownSnapshotError(PsdistError, code="unknown_snapshot", status="NOT_FOUND"):
    """No committed snapshot has this name."""


class SnapshotFailedError(PsdistError, code="snapshot_failed", status="ABORTED"):
    """A snapshot was abandoned; the message says why. Nothing was committed, and training continues."""


class WaitTimeoutError(PsdistError, TimeoutError, code="wait_timeout", status="DEADLINE_EXCEEDED"):
    """A wait exceeded its caller's timeout. The message names the missing members."""


class MutualWaitError(PsdistError, code="mutual_wait", status="FAILED_PRECONDITION"):
    """The worker's script and others wait for each other: a deadlock.

    ``details``: "group_0" and so on are the keys of groups whose calls are among the waits. These groups have ended.
    """


class WorkerLeftError(PsdistError, code="worker_left", status="FAILED_PRECONDITION"):
    """A worker that this call needs has ended its script without making the same call."""


class UnevenInputsError(PsdistError, code="uneven_inputs", status="FAILED_PRECONDITION"):
    """A worker ran out of batches, and ``join`` of ``psdist.torch`` was told to raise in that case."""


class LateWorkerError(PsdistError, code="late_worker", status="FAILED_PRECONDITION"):
    """Training started without this worker, and no source can give it the current weights."""


class LaunchFailedError(PsdistError, code="launch_failed", status="ABORTED"):
    """A run that ``psdist.launch`` started did not succeed. The message has the traceback of the worker that failed
    first.

    ``details``: "status" is the exit status of the run, "rank" that of the worker, "traceback" its traceback.
    """


class PushDroppedError(PsdistError, code="push_dropped", status="ABORTED"):
    """Pushes of this worker were dropped because the others had continued without it. It is a member again."""


class TraceInProgressError(PsdistError, code="trace_in_progress", status="FAILED_PRECONDITION"):
    """Another ``psdist trace`` is recording this run. The message says for how long."""


class ClosedError(PsdistError, code="closed", status="CANCELLED"):
    """The client, or the peer, was closed."""


class InternalError(PsdistError, code="internal"):
    """A bug in psdist, or an unexpected answer."""


#: Errors that end a run everywhere. SnapshotCorruptError: no snapshot is left to resume from.
RUN_ENDING: Final = (ServerLostError, RunLostError, SnapshotCorruptError, RunNotStartedError)


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Raise InvalidArgumentError unless ``value`` is a whole number in [low, high]."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidArgumentError(f"{name}={value!r:.40} is out of range: use a whole number from {low} to {high}")
