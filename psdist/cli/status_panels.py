"""The panels of ``psdist status`` as lines of text, made from a ``RunView``. Pure.

``psdist status`` prints the first panel, with the title above it; ``psdist status --watch`` shows all of them. A panel
has heads, which stay, and rows, which a filter selects. State is shown by signs and words, and colour only adds to
them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from rich.text import Text

from psdist.addresses import is_loopback, parse_address
from psdist.cli.tables import (
    SNAPSHOT_COLUMNS,
    clock,
    duration,
    moment,
    natural,
    rate,
    snapshot_row,
    state_text,
    steps,
    table,
)
from psdist.cli.terminal import printable, printable_values
from psdist.launcher.events import plural
from psdist.launcher.scheduler_calls import size
from psdist.monitoring.dashboard import dashboard_link
from psdist.monitoring.run_json import status_json
from psdist.monitoring.run_state import RunState
from psdist.security.tls import WARN_SECONDS, utc
from psdist.v1 import scheduler_pb2 as pb

_LEVELS: Final = "▁▂▃▄▅▆▇█"
#: Sign and colour of each phase in a worker's bar.
PHASE_SIGNS: Final = {"compute": ("█", "green"), "push": ("▓", "blue"), "wait": ("░", "yellow"), "pull": ("▒", "cyan")}
_BAR_COLUMNS: Final = 24
#: Of the first panel.
_SHOWN_EVENTS: Final = 8
_SHOWN_SNAPSHOTS: Final = 4


class RunView:
    """A run as its panels show it. Its texts cannot control the terminal.

    status: the JSON form of the last status; None before the first one.
    state: of ``RunState``.
    trouble: why the status is not the newest.
    time: the scheduler's clock at the last status, in seconds since 1970.
    dashboard_key: for the link to the dashboard; empty if it is not known.
    """

    def __init__(self, dashboard_key: str = "") -> None:
        self.dashboard_key = dashboard_key
        self.status: dict[str, Any] | None = None
        self.state: dict[str, Any] = {}
        self.trouble = ""
        self.time = 0.0
        self.activity = RunState()

    def add(self, answer: pb.GetStatusResponse, samples: Iterable[pb.RunSample] = ()) -> None:
        """Take an answer of the scheduler. samples: those after ``activity.last_sample``, oldest first."""
        status = status_json(answer)
        self.activity.add_samples(samples, status)
        self.state = printable_values(self.activity.state(status))
        self.status, self.trouble, self.time = printable_values(status), "", answer.time


class Panel(NamedTuple):
    """Lines of a panel. heads: lines that no filter hides."""

    heads: list[Text]
    rows: list[Text]

    def matching(self, words: str) -> list[Text]:
        """Return the heads, and the rows that contain ``words`` in any case."""
        found = [row for row in self.rows if words.lower() in row.plain.lower()]
        if self.rows and not found:
            found = [Text(f"none of {plural(len(self.rows), 'line')} contains {words!r}", "dim")]
        return [*self.heads, *found]


def title(run: RunView) -> list[Text]:
    """Return the lines above all panels: the notice if the scheduler does not answer, and the state of the run."""
    notice = [Text(f"! {printable(run.trouble)}", "bold red")] if run.trouble else []
    if (status := run.status) is None:
        return [*notice, Text("no status yet")]
    counted = Counter((member["role"], member["state"]) for member in status["members"])
    facts = [
        f"up {duration(status['uptime_seconds'])}",
        f"epoch {status['epoch']}",
        # 0: no number was set.
        *([f"servers wanted {status['servers_wanted']}"] if status["servers_wanted"] else []),
        f"copies of each shard {status['replicas']}",
        *(f"{plural(count, role)} {state}" for (role, state), count in sorted(counted.items())),
        f"psdist {status['version']}",
    ]
    found = [Text(f"{status['run_id']}: {status['phase']}", "bold"), Text(", ".join(facts))]
    if status["metrics_address"]:
        url = dashboard_link(status["metrics_address"], "", secure=_is_secure(status, "metrics_address"))
        found.append(Text(f"metrics: {url}metrics; ports of all processes: /targets"))
    if status["dashboard_address"]:
        is_secure = _is_secure(status, "dashboard_address")
        link = dashboard_link(status["dashboard_address"], run.dashboard_key, secure=is_secure)
        found.append(Text(f"dashboard: {link}"))
    return [*notice, *found]


def _is_secure(status: dict[str, Any], name: str) -> bool:
    """True if a port of the scheduler speaks TLS: it does beyond its machine if the scheduler has a certificate."""
    return bool(status["certificate_not_after"]) and not is_loopback(parse_address(status[name])[0])


def notices(run: RunView) -> list[Text]:
    """Return a line for each problem, each certificate that ends soon, and each wait, with its reason."""
    if (status := run.status) is None:
        return []
    ends = {"the scheduler": status["certificate_not_after"]}
    ends |= {member["id"]: member["certificate_not_after"] for member in status["members"]}
    now = time.time()
    certificates = [
        f"certificate of {name} {'expired' if end <= now else 'expires'} at {utc(end)}: renew it (psdist certs issue)"
        for name, end in ends.items()
        if end is not None and end - now < WARN_SECONDS
    ]
    waits = [f"{member['id']} waits {reason}" for member in status["members"] for reason in member["waiting_for"]]
    return [
        *(Text(f"! {one['text']}", "red") for one in run.state["problems"]),
        *(Text(f"! {warning}", "yellow") for warning in certificates),
        *(Text(f"… waiting: {wait}", "yellow") for wait in dict.fromkeys([*status["waiting_for"], *waits])),
    ]


# --- the panels -------------------------------------------------------------------------------------------------------


def overview(run: RunView, width: int) -> Panel:
    """Return everything but curves: members, parameter sets, shards, data sets, snapshots, connections, events."""
    if (status := run.status) is None:
        return Panel([], [])
    snapshots_shown = _snapshots(status["snapshots"], _SHOWN_SNAPSHOTS) if status["snapshots"] else []
    parts = (
        *(_members(run, "worker", 0), _members(run, "server", 0), _parameters(status), _shards(status)),
        *(_datasets(status), snapshots_shown, _connections(status), _events(status["events"][-_SHOWN_EVENTS:])),
    )
    return Panel([], [line for part in parts for line in part])


def training(run: RunView, width: int) -> Panel:
    """Return parameter sets, reported values such as the loss, and throughput, as curves of the last minutes."""
    if (status := run.status) is None:
        return Panel([], [])
    points = [point for point in run.activity.recent if point.seconds]
    curves: list[tuple[str, str, list[float]]] = []
    names = dict.fromkeys(name for point in points for name in point.reported)
    for name in sorted(names, key=lambda name: ("loss" not in name, name)):
        values = [point.reported[name].value for point in points if name in point.reported]
        curves.append((printable(name), f"{values[-1]:.4g}", values))
    for name in dict.fromkeys(name for point in points for name in point.steps):
        values = [point.steps.get(name, 0.0) / point.seconds for point in points]
        curves.append((printable(name), f"{rate(values[-1])} steps/s", values))
    if any(point.samples for point in points):
        values = [point.samples / point.seconds for point in points]
        curves.append(("samples", f"{rate(values[-1])} samples/s", values))
    rows = [*_parameters(status), *_datasets(status), *(line for one in curves for line in _curve(*one, width))]
    return Panel([] if rows else [Text("no parameters yet", "dim")], rows)


def workers(run: RunView, width: int) -> Panel:
    """Return the workers with their phases as bars."""
    legend = Text.assemble(*((f"{sign} {phase}  ", style) for phase, (sign, style) in PHASE_SIGNS.items()))
    found = _members(run, "worker", max(8, min(width - 70, 60)))
    return Panel([legend, found[0]], found[1:]) if found else Panel([Text("no workers yet", "dim")], [])


def shards(run: RunView, width: int) -> Panel:
    """Return the shards of each parameter set by primary, with their copies and lag, and the servers' work."""
    rows = [] if run.status is None else [*_shards(run.status), *_members(run, "server", 0)]
    return Panel([] if rows else [Text("no servers yet", "dim")], rows)


