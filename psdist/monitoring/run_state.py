"""State of a run as its views show it: nested objects by id, small enough to be sent every second.

**The rule for stragglers**, which ``psdist explain`` and the alert PsdistStraggler share: a worker's own time in a step
is that of computing and sending; other workers may have to wait for it. If it receives slowly, its own time is all but
waiting. (Receiving is no part of the first one, because the others receive slowly, too, while a worker sends slowly.) A
straggler's own time exceeds ``FACTOR`` times the lower quartile of all workers' own times, by at least ``STEP_SHARE``
of its step. The alert is in ``deploy/monitoring/alerts.yml``.

The dashboard's page and the terminal show a ``RunState``, which is assembled from the status and the samples; the page
of ``psdist report`` shows a ``saved_run``. Pure. Numbers are rounded as the page shows them, so that few of them
change. There are no nulls, and names of peers are values or keys, never markup.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec

from psdist.monitoring.run_json import sample_json
from psdist.monitoring.run_summary import MemberPart, Point, RunCurves, Summary, WorkerPart, point_of
from psdist.v1 import scheduler_pb2 as pb

#: A member that has missed this many heartbeats is called silent.
MISSED_HEARTBEATS: Final = 2
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


def member_problems(status: dict[str, Any], heartbeat_seconds: float) -> list[dict[str, Any]]:
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


def snapshot_problems(status: dict[str, Any]) -> list[dict[str, Any]]:
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


def shard_problems(status: dict[str, Any]) -> list[dict[str, Any]]:
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


def worker_problems(samples: Mapping[str, Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
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


#: Points of the recent curve. One a second: five minutes.
POINTS: Final = 300
#: Samples of a worker from which its slowness is judged.
_WINDOW: Final = 3
#: Events that the page shows, of a live run and of a summary.
EVENTS_SHOWN: Final = 100
EVENTS_SAVED: Final = 500
#: Kinds of events that are faults, or reactions to them.
_FAULTS: Final = frozenset({"loss", "promotion", "rollback", "snapshot_failed"})
#: A heartbeat that is younger is shown as current: its age would change every second.
_AGE_SHOWN_SECONDS: Final = 1.0
#: Sentences of one member's waits, and those of the run.
_WAITS_SHOWN: Final = 4
_RUN_WAITS_SHOWN: Final = 20
_PHASES: Final = ("compute", "push", "wait", "pull")

Tree = dict[str, Any]


class RunState:
    """Assembler of the state, which remembers the last samples and the curves."""

    def __init__(self) -> None:
        #: The curves: second by second, and of the whole run.
        self.recent: deque[Point] = deque(maxlen=POINTS)
        self.whole = RunCurves()
        self._workers: dict[str, deque[Tree]] = {}
        self._servers: dict[str, Tree] = {}
        self._places: dict[tuple[str, int], tuple[str, int]] = {}
        self._links_judged_after = 0
        self.last_sample = 0

    def add_samples(self, samples: Iterable[pb.RunSample], status: Tree, whole: RunCurves | None = None) -> list[Point]:
        """Take in samples, oldest first. Returns their points.

        status: in the form of ``status_json``.
        whole: curves of the whole run, samples included; None if it began with the first sample.
        """
        modes = {one["name"]: one["consistency"] for one in status["parameters"]}
        points = []
        for sample in samples:
            if sample.number <= self.last_sample:  # The scheduler restarted, and counts from 1 again.
                self.recent.clear()
            self.last_sample = sample.number
            form = sample_json(sample)
            for worker, one in form["workers"].items():
                self._workers.setdefault(worker, deque(maxlen=_WINDOW)).append(one)
            self._servers |= form["servers"]
            if form["workers"]:
                points.append(point_of(sample, modes))
                if whole is None:
                    self.whole.add(point_of(sample, modes))
        self.recent.extend(points)
        self.whole = whole or self.whole
        return points

    def state(self, status: dict[str, Any], heartbeat_seconds: float) -> Tree:
        """Return the state for a status in the form of ``status_json``. heartbeat_seconds: between two heartbeats of a
        member."""
        members = member_problems(status, heartbeat_seconds)
        self._follow_servers(status, members)
        # What a silent member did before says nothing about now.
        silent = {one["who"] for one in members if one["kind"] == "silent"}
        live = {member["id"] for member in status["members"] if member["state"] == "live"} - silent
        for table in (self._workers, self._servers):
            for gone in [name for name in table if name not in live]:
                del table[gone]
        found = [
            *members,
            *shard_problems(status),
            *snapshot_problems(status),
            *self._slow_workers(),
        ]
        return without_nulls(
            {
                "run": _run(status),
                "problems": found,
                "waits": [str(text) for text in status["waiting_for"][:_RUN_WAITS_SHOWN]],
                "workers": {m["id"]: self._worker(m) for m in status["members"] if m["role"] == "worker"},
                "servers": {m["id"]: self._server(m, status) for m in status["members"] if m["role"] == "server"},
                "parameters": {one["name"]: _parameters(one) for one in status["parameters"]},
                "traffic": self._traffic(),
                "events": {str(one["number"]): _event(one) for one in status["events"][-EVENTS_SHOWN:]},
                "snapshots": _snapshots(status["snapshots"]),
                "datasets": {one["name"]: _dataset(one) for one in status["datasets"]},
            }
        )

    def _slow_workers(self) -> list[dict[str, Any]]:
        """Return the slow workers: by their newest second, so that they are seen soon, and by the window, so that they
        stay while single seconds differ."""
        newest = worker_problems({name: [found[-1]] for name, found in self._workers.items()})
        named = {one["who"] for one in newest}
        window = worker_problems(self._workers)
        slow = newest + [one for one in window if one["who"] not in named]
        return [one for one in slow if one["kind"] != "link" or self.last_sample >= self._links_judged_after]

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
            self._links_judged_after = self.last_sample + _WINDOW
        self._places = places

    def _worker(self, member: dict[str, Any]) -> Tree:
        samples = self._workers.get(member["id"])
        state: Tree = {**_member(member), "rank": member["rank"], "links": _links(member["connections"])}
        if samples:
            last, recent = samples[-1], period(samples)
            state |= {
                "phases": [round(100 * recent.shares[phase]) for phase in _PHASES],
                "rate": _digits(recent.rate),
                "sent": _digits(sum(one["push_bytes_per_second"] for one in last["traffic"])),
                "received": _digits(sum(one["pull_bytes_per_second"] for one in last["traffic"])),
                "staleness": last["staleness"],
            }
        return state

    def _server(self, member: dict[str, Any], status: dict[str, Any]) -> Tree:
        held = [one for each in status["parameters"] for one in each["servers"] if one["id"] == member["id"]]
        state: Tree = {
            **_member(member),
            "device": member["device"],
            "shards": sum(one["shards"] for one in held),
            "copies": sum(one["copies"] for one in held),
            "weights": sum(one["weight_bytes"] for one in held),
        }
        if (last := self._servers.get(member["id"])) is not None:
            state |= {
                "slices": _digits(last["slices_per_second"]),
                "apply": round(100 * last["apply_share"]),
                "waiting_bytes": _digits(last["waiting_bytes"]),
                "resident": _digits(last["resident_bytes"]),
                "lag": last["lag_updates"],
            }
        return state

    def _traffic(self) -> Tree:
        """Return the bytes per second of all workers, by transport and codecs."""
        found: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        for samples in self._workers.values():
            for one in samples[-1]["traffic"]:
                row = found[f"{one['transport']}|{one['push_codec']}|{one['pull_codec']}"]
                row[0] += 1
                row[1] += one["push_bytes_per_second"]
                row[2] += one["pull_bytes_per_second"]
        return {name: [row[0], _digits(row[1]), _digits(row[2])] for name, row in sorted(found.items())}


def _run(status: dict[str, Any]) -> Tree:
    names = ("version", "phase", "epoch", "workers_min", "servers_min", "replicas")
    return {"id": status["run_id"], **{name: status[name] for name in names}}


def _member(member: dict[str, Any]) -> Tree:
    age = member["heartbeat_age_seconds"]
    return {
        **{name: member[name] for name in ("state", "host", "pid", "incarnation")},
        "reason": member["reason"] or None,
        "draining": member["draining"] or None,
        "age": round(age, 1) if age >= _AGE_SHOWN_SECONDS and member["state"] == "live" else None,
        "waits": member["waiting_for"][:_WAITS_SHOWN] or None,
    }


def _links(connections: list[dict[str, Any]]) -> Tree:
    """Return the number of a worker's connections, by transport and the reason for it."""
    counts: Tree = {}
    for one in connections:
        name = f"{one['transport']}|{one['reason']}"
        counts[name] = counts.get(name, 0) + 1
    return counts


