"""This worker's part in snapshots: its worker-local state, and the answers to the scheduler's commands.

A state belongs to one worker's pushes of one parameter set. The script changes its part at any time, so that is taken
at one place only: in the call that makes a push, while the script waits in psdist. Each snapshot with pushes 0 to n - 1
holds it from push n - 1. A worker may have begun push n before it hears of the cut, so the states of its last two
pushes are kept.

psdist's own state changes in pushes alone. It is copied as it is between push n - 1 and push n, when a snapshot needs
it. It is saved at the begin of push n, which encoding changes.

Invariants: a record of the script's state is never changed, and is labelled by the number of the push after it. A state
that was handed in for one attempt is not sent for another.

``SnapshotParticipant`` joins the numbers of the next pushes (``SnapshotMarks``) and the worker-local states
(``WorkerStates``), which it hands to the scheduler as files (``StateUploads``), and fetches again.

Not here: the numbers of pushes (``push_sequence``), the files (the scheduler), asking for a snapshot (``snapshots``),
the servers' part.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from psdist.client.core.push_sequence import MarkAnswer, PushSequence, SnapshotMarks
from psdist.client.session.membership import WorkerMembership, drop_when_fenced, run_in_incarnation
from psdist.client.session.scheduler_calls import SchedulerCalls
from psdist.client.session.waits import WaitTracker
from psdist.data.samples import BATCHES
from psdist.errors import InternalError, InvalidArgumentError, PsdistError, SnapshotFailedError
from psdist.off_loop import in_thread
from psdist.snapshots.model_tensors import BUFFERS
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import limits, status

logger = logging.getLogger("psdist")

State = dict[str, NDArray[Any]]


class DeferredArray:
    """``dtype``[size] that is read only if a snapshot needs it, such as an array in the memory of a device.

    read: returns its values, in a new array. In a script's state they are those from when this was made.
    """

    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.float32)

    def __init__(self, size: int, read: Callable[[], NDArray[Any]]) -> None:
        self.nbytes = self.dtype.itemsize * size
        self._read = read

    def copy(self) -> NDArray[Any]:
        """Return its values."""
        return self._read()


#: A state as it is saved.
SavedState = dict[str, NDArray[Any] | DeferredArray]
Save = Callable[[], Mapping[str, NDArray[Any] | DeferredArray]]
Restore = Callable[[State], None]

#: Records of one script's state: of the last push that is over, and of the one under way.
_RECORDS: Final = 2


#: Prefix of the names of random generators among the states of a worker in a snapshot.
RANDOM: Final = "psdist-random."
#: Prefix of the names of psdist's own state.
OWN: Final = "psdist."
#: Prefix of the local state of a worker that makes local steps.
LOCAL_STEPS: Final = "psdist-local-steps."
_RESERVED: Final = (OWN, BUFFERS, BATCHES, RANDOM, LOCAL_STEPS)


@dataclass(slots=True)
class _Kept:
    """The state of one parameter set.

    own: functions that save and restore psdist's own state.
    parts: functions that save and restore the script's state, by prefix of the names; "" for the user's.
    records: the script's state from the newest pushes, by the number of the push after each, ascending; the error if it
        could not be saved.
    before: psdist's own state when the push under way began.
    wanted: the attempt that needs the state, and the number of the push before which it is needed.
    """

    session: PushSequence
    own: tuple[Save, Restore] | None = None
    parts: dict[str, tuple[Save, Restore]] = field(default_factory=dict)
    records: dict[int, SavedState | SnapshotFailedError] = field(default_factory=dict)
    before: SavedState | None = None
    wanted: tuple[int, int] | None = None

    @property
    def all_parts(self) -> dict[str, tuple[Save, Restore]]:
        """psdist's own part, and those of the script."""
        return self.parts if self.own is None else {OWN: self.own, **self.parts}

    @property
    def is_final(self) -> bool:
        """True if the state after the push under way is known before that push is answered.

        In SSP the answer may wait for a worker that waits for this very state. Encoding may still change psdist's own.
        """
        session = self.session
        return session.unfinished and not session.partial and not session.synchronous and self.own is None

    def record_before(self, number: int) -> SavedState | SnapshotFailedError | None:
        """Return the script's state from its last push below ``number``; None if there is none yet."""
        return next((record for label, record in reversed(self.records.items()) if label <= number), None)


