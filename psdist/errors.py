"""Every error that psdist raises, one class per case.

A class has a stable ``code``, which crosses the wire (see ``psdist.wire.status``), and the name of its gRPC status.
Messages name the offending value, the limit, and the remedy. An operation that raises one of these errors has changed
nothing, unless the class says otherwise.
"""

from __future__ import annotations

from typing import ClassVar


class PsdistError(Exception):
    """Base of all errors of psdist. ``details`` holds the offending values as text."""

    code: ClassVar[str] = "internal"
    status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details = {key: str(value) for key, value in details.items()}


# --- wrong input ------------------------------------------------------------------------------------------------------


class InvalidArgumentError(PsdistError, ValueError):
    """A value is malformed, out of its range, or not supported."""

    code = "invalid_argument"
    status = "INVALID_ARGUMENT"


class ConfigurationError(InvalidArgumentError):
    """A flag, a variable or a file that configures a process is wrong."""

    code = "configuration"


class InvalidNameError(InvalidArgumentError):
    """A name is not made of 1 to 256 of ``A-Z a-z 0-9 . _ / -``."""

    code = "invalid_name"


class UnknownTensorError(InvalidArgumentError):
    """The parameter set has no tensor of this name."""

    code = "unknown_tensor"


class MissingTensorError(InvalidArgumentError):
    """A tensor of the parameter set is missing from the input."""

    code = "missing_tensor"


class ShapeMismatchError(InvalidArgumentError):
    """A tensor does not have the declared shape."""

    code = "shape_mismatch"


class DTypeMismatchError(InvalidArgumentError):
    """A tensor's element type cannot be used here."""

    code = "dtype_mismatch"


class NonFiniteGradientError(InvalidArgumentError):
    """A gradient has NaN or Inf, and ``non_finite`` is "reject"."""

    code = "non_finite_gradient"


class UnknownCodecError(InvalidArgumentError):
    """There is no codec of this name."""

    code = "unknown_codec"


class LimitExceededError(PsdistError):
    """A limit on what one peer may make another hold was reached."""

    code = "limit_exceeded"
    status = "RESOURCE_EXHAUSTED"


# --- members and their rights -----------------------------------------------------------------------------------------


class UnauthenticatedError(PsdistError):
    """The token is missing or wrong."""

    code = "unauthenticated"
    status = "UNAUTHENTICATED"


class InsecureBindError(InvalidArgumentError):
    """A bind beyond loopback was asked for without TLS and without ``--insecure``."""

    code = "insecure_bind"


class ProtocolMismatchError(PsdistError):
    """The two sides speak different protocol versions."""

    code = "protocol_mismatch"
    status = "FAILED_PRECONDITION"


class WrongRunError(PsdistError):
    """The request names a run that is not served here."""

    code = "wrong_run"
    status = "FAILED_PRECONDITION"


class DuplicateMemberError(PsdistError):
    """A live member already has this id."""

    code = "duplicate_member"
    status = "ALREADY_EXISTS"


class FencedError(PsdistError):
    """This incarnation was replaced or expelled. Nothing that it sends counts any more."""

    code = "fenced"
    status = "FAILED_PRECONDITION"


class NotMemberError(PsdistError):
    """The worker is not a member of this parameter set."""

    code = "not_member"
    status = "FAILED_PRECONDITION"


# --- parameter sets and steps -----------------------------------------------------------------------------------------


class UnknownParametersError(PsdistError):
    """No parameter set has this name, or this server holds none of its slices."""

    code = "unknown_parameters"
    status = "NOT_FOUND"


class UnknownDatasetError(PsdistError):
    """No data set of this name was opened."""

    code = "unknown_dataset"
    status = "NOT_FOUND"


class LayoutMismatchError(PsdistError):
    """A parameter set of this name exists with other tensors."""

    code = "layout_mismatch"
    status = "FAILED_PRECONDITION"


