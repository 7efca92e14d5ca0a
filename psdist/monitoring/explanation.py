"""Explanation of a run's speed: what bounds the step now, by which evidence, and which setting would change it.

A step's time is divided into parts, from the phases of all workers and the kernel times of all servers:

* *script*: computation of a typical worker, outside of psdist.
* *straggler*: time by which the slowest worker that a step waits for exceeds a typical one.
* *server kernel*: time of the busiest server's threads in updates.
* *link*: the rest of the communication, if payloads are large; over shared memory, the copying of gradients.
* *latency*: the rest of the communication, if payloads are small: round trips, wake-ups and queues.

The largest part bounds the step. A prediction changes that part alone, so it is an upper limit if another part grows
with the change. Pure: works on the JSON forms of ``run_json``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from statistics import fmean, median
from typing import Any, Final, NamedTuple

from psdist.monitoring.problems import StepTimes, lower_quartile, period, stragglers

#: Completed steps of each worker that an explanation needs: one more or less is an error of a fifth.
STEPS_MIN: Final = 5
#: Payload of one step in bytes, both directions, from which its time is the link's and not the latency's.
TRANSFER_BYTES_MIN: Final = 256 << 10
#: Bytes of an element as the codecs send it.
_INT8_BYTES: Final = 1 + 4 / 256
_TOPK_BYTES: Final = 0.08
#: With fewer idle cores on the server's host another server is proposed, not a thread.
_IDLE_CORES_MIN: Final = 0.25
#: Batches per push that are proposed against latency.
_BATCHES: Final = 4

SCRIPT: Final = "script"
STRAGGLER: Final = "straggler"
KERNEL: Final = "server kernel"
LINK: Final = "link"
LATENCY: Final = "latency"


class _Worker(NamedTuple):
    """Means of one worker over the window: seconds and bytes of one step.

    times: the step by phase.
    transports: all that it uses.
    """

    id: str
    seconds: float
    times: StepTimes
    push_bytes: float
    pull_bytes: float
    transports: frozenset[str]

    @property
    def own(self) -> float:
        """Seconds that other workers may wait for."""
        return self.times.own


class _Server(NamedTuple):
    """The busiest server. busy: share of its threads' time in updates, from 0 to 1. idle: cores of its host that do
    nothing; infinite if unknown."""

    id: str
    busy: float
    threads: int
    cores: int
    idle: float = inf


@dataclass(frozen=True, slots=True)
class Pending:
    """Reason why there is no explanation yet."""

    reason: str


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a setting, and its predicted effect.

    setting: name of the setting.
    text: the change, as the object of "would".
    speedup: predicted speed divided by the current one; of ``unit``.
    unit: counted by the speed: "steps", "batches" or "pushes".
    """

    setting: str
    text: str
    speedup: float
    unit: str = "steps"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Bottleneck of a parameter set's steps.

    seconds: length of the window.
    step_seconds: length of a step, and ``parts`` its division; both in seconds.
    evidence: a sentence with the numbers.
    """

    parameters: str
    consistency: str
    workers: int
    seconds: float
    step_seconds: float
    parts: Mapping[str, float]
    bottleneck: str
    culprit: str
    evidence: str
    change: Change

    @property
    def sentences(self) -> tuple[str, str, str]:
        """The bottleneck, its evidence, and the change that would help."""
        culprit = f" ({self.culprit})" if self.culprit else ""
        share = self.parts[self.bottleneck] / self.step_seconds
        return (
            f"Steps of {self.parameters!r} take {_time(self.step_seconds)}, bounded by the {self.bottleneck}{culprit}: "
            f"{share:.0%} of the step.",
            self.evidence,
            f"{self.change.text} would make about {self.change.speedup:.2g} times as many {self.change.unit} a second.",
        )

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form, whose keys are stable. Times in seconds."""
        values = {**asdict(self), "sentences": list(self.sentences)}
        values["parts"] = {part: round(seconds, 6) for part, seconds in self.parts.items()}
        return values


def explain(status: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], seconds: float) -> Explanation | Pending:
    """Explain the speed of a run, or return why that is not possible yet.

    status: ``status_json`` of the run.
    samples: each ``sample_json``, oldest first.
    seconds: shortest window. A longer one is used if steps are long.
    """
    live = {one["id"] for one in status["members"] if one["role"] == "worker" and one["state"] == "live"}
    if not live:
        return Pending("the run has no live worker")
    if not status["parameters"]:
        return Pending("no worker has created a parameter set yet")
    window = _window(samples, live, seconds)
    if isinstance(window, Pending):
        return _with_waits(window, status)
    parameters = _main_parameters(status["parameters"], window)
    if parameters is None:
        return _with_waits(Pending("no worker has pushed a gradient yet"), status)
    workers = [worker for one in sorted(live) if (worker := _worker(one, parameters["name"], window)) is not None]
    if not workers:
        return Pending(f"no worker has completed {STEPS_MIN} steps of {parameters['name']!r} yet")
    return _Division(parameters, workers, _busiest(status["members"], window)).explanation(window)