class WorkerStates:
    """Worker-local states of one client.

    hand_in: called with each copied state: attempt, parameter set, the number of the push before which it was copied,
        and arrays that do not change.
    failed: called with the attempt and the error if a state cannot be copied.
    """

    def __init__(
        self, hand_in: Callable[[int, str, int, State], None], failed: Callable[[int, PsdistError], None]
    ) -> None:
        self._kept: dict[str, _Kept] = {}
        self._hand_in = hand_in
        self._failed = failed

    @property
    def names(self) -> tuple[str, ...]:
        """Parameter sets that have a state."""
        return tuple(self._kept)

    def keep(self, parameters: str, save: Save, restore: Restore, session: PushSequence, *, prefix: str = "") -> None:
        """Register a state of this parameter set. prefix: prefix of psdist's own state."""
        kept = self._kept.setdefault(parameters, _Kept(session))
        if prefix == OWN:
            kept.own = save, restore
            return
        kept.parts[prefix] = save, restore
        part = self._save(parameters, {prefix: (save, restore)})
        records = kept.records or {session.next: dict[str, Any]()}
        kept.records = {label: _merge(parameters, record, part) for label, record in records.items()}

    def start_incarnation(self, parameters: str, session: PushSequence, *, continues: bool) -> Restore | None:
        """Follow the pushes of a new incarnation. Returns the function that restores the state; None if there is
        none.

        continues: the numbers of the pushes continue. Otherwise the next push follows the last one that was made.
        """
        kept = self._kept.get(parameters)
        if kept is None:
            return None
        kept.session, kept.before, kept.wanted = session, None, None
        if not continues and kept.records:
            kept.records = {session.next: list(kept.records.values())[-1]}

        def restore_all(state: State) -> None:
            kept.records.clear()
            for prefix, (_, restore) in kept.all_parts.items():
                restore(part_of(state, prefix))
            self._record(parameters, kept, session.next)

        return restore_all

    def take(self, parameters: str) -> None:
        """Take the script's state, in the call that makes the next push, or gives the last part of it."""
        kept = self._kept[parameters]
        self._record(parameters, kept, kept.session.step + 1)

    def push_started(self, parameters: str) -> None:
        """Save psdist's own state before a push is encoded for the first time."""
        kept = self._kept[parameters]
        if not kept.session.unfinished:
            self._check(parameters, kept)
            kept.before = self._save_own(parameters, kept)

    def push_finished(self, parameters: str) -> None:
        """Forget the states before a push that is over."""
        kept = self._kept[parameters]
        kept.before = None
        self._check(parameters, kept)
        while len(kept.records) > 1 and list(kept.records)[1] <= kept.session.step:
            del kept.records[next(iter(kept.records))]

    def mark(self, attempt: int, sessions: Mapping[str, PushSequence], steps: Mapping[str, int]) -> dict[str, int]:
        """Hand in the states that an attempt needs, now or later. Returns the lowest push before which each is
        available.

        sessions: push sequences of this incarnation.
        steps: the cut, by BSP parameter set.
        """
        lowest: dict[str, int] = {}
        for name, kept in self._kept.items():
            session = kept.session
            if sessions.get(name) is not session or (session.synchronous and name not in steps):
                continue
            first = max(session.step, next(iter(kept.records), 0))
            lowest[name] = first if session.synchronous else session.next
            before = steps[name] if session.synchronous else session.next
            if lowest[name] <= before:
                kept.wanted = attempt, before
                self._check(name, kept)
        return lowest

    def end(self, attempt: int) -> None:
        """Forget the states that an attempt needed, because it is over."""
        for kept in self._kept.values():
            if kept.wanted is not None and kept.wanted[0] <= attempt:
                kept.wanted = None

    def _record(self, name: str, kept: _Kept, before: int) -> None:
        """Record the script's state, as that of the push before ``before``."""
        if not kept.parts:
            return
        last = list(kept.records.values())[-1] if kept.records else None
        kept.records.pop(before, None)
        kept.records[before] = self._save(name, kept.parts, is_logged=isinstance(last, SnapshotFailedError))
        while len(kept.records) > _RECORDS:
            del kept.records[next(iter(kept.records))]
        self._check(name, kept)

    def _check(self, name: str, kept: _Kept) -> None:
        """Hand in the state if it is needed and this worker is between the last push of the cut and the end of the next
        one, or in the last push of the cut and its state is final."""
        if kept.wanted is None:
            return
        (attempt, before), session = kept.wanted, kept.session
        is_final = kept.is_final and session.next == before
        if not is_final and not (session.step == before if session.unfinished else session.step >= before):
            return
        own = kept.before if session.unfinished and not is_final else self._save_own(name, kept)
        record = kept.record_before(before) if kept.parts else dict[str, Any]()
        if own is None or record is None:
            return
        kept.wanted = None
        if isinstance(record, SnapshotFailedError):
            self._failed(attempt, record)
            return
        state = {key: array.copy() for key, array in own.items()}
        for key, array in record.items():
            state[key] = array.copy() if isinstance(array, DeferredArray) else array
        self._hand_in(attempt, name, before, state)

    def _save_own(self, name: str, kept: _Kept) -> SavedState | None:
        """Return psdist's own state; None if ``save`` fails."""
        if kept.own is None:
            return {}
        state = self._save(name, {OWN: kept.own}, copies=False)
        if not isinstance(state, SnapshotFailedError):
            return state
        if kept.wanted is not None:
            self._failed(kept.wanted[0], state)
            kept.wanted = None
        return None

    def _save(
        self, name: str, parts: Mapping[str, tuple[Save, Restore]], *, copies: bool = True, is_logged: bool = False
    ) -> SavedState | SnapshotFailedError:
        """Return the current state; the error if a function fails.

        copies: copy the arrays.
        is_logged: the error was logged for the state before.
        """
        try:
            state: SavedState = {}
            for prefix, (save, _) in parts.items():
                saved = check_state(name, save())
                state |= {prefix + key: _frozen(array) if copies else array for key, array in saved.items()}
            return check_size(name, state)
        except Exception as error:  # The user's own function. Training continues without its state.
            if not is_logged:
                logger.exception("the state of %r cannot be saved", name)
            return SnapshotFailedError(f"the state of {name!r} cannot be saved: {type(error).__name__}: {error}")