def _parameters(one: dict[str, Any]) -> Tree:
    names = ("state", "tensors", "elements", "slices", "consistency", "optimizer", "version_min", "version_max")
    lags: dict[int, list[Any]] = {}
    for copy in one["replicas"]:
        lags.setdefault(copy["shard"], []).append(
            [copy["server"], copy["state"], copy["lag_updates"], copy["slices_filled"], copy["slices"], copy["carrier"]]
        )
    return {
        **{name: one[name] for name in names},
        "rate": _digits(one["steps_per_second"]),
        "shards": {
            str(shard["number"]): {
                "primary": shard["primary"],
                "term": shard["term"],
                "backups": shard["backups"] or None,
                "filling": shard["filling"] or None,
                "lost": shard["lost"] or None,
                "copies": lags.get(shard["number"]),
            }
            for shard in one["shards"]
        },
    }


def _event(one: dict[str, Any]) -> list[Any]:
    return [round(one["time"], 1), one["kind"], one["text"], bool(one["warning"])]


def _snapshots(one: dict[str, Any] | None) -> Tree | None:
    if one is None:
        return None
    return {
        "storage": one["storage"],
        "policy": one["policy"],
        "committed": one["committed"],
        "attempt": one["attempt"],
        "failed": one["failed"],
        "last_failure": one["last_failure"] or None,
        "restored": one["restored"]["directory"] if one["restored"] else None,
    }


