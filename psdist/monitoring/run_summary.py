"""Summary of a whole run, of a bounded size: its configuration, curves, members, events and environment.

The scheduler keeps it, and stores it beside the snapshots as ``summaries/RUN/NUMBER-DIGEST.json``; ``psdist report``
shows it. docs/watch.md describes the JSON form, whose keys are stable.

Invariants: A file is never replaced, and the highest number is the newest. The digest in its name is that of its bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import xxhash

from psdist.errors import SnapshotCorruptError, StorageError
from psdist.snapshots.storage import Storage
from psdist.wire.limits import SUMMARY_BYTES_MAX

if TYPE_CHECKING:
    from psdist.v1 import scheduler_pb2 as pb

#: Newest version of the JSON form.
FORMAT: Final = 1
DIRECTORY: Final = "summaries"
#: Limits on what is kept: points of the curves, names of reported numbers and of parameter sets, members and events.
POINTS_KEPT: Final = 512
NAMES_KEPT: Final = 16
MEMBERS_KEPT: Final = 1024
EVENTS_KEPT: Final = 2000

_NAME: Final = re.compile(r"([0-9]{12})-([0-9a-f]{32})\.json")


class Phases(msgspec.Struct):
    """Seconds of workers' scripts by phase."""

    compute: float = 0.0
    push: float = 0.0
    wait: float = 0.0
    pull: float = 0.0


class MeanValue(msgspec.Struct):
    """Mean of a reported number. weight: number of values in it."""

    value: float
    weight: float


class Point(msgspec.Struct):
    """Point of the curves.

    time: its start, in seconds since 1970.
    seconds: training time in it; there may be gaps between points.
    steps: by parameter set, growth of its version: in BSP the steps, otherwise all workers' pushes.
    samples: samples that all workers processed; 0 if scripts report none.
    bytes: payloads that all workers sent and received.
    reported: means over all workers.
    """

    time: float
    seconds: float = 0.0
    steps: dict[str, float] = {}
    samples: float = 0.0
    bytes: float = 0.0
    reported: dict[str, MeanValue] = {}


class RunCurves(msgspec.Struct):
    """Points in the order of time. period_seconds: length of a point."""

    period_seconds: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    points: list[Point] = []

    def add(self, new: Point) -> None:
        """Add a point. If there are more than ``POINTS_KEPT``, merge neighbours until three quarters of them remain.

        Each merge doubles the period. A run that pauses often has points further apart, so that the first ones may
        change nothing.
        """
        _append(self.points, new, self.period_seconds)
        if len(self.points) > POINTS_KEPT:
            while len(self.points) > POINTS_KEPT * 3 // 4:
                self.period_seconds *= 2
                fewer: list[Point] = []
                for point in self.points:
                    _append(fewer, point, self.period_seconds)
                self.points = fewer


def point_of(sample: pb.RunSample, modes: Mapping[str, str]) -> Point:
    """Return the point of one sample. modes: kind of consistency by parameter set."""
    point = Point(time=sample.time, seconds=max((worker.seconds for worker in sample.workers), default=0.0))
    for worker in sample.workers:
        for name, count in worker.pushes.items():
            if name in point.steps or len(point.steps) < NAMES_KEPT:
                before = point.steps.get(name, 0.0)
                point.steps[name] = max(before, count) if modes.get(name) == "bsp" else before + count
        point.samples += worker.samples_per_second * worker.seconds
        point.bytes += sum(each.push_bytes + each.pull_bytes for each in worker.traffic)
        for name, value in worker.reported.items():
            if math.isfinite(value):
                _add_mean(point.reported, name, MeanValue(value, 1.0))
    return point


def _append(points: list[Point], new: Point, period: float) -> None:
    """Add a point, or merge it into the last one. A clock that is set back makes a point that is before the last."""
    if not points or abs(new.time - points[-1].time) >= period - 0.5:
        points.append(new)
        return
    last = points[-1]
    last.seconds += new.seconds
    for name, count in new.steps.items():
        if name in last.steps or len(last.steps) < NAMES_KEPT:
            last.steps[name] = last.steps.get(name, 0.0) + count
    last.samples += new.samples
    last.bytes += new.bytes
    for name, mean in new.reported.items():
        _add_mean(last.reported, name, mean)


def _add_mean(means: dict[str, MeanValue], name: str, new: MeanValue) -> None:
    if (old := means.get(name)) is None:
        if len(means) < NAMES_KEPT:
            means[name] = new
        return
    weight = old.weight + new.weight
    # Their difference may exceed the largest number, and JSON has none for infinity.
    mean = old.value * (old.weight / weight) + new.value * (new.weight / weight)
    means[name] = MeanValue(mean, weight)


class WorkerPart(msgspec.Struct):
    """Activity of one worker over the whole run: seconds by phase, answered and dropped pushes, bytes."""

    phases: Phases = msgspec.field(default_factory=Phases)
    pushes: float = 0.0
    dropped: float = 0.0
    push_bytes: float = 0.0
    pull_bytes: float = 0.0


