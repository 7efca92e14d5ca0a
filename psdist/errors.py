"""Every error that psdist raises, one class per case.

A class has a stable ``code``, which crosses the wire (see ``psdist.wire.status``), and the name of its gRPC status.
Messages name the offending value, the limit, and the remedy. An operation that raises one of these errors has changed
nothing, unless the class says otherwise. A push of which servers refused a slice keeps its number: slices that were
taken count once, and the same push, made again, brings the rest.
"""

from __future__ import annotations

from typing import ClassVar, Final

#: Error classes by their code.
BY_CODE: dict[str, type[PsdistError]] = {}


class PsdistError(Exception):
    """Base of all errors of psdist. ``details`` holds the offending values as text."""

    code: ClassVar[str] = "internal"
    status: ClassVar[str] = "INTERNAL"

    def __init_subclass__(cls, code: str = "", status: str = "") -> None:
        """Without ``code`` or ``status`` a class has those of its base."""
        super().__init_subclass__()
        cls.code, cls.status = code or cls.code, status or cls.status
        if code:
            BY_CODE[code] = cls

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details = {key: str(value) for key, value in details.items()}


def again(error: PsdistError) -> PsdistError:
    """A copy to raise: one error may end many calls, and each has a traceback of its own."""
    return type(error)(error.message, **error.details)


# --- wrong input ------------------------------------------------------------------------------------------------------


class InvalidArgumentError(PsdistError, ValueError, code="invalid_argument", status="INVALID_ARGUMENT"):
    """A value is malformed, out of its range, or not supported."""


class ConfigurationError(InvalidArgumentError, code="configuration"):
    """A flag, a variable or a file that configures a process is wrong."""


class InvalidNameError(InvalidArgumentError, code="invalid_name"):
    """A name is not made of 1 to 256 of ``A-Z a-z 0-9 . _ / -``."""


class UnknownTensorError(InvalidArgumentError, code="unknown_tensor"):
    """The parameter set has no tensor of this name."""


class MissingTensorError(InvalidArgumentError, code="missing_tensor"):
    """A tensor of the parameter set is missing from the input."""


class ShapeMismatchError(InvalidArgumentError, code="shape_mismatch"):
    """A tensor does not have the declared shape."""


class DTypeMismatchError(InvalidArgumentError, code="dtype_mismatch"):
    """A tensor's element type cannot be used here."""


class NonFiniteGradientError(InvalidArgumentError, code="non_finite_gradient"):
    """A gradient has NaN or Inf, and ``non_finite`` is "reject"."""


class UnknownCodecError(InvalidArgumentError, code="unknown_codec"):
    """There is no codec of this name."""


class MalformedPayloadError(InvalidArgumentError, code="malformed_payload"):
    """An encoded payload is not exactly an encoding of so many elements; the message says where and why."""


class LimitExceededError(PsdistError, code="limit_exceeded", status="RESOURCE_EXHAUSTED"):
    """A limit on what one peer may make another hold was reached."""


# --- members and their rights -----------------------------------------------------------------------------------------


class UnauthenticatedError(PsdistError, code="unauthenticated", status="UNAUTHENTICATED"):
    """The token is missing or wrong."""


class InsecureBindError(InvalidArgumentError, code="insecure_bind"):
    """A bind beyond loopback was asked for without TLS and without ``--insecure``."""


class ProtocolMismatchError(PsdistError, code="protocol_mismatch", status="FAILED_PRECONDITION"):
    """The two sides speak different protocol versions."""


class WrongRunError(PsdistError, code="wrong_run", status="FAILED_PRECONDITION"):
    """The request names a run that is not served here."""


class DuplicateMemberError(PsdistError, code="duplicate_member", status="ALREADY_EXISTS"):
    """A live member already has this id."""


class FencedError(PsdistError, code="fenced", status="FAILED_PRECONDITION"):
    """This incarnation was replaced or expelled. Nothing that it sends counts any more."""


class NotMemberError(PsdistError, code="not_member", status="FAILED_PRECONDITION"):
    """The worker is not a member of this parameter set."""


# --- parameter sets and steps -----------------------------------------------------------------------------------------


class UnknownParametersError(PsdistError, code="unknown_parameters", status="NOT_FOUND"):
    """No parameter set has this name, or this server holds none of its slices."""


class UnknownDatasetError(PsdistError, code="unknown_dataset", status="NOT_FOUND"):
    """No data set of this name was opened."""


class LayoutMismatchError(PsdistError, code="layout_mismatch", status="FAILED_PRECONDITION"):
    """A parameter set of this name exists with other tensors."""


class SettingsMismatchError(PsdistError, code="settings_mismatch", status="FAILED_PRECONDITION"):
    """A parameter set or data set of this name exists with other settings."""


class StaleEpochError(PsdistError, code="stale_epoch", status="ABORTED"):
    """The request was routed by an older cluster map. The client fetches the new one and sends again."""


class StaleEstimateError(PsdistError, code="stale_estimate", status="ABORTED"):
    """A push has differences to an estimate that the server does not keep. The client sends the gradient whole."""


