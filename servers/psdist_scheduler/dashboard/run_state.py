"""State of a run as the page shows it: nested objects by id, small enough to be sent every second.

Pure: assembled from the JSON forms of ``psdist.monitoring.run_json``. Numbers are rounded as the page shows them, so
that few of them change. There are no nulls, and names of peers are values or keys, never markup.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any, Final

from psdist_scheduler.dashboard import problems

#: Samples of a worker from which its slowness is judged.
_WINDOW: Final = 3
#: Events that the page shows.
EVENTS_SHOWN: Final = 100
#: A heartbeat that is younger is shown as current: its age would change every second.
_AGE_SHOWN_SECONDS: Final = 1.0
#: Sentences of one member's waits, and those of the run.
_WAITS_SHOWN: Final = 4
_RUN_WAITS_SHOWN: Final = 20
_PHASES: Final = ("compute", "push", "wait", "pull")


class RunState:
    """Assembler of the page's state, which remembers the last samples and the curves."""

    def __init__(self) -> None:
        self.curves = Curves()
        self._workers: dict[str, deque[dict[str, Any]]] = {}
        self._servers: dict[str, dict[str, Any]] = {}
        self._places: dict[tuple[str, int], tuple[str, int]] = {}
        self._links_judged_after = 0
        self.last_sample = 0

    def add_samples(self, samples: list[dict[str, Any]]) -> list[Point]:
        """Take in samples in the form of ``sample_json``, oldest first. Returns their points."""
        points = []
        for sample in samples:
            self.last_sample = sample["number"]
            for worker, one in sample["workers"].items():
                self._workers.setdefault(worker, deque(maxlen=_WINDOW)).append(one)
            self._servers |= sample["servers"]
            if sample["workers"]:
                points.append(point(sample))
                self.curves.add(points[-1])
        return points

    def state(self, status: dict[str, Any], heartbeat_seconds: float) -> Tree:
        """Return the state for a status in the form of ``status_json``. heartbeat_seconds: between two heartbeats of a
        member."""
        members = problems.of_members(status, heartbeat_seconds)
        self._follow_servers(status, members)
        # What a silent member did before says nothing about now.
        silent = {one["who"] for one in members if one["kind"] == "silent"}
        live = {member["id"] for member in status["members"] if member["state"] == "live"} - silent
        for table in (self._workers, self._servers):
            for gone in [name for name in table if name not in live]:
                del table[gone]
        found = [
            *members,
            *problems.of_shards(status),
            *problems.of_snapshots(status),
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
        newest = problems.of_workers({name: [found[-1]] for name, found in self._workers.items()})
        named = {one["who"] for one in newest}
        window = problems.of_workers(self._workers)
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
            last, recent = samples[-1], problems.period(samples)
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


# --- curves -----------------------------------------------------------------------------------------------------------
#
# Curves since the scheduler opened the dashboard: the last minutes second by second, and the whole run with as many
# points. Both curves have at most ``POINTS`` points, however long the run is.

#: Points of each curve. One a second in the recent curve: five minutes.
POINTS: Final = 300

Point = dict[str, Any]


def point(sample: dict[str, Any]) -> Point:
    """Return the point of one sample, as ``sample_json`` returns it: means of the numbers that workers report, and the
    rates of the run. Numbers that are not finite count as missing."""
    workers = list(sample["workers"].values())
    names = sorted({name for worker in workers for name in worker["reported"]})
    sets = sorted({name for worker in workers for name in worker["steps_per_second"]})
    reported = {name: _mean(worker["reported"].get(name) for worker in workers) for name in names}
    steps = {name: _mean(worker["steps_per_second"].get(name) for worker in workers) for name in sets}
    return {
        "time": sample["time"],
        "step": max((worker["reported_step"] for worker in workers), default=0),
        "reported": {name: value for name, value in reported.items() if value is not None},
        "steps": {name: value for name, value in steps.items() if value is not None},
        "samples": round(sum(worker["samples_per_second"] for worker in workers), 1),
    }


class Curves:
    """The points of a run: the recent ones, and those of the whole run.

    A point of the whole run is the mean of ``stride`` points. When there are too many, neighbours are joined and the
    stride doubles.
    """

    def __init__(self) -> None:
        self.recent: deque[Point] = deque(maxlen=POINTS)
        self.whole: list[Point] = []
        self.stride = 1
        self._pending: list[Point] = []

    def add(self, new: Point) -> None:
        """Add the newest point."""
        self.recent.append(new)
        self._pending.append(new)
        if len(self._pending) == self.stride:
            self.whole.append(_joined(self._pending))
            self._pending = []
        if len(self.whole) > POINTS:
            self.whole = [_joined(self.whole[at : at + 2]) for at in range(0, len(self.whole), 2)]
            self.stride *= 2
            self._pending = []


def _joined(points: list[Point]) -> Point:
    if len(points) == 1:
        return points[0]
    last = points[-1]
    return {
        "time": last["time"],
        "step": last["step"],
        "reported": _means(points, "reported"),
        "steps": _means(points, "steps"),
        "samples": _mean(one["samples"] for one in points),
    }


def _means(points: list[Point], key: str) -> dict[str, float]:
    names = dict.fromkeys(name for one in points for name in one[key])
    return {name: mean for name in names if (mean := _mean(one[key].get(name) for one in points)) is not None}


def _mean(values: Iterable[float | str | None]) -> float | None:
    """Return the mean of the numbers among ``values``, with six digits; None without any."""
    numbers = [value for value in values if isinstance(value, int | float)]
    return float(f"{sum(numbers) / len(numbers):.6g}") if numbers else None


# --- merge patch ------------------------------------------------------------------------------------------------------
#
# RFC 7396: the members of an object that changed, and null for those that are gone. Lists are replaced as a whole. An
# object that is to be patched holds no null.

Tree = dict[str, Any]


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