def _dataset(one: dict[str, Any]) -> Tree:
    return {name: one[name] for name in ("data_epoch", "data_epochs", "ranges", "done_ranges", "leased_ranges")}


def _digits(value: float) -> float:
    """Return a number with three significant digits, as an integer if it is one."""
    rounded = float(f"{value:.3g}")
    return int(rounded) if rounded.is_integer() else rounded


# --- a summary --------------------------------------------------------------------------------------------------------


def saved_run(summary: Summary) -> Tree:
    """Return the page of a summary, in the form of the message that has the whole state of a live run.

    Times and rates are those of the whole run, faults are its problems, and facts are in a table.
    """
    configuration, events = summary.configuration, summary.history.events
    members = {one.id: one for one in summary.members}
    workers = dict.fromkeys([*summary.workers, *(one.id for one in summary.members if one.role == "worker")])
    storage = configuration.get("storage")
    state = {
        "run": {"id": summary.run_id, "phase": f"{summary.state}{summary.reason and ': '}{summary.reason}"},
        "facts": _facts(summary),
        "problems": [
            {"who": "", "kind": one.kind, "text": f"{_moment(one.time)}: {one.text}"}
            for one in [event for event in events if event.kind in _FAULTS][-EVENTS_SAVED:]
        ],
        "waits": [],
        "workers": {name: _saved_worker(members.get(name), summary.workers.get(name)) for name in workers},
        "servers": {one.id: _saved_member(one) for one in summary.members if one.role == "server"},
        "parameters": {one.name: {**msgspec.to_builtins(one), "shards": {}} for one in summary.parameters},
        "traffic": {},
        "events": {str(one.number): _event(msgspec.to_builtins(one)) for one in events[-EVENTS_SAVED:]},
        "events_omitted": summary.history.omitted + len(events[:-EVENTS_SAVED]),
        "snapshots": {
            "storage": storage,
            "policy": configuration.get("snapshots"),
            "committed": msgspec.to_builtins(summary.snapshots),
        } if storage else None,
        "datasets": {},
    }  # fmt: skip
    points = msgspec.to_builtins(summary.curves.points)
    return {"time": summary.written, "state": without_nulls(state), "recent": [], "whole": points}


def _facts(summary: Summary) -> dict[str, str]:
    points, steps = summary.curves.points, defaultdict[str, float](float)
    for point in points:
        for name, count in point.steps.items():
            steps[name] += count
    return {
        "first seen": _moment(summary.started),
        "last seen": _moment(summary.written),
        "time with training": f"{sum(point.seconds for point in points):,.0f} s",
        **{f"updates of {name}": f"{count:,.0f}" for name, count in sorted(steps.items())},
        "schedulers, one after another": str(summary.schedulers),
        **{name.replace("_", " "): str(value) for name, value in summary.configuration.items()},
        **{f"{name}, where the scheduler ran": value for name, value in summary.environment.items()},
    }


def _saved_member(member: MemberPart) -> Tree:
    threads = f"{member.kernel_threads} kernel threads, {member.cores} cores" if member.cores else ""
    notes = (f"on {member.host}", member.device if member.device != "cpu" else "", threads)
    return {
        **{name: getattr(member, name) for name in ("state", "host", "incarnation")},
        "reason": member.reason or None,
        "resident": member.resident_bytes,
        "note": "; ".join(filter(None, notes)),
    }


def _saved_worker(member: MemberPart | None, part: WorkerPart | None) -> Tree:
    state: Tree = {"state": "gone"} if member is None else _saved_member(member)
    if part is None:
        return state
    seconds = [max(0.0, getattr(part.phases, phase)) for phase in _PHASES]
    total = sum(seconds) or 1.0
    counts = f"{part.pushes:,.0f} pushes" + (f", {part.dropped:,.0f} dropped" if part.dropped else "")
    return state | {
        "phases": [round(100 * one / total) for one in seconds],
        "rate": _digits(part.pushes / total),
        "sent": _digits(part.push_bytes / total),
        "received": _digits(part.pull_bytes / total),
        "note": "; ".join(filter(None, (state.get("note"), counts))),
    }


def _moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g}"


# --- merge patch ------------------------------------------------------------------------------------------------------
#
# RFC 7396: the members of an object that changed, and null for those that are gone. Lists are replaced as a whole. An
# object that is to be patched holds no null.


def difference(before: Tree, after: Tree) -> Tree:
    """Return the patch that turns ``before`` into ``after``; empty if they are equal."""
    patch: Tree = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            if inner := difference(old, value):
                patch[name] = inner
        elif name not in before or old != value:
            patch[name] = value
    return patch


def without_nulls(tree: Tree) -> Tree:
    """Return ``tree`` without the members that are None, which a patch could not set."""
    return {
        name: without_nulls(value) if isinstance(value, dict) else value
        for name, value in tree.items()
        if value is not None
    }