def _with_waits(pending: Pending, status: Mapping[str, Any]) -> Pending:
    """Add the run's own reason to wait, if it has one."""
    waits = status["waiting_for"]
    return Pending(f"{pending.reason}; the run waits {waits[0]}") if waits else pending


def _window(
    samples: Sequence[Mapping[str, Any]], live: Iterable[str], seconds: float
) -> Sequence[Mapping[str, Any]] | Pending:
    """Return the newest samples that cover ``seconds``, and in which each live worker has completed enough steps."""
    covered = dict.fromkeys(live, 0.0)
    steps = dict.fromkeys(live, 0.0)
    for start in range(len(samples) - 1, -1, -1):
        for member, one in samples[start]["workers"].items():
            if member in covered:
                covered[member] += one["seconds"]
                steps[member] += max((rate * one["seconds"] for rate in one["steps_per_second"].values()), default=0.0)
        if min(covered.values()) >= seconds and min(steps.values()) >= STEPS_MIN - 0.01:
            return samples[start:]
    short = min(covered, key=lambda member: covered[member])
    if covered[short] < seconds:
        return Pending(f"{short} has reported {covered[short]:.0f} of {seconds:g} s of its training")
    slow = min(steps, key=lambda member: steps[member])
    return Pending(f"{slow} has completed {steps[slow]:.0f} of {STEPS_MIN} steps in {covered[slow]:.0f} s")


