"""Problems of a run as sentences: who is dead, silent, slow or badly connected, and what cannot be saved.

The scheduler looks about once a second (``Watch``). ``psdist status`` and the dashboard show the problems, and the
history has an event for each one that lasts (``Announcer``). Each alert of ``deploy/monitoring/alerts.yml`` names its
kind.

**The rule for stragglers**, which ``psdist explain`` and the alert PsdistStraggler share: a worker's own time in a step
is that of computing and sending; other workers may have to wait for it. If it receives slowly, its own time is all but
waiting. (Receiving is no part of the first one, because the others receive slowly, too, while a worker sends slowly.) A
straggler's own time exceeds ``FACTOR`` times the lower quartile of all workers' own times, by at least ``STEP_SHARE``
of its step.

Pure: each function reads the JSON forms of ``run_json``.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

#: Kinds of problems, each with whether the run's history has an event of its own for it.
KINDS: Final = {
    "lost": True,
    "silent": False,
    "draining": True,
    "missing": False,
    "shards": True,
    "copies": False,
    "rollback": True,
    "snapshot": True,
    "snapshot_old": False,
    "stalled": False,
    "dropped": False,
    "not_finite": False,
    "straggler": False,
    "link": False,
    "lag": False,
}
#: Those that may be no fault: a script that evaluates, or a machine with few cores.
HARMLESS: Final = frozenset({"straggler", "link", "stalled"})

#: A member that has missed this many heartbeats is called silent.
MISSED_HEARTBEATS: Final = 2
#: Members are missing after this time, and a copy is behind.
_MISSING_SECONDS: Final = 60.0
_LAG_SECONDS: Final = 60.0
_LAG_UPDATES: Final = 100
#: Why workers leave whose work is done.
_DONE: Final = ("closed", "done")
#: Time without an update after which a run is called stalled.
_STALLED_SECONDS: Final = 120.0
#: Age of a snapshot that is old.
_SNAPSHOT_SECONDS: Final = 3600.0
#: A rollback, and pushes that did not count, are shown for this time.
_RECENT_SECONDS: Final = 300.0
#: Samples of a worker from which its slowness is judged.
_WINDOW: Final = 3
#: The others wait for a straggler if their share of waiting exceeds its own by this.
_HELD_UP: Final = 0.2


@dataclass(frozen=True, slots=True)
class Period:
    """A worker's mean over some of its periods.

    shares: of the time, by phase.
    rates: steps per second, by parameter set.
    traffic: pushed and pulled bytes per second.
    """

    seconds: float
    shares: Mapping[str, float]
    rates: Mapping[str, float]
    traffic: tuple[float, float]

    @property
    def rate(self) -> float:
        """Steps per second of the parameter set with most steps."""
        return max(self.rates.values(), default=0.0)

    def step_seconds(self, *phases: str) -> float | None:
        """Return the time that a step spends in these phases; None if there was no step."""
        return sum(self.shares[phase] for phase in phases) / self.rate if self.rate else None

    def step_times(self, steps: float) -> StepTimes:
        """Return the time of a step by phase, if there were this many."""
        return StepTimes(**{phase: self.shares[phase] * self.seconds / steps for phase in StepTimes._fields})


def period(periods: Sequence[Mapping[str, Any]]) -> Period:
    """Return the mean of a worker's periods, in the form of ``sample_json``, by their length."""
    seconds = sum(one["seconds"] for one in periods)

    def mean(values: Iterable[float]) -> float:
        weighted = (value * one["seconds"] for value, one in zip(values, periods, strict=True))
        return float(sum(weighted) / (seconds or 1.0))

    sets = {name for one in periods for name in one["steps_per_second"]}
    push, pull = (
        mean(sum(each[f"{way}_bytes_per_second"] for each in one["traffic"]) for one in periods)
        for way in ("push", "pull")
    )
    return Period(
        seconds,
        {phase: mean(one["phases"][phase] for one in periods) for phase in StepTimes._fields},
        {name: mean(one["steps_per_second"].get(name, 0.0) for one in periods) for name in sets},
        (push, pull),
    )


def problem(who: str, text: str, *, kind: str) -> dict[str, Any]:
    """Return one problem. who: id of a member; empty if it is the run's."""
    return {"who": who, "kind": kind, "text": text}