def _frozen(array: NDArray[Any] | DeferredArray) -> NDArray[Any] | DeferredArray:
    """Return a copy, which later writes of the script do not change."""
    return array if isinstance(array, DeferredArray) else array.copy()


def _merge(
    name: str, record: SavedState | SnapshotFailedError, part: SavedState | SnapshotFailedError
) -> SavedState | SnapshotFailedError:
    """Return a record with another part."""
    if isinstance(record, SnapshotFailedError):
        return record
    return part if isinstance(part, SnapshotFailedError) else check_size(name, {**record, **part})


def check_state(parameters: str, state: object) -> SavedState:
    """Return ``state`` if it is valid, else raise InvalidArgumentError."""
    if not isinstance(state, Mapping):
        raise InvalidArgumentError(f"the state of {parameters!r} is {type(state).__name__}: give a dict of arrays")
    for name, array in state.items():
        if (
            not isinstance(name, str)
            or not isinstance(array, np.ndarray | DeferredArray)
            or array.dtype.kind not in "fiub"
            or array.dtype.itemsize > 8
        ):
            raise InvalidArgumentError(
                f"{name!r:.80} in the state of {parameters!r} is {type(array).__name__} {getattr(array, 'dtype', '')}: "
                "give numpy arrays of numbers of at most 8 bytes by name"
            )
        if name.startswith(_RESERVED):
            raise InvalidArgumentError(
                f"{name!r:.80} in the state of {parameters!r} begins with {name.split('.')[0] + '.'!r}, which is "
                "psdist's own: rename it"
            )
    return check_size(parameters, dict(state))


def check_size(parameters: str, state: SavedState) -> SavedState:
    """Return ``state`` if it is not too large, else raise InvalidArgumentError."""
    size = sum(array.nbytes for array in state.values())
    if size > limits.STATE_BYTES_MAX:
        raise InvalidArgumentError(
            f"the state of {parameters!r} has {size} bytes, and may have {limits.STATE_BYTES_MAX}: keep less"
        )
    return state


def part_of(state: State, prefix: str) -> State:
    """Return the entries of a restored state that have this prefix, by their own names."""
    if prefix:
        return {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}
    return {name: array for name, array in state.items() if not name.startswith(_RESERVED)}


# --- random generators ------------------------------------------------------------------------------------------------


