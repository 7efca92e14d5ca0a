"""Values shared by all parts of psdist: tensors, layouts, slices, and the cluster map. Pure.

All are frozen dataclasses. The state machines of client, server and scheduler use these types; protobuf messages exist
only at the edges.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

from psdist.consistency import BSP, Consistency
from psdist.errors import InvalidArgumentError, InvalidNameError, LimitExceededError, check_integer
from psdist.optim import Optimizer

DType = Literal["float32", "float16", "bfloat16", "float64"]
MasterDType = Literal["float32", "float64"]
NonFinite = Literal["reject", "skip"]

#: Bytes per element, by dtype.
ITEM_BYTES: Final[dict[str, int]] = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
#: Dtypes of payloads.
WIRE_DTYPES: Final = ("float32", "float16", "bfloat16")
#: Elements of the flat vector that one value takes, by the dtype in which servers compute. Whatever only moves or
#: copies the vector, such as transports, replicas and snapshots, treats a float64 as two float32.
WORDS: Final[dict[str, int]] = {"float32": 1, "float64": 2}

SLICE_ELEMENTS_MAX: Final = 1 << 20  # 4 MiB of float32
SLICE_ELEMENTS_MIN: Final = 1 << 12
SHARDS_PER_SERVER: Final = 4
_SLICES_WANTED: Final = 16
#: Slices of up to 1 MiB; even a small vector then has enough slices for all servers.
_SMALL_SLICE_ELEMENTS: Final = 1 << 18
#: Vectors with at least this many slices use larger ones. A slice costs the interpreters the same, whatever its size.
_LARGE_SLICES_WANTED: Final = 20
#: Between hosts, a slice completes when the slowest link has delivered its part, so the other links idle in a step's
#: last slices. With many slices these are a smaller fraction.
_SLICES_WANTED_BETWEEN_HOSTS: Final = 80

SAMPLES_MAX: Final = 1 << 62
#: Limit on the ranges of one data epoch.
RANGES_MAX: Final = 1 << 32
#: Data epochs of a data set without an end.
DATA_EPOCHS_MAX: Final = (1 << 30) - 1

_NAME = re.compile(r"[A-Za-z0-9._/-]{1,256}")
_DIRECTORY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def check_name(name: str, what: str) -> str:
    """Return ``name`` if it has 1 to 256 of the characters ``A-Z a-z 0-9 . _ / -``, else raise InvalidNameError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidNameError(
            f"{what} {name!r:.80} is not allowed: use 1 to 256 of the characters A-Z a-z 0-9 . _ / -", name=name
        )
    return name


def check_tensor_name(name: str) -> str:
    """Return ``name`` if it is printable text of 1 to 256 bytes in UTF-8, else raise InvalidNameError."""
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name.encode()) <= 256:
        raise InvalidNameError(
            f"tensor name {name!r:.80} is not allowed: use printable text of 1 to 256 bytes in UTF-8", name=name
        )
    return name


def check_directory(name: str) -> str:
    """Return ``name`` if it can name a snapshot's directory, or a file in one, else raise InvalidNameError.

    Allowed are 1 to 128 of the characters ``A-Z a-z 0-9 . _ -``, not beginning with a dot.
    """
    if not isinstance(name, str) or not _DIRECTORY.fullmatch(name):
        raise InvalidNameError(
            f"{name!r:.80} cannot name a file of a snapshot: use 1 to 128 of the characters A-Z a-z 0-9 . _ -, not "
            "beginning with a dot",
            name=name,
        )
    return name


def _difference(mine: object, theirs: object, names: Iterable[str], prefix: str = "") -> str:
    for name in names:
        one, other = getattr(mine, name), getattr(theirs, name)
        if one == other:
            continue
        if is_dataclass(one) and type(one) is type(other):
            return _difference(one, other, [field.name for field in fields(one)], f"{prefix}{name}.")
        return f"{prefix}{name} is {_brief(other)}, not {_brief(one)}"
    return ""