def transports(run: RunView, width: int) -> Panel:
    """Return the bytes by transport and codec, and how workers reach servers, with the reason."""
    if (status := run.status) is None:
        return Panel([], [])
    values = [point.bytes / point.seconds for point in run.activity.recent if point.seconds]
    curve = _curve("payload", f"{size(round(values[-1]))}/s", values, width) if values else ()
    traffic = (
        [*(name or "none" for name in key.split("|")), str(count), *(f"{size(round(each))}/s" for each in moved)]
        for key, (count, *moved) in run.state["traffic"].items()
    )
    columns = ("transport", "push as", "pull as", "workers", "pushed", "pulled")
    return Panel([], [*curve, *table(columns, traffic), *_connections(status)])


def events(run: RunView, width: int) -> Panel:
    """Return the history of the run, the newest event first. A warning has the sign ``!``."""
    rows = [] if run.status is None else _events(run.status["events"])[::-1]
    return Panel([] if rows else [Text("no events yet", "dim")], rows)


def snapshots(run: RunView, width: int) -> Panel:
    """Return the committed snapshots, and the one under way or the last failure."""
    found = None if run.status is None else run.status["snapshots"]
    if not found:
        return Panel([Text("this run has no storage: it takes no snapshots", "dim")], [])
    return Panel([], _snapshots(found, len(found["committed"])))