def save_random_generators() -> dict[str, NDArray[Any]]:
    """Return the states of the process's random generators, those of Python's ``random``, ``numpy.random`` and torch.

    torch's are among them once torch is imported, and CUDA's once it is in use.
    """
    _, words, following = random.getstate()
    _, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, NDArray[Any]] = {
        "python": np.array(words, np.uint32),
        "python.gauss": np.array([] if following is None else [following], np.float64),
        "numpy": np.array([*key, position, has_gauss], np.uint32),
        "numpy.gauss": np.array([gauss], np.float64),
    }
    if (torch := sys.modules.get("torch")) is not None:
        state["torch"] = torch.get_rng_state().numpy()
        if torch.cuda.is_initialized():
            state |= {f"cuda.{number}": one.numpy() for number, one in enumerate(torch.cuda.get_rng_state_all())}
    return state


def restore_random_generators(state: Mapping[str, NDArray[Any]]) -> None:
    """Restore the states of ``save_random_generators``; nothing if ``state`` is empty.

    Logs a warning for torch's if torch is not imported.
    """
    if not state:
        return
    gauss = state["python.gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    *key, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(key, np.uint32), position, has_gauss, state["numpy.gauss"][0]))
    if "torch" not in state:
        return
    torch = sys.modules.get("torch")
    if torch is None:
        logger.warning("the state of torch's random generator is not restored: import torch before keep_state()")
        return
    torch.set_rng_state(torch.from_numpy(state["torch"].copy()))
    for number in range(torch.cuda.device_count() if "cuda.0" in state else 0):
        if (one := state.get(f"cuda.{number}")) is not None:
            torch.cuda.set_rng_state(torch.from_numpy(one.copy()), number)


_PART_BYTES: Final = 1 << 20


@dataclass
class LocalProgress:
    """Local steps that a worker has made, and how many of them the servers have."""

    made: int = 0
    contributed: int = 0


class SnapshotParticipant:
    """Snapshots of one client. send: puts a report on the session."""

    def __init__(
        self, calls: SchedulerCalls, membership: WorkerMembership, send: Callable[[pb.SessionRequest], None]
    ) -> None:
        #: Next pushes of all parameter sets of this incarnation.
        self.marks = SnapshotMarks()
        self._uploads = StateUploads(calls, membership, self._report_failed)
        self.states = WorkerStates(self._uploads.put, self._report_failed)
        self._send = send
        #: Progress of the models that this worker trains by local steps.
        self.local: list[LocalProgress] = []

    def start_incarnation(self) -> None:
        """Replace the marks: the snapshot attempts of the previous incarnation were abandoned."""
        self.marks = SnapshotMarks(self.marks.dropped)

    def session_began(self) -> None:
        """Report again, because the previous session may have lost it."""
        self.report_kept()
        if (pending_answer := self.marks.pending_answer) is not None:
            self._report_marked(*pending_answer)

    def on_command(self, command: pb.SnapshotCommand) -> None:
        """Carry out a command of the scheduler."""
        match command.WhichOneof("kind"):
            case "mark":
                lowest = partial(self.states.mark, command.attempt, self.marks.sequences, command.mark.steps)
                if (answer := self.marks.answer(command.attempt, lowest)) is not None:
                    self._report_marked(command.attempt, answer)
            case "end":
                self.marks.end(command.attempt)
                self.states.end(command.attempt)
                self._uploads.end(command.attempt)

    def report_kept(self) -> None:
        """Report the parameter sets for which this worker keeps a state."""
        if self.states.names:
            self._report(pb.SnapshotReport(keeps=pb.SnapshotReport.Keeps(parameters=self.states.names)))

    async def close(self) -> None:
        """Cancel the uploads under way."""
        await self._uploads.close()

    def _report_marked(self, attempt: int, answer: MarkAnswer) -> None:
        marked = pb.SnapshotReport.Marked(next=answer.next, keeps=answer.keeps)
        self._report(pb.SnapshotReport(attempt=attempt, marked=marked))

    def _report_failed(self, attempt: int, error: PsdistError) -> None:
        failed = pb.SnapshotReport.Failed(error=status.to_detail(error))
        self._report(pb.SnapshotReport(attempt=attempt, failed=failed))

    def _report(self, report: pb.SnapshotReport) -> None:
        self._send(pb.SessionRequest(snapshot=report))


# --- states in files --------------------------------------------------------------------------------------------------


class StateUploads:
    """Uploads of states to the scheduler. failed: called with the attempt and the error if one is refused."""

    def __init__(
        self, calls: SchedulerCalls, membership: WorkerMembership, failed: Callable[[int, PsdistError], None]
    ) -> None:
        self._calls = calls
        self._membership = membership
        self._failed = failed
        #: By parameters. A newer attempt's replaces an older's.
        self._tasks: dict[str, tuple[int, asyncio.Task[None]]] = {}

    def put(self, attempt: int, parameters: str, before: int, state: State) -> None:
        """Upload a state, in a task."""
        self.end(attempt - 1, parameters)
        task = asyncio.create_task(self._send(attempt, parameters, before, state), name="psdist state")
        self._tasks[parameters] = attempt, task

    def end(self, attempt: int, parameters: str | None = None) -> None:
        """Cancel the uploads of an attempt that is over."""
        for name, (number, task) in list(self._tasks.items()):
            if number <= attempt and parameters in (None, name):
                task.cancel()
                del self._tasks[name]

    async def close(self) -> None:
        """Cancel all uploads."""
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, attempt: int, parameters: str, before: int, state: State) -> None:
        try:  # The snapshot attempt ends with the incarnation.
            await run_in_incarnation(lambda: self._hand_in(attempt, parameters, before, state), drop_when_fenced)
        except PsdistError as error:
            logger.warning("the state of %r was refused for the snapshot: %s", parameters, error)
            self._failed(attempt, error)
        except Exception as error:  # The scheduler would wait for a state that does not come.
            logger.exception("the state of %r cannot be handed in for the snapshot", parameters)
            text = f"the state of {parameters!r} cannot be handed in: {type(error).__name__}: {error}"
            self._failed(attempt, SnapshotFailedError(text))

    async def _hand_in(self, attempt: int, parameters: str, before: int, state: State) -> None:
        data = await in_thread(lambda: _to_bytes(state))
        mine = self._membership.registration
        header = pb.HandInStateRequest.Header(
            **mine.caller(), attempt=attempt, parameters=parameters, next=before, length=len(data),
            digest=xxhash.xxh3_128_digest(data),
        )  # fmt: skip
        reason = f"for {self._calls.peer} to take the state of {parameters!r} for a snapshot"
        method = self._calls.stub.HandInState
        await self._calls.call_until_answered(method, lambda: _parts(header, data), reason, mine.incarnation)