def of_members(status: dict[str, Any], heartbeat_seconds: float) -> list[dict[str, Any]]:
    """Return the members that were lost, are silent, or leave."""
    found = []
    for member in status["members"]:
        who, role, age = member["id"], member["role"], member["heartbeat_age_seconds"]
        if member["state"] == "lost":
            found.append(problem(who, f"{role} {who} was lost: {member['reason'] or 'no reason known'}", kind="lost"))
        elif member["state"] == "live" and age > MISSED_HEARTBEATS * heartbeat_seconds:
            text = f"{role} {who} is silent for {age:.1f} s: its process is frozen or starved, or its link is cut"
            found.append(problem(who, text, kind="silent"))
        elif member["draining"]:
            found.append(problem(who, f"server {who} is draining: its shards are being moved away", kind="draining"))
    return found


def of_snapshots(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Return why the newest attempt to save a snapshot failed."""
    snapshots = status["snapshots"]
    if snapshots is None or not snapshots["last_failure"]:
        return []
    newest = max((one["time"] for one in snapshots["committed"]), default=0.0)
    if newest > snapshots["last_failure_time"] > 0:
        return []
    count = snapshots["failed"]
    times = f" ({count} attempts failed)" if count > 1 else ""
    return [problem("", f"the last snapshot failed{times}: {snapshots['last_failure']}", kind="snapshot")]


def of_shards(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter sets that have lost shards, or have fewer copies than the run asks for."""
    found = []
    for one in status["parameters"]:
        lost = [shard["number"] for shard in one["shards"] if shard["lost"]]
        short = [s for s in one["shards"] if not s["lost"] and len(s["backups"]) + 1 < status["replicas"]]
        if lost:
            found.append(problem("", f"{one['name']}: {len(lost)} shards are lost", kind="shards"))
        if short:
            text = f"{one['name']}: {len(short)} of {len(one['shards'])} shards lack one of {status['replicas']} copies"
            found.append(problem("", text, kind="copies"))
    return found


def of_workers(samples: Mapping[str, Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the stragglers. samples: each worker's newest periods."""
    periods = {who: period(found) for who, found in samples.items()}
    return [
        _slowness(who, periods[who], [one for other, one in periods.items() if other != who])
        for who in stragglers(step_times(samples))
    ]


def _slowness(who: str, mine: Period, others: list[Period]) -> dict[str, Any]:
    """Return a straggler with the reason for its slowness."""

    def median(*phases: str) -> float:
        return statistics.median(sum(one.shares[phase] for phase in phases) for one in others)

    def exceeds(*phases: str) -> float:
        return sum(mine.shares[phase] for phase in phases) - median(*phases)

    # While it sends slowly, the others receive its results as slowly, instead of waiting for them.
    holds_up = min(exceeds("wait"), exceeds("wait", "pull")) < -_HELD_UP
    rate = statistics.median(one.rate for one in others)
    excess = {
        "straggler": exceeds("compute"),
        "link": max(exceeds("push"), exceeds("push", "pull")),
    }
    kind = max(excess, key=lambda name: excess[name])
    phases = ("compute",) if kind == "straggler" else ("push", "pull")
    verb = "computes" if kind == "straggler" else "sends and receives"
    share = sum(mine.shares[phase] for phase in phases)
    effect = "the others wait for it" if holds_up else f"it makes {mine.rate:.2g} steps/s, the others {rate:.2g}"
    seconds = mine.step_seconds(*phases)
    each = f", {1e3 * seconds:.0f} ms a step" if seconds is not None else ""
    name = "is slow" if kind == "straggler" else "has a slow link"
    return problem(who, f"worker {who} {name}: it {verb} for {share:.0%} of its time{each}, and {effect}", kind=kind)


def of_events(status: dict[str, Any], now: float) -> list[dict[str, Any]]:
    """Return the newest rollback if it was recently. now: seconds since 1970."""
    found = [one for one in status["events"] if one["kind"] == "rollback" and now - one["time"] < _RECENT_SECONDS]
    return [
        problem("", f"rolled back {now - one['time']:.0f} s ago: {one['text']}", kind="rollback") for one in found[-1:]
    ]


def of_old_snapshots(status: dict[str, Any], now: float) -> list[dict[str, Any]]:
    """Return that the newest snapshot is old, if a worker is live. now: seconds since 1970."""
    committed = status["snapshots"]["committed"] if status["snapshots"] else []
    age = now - max((one["time"] for one in committed), default=now)
    if age <= _SNAPSHOT_SECONDS or not _live(status, "worker"):
        return []
    text = (
        f"the newest snapshot is {age / 3600:.1f} h old: a loss of state costs the steps since (psdist snapshot save)"
    )
    return [problem("", text, kind="snapshot_old")]


def _live(status: dict[str, Any], role: str) -> int:
    return sum(member["role"] == role and member["state"] == "live" for member in status["members"])


def _missing(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Return that fewer members are live than wanted. A run without a live worker has ended, or not begun; one whose
    work is done is not missed."""
    done = sum(member["state"] == "left" and member["reason"] in _DONE for member in status["members"])
    wanted = {"worker": status["workers_min"] - done, "server": status["servers_wanted"] or status["servers_min"]}
    live = {role: _live(status, role) for role in wanted}
    short = [f"{live[role]} of {count} {role}s" for role, count in wanted.items() if live[role] < count]
    if not live["worker"] or not short:
        return []
    text = f"only {' and '.join(short)} are live: start the missing ones, or run with fewer (psdist scale)"
    return [problem("", text, kind="missing")]


def _lagging(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the servers with a copy that is far behind."""
    lags = Counter[tuple[str, str, str]]()
    for one in status["parameters"]:
        for copy in one["replicas"]:
            lags[copy["server"], copy["primary"], one["name"]] += copy["lag_updates"]
    return [
        problem(server, f"the copies of {name} on {server} are {lag} updates behind {primary}", kind="lag")
        for (server, primary, name), lag in lags.items()
        if lag > _LAG_UPDATES
    ]


# --- looks ------------------------------------------------------------------------------------------------------------


class Watch:
    """Finds the problems of a run, and remembers between two looks the counts that only their changes explain."""

    def __init__(self) -> None:
        self._number = 0
        self._workers: dict[str, deque[dict[str, Any]]] = {}
        self._places: dict[tuple[str, int], tuple[str, int]] = {}
        self._links_judged_after = 0
        #: By kind and worker: times and numbers of its pushes or slices that did not count.
        self._unused: dict[tuple[str, str], deque[tuple[float, int]]] = {}
        #: By worker: slices that servers have found not finite.
        self._non_finite: dict[str, int] = {}
        #: When each problem that has to last was seen first, and when parameters were updated last.
        self._since: dict[tuple[str, str], float] = {}
        self._updated: float | None = None

    def look(
        self, status: dict[str, Any], samples: Iterable[dict[str, Any]], heartbeat_seconds: float, now: float
    ) -> list[dict[str, Any]]:
        """Return the problems. samples: the new ones, oldest first. heartbeat_seconds: between two heartbeats of a
        member. now: seconds since 1970."""
        for sample in samples:
            self._add(sample)
        members = of_members(status, heartbeat_seconds)
        self._follow_servers(status, members)
        # What a silent member did before says nothing about now.
        silent = {one["who"] for one in members if one["kind"] == "silent"}
        live = {member["id"] for member in status["members"] if member["state"] == "live"}
        for gone in [name for name in self._workers if name not in live - silent]:
            del self._workers[gone]
        self._count_non_finite(status, live, now)
        return [
            *members,
            *of_shards(status),
            *of_events(status, now),
            *of_snapshots(status),
            *of_old_snapshots(status, now),
            *self._lasting(now, [(_missing(status), _MISSING_SECONDS), (_lagging(status), _LAG_SECONDS)]),
            *self._stalled(status, now),
            *self._uncounted(live, now),
            *self._slow_workers(),
        ]

    def _add(self, sample: dict[str, Any]) -> None:
        self._number = sample["number"]
        for worker, one in sample["workers"].items():
            self._workers.setdefault(worker, deque(maxlen=_WINDOW)).append(one)
            self._add_unused("dropped", worker, one["dropped"], sample["time"])
            self._add_unused("not_finite", worker, one["abstained"], sample["time"])
        if any(one["slices_per_second"] for one in sample["servers"].values()):
            self._updated = sample["time"]

    def _add_unused(self, kind: str, worker: str, count: int, now: float) -> None:
        if count:
            self._unused.setdefault((kind, worker), deque()).append((now, count))

    def _count_non_finite(self, status: dict[str, Any], live: set[str], now: float) -> None:
        """Add the slices that servers have left out since the last look: the worker has not counted them itself."""
        totals = Counter[str]()
        for one in status["parameters"]:
            for member in one["members"]:
                totals[member["id"]] += member["non_finite"]
        for worker in live:
            grown = totals[worker] - self._non_finite.get(worker, totals[worker])
            self._add_unused("not_finite", worker, max(0, grown), now)
        self._non_finite = dict(totals)

    def _uncounted(self, live: set[str], now: float) -> list[dict[str, Any]]:
        """Return the workers whose pushes did not count recently."""
        texts = {
            "dropped": "{} pushes of worker {} were dropped within 5 min: it was expelled, or the run rolled back",
            "not_finite": (
                "{} gradients of worker {} were left out within 5 min: they held NaN or Inf (lower the learning rate, "
                "clip, look at its batches), or had weight 0"
            ),
        }
        found = []
        for (kind, worker), counts in list(self._unused.items()):
            while counts and now - counts[0][0] > _RECENT_SECONDS:
                counts.popleft()
            if not counts or worker not in live:
                del self._unused[kind, worker]
            else:
                text = texts[kind].format(sum(count for _, count in counts), worker)
                found.append(problem(worker, text, kind=kind))
        return found

    def _lasting(self, now: float, found: Iterable[tuple[list[dict[str, Any]], float]]) -> list[dict[str, Any]]:
        """Return the problems that have lasted. found: problems of this look, with the time that they have to last."""
        due = [(one, seconds) for several, seconds in found for one in several]
        self._since = {key: self._since.get(key, now) for one, _ in due for key in [(one["who"], one["kind"])]}
        return [one for one, seconds in due if now - self._since[one["who"], one["kind"]] >= seconds]

    def _stalled(self, status: dict[str, Any], now: float) -> list[dict[str, Any]]:
        """Return that no slice was updated for long, although workers are live."""
        live = _live(status, "worker")
        if self._updated is None or not live or not any(one["state"] == "ready" for one in status["parameters"]):
            self._updated = now
        if now - self._updated < _STALLED_SECONDS:
            return []
        text = (
            f"no parameters were updated for {now - self._updated:.0f} s although {live} workers are live: look at the "
            "waits; a script that evaluates or compiles for long is no fault"
        )
        return [problem("", text, kind="stalled")]

    def _slow_workers(self) -> list[dict[str, Any]]:
        """Return the slow workers: by their newest second, so that they are seen soon, and by the window, so that they
        stay while single seconds differ."""
        newest = of_workers({name: [found[-1]] for name, found in self._workers.items()})
        named = {one["who"] for one in newest}
        window = of_workers(self._workers)
        slow = newest + [one for one in window if one["who"] not in named]
        return [one for one in slow if one["kind"] != "link" or self._number >= self._links_judged_after]

    def _follow_servers(self, status: dict[str, Any], members: list[dict[str, Any]]) -> None:
        """Judge no links while a server is silent, or after shards moved, until the samples before that are out of the
        window: a worker that such a server keeps waiting seems to send all the time."""
        servers = {member["id"] for member in status["members"] if member["role"] == "server"}
        places = {
            (one["name"], shard["number"]): (shard["primary"], shard["term"])
            for one in status["parameters"]
            for shard in one["shards"]
        }
        moved = any(self._places.get(shard, place) != place for shard, place in places.items())
        if moved or any(one["kind"] == "silent" and one["who"] in servers for one in members):
            self._links_judged_after = self._number + _WINDOW
        self._places = places


#: Seconds for which a problem lasts before the history has an event, and is gone before it has one of its end.
_ANNOUNCED_SECONDS: Final = 10.0
_OVER_SECONDS: Final = 60.0
#: A problem that flickers counts as lasting.
_GAP_SECONDS: Final = 5.0
#: More members with new problems of a kind get one event together.
_TOGETHER: Final = 5


class Announcement(NamedTuple):
    """An event for the run's history."""

    text: str
    warning: bool
    peer: str


@dataclass(slots=True)
class _Standing:
    """A problem as it was seen: first, last, and whether it has its event."""

    first: float
    last: float
    text: str
    announced: bool = False


class Announcer:
    """Turns problems into events: one when it has lasted, and one when it is over. Kinds with events of their own get
    none."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], _Standing] = {}

    def changes(self, found: Iterable[Mapping[str, Any]], now: float) -> list[Announcement]:
        """Return the events of a look at time ``now``."""
        for one in found:
            if not KINDS[one["kind"]]:
                known = self._known.setdefault((one["kind"], one["who"]), _Standing(now, now, one["text"]))
                known.last, known.text = now, one["text"]
        begun: dict[str, list[tuple[str, str]]] = {}
        over: list[Announcement] = []
        for (kind, who), known in list(self._known.items()):
            if not known.announced and now - known.last > _GAP_SECONDS:
                del self._known[kind, who]
            elif not known.announced and known.last - known.first >= _ANNOUNCED_SECONDS:
                known.announced = True
                begun.setdefault(kind, []).append((who, known.text))
            elif now - known.last >= _OVER_SECONDS:
                del self._known[kind, who]
                over.append(Announcement(f"over: {known.text}", False, who))
        return [*(one for kind, each in begun.items() for one in _begun(kind, each)), *over[:_TOGETHER]]


def _begun(kind: str, each: list[tuple[str, str]]) -> list[Announcement]:
    warning = kind not in HARMLESS
    if len(each) <= _TOGETHER:
        return [Announcement(text, warning, who) for who, text in each]
    return [Announcement(f"{each[0][1]}; the same holds for {len(each) - 1} others", warning, each[0][0])]


# --- stragglers -------------------------------------------------------------------------------------------------------

#: Smallest own time of a straggler, divided by the lower quartile.
FACTOR: Final = 1.5
#: Least part of its step by which a straggler exceeds the lower quartile: less is not worth a word.
STEP_SHARE: Final = 0.1
#: With fewer steps of the fastest worker one more or less is a large error, so all workers count as equally fast.
_STEPS_MIN: Final = 10.0


class StepTimes(NamedTuple):
    """A worker's mean step: seconds by phase."""

    compute: float
    push: float
    wait: float
    pull: float

    @property
    def own(self) -> float:
        """Seconds of computing and sending."""
        return self.compute + self.push

    @property
    def busy(self) -> float:
        """Seconds of all but waiting."""
        return self.own + self.pull


def stragglers(workers: Mapping[str, StepTimes]) -> dict[str, float]:
    """Return the stragglers among workers by id, each with its own time divided by the lower quartile."""
    found: dict[str, float] = {}
    for own in ({who: one.own for who, one in workers.items()}, {who: one.busy for who, one in workers.items()}):
        typical = lower_quartile(own.values())
        for who, seconds in own.items():
            if seconds > FACTOR * typical and seconds - typical > STEP_SHARE * sum(workers[who]):
                found.setdefault(who, seconds / typical if typical else float("inf"))
    return found


def step_times(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, StepTimes]:
    """Return the mean step of each worker from its periods, in the form of ``sample_json``.

    A step counts for the parameter set with most steps. A worker without a finished step has its time so far. In a
    window with few steps the times are those of a second.
    """
    periods = {who: period(found) for who, found in samples.items()}
    steps = {who: max(1.0, one.rate * one.seconds) for who, one in periods.items()}
    if max(steps.values(), default=0.0) < _STEPS_MIN:
        steps = {who: one.seconds or 1.0 for who, one in periods.items()}
    return {who: one.step_times(steps[who]) for who, one in periods.items()}


def lower_quartile(values: Iterable[float]) -> float:
    """Return the quartile between two neighbours, as Prometheus' ``quantile(0.25, ...)`` does; 0 without values."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    below, part = divmod((len(ordered) - 1) / 4, 1)
    left, right = ordered[int(below)], ordered[min(int(below) + 1, len(ordered) - 1)]
    return left + part * (right - left)