def _brief(value: object) -> str:
    """Return a specification's class name, since its fields would hide the difference; other values as ``repr``."""
    return type(value).__name__ if is_dataclass(value) else repr(value)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and element type of one dense tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: DType = "float32"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Tensors of a flat vector, stored in this order without gaps.

    dtype: dtype in which servers compute. A float64 takes two elements of the vector.
    """

    tensors: tuple[TensorSpec, ...]
    dtype: MasterDType = "float32"

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Element offset of each tensor, followed by the total."""
        offsets, words = [0], WORDS[self.dtype]
        for tensor in self.tensors:
            offsets.append(offsets[-1] + words * tensor.size)
        return tuple(offsets)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Number of values before each tensor, followed by that of all: ``offsets`` in units of ``dtype``."""
        words = WORDS[self.dtype]
        return self.offsets if words == 1 else tuple(offset // words for offset in self.offsets)

    @cached_property
    def total(self) -> int:
        """Number of elements of the flat vector."""
        return self.offsets[-1]

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of one line ``name dtype shape`` per tensor, and of a first line if ``dtype`` is not float32."""
        lines = (f"{t.name} {t.dtype} {','.join(map(str, t.shape))}\n" for t in self.tensors)
        first = "" if self.dtype == "float32" else f"{self.dtype}\n"
        return hashlib.sha256((first + "".join(lines)).encode()).digest()

    def difference(self, other: Layout) -> str:
        """Describe the first difference of ``other`` from this layout, or return an empty string."""
        mine = {t.name: t for t in self.tensors}
        theirs = {t.name: t for t in other.tensors}
        if missing := sorted(mine.keys() - theirs.keys()):
            return f"tensor {missing[0]!r} is missing" + (f" (and {len(missing) - 1} more)" if missing[1:] else "")
        if extra := sorted(theirs.keys() - mine.keys()):
            return f"tensor {extra[0]!r} is unknown" + (f" (and {len(extra) - 1} more)" if extra[1:] else "")
        for name, tensor in mine.items():
            if theirs[name].shape != tensor.shape:
                return f"tensor {name!r} has shape {theirs[name].shape}, not {tensor.shape}"
            if theirs[name].dtype != tensor.dtype:
                return f"tensor {name!r} has dtype {theirs[name].dtype}, not {tensor.dtype}"
        if self.tensors != other.tensors:
            return "the tensors come in another order"
        if self.dtype != other.dtype:
            return f"the servers compute in {other.dtype}, not {self.dtype}"
        return ""


class GradientDifference(NamedTuple):
    """Marks a push as a difference to the gradient of an earlier push (EF21), not a gradient.

    number: counter of a worker's difference pushes.
    from_zeros: True if the difference is added to zeros instead of the previous gradient.
    """

    number: int
    from_zeros: bool