async def fetch_state(
    calls: SchedulerCalls, membership: WorkerMembership, waits: WaitTracker, parameters: str
) -> State:
    """Return the state that the worker of this rank handed in for the snapshot from which the parameter set began;
    empty if there is none.

    Raises SnapshotCorruptError, StorageError, FencedError.
    """
    request = pb.GetStateRequest(**membership.registration.caller(), parameters=parameters)
    with waits.open(f"for {calls.peer} to give the state of {parameters!r} back") as wait:
        received = _Received()
        data = await calls.read_until_result(calls.stub.GetState, request, wait, received.on_part)
    return await asyncio.to_thread(_from_bytes, data) if data else {}


class _Received:
    """Parts of a file. The first message of a new stream discards those of a broken one."""

    def __init__(self) -> None:
        self._data, self._length, self._digest = bytearray(), 0, b""

    async def on_part(self, response: Any) -> bytes | None:
        """Add a part. Returns the whole file with its last part."""
        if response.digest:
            if response.length > limits.STATE_BYTES_MAX:
                raise InternalError(f"the scheduler has a state of {response.length} bytes")
            self._data, self._length, self._digest = bytearray(), response.length, response.digest
        self._data += response.part
        if len(self._data) < self._length:
            return None
        data = bytes(self._data)
        if data and (len(data) != self._length or xxhash.xxh3_128_digest(data) != self._digest):
            raise InternalError("the state that came is not the one that was handed in")
        return data


def _to_bytes(state: State) -> bytes:
    from safetensors.numpy import save

    return bytes(save({name: np.ascontiguousarray(array) for name, array in state.items()}))


def _from_bytes(data: bytes) -> State:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return dict(load(data))
    except SafetensorError as error:
        raise InternalError(f"the state that came cannot be read: {error}") from None


async def _parts(header: pb.HandInStateRequest.Header, data: bytes) -> AsyncIterator[pb.HandInStateRequest]:
    yield pb.HandInStateRequest(header=header, part=data[:_PART_BYTES])
    for start in range(_PART_BYTES, len(data), _PART_BYTES):
        yield pb.HandInStateRequest(part=data[start : start + _PART_BYTES])