class EventPart(msgspec.Struct):
    """Event of the run's history."""

    number: int
    time: float
    kind: str
    warning: bool
    text: str


class HistoryPart(msgspec.Struct):
    """The newest events, oldest first. omitted: number of older ones."""

    omitted: int = 0
    events: list[EventPart] = []


class MemberPart(msgspec.Struct):
    """Member as the scheduler knew it last."""

    id: str
    role: str
    state: str
    host: str
    incarnation: int = 0
    reason: str = ""
    device: str | None = None
    cores: int | None = None
    kernel_threads: int | None = None
    resident_bytes: int | None = None


class ParametersPart(msgspec.Struct):
    """Parameter set with its settings."""

    name: str
    state: str
    tensors: int
    elements: int
    slices: int
    consistency: str
    optimizer: str
    version_max: int | None = None


class SnapshotPart(msgspec.Struct):
    """Committed snapshot in the storage."""

    directory: str
    steps: dict[str, int]
    bytes: int
    time: float
    seconds: float
    reason: str


class Summary(msgspec.Struct, kw_only=True):
    """Summary of one run.

    state: "running", "ended", "stopped" (its scheduler ended, and may return) or "lost", with its reason.
    started, written: seconds since 1970.
    schedulers: number of schedulers that have kept this summary, one after another.
    environment: texts about the scheduler's host, by name.
    """

    format: int = FORMAT
    run_id: str
    state: str = "running"
    reason: str = ""
    started: float
    written: float
    schedulers: int = 1
    configuration: dict[str, str | int] = {}
    environment: dict[str, str] = {}
    curves: RunCurves = msgspec.field(default_factory=RunCurves)
    workers: dict[str, WorkerPart] = {}
    members: list[MemberPart] = []
    parameters: list[ParametersPart] = []
    snapshots: list[SnapshotPart] = []
    history: HistoryPart = msgspec.field(default_factory=HistoryPart)


# --- bytes ------------------------------------------------------------------------------------------------------------


def to_bytes(summary: Summary) -> bytes:
    """Return the JSON form."""
    return msgspec.json.encode(summary)


def parse(data: bytes, file: str) -> Summary:
    """Return the summary in ``data``. file: its name, for errors.

    Raises StorageError for one of a newer format, and SnapshotCorruptError for anything else that is no summary.
    """
    try:
        values = json.loads(data)
        found = values.get("format") if isinstance(values, dict) else None
        if type(found) is not int or found < 1:
            raise ValueError("it is no summary of a run")
    except (ValueError, RecursionError) as error:
        raise _corrupt(file, str(error)) from None
    if found > FORMAT:
        raise StorageError(
            f"{file} has format {found}, but this psdist reads up to {FORMAT}: use the psdist that wrote it", file=file
        )
    try:
        return msgspec.json.decode(data, type=Summary)
    except msgspec.DecodeError as error:
        raise _corrupt(file, str(error)) from None


def _corrupt(file: str, why: str) -> SnapshotCorruptError:
    return SnapshotCorruptError(
        f"{file} is not what was written ({why:.200}): delete it, and the next older one is used, or the run's "
        "scheduler writes another",
        file=file,
    )


# --- files ------------------------------------------------------------------------------------------------------------


def path_of(run_id: str, number: int, data: bytes) -> str:
    """Return the path of summary ``number`` in the storage."""
    return f"{DIRECTORY}/{run_id}/{number:012d}-{xxhash.xxh3_128_hexdigest(data)}.json"


async def paths(storage: Storage, run_id: str) -> list[tuple[int, str]]:
    """Return the numbers and paths of a run's summaries, newest first. Raises StorageError."""
    found = []
    for stored in await storage.list(f"{DIRECTORY}/{run_id}"):
        if match := _NAME.fullmatch(stored.path.rpartition("/")[2]):
            found.append((int(match[1]), stored.path))
    return sorted(found, reverse=True)


async def runs(storage: Storage) -> list[str]:
    """Return the ids of the runs with a summary. Raises StorageError."""
    parts = [stored.path.split("/") for stored in await storage.list(DIRECTORY)]
    return sorted({each[1] for each in parts if len(each) == 3 and _NAME.fullmatch(each[2])})


async def read(storage: Storage, path: str) -> Summary:
    """Read a summary. Raises StorageError, UnknownSnapshotError if it is gone, SnapshotCorruptError."""
    data = await storage.read(path, 0, SUMMARY_BYTES_MAX + 1)
    if len(data) > SUMMARY_BYTES_MAX:
        raise _corrupt(path, f"it is larger than {SUMMARY_BYTES_MAX} bytes")
    match = _NAME.fullmatch(path.rpartition("/")[2])
    if match is None or xxhash.xxh3_128_hexdigest(data) != match[2]:
        raise _corrupt(path, "its digest is not the one in its name")
    return parse(data, path)