class SettingsMismatchError(PsdistError):
    """A parameter set or data set of this name exists with other settings."""

    code = "settings_mismatch"
    status = "FAILED_PRECONDITION"


class StaleEpochError(PsdistError):
    """The request was routed by an older cluster map. The client fetches the new one and sends again."""

    code = "stale_epoch"
    status = "ABORTED"


class FutureStepError(PsdistError):
    """A push names a step that has not begun."""

    code = "future_step"
    status = "FAILED_PRECONDITION"


class SequenceGapError(PsdistError):
    """A push's sequence number skips one that has not arrived."""

    code = "sequence_gap"
    status = "FAILED_PRECONDITION"


# --- reaching each other ----------------------------------------------------------------------------------------------


class SchedulerUnreachableError(PsdistError, ConnectionError):
    """No scheduler answers at the address; the message says what was tried."""

    code = "scheduler_unreachable"
    status = "UNAVAILABLE"


class ServerUnreachableError(PsdistError, ConnectionError):
    """A server does not answer. Pushes that were not acknowledged may or may not have been applied."""

    code = "server_unreachable"
    status = "UNAVAILABLE"


class SharingUnavailableError(PsdistError):
    """A worker and a server cannot share memory; the message says why. Nothing is wrong with the data."""

    code = "sharing_unavailable"
    status = "FAILED_PRECONDITION"


class StaleTermError(PsdistError):
    """A server acted as the primary of a shard that has a newer one."""

    code = "stale_term"
    status = "ABORTED"


class ReplicaMismatchError(PsdistError):
    """Two copies of a slice differ, and it is not known which is right. The shard is stopped."""

    code = "replica_mismatch"
    status = "DATA_LOSS"


class ServerLostError(PsdistError):
    """A server that held the only copy of some shards is gone."""

    code = "server_lost"
    status = "DATA_LOSS"


class StorageError(PsdistError):
    """The storage of a run's snapshots cannot be read or written; the message says what failed, and why."""

    code = "storage"
    status = "UNAVAILABLE"


class NoStorageError(PsdistError):
    """The run has no storage for snapshots."""

    code = "no_storage"
    status = "FAILED_PRECONDITION"


class SnapshotCorruptError(PsdistError):
    """A file of a snapshot is not what was written; the message names it. None of its values was used."""

    code = "snapshot_corrupt"
    status = "DATA_LOSS"


class UnknownSnapshotError(PsdistError):
    """There is no such committed snapshot."""

    code = "unknown_snapshot"
    status = "NOT_FOUND"


class SnapshotFailedError(PsdistError):
    """A snapshot was given up; the message says why. Training goes on, and nothing was committed."""

    code = "snapshot_failed"
    status = "ABORTED"


class WaitTimeoutError(PsdistError, TimeoutError):
    """A wait took longer than its caller allowed; the message names the members that were waited for."""

    code = "wait_timeout"
    status = "DEADLINE_EXCEEDED"


class MutualWaitError(PsdistError):
    """This worker's script and others wait for each other, so that none can go on."""

    code = "mutual_wait"
    status = "FAILED_PRECONDITION"


class PushDroppedError(PsdistError):
    """Pushes of this worker were dropped, because the others had gone on without it. It is a member again."""

    code = "push_dropped"
    status = "ABORTED"


class ClosedError(PsdistError):
    """The client, or the peer, was closed."""

    code = "closed"
    status = "CANCELLED"


class InternalError(PsdistError):
    """A defect of psdist, or an unexpected answer."""


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Raises InvalidArgumentError unless ``value`` is a whole number in [low, high]."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidArgumentError(f"{name}={value!r:.40} is out of range: use a whole number from {low} to {high}")


def _all_subclasses(base: type[PsdistError]) -> list[type[PsdistError]]:
    direct = base.__subclasses__()
    return direct + [leaf for child in direct for leaf in _all_subclasses(child)]


#: Error classes by their code.
BY_CODE: dict[str, type[PsdistError]] = {cls.code: cls for cls in _all_subclasses(PsdistError)}