class FutureStepError(PsdistError, code="future_step", status="FAILED_PRECONDITION"):
    """A push names a step that has not begun."""


class SequenceGapError(PsdistError, code="sequence_gap", status="FAILED_PRECONDITION"):
    """A push's sequence number skips one that has not arrived."""


# --- reaching each other ----------------------------------------------------------------------------------------------


class SchedulerUnreachableError(PsdistError, ConnectionError, code="scheduler_unreachable", status="UNAVAILABLE"):
    """No scheduler answers at the address; the message says what was tried."""


class ServerUnreachableError(PsdistError, ConnectionError, code="server_unreachable", status="UNAVAILABLE"):
    """A server does not answer. Pushes that were not acknowledged may or may not have been applied."""


class SharingUnavailableError(PsdistError, code="sharing_unavailable", status="FAILED_PRECONDITION"):
    """A worker and a server cannot share memory; the message says why. Nothing is wrong with the data."""


class TcpUnavailableError(PsdistError, code="tcp_unavailable", status="FAILED_PRECONDITION"):
    """A worker cannot open a direct TCP connection to a server; the message says why. Nothing is wrong with the
    data."""


class DeviceUnavailableError(PsdistError, code="device_unavailable", status="FAILED_PRECONDITION"):
    """A CUDA device was asked for, and something that it needs is missing: ``details["missing"]`` names it. One of
    "cupy", "nvrtc", "headers", "driver", "device", "memory"."""


class DeviceLostError(PsdistError, code="device_lost", status="DATA_LOSS"):
    """A CUDA device failed while it was used. What it held is lost."""


class StaleTermError(PsdistError, code="stale_term", status="ABORTED"):
    """A server acted as the primary of a shard that has a newer one."""


class ReplicaMismatchError(PsdistError, code="replica_mismatch", status="DATA_LOSS"):
    """Two copies of a slice differ, and it is not known which is right. The shard is stopped."""


class StaleCopyError(PsdistError, code="stale_copy", status="FAILED_PRECONDITION"):
    """A replica was sent an update that does not fit its copy of a slice. The copy must be filled again."""


class ServerLostError(PsdistError, code="server_lost", status="DATA_LOSS"):
    """A server that held the only copy of some shards is gone."""


class RunLostError(PsdistError, code="run_lost", status="DATA_LOSS"):
    """The scheduler's record of the run is gone, or older than what members of the run know. They cannot continue."""


class RunNotStartedError(PsdistError, code="run_not_started", status="FAILED_PRECONDITION"):
    """The run ended before training had begun: workers or servers that it needs did not come."""


class StorageError(PsdistError, code="storage", status="UNAVAILABLE"):
    """The storage of a run's snapshots cannot be read or written; the message says what failed, and why."""


class NoStorageError(PsdistError, code="no_storage", status="FAILED_PRECONDITION"):
    """The run has no storage for snapshots."""


class SnapshotCorruptError(PsdistError, code="snapshot_corrupt", status="DATA_LOSS"):
    """A file of a snapshot is not what was written; the message names it. None of its values was used."""


class UnknownSnapshotError(PsdistError, code="unknown_snapshot", status="NOT_FOUND"):
    """There is no such committed snapshot."""


class SnapshotFailedError(PsdistError, code="snapshot_failed", status="ABORTED"):
    """A snapshot was given up; the message says why. Training goes on, and nothing was committed."""


class WaitTimeoutError(PsdistError, TimeoutError, code="wait_timeout", status="DEADLINE_EXCEEDED"):
    """A wait took longer than its caller allowed; the message names the members that were waited for."""


class MutualWaitError(PsdistError, code="mutual_wait", status="FAILED_PRECONDITION"):
    """This worker's script and others wait for each other, so that none can go on."""


class WorkerLeftError(PsdistError, code="worker_left", status="FAILED_PRECONDITION"):
    """A worker that this call needs has ended its script without making the same call."""


class UnevenInputsError(PsdistError, code="uneven_inputs", status="FAILED_PRECONDITION"):
    """A worker has no batch left, and ``join`` of ``psdist.torch`` was asked to raise then."""


class LateWorkerError(PsdistError, code="late_worker", status="FAILED_PRECONDITION"):
    """Training began without this worker, and nobody can give it what the others have learned since."""


class PushDroppedError(PsdistError, code="push_dropped", status="ABORTED"):
    """Pushes of this worker were dropped, because the others had gone on without it. It is a member again."""


class ClosedError(PsdistError, code="closed", status="CANCELLED"):
    """The client, or the peer, was closed."""


class InternalError(PsdistError, code="internal"):
    """A defect of psdist, or an unexpected answer."""


#: Errors after which a run ends everywhere. SnapshotCorruptError: no snapshot to resume from.
RUN_ENDING: Final = (ServerLostError, RunLostError, SnapshotCorruptError, RunNotStartedError)


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Raises InvalidArgumentError unless ``value`` is a whole number in [low, high]."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidArgumentError(f"{name}={value!r:.40} is out of range: use a whole number from {low} to {high}")