#: The panels in the order of their keys.
PANELS: Final[dict[str, Callable[[RunView, int], Panel]]] = {
    "run": overview,
    "training": training,
    "workers": workers,
    "shards": shards,
    "transports": transports,
    "events": events,
    "snapshots": snapshots,
}


# --- parts ------------------------------------------------------------------------------------------------------------


def _members(run: RunView, role: str, bar: int) -> list[Text]:
    """Return the members of a role: those that are not live first, then in the order of their numbers.

    bar: columns of the time by phase; 0 without it.
    """
    members = [] if run.status is None else [one for one in run.status["members"] if one["role"] == role]
    named = {one["who"] for one in run.state["problems"]} if members else set()
    each = run.state[f"{role}s"] if members else {}

    def row(member: dict[str, Any]) -> list[str | Text]:
        is_live, now = member["state"] == "live", each[member["id"]]
        state = "draining" if is_live and member["draining"] else str(member["state"])
        return [
            Text(f"{'! ' if member['id'] in named else ''}{member['id']}", "bold red" if member["id"] in named else ""),
            _role(member),
            state_text(state),
            f"{member['heartbeat_age_seconds']:.1f} s ago" if is_live else "",
            str(member["epoch"]) if is_live else "",
            ", ".join(map(rate, member["steps_per_second"].values())),
            "" if member["waiting_share"] is None else f"{member['waiting_share']:.0%}",
            _phase_bar(now["phases"], bar) if bar and "phases" in now else "",
            *_server_cells(member, now),
            str(member["pid"]) if is_live and member["pid"] else "",
            member["address"] or member["host"],
            member["metrics_address"],
            member["reason"],
        ]

    columns = ("member", "role", "state", "heartbeat", "epoch", "steps/s", "waiting", "time by phase", "holds",
               "memory", "updates/s", "busy", "queued", "behind", "pid", "address", "metrics",
               "reason")  # fmt: skip
    ordered = sorted(members, key=lambda member: (member["state"] == "live", natural(member["id"])))
    return table(columns, map(row, ordered))