@dataclass(frozen=True)
class Slicing:
    """Division of a flat vector of ``total`` elements into slices, independent of the number of servers."""

    total: int
    slice_elements: int

    @cached_property
    def count(self) -> int:
        """Number of slices."""
        return -(-self.total // self.slice_elements)

    def bounds(self, index: int) -> tuple[int, int]:
        """Return the first element of slice ``index``, and the one after its last."""
        start = index * self.slice_elements
        return start, min(start + self.slice_elements, self.total)

    def size(self, index: int) -> int:
        """Return the number of elements of slice ``index``."""
        start, stop = self.bounds(index)
        return stop - start


def choose_slice_elements(total: int, *, between_hosts: bool = False) -> int:
    """Return the slice size for ``total`` elements: a power of two, 16 KiB to 4 MiB of float32.

    There are about 16 slices or more. Vectors with slices above 1 MiB have 20 or more; 80 or more if slices travel
    between hosts.
    """
    wanted = max(1, total // _SLICES_WANTED)
    small = min(_SMALL_SLICE_ELEMENTS, max(SLICE_ELEMENTS_MIN, 1 << (wanted - 1).bit_length()))
    enough = _SLICES_WANTED_BETWEEN_HOSTS if between_hosts else _LARGE_SLICES_WANTED
    large = min(SLICE_ELEMENTS_MAX, 1 << max(1, total // enough).bit_length() - 1)
    return max(small, large)


@dataclass(frozen=True)
class ParametersSpec:
    """Settings of a parameter set, on which all workers must agree.

    slice_elements: elements per slice; 0 lets the scheduler choose.
    reset_optimizer: True to restart the optimizer's state if the run resumes from a snapshot.
    pull_compression: codec for differences of weights sent to workers, as text (``pull_codec_from_text``); "" to send
        the weights themselves.
    dtype: dtype in which servers hold weights and optimizer state, and compute.
    workers: ranks of the workers that train it, in ascending order; empty for all workers of the run.
    Raises InvalidArgumentError and InvalidNameError.
    """

    name: str
    optimizer: Optimizer
    consistency: Consistency
    non_finite: NonFinite = "reject"
    slice_elements: int = 0
    reset_optimizer: bool = False
    pull_compression: str = ""
    dtype: MasterDType = "float32"
    workers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name, "parameters name")
        if self.workers and (self.workers[0] < 0 or sorted(set(self.workers)) != [*self.workers]):
            raise InvalidArgumentError(
                f"workers={self.workers!s:.60} of {self.name!r} are not ranks in ascending order: ranks count from 0"
            )
        if self.dtype not in WORDS:
            raise InvalidArgumentError(f"master_dtype={self.dtype!r:.40} is unknown: use one of {', '.join(WORDS)}")
        if self.dtype == "float64" and self.pull_compression:
            raise InvalidArgumentError(
                f"pull_compression={self.pull_compression} with master_dtype='float64': codecs encode float32. Leave "
                "one of them out"
            )
        if self.slice_elements % WORDS[self.dtype]:
            raise InvalidArgumentError(
                f"slice_elements={self.slice_elements} with master_dtype='float64': a float64 takes two elements, so "
                "use an even number"
            )
        if not isinstance(self.reset_optimizer, bool):
            raise InvalidArgumentError(f"reset_optimizer={self.reset_optimizer!r:.40} is neither True nor False")
        if self.non_finite not in ("reject", "skip"):
            raise InvalidArgumentError(f"non_finite={self.non_finite!r} is unknown: use 'reject' or 'skip'")
        if self.slice_elements != 0 and not 1 <= self.slice_elements <= SLICE_ELEMENTS_MAX:
            raise InvalidArgumentError(
                f"slice_elements={self.slice_elements} is out of range: use 1 to {SLICE_ELEMENTS_MAX}, or 0 to let "
                "psdist choose"
            )

    @cached_property
    def is_trained(self) -> bool:
        """True if pushes change the weights. With a learning rate of 0, workers only share values."""
        optimizer = self.optimizer
        return any(optimizer.group_values(group)["lr"] for group in range(len(optimizer.overrides) + 1))

    @cached_property
    def is_ordered(self) -> bool:
        """True if all workers train this set step by step, so that its place in the order of a script matters."""
        consistency = self.consistency
        return isinstance(consistency, BSP) and not consistency.backup_workers and self.is_trained

    def difference(self, other: ParametersSpec) -> str:
        """Describe the first setting in which ``other`` differs, or return an empty string."""
        names = ["optimizer", "consistency", "non_finite", "reset_optimizer", "pull_compression", "dtype", "workers"]
        return _difference(self, other, names if other.slice_elements == 0 else [*names, "slice_elements"])

    def check_assignable(self) -> None:
        """Raise InvalidArgumentError if scripts cannot write to the weights."""
        if self.optimizer.kind == "ftrl":
            raise InvalidArgumentError(
                f"weights of {self.name!r} cannot be written: FTRL computes them from its state in every update. Use "
                "another optimizer, or create another parameter set with these values"
            )


@dataclass(frozen=True, slots=True)
class ParametersMember:
    """Worker that takes part in the training of a parameter set.

    first_step: BSP: first step that the worker contributes to. SSP: its clock when its next push is ``first_push``.
    origin: incarnation in which the worker's sequence of pushes began; 0 stands for its own. The next incarnation of
        an expelled worker may continue the sequence: an unfinished push is then completed, and servers know which
        slices of it they have.
    first_push: SSP and ASP: number of the first push of this incarnation.
    """

    worker_id: str
    incarnation: int
    rank: int
    first_step: int = 0
    origin: int = 0
    first_push: int = 0

    @property
    def identity(self) -> tuple[str, int]:
        """The worker's id and incarnation."""
        return self.worker_id, self.incarnation

    @property
    def producer(self) -> tuple[str, int]:
        """Name of the worker's push sequence in duplicate tables: worker id, and origin of the sequence."""
        return self.worker_id, self.origin or self.incarnation


@dataclass(frozen=True, slots=True)
class GroupRange:
    """Elements [start, stop) with override number ``group`` (1 is ``optimizer.overrides[0]``)."""

    start: int
    stop: int
    group: int


@dataclass(frozen=True, slots=True)
class Replica:
    """Incarnation of a server that holds a copy of a shard."""

    server_id: str
    incarnation: int

    def __str__(self) -> str:
        return self.server_id


@dataclass(frozen=True, slots=True)
class Shard:
    """Servers that hold a shard. Only the scheduler changes it, with a new epoch each time.

    primary: server that workers send requests to. It answers a push once it has applied it and all ``backups`` have
        acknowledged it.
    term: number of primaries so far. A server that knows a higher term rejects an update with a lower one.
    backups: servers with every acknowledged update. One of them is promoted when the primary is lost.
    filling: servers that the primary is filling. They become backups once it reports that they are complete.
    lost: True if the primary is gone and there was no backup.
    fills: number of the filling of each of ``backups``, then of ``filling``. A replica that is dropped and filled
        again gets a new number, so that a late report about the earlier filling is recognized.
    """

    primary: Replica
    term: int = 1
    backups: tuple[Replica, ...] = ()
    filling: tuple[Replica, ...] = ()
    lost: bool = False
    fills: tuple[int, ...] = ()

    def fill_of(self, replica: Replica) -> int:
        """Return the number of the filling that made, or makes, this replica's copy; 0 if there is none."""
        return dict(zip((*self.backups, *self.filling), self.fills, strict=False)).get(replica, 0)

    def with_copies(self, backups: tuple[Replica, ...], filling: tuple[Replica, ...], **changes: Any) -> Shard:
        """Return the shard with these copies, each with the number of its filling.

        changes: values of other fields.
        """
        fills = tuple(self.fill_of(replica) for replica in (*backups, *filling))
        return replace(self, backups=backups, filling=filling, fills=fills if any(fills) else (), **changes)

    def with_filling(self, replica: Replica, number: int) -> Shard:
        """Return the shard with one more replica that is being filled.

        number: number of this filling.
        """
        fills = map(self.fill_of, (*self.backups, *self.filling))
        return replace(self, filling=(*self.filling, replica), fills=(*fills, number))

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All servers that hold a copy, or will; the primary first."""
        return (self.primary, *self.backups, *self.filling)


@dataclass(frozen=True, slots=True)
class Restore:
    """Committed snapshot from which values are loaded.

    directory: name of the snapshot below ``snapshots/`` in the run's storage.
    manifest_digest: xxh3_128 of its manifest.
    weights_only: True to restart the optimizer's state instead of loading it.
    """

    directory: str
    manifest_digest: bytes
    weights_only: bool = False


@dataclass(frozen=True)
class ParametersEntry:
    """Parameter set in the cluster map. Slice i belongs to shard ``i % len(shards)``."""

    spec: ParametersSpec
    total: int
    shards: tuple[Shard, ...]
    members: tuple[ParametersMember, ...] = ()
    ranges: tuple[GroupRange, ...] = ()
    ready: bool = False
    layout_digest: bytes = b""
    #: Number of members when the parameter set was placed: the reference of ``BSP.resize_lr``.
    reference_workers: int = 0
    #: Snapshot with the initial values, if no worker uploads them.
    restore: Restore | None = None
    #: Number of times this run has restored the parameter set. Servers drop data of a lower generation.
    generation: int = 0
    #: SSP and ASP: lost members that may return. Servers keep their entries of the duplicate table.
    departed: tuple[ParametersMember, ...] = ()
    #: Version at which the optimizer's state began: 0, or that of its reset (SSP and ASP: the lowest of any slice).
    state_since: int = 0

    @property
    def producers(self) -> frozenset[tuple[str, int]]:
        """Producers whose pushes may continue."""
        return frozenset(member.producer for member in (*self.members, *self.departed))

    @cached_property
    def has_lost_shards(self) -> bool:
        """True if a shard has no copy any more."""
        return any(shard.lost for shard in self.shards)

    @property
    def primaries(self) -> tuple[str, ...]:
        """Id of the primary, by shard number."""
        return tuple(shard.primary.server_id for shard in self.shards)

    @property
    def slicing(self) -> Slicing:
        """Division of the vector into slices. ``spec.slice_elements`` is never 0 here."""
        return Slicing(self.total, self.spec.slice_elements)

    def slices_of(self, server_id: str) -> tuple[int, ...]:
        """Return the slices whose primary is ``server_id``, ascending."""
        shards = len(self.shards)
        mine = {number for number, owner in enumerate(self.primaries) if owner == server_id}
        return tuple(index for index in range(self.slicing.count) if index % shards in mine)


@dataclass(frozen=True, slots=True)
class ServerEntry:
    """Live server, and the address (host:port) that it listens on."""

    server_id: str
    incarnation: int
    address: str


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """Live worker."""

    worker_id: str
    incarnation: int
    rank: int
    #: host:port of its connections from other workers; empty if it accepts none.
    address: str = ""

    @property
    def identity(self) -> tuple[str, int]:
        """The worker's id and incarnation."""
        return self.worker_id, self.incarnation


@dataclass(frozen=True)
class ClusterMap:
    """Members, parameter sets, and shards with their owners, numbered by the epoch."""

    run_id: str
    epoch: int
    servers: tuple[ServerEntry, ...] = ()
    workers: tuple[WorkerEntry, ...] = ()
    parameters: tuple[ParametersEntry, ...] = field(default=())
    #: Reason why no worker may start a step: an elastic run has fewer workers than its minimum. Empty otherwise.
    paused: str = ""
    #: Name of the scheduler process that published this map, and the ranks without a live worker whose work is done.
    scheduler_id: str = ""
    ranks_done: tuple[int, ...] = ()

    def entry(self, parameters: str) -> ParametersEntry | None:
        """Return the parameter set with this name, or None."""
        return next((entry for entry in self.parameters if entry.spec.name == parameters), None)

    def server(self, server_id: str) -> ServerEntry | None:
        """Return the live server with this id, or None."""
        return next((server for server in self.servers if server.server_id == server_id), None)


@dataclass(frozen=True, slots=True)
class Identity:
    """Sender of a request, and the epoch of the map that routed it."""

    run_id: str
    worker_id: str
    incarnation: int
    epoch: int
    parameters: str


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """Settings of a data set with leased ranges, on which all workers must agree.

    size: number of samples.
    range_size: number of samples in a range; the last range may be shorter.
    shuffle: True for a different order in each data epoch.
    seed: seed of these orders.
    data_epochs: number of passes over all samples; 0 for no end.
    retries_max: how often a range is leased again after its worker was lost.
    Raises InvalidArgumentError, InvalidNameError and LimitExceededError.
    """

    name: str
    size: int
    range_size: int
    shuffle: bool = True
    seed: int = 0
    data_epochs: int = 1
    retries_max: int = 3

    def __post_init__(self) -> None:
        check_name(self.name, "data set name")
        bounds = {
            "size": (1, SAMPLES_MAX),
            "range_size": (1, SAMPLES_MAX),
            "seed": (0, (1 << 63) - 1),
            "data_epochs": (0, DATA_EPOCHS_MAX),
            "retries_max": (0, (1 << 31) - 1),
        }
        for name, (low, high) in bounds.items():
            check_integer(name, getattr(self, name), low, high)
        if not isinstance(self.shuffle, bool):
            raise InvalidArgumentError(f"shuffle={self.shuffle!r:.40} is neither True nor False")
        if self.ranges > RANGES_MAX:
            raise LimitExceededError(
                f"{self.size} samples in ranges of {self.range_size} are {self.ranges} ranges, over the limit of "
                f"{RANGES_MAX}: use a larger range_size"
            )

    @property
    def ranges(self) -> int:
        """Number of ranges in one data epoch."""
        return -(-self.size // self.range_size)

    @property
    def places(self) -> int:
        """Number of ranges in all data epochs. Range r of data epoch e has place ``e * ranges + r``."""
        return self.ranges * (self.data_epochs or DATA_EPOCHS_MAX)

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the first sample of range ``number`` in the data epoch's order, and the one after its last."""
        start = number * self.range_size
        return start, min(start + self.range_size, self.size)

    def difference(self, other: DatasetSpec) -> str:
        """Describe the first setting in which ``other`` differs, or return an empty string."""
        return _difference(self, other, ("size", "range_size", "shuffle", "seed", "data_epochs", "retries_max"))


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Position in a data set, as a pure value. A data set opened at this position continues from it.

    data_epoch: first unfinished data epoch; the number of data epochs once all are finished.
    done: stretches (first, count) of finished ranges, ascending and not adjacent, counted from the start of
        ``data_epoch``. The ranges of later data epochs follow its last.
    repeated_ranges: number of ranges handed out again so far because their worker was lost, or returned them used in
        part; their samples may have been used twice.
    failed_ranges: number of ranges given up because their workers were lost too often.
    """

    data_epoch: int = 0
    done: tuple[tuple[int, int], ...] = ()
    repeated_ranges: int = 0
    failed_ranges: int = 0

    def __post_init__(self) -> None:
        numbers = [self.data_epoch, self.repeated_ranges, self.failed_ranges, *(n for pair in self.done for n in pair)]
        if any(not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= SAMPLES_MAX for n in numbers):
            raise InvalidArgumentError(f"{self!r:.200} is not a position: all numbers must be whole and 0 or more")

    def to_json(self) -> str:
        """Return the position as text, for storage."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DataPosition:
        """Parse the result of ``to_json``. Raises InvalidArgumentError."""
        try:
            values = json.loads(text)
            return cls(**(values | {"done": tuple((first, count) for first, count in values["done"])}))
        except (ValueError, TypeError, KeyError):
            raise InvalidArgumentError(f"{text!r:.100} is not a position of a data set") from None