def _main_parameters(
    parameters: Iterable[Mapping[str, Any]], window: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """Return the parameter set that a step is counted by: of those with pushes the largest."""
    pushed = {
        name
        for sample in window
        for one in sample["workers"].values()
        for name, rate in one["steps_per_second"].items()
        if rate
    }
    found = [one for one in parameters if one["name"] in pushed]
    return max(found, key=lambda one: (one["elements"], one["name"]), default=None)


def _worker(member: str, parameters: str, window: Iterable[Mapping[str, Any]]) -> _Worker | None:
    """Return a worker's means; None if it has made too few steps of the parameter set."""
    found = [sample["workers"][member] for sample in window if member in sample["workers"]]
    mean = period(found)
    steps = mean.rates.get(parameters, 0.0) * mean.seconds
    if steps < STEPS_MIN - 0.01:
        return None
    push_bytes, pull_bytes = (each * mean.seconds / steps for each in mean.traffic)
    return _Worker(
        id=member,
        seconds=mean.seconds / steps,
        times=mean.step_times(steps),
        push_bytes=push_bytes,
        pull_bytes=pull_bytes,
        transports=frozenset(each["transport"] for one in found for each in one["traffic"]),
    )


def _busiest(members: Iterable[Mapping[str, Any]], window: Sequence[Mapping[str, Any]]) -> _Server | None:
    """Return the server whose threads are busiest; None if none has reported."""
    found = []
    for member in members:
        if member["role"] != "server" or member["state"] != "live":
            continue
        periods = [sample["servers"][member["id"]] for sample in window if member["id"] in sample["servers"]]
        if seconds := sum(one["seconds"] for one in periods):
            threads = max(1, member["kernel_threads"])
            share = sum(one["apply_share"] * one["seconds"] for one in periods) / seconds
            idle = [one["idle_cores"] for one in periods if one.get("idle_cores") is not None]
            busy, cores = min(1.0, share / threads), max(1, member["cores"])
            found.append(_Server(member["id"], busy, threads, cores, fmean(idle) if idle else inf))
    return max(found, key=lambda server: server.busy, default=None)


def _covered(window: Iterable[Mapping[str, Any]]) -> float:
    """Return the longest time that the window has of one worker, in seconds."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for sample in window:
        for member, one in sample["workers"].items():
            seconds[member] += one["seconds"]
    return max(seconds.values())


def _slowest_first(workers: Sequence[_Worker], slow: Iterable[str]) -> list[_Worker]:
    """Return the workers in the order in which others wait for them: first the stragglers, whose ids are ``slow``.

    All receive as slowly as one of them sends, so the time of receiving alone does not tell who is late.
    """
    own = lower_quartile(one.own for one in workers)
    busy = lower_quartile(one.times.busy for one in workers)
    late = {one.id: max(one.own - own, one.times.busy - busy) for one in workers}
    return sorted(workers, key=lambda one: (one.id in slow, late[one.id]), reverse=True)


class _Division:
    """Division of a step into its parts."""

    def __init__(self, parameters: Mapping[str, Any], workers: Sequence[_Worker], server: _Server | None) -> None:
        self.parameters = parameters
        self.workers = workers
        self.server = server
        self.step = median(worker.seconds for worker in workers)
        slow = stragglers({one.id: one.times for one in workers}) if parameters["consistency"] != "asp" else {}
        slowest_first = _slowest_first(workers, slow)
        #: Workers that nobody waits for.
        spared = 0 if parameters["consistency"] != "bsp" else parameters["backup_workers"]
        waited = slowest_first[min(spared, len(slowest_first) - 1) :]
        self.slowest = waited[0]
        self.others = waited[1:] or waited
        self.typical = median(worker.own for worker in self.others)
        self.typical_busy = median(worker.times.busy for worker in self.others)
        self.stragglers = [one for one in waited if one.id in slow]
        self.excess = self._excess()
        self.push_bytes = median(worker.push_bytes for worker in workers)
        self.pull_bytes = median(worker.pull_bytes for worker in workers)
        self.transports = sorted({transport for worker in workers for transport in worker.transports})
        #: Seconds in which the gradient is sent.
        self.sending = median(worker.times.push for worker in workers)
        self.parts = self._parts()

    def _excess(self) -> float:
        """Return the seconds of a step in which workers wait for the slowest straggler; 0 without one."""
        if not self.stragglers:
            return 0.0
        late = max(self.slowest.own - self.typical, self.slowest.times.busy - self.typical_busy)
        return min(max(late, 0.0), self.step)

    def _parts(self) -> dict[str, float]:
        """Return seconds by part, which add up to the step."""
        typical = [one.times for one in (self.others if self.stragglers else [self.slowest])]
        compute = min(median(one.compute for one in typical), self.step - self.excess)
        rest = self.step - self.excess - compute
        kernel = min(rest, self.server.busy * self.step) if self.server is not None else 0.0
        left = rest - kernel
        copying = min(left, median(one.push for one in typical))
        if self.transports == ["shm"]:
            link = copying if self.push_bytes >= TRANSFER_BYTES_MIN else 0.0
        else:
            link = left if self.push_bytes + self.pull_bytes >= TRANSFER_BYTES_MIN else 0.0
        return {SCRIPT: compute, STRAGGLER: self.excess, KERNEL: kernel, LINK: link, LATENCY: left - link}

    def explanation(self, window: Sequence[Mapping[str, Any]]) -> Explanation:
        """Return the explanation with its evidence and the change of the bottleneck."""
        bottleneck = max(self.parts, key=lambda part: self.parts[part])
        change = {
            SCRIPT: self._more_workers,
            STRAGGLER: self._fewer_stragglers,
            KERNEL: self._more_threads,
            LINK: self._fewer_bytes,
            LATENCY: self._fewer_pushes,
        }[bottleneck]()
        return Explanation(
            parameters=self.parameters["name"],
            consistency=self.parameters["consistency"],
            workers=len(self.workers),
            seconds=round(_covered(window), 3),
            step_seconds=self.step,
            parts=self.parts,
            bottleneck=bottleneck,
            culprit=self._culprit(bottleneck),
            evidence=self._evidence(),
            change=change,
        )

    def _culprit(self, bottleneck: str) -> str:
        if bottleneck == KERNEL and self.server is not None:
            return self.server.id
        if bottleneck == STRAGGLER:
            return ", ".join(sorted(one.id for one in self.stragglers)[:3])
        return ", ".join(self.transports) if bottleneck in (LINK, LATENCY) else ""

    def _evidence(self) -> str:
        parts = ", ".join(f"{name} {_time(seconds)}" for name, seconds in self.parts.items() if seconds)
        moved = f"a worker sends {_size(self.push_bytes)} and receives {_size(self.pull_bytes)} a step"
        moved += f" over {' and '.join(self.transports)}" if self.transports else ""
        slowest = ""
        if self.excess:
            slowest = f"; {self.slowest.id} {self._lateness()}"
        kernel = ""
        if self.server is not None:
            kernel = f"; the {self.server.threads} kernel thread(s) of {self.server.id} are {self.server.busy:.0%} busy"
        return f"A step has {parts}; {moved}{slowest}{kernel}."

    def _lateness(self) -> str:
        """Return the times in which the slowest worker differs from the others."""
        own, busy = self.slowest.own, self.slowest.times.busy
        computing = self.slowest.times.compute - median(one.times.compute for one in self.others)
        name = "has a slow link: it " if computing < self.excess / 2 else ""
        if own - self.typical >= busy - self.typical_busy:
            return f"{name}computes and sends for {_time(own)}, the others for {_time(self.typical)}"
        return f"{name}computes, sends and receives for {_time(busy)}, the others for {_time(self.typical_busy)}"

    # --- changes ------------------------------------------------------------------------------------------------------

    def _speedup(self, part: str, remaining: float) -> float:
        """Return the speedup if only this fraction of a part remains."""
        return self.step / max(1e-9, self.step - self.parts[part] * (1 - remaining))

    def _more_workers(self) -> Change:
        count = len(self.workers)
        text = f"One more worker (--nproc-per-node or `psdist scale workers {count + 1}`), on a core of its own,"
        return Change("workers", text, (count + 1) / count, "batches")

    def _fewer_stragglers(self) -> Change:
        """Not waiting for the stragglers: backup workers in BSP, ASP in SSP."""
        names = ", ".join(sorted(one.id for one in self.stragglers)[:3])
        if self.parameters["consistency"] != "bsp":
            # Each is as fast as the slowest one, but for the time that it waits for that one.
            alone = [max(1e-9, one.times.busy + self.step - self.slowest.times.busy) for one in self.workers]
            pushes = sum(1 / seconds for seconds in alone)
            speedup = pushes * self.step / len(self.workers)
            return Change("consistency", f"consistency=ASP(), which does not wait for {names},", speedup, "pushes")
        backup = self.parameters["backup_workers"] + len(self.stragglers)
        text = f"Repairing {names}, or consistency=BSP(backup_workers={backup}), which does not wait for it,"
        return Change("backup_workers", text, self._speedup(STRAGGLER, 0.0))

    def _more_threads(self) -> Change:
        assert self.server is not None
        threads, cores = self.server.threads, self.server.cores
        if threads < cores and self.server.idle >= _IDLE_CORES_MIN:
            text = f"--kernel-threads {cores} for {self.server.id}, which has {threads} on {cores} cores,"
            # A thread without a core of its own adds nothing.
            faster = threads + min(cores - threads, self.server.idle)
            return Change("kernel_threads", text, self._speedup(KERNEL, threads / faster))
        servers = sum(1 for one in self.parameters["servers"] if one["shards"]) or 1
        text = f"Another server, on a host of its own (`psdist scale servers {servers + 1}`),"
        return Change("servers", text, self._speedup(KERNEL, servers / (servers + 1)))

    def _fewer_bytes(self) -> Change:
        if self.transports == ["shm"]:
            text = "gradient_buffers() and copy=False, which leave gradients where the servers read them,"
            return Change("gradient_buffers", text, self._speedup(LINK, 0.0))
        elements = max(1, self.parameters["elements"])
        push, pull = self.push_bytes / elements, self.pull_bytes / elements
        for codec, size in (("Int8()", _INT8_BYTES), ("TopK(0.01)", _TOPK_BYTES)):
            changed = min(push, size) + min(pull, size)
            if changed < 0.7 * (push + pull):
                names = [name for name, now in (("compression", push), ("pull_compression", pull)) if now > 1.2 * size]
                text = " and ".join(f"{name}={codec}" for name in names)
                remaining = _remaining_link(self.parts[LINK], self.sending, push, pull, size)
                return Change(names[0], text, self._speedup(LINK, remaining))
        return self._fewer_pushes()

    def _fewer_pushes(self) -> Change:
        """Accumulating gradients: the script's part remains for each batch, everything else is divided."""
        per_batch = self.parts[SCRIPT] + (self.step - self.parts[SCRIPT]) / _BATCHES
        text = f"Accumulating {_BATCHES} batches per push"
        if "grpc" in self.transports:
            text += " (or PSDIST_TRANSPORT=auto, if grpc is not needed)"
        return Change("batches_per_push", text, self.step / max(1e-9, per_batch), "batches")


def _remaining_link(link: float, sending: float, push: float, pull: float, size: float) -> float:
    """Return the fraction of the link's time that remains with a codec.

    link, sending: seconds of a step on the link now, and those in which a gradient is sent.
    push, pull: bytes of an element now. size: with the codec.

    A link is as fast in both directions, so the bytes tell the time of receiving from that of sending. The step shows
    how much of it is hidden: answers arrive while the gradient is still sent, unless they wait behind it in the queues.
    The same share is hidden with a codec, but no more than there is time of sending.
    """
    if link <= 0:
        return 1.0
    # Buffers take a small gradient immediately: then at least nothing is hidden.
    sending = min(link, max(sending, link * push / (push + pull)))
    receiving = min(link, sending * pull / push) if push else link
    hidden = max(0.0, sending + receiving - link)
    share = hidden / receiving if receiving else 0.0
    sending *= min(1.0, size / push) if push else 0.0
    receiving *= min(1.0, size / pull) if pull else 0.0
    return min(1.0, (sending + receiving - min(share * receiving, sending)) / link)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"