def _server_cells(member: dict[str, Any], now: dict[str, Any]) -> list[str]:
    if member["role"] != "server" or member["state"] != "live":
        return [""] * 6
    copies = f", copies of {now['copies']}" if now["copies"] else ""
    held = f"{plural(now['shards'], 'shard')}{copies}, {size(now['weights'])}" if now["shards"] or copies else ""
    memory = size(member["resident_bytes"]) if member["resident_bytes"] else ""
    if "slices" not in now:
        return [held, memory, "", "", "", ""]
    waiting = size(now["waiting_bytes"]) if now["waiting_bytes"] else ""
    lag = f"{now['lag']} updates" if now["lag"] else ""
    return [held, memory, rate(now["slices"]), f"{now['apply']}%", waiting, lag]


def _role(member: dict[str, Any]) -> str:
    """Return the role, with a worker's rank or a server's device, if it has one."""
    if member["rank"] is not None:
        return f"worker {member['rank']}"
    role: str = member["role"]
    return f"{role}, {member['device']}, {size(member['device_bytes'])}" if member["device_bytes"] else role


def _phase_bar(percent: Sequence[int], columns: int) -> Text:
    """Return a bar of exactly ``columns`` characters."""
    bar, done, drawn = Text(), 0, 0
    for (sign, style), share in zip(PHASE_SIGNS.values(), percent, strict=True):
        done += share
        upto = min(columns, round(columns * done / 100))
        bar.append(sign * (upto - drawn), style)
        drawn = upto
    return bar.append(" " * (columns - drawn))


def _parameters(status: dict[str, Any]) -> list[Text]:
    def row(one: dict[str, Any]) -> list[str | Text]:
        low, high = one["version_min"], one["version_max"]
        return [
            f"{one['name']} ({one['optimizer']}, {one['consistency']})",
            state_text(one["state"]),
            f"{one['elements']:,}",
            str(one["slices"]),
            "?" if low is None else str(low) if low == high else f"{low}-{high}",
            rate(one["steps_per_second"]),
            str(len(one["members"])),
        ]

    columns = ("parameters", "state", "elements", "slices", "version", "steps/s", "members")
    return table(columns, map(row, status["parameters"]))


def _shards(status: dict[str, Any]) -> list[Text]:
    """Return the holders of shards; one row for all shards of one parameter set on the same servers."""
    rows: list[list[str | Text]] = []
    for one in status["parameters"]:
        places: dict[tuple[str, str], list[int]] = {}
        for shard in one["shards"]:
            primary = "" if shard["lost"] else shard["primary"]
            copies = ", ".join([*shard["backups"], *(f"{server} (filling)" for server in shard["filling"])])
            places.setdefault((primary, copies), []).append(shard["number"])
        for (primary, copies), numbers in places.items():
            replicas = [each for each in one["replicas"] if each["shard"] in numbers]
            carriers = "; ".join(dict.fromkeys(each["carrier"] for each in replicas if each["carrier"]))
            holder = primary or state_text("lost")
            rows.append([one["name"], _spans(numbers), holder, copies, carriers, _behind(replicas)])
    return table(("shards", "number", "primary", "copies", "by", "behind"), rows)


