"""State of a run as its views show it: nested objects by id, small enough to be sent every second.

The dashboard's page and the terminal show a ``RunState``, which is assembled from the status and the samples; the page
of ``psdist report`` shows a ``saved_run``. Pure. Numbers are rounded as the page shows them, so that few of them
change. There are no nulls, and names of peers are values or keys, never markup.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from psdist.monitoring.problems import period
from psdist.monitoring.run_json import sample_json
from psdist.monitoring.run_summary import MemberPart, Point, RunCurves, Summary, WorkerPart, point_of
from psdist.v1 import scheduler_pb2 as pb

#: Points of the recent curve. One a second: five minutes.
POINTS: Final = 300
#: Samples of a worker over which its phases are shown.
_WINDOW: Final = 3
#: Events that the page shows, of a live run and of a summary.
EVENTS_SHOWN: Final = 100
EVENTS_SAVED: Final = 500
#: Kinds of events that are faults, or reactions to them.
_FAULTS: Final = frozenset({"loss", "promotion", "rollback", "snapshot_failed", "problem"})
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

    def state(self, status: dict[str, Any]) -> Tree:
        """Return the state for a status in the form of ``status_json``."""
        # What a silent member did before says nothing about now.
        silent = {one["who"] for one in status["problems"] if one["kind"] == "silent"}
        live = {member["id"] for member in status["members"] if member["state"] == "live"} - silent
        for table in (self._workers, self._servers):
            for gone in [name for name in table if name not in live]:
                del table[gone]
        return without_nulls(
            {
                "run": _run(status),
                "problems": status["problems"],
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