def _spans(numbers: Iterable[int]) -> str:
    """Return ``0-3, 7`` for these numbers, in ascending order."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, span)) for span in spans)


def _behind(replicas: list[dict[str, Any]]) -> str:
    """Return how far copies are behind their primaries."""
    filling = [each for each in replicas if each["state"] == "filling"]
    said = [f"{each['server']} does not answer" for each in replicas if each["state"] == "unreachable"]
    if filling:
        have, all_ = sum(each["slices_filled"] for each in filling), sum(each["slices"] for each in filling)
        said.append(f"{have} of {all_} slices filled")
    if updates := sum(each["lag_updates"] for each in replicas):
        said.append(f"{updates} updates, {size(sum(each['lag_bytes'] for each in replicas))}")
    return "; ".join(dict.fromkeys(said))


def _datasets(status: dict[str, Any]) -> list[Text]:
    rows = [
        [
            one["name"],
            f"{one['size']:,}",
            f"{one['data_epoch']} of {one['data_epochs']}" if one["data_epochs"] else str(one["data_epoch"]),
            f"{one['done_ranges']} of {one['ranges']}",
            *(str(one[f"{what}_ranges"]) for what in ("leased", "repeated", "failed")),
        ]
        for one in status["datasets"]
    ]
    return table(("data set", "samples", "data epoch", "ranges done", "leased", "repeated", "failed"), rows)


def _snapshots(found: dict[str, Any], count: int) -> list[Text]:
    """Return the location of snapshots, ``count`` committed ones, and the running or failed attempt."""
    lines = [Text(f"snapshots: {found['policy']}, in {found['storage']}")]
    lines += table(SNAPSHOT_COLUMNS, map(snapshot_row, found["committed"][:count]))
    if one := found["restored"]:
        lines.append(Text(f"the run resumed from snapshot {one['directory']}, step {steps(one['steps'])}"))
    if attempt := found["attempt"]:
        line = f"… snapshot {attempt['number']} under way: {attempt['phase']}"
        if attempt["bytes"]:
            filled = min(_BAR_COLUMNS, _BAR_COLUMNS * attempt["bytes_done"] // attempt["bytes"])
            bar = f"[{'#' * filled}{'.' * (_BAR_COLUMNS - filled)}]"
            line += f" {bar} {size(attempt['bytes_done'])} of {size(attempt['bytes'])}"
        waiting = f", waiting {attempt['waiting_for']}" if attempt["waiting_for"] else ""
        lines.append(Text(line + waiting, "yellow"))
    if found["failed"]:
        failed_at = found["last_failure_time"]
        given_up = plural(found["failed"], "snapshot")
        text = f"{given_up} given up, the last at {moment(failed_at)}: {found['last_failure']}"
        over = any(one["time"] > failed_at for one in found["committed"])
        lines.append(Text(text) if over else Text(f"! {text}", "red"))
    return lines


def _connections(status: dict[str, Any]) -> list[Text]:
    """Return how workers reach servers; one row for all parameter sets that a worker reaches in the same way."""
    reached: dict[tuple[str, str, str, str], list[str]] = {}
    for member in status["members"]:
        for one in member["connections"]:
            reasons = [one["reason"], f"compression={one['compression']}" if one["compression"] else ""]
            key = (member["id"], one["server"], one["transport"], "; ".join(filter(None, reasons)))
            reached.setdefault(key, []).append(one["parameters"])
    rows: list[list[str | Text]] = [
        [
            f"{worker} - {server}",
            Text(transport, "green" if transport == "shm" else ""),
            ", ".join(dict.fromkeys(parameters)),
            reason,
        ]
        for (worker, server, transport, reason), parameters in reached.items()
    ]
    return table(("connection", "transport", "parameters", "reason"), rows)


def _events(found: Iterable[dict[str, Any]]) -> list[Text]:
    return [
        Text(
            f"{clock(event['time'])} {'!' if event['warning'] else ' '} {event['kind']:<11} {event['text']}",
            "yellow" if event["warning"] else "dim",
        )
        for event in found
    ]


def sparkline(values: Sequence[float], columns: int) -> str:
    """Return a curve of at most ``columns`` characters; each shows the mean of its values."""
    if not values or columns < 1:
        return ""
    count = min(columns, len(values))
    bounds = [len(values) * number // count for number in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(bounds)]
    low, high = min(means), max(means)
    if high == low:
        return _LEVELS[0 if high == 0 else 3] * count
    return "".join(_LEVELS[int((value - low) / (high - low) * (len(_LEVELS) - 1) + 0.5)] for value in means)


def _curve(name: str, value: str, values: Sequence[float], width: int) -> Iterator[Text]:
    """Yield a line with name, value and bounds, and a curve below it."""
    yield Text.assemble((f"{name}  ", "bold"), value, (f"  {min(values):.4g} to {max(values):.4g}", "dim"))
    yield Text(sparkline(values, width), "cyan")
