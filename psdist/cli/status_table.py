"""The status of a run for people, made from the JSON form of ``psdist status``: tables, and the texts that its screen
and ``psdist top`` show, too."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from psdist.cli.terminal import printable, printable_values
from psdist.launcher.events import plural
from psdist.launcher.scheduler_calls import size
from psdist.security.tls import WARN_SECONDS, utc

_SHOWN_EVENTS = 8
_SHOWN_SNAPSHOTS = 4
#: Colours of states.
STATE_STYLES = {"live": "green", "ready": "green", "left": "dim", "lost": "red"}

#: The columns of ``snapshot_row``.
SNAPSHOT_COLUMNS = ("snapshot", "step", "size", "taken", "in", "why")


def make_console(file: IO[str] | None = None) -> Console:
    """Return a console for ``file``, or standard output. In a pipe, tables are wider than the 80 columns that rich
    assumes."""
    return Console(file=file, highlight=False, width=None if (file or sys.stdout).isatty() else 160)


def print_status(status: dict[str, Any], file: IO[str] | None = None) -> None:
    """Print ``status``: the phase first, then members, parameters, waits and the newest events."""
    console, status = make_console(file), printable_values(status)
    console.print(Text(f"{status['run_id']}: {status['phase']}", style="bold"))
    # 0: no number was set.
    wanted = f"servers wanted {status['servers_wanted']}, " if status["servers_wanted"] else ""
    wanted += f"copies of each shard {status['replicas']}"
    console.print(
        Text(f"epoch {status['epoch']}, up {duration(status['uptime_seconds'])}, psdist {status['version']}; {wanted}")
    )
    if status["metrics_address"]:
        console.print(Text(f"metrics: http://{status['metrics_address']}/metrics; ports of all processes: /targets"))
    if status["dashboard_address"]:
        console.print(Text(f"dashboard: http://{status['dashboard_address']}/"))
    for warning in certificate_warnings(status, time.time()):
        console.print(Text(warning, style="yellow"))
    if status["members"]:
        console.print(_members(status["members"]))
    if status["parameters"]:
        console.print(_parameters(status["parameters"]))
    if any(len(shard_copies(shard)) > 0 or shard["lost"] for one in status["parameters"] for shard in one["shards"]):
        console.print(_shards(status["parameters"]))
    if status["datasets"]:
        console.print(_datasets(status["datasets"]))
    if status["snapshots"]:
        _snapshots(console, status["snapshots"])
    if any(member["connections"] for member in status["members"]):
        console.print(_connections(status["members"]))
    for wait in waits(status):
        console.print(Text(f"waiting: {wait}", style="yellow"))
    for event in status["events"][-_SHOWN_EVENTS:]:
        console.print(Text(f"{clock(event['time'])}  {event['text']}", style="dim"))


def certificate_warnings(status: dict[str, Any], now: float) -> list[str]:
    """Return a line for each process whose TLS certificate expires within a week. now: in seconds since 1970."""
    ends = {"the scheduler": status["certificate_not_after"]}
    ends |= {member["id"]: member["certificate_not_after"] for member in status["members"]}
    return [
        f"certificate of {name} {'expired' if end <= now else 'expires'} at {utc(end)}: renew it (psdist certs issue)"
        for name, end in ends.items()
        if end is not None and end - now < WARN_SECONDS
    ]


def make_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Return a table without lines and without empty columns. Cells are shown literally, without markup."""
    rows = [[Text(printable(cell)) if isinstance(cell, str) else cell for cell in row] for row in rows]
    shown = [number for number in range(len(columns)) if not rows or any(row[number] for row in rows)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number in shown:
        table.add_column(columns[number], overflow="fold")
    for row in rows:
        table.add_row(*(row[number] for number in shown))
    return table


def _members(members: list[dict[str, Any]]) -> Table:
    def row(member: dict[str, Any]) -> list[str | Text]:
        live = member["state"] == "live"
        return [
            member["id"],
            _role(member),
            _state(member_state(member)),
            f"{member['heartbeat_age_seconds']:.1f} s ago" if live else "",
            str(member["epoch"]) if live else "",
            ", ".join(map(rate, member["steps_per_second"].values())),
            "" if member["waiting_share"] is None else f"{member['waiting_share']:.0%}",
            member["address"] or member["host"],
            member["metrics_address"],
            member["reason"],
        ]

    columns = ("member", "role", "state", "heartbeat", "epoch", "steps/s", "waiting", "address", "metrics", "reason")
    return make_table(columns, map(row, members))


def _role(member: dict[str, Any]) -> str:
    """Return the role, with a worker's rank or a server's device, if it has one."""
    if member["rank"] is not None:
        return f"worker {member['rank']}"
    role: str = member["role"]
    return f"{role}, {member['device']}, {size(member['device_bytes'])}" if member["device_bytes"] else role


def rate(per_second: float) -> str:
    """Format a rate per second."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.1f}"


def _parameters(parameters: list[dict[str, Any]]) -> Table:
    def row(one: dict[str, Any]) -> list[str | Text]:
        low, high = one["version_min"], one["version_max"]
        held = [
            f"{server['id']}: {plural(server['shards'], 'shard')}, "
            f"{f'{copies} copies, ' if (copies := server['copies']) else ''}{size(server['weight_bytes'])}"
            for server in one["servers"]
        ]
        return [
            f"{one['name']} ({one['optimizer']}, {one['consistency']})",
            _state(one["state"]),
            f"{one['elements']:,}",
            str(one["slices"]),
            "?" if low is None else str(low) if low == high else f"{low}-{high}",
            rate(one["steps_per_second"]),
            str(len(one["members"])),
            "\n".join(held),
        ]

    columns = ("parameters", "state", "elements", "slices", "version", "steps/s", "members", "servers")
    return make_table(columns, map(row, parameters))


def shard_copies(shard: dict[str, Any]) -> list[str]:
    """Return the servers with a copy of a shard, and those whose copy is being filled."""
    return [*shard["backups"], *(f"{server} (filling)" for server in shard["filling"])]


def shard_places(parameters: dict[str, Any]) -> Iterator[tuple[str, str, list[int], list[dict[str, Any]]]]:
    """Yield the primary (empty if the shards are lost), the servers with copies, the numbers of all shards there, and
    the state of their copies."""
    places: dict[tuple[str, str], list[int]] = {}
    for shard in parameters["shards"]:
        primary = "" if shard["lost"] else shard["primary"]
        places.setdefault((primary, ", ".join(shard_copies(shard))), []).append(shard["number"])
    for (primary, copies), numbers in places.items():
        yield primary, copies, numbers, [each for each in parameters["replicas"] if each["shard"] in numbers]


def _shards(parameters: list[dict[str, Any]]) -> Table:
    """Return the holders of shards; one row for all shards of one parameter set on the same servers."""
    rows: list[list[str | Text]] = []
    for one in parameters:
        for primary, copies, numbers, replicas in shard_places(one):
            carriers = "; ".join(dict.fromkeys(each["carrier"] for each in replicas if each["carrier"]))
            holder = primary or _state("lost")
            rows.append([one["name"], ", ".join(map(str, numbers)), holder, copies, carriers, behind(replicas)])
    return make_table(("shards", "number", "primary", "copies", "by", "behind"), rows)


def behind(replicas: list[dict[str, Any]]) -> str:
    """Return how far copies are behind their primaries."""
    filling = [each for each in replicas if each["state"] == "filling"]
    said = [f"{each['server']} does not answer" for each in replicas if each["state"] == "unreachable"]
    if filling:
        have, all_ = sum(each["slices_filled"] for each in filling), sum(each["slices"] for each in filling)
        said.append(f"{have} of {all_} slices filled")
    if updates := sum(each["lag_updates"] for each in replicas):
        said.append(f"{updates} updates, {size(sum(each['lag_bytes'] for each in replicas))}")
    return "; ".join(dict.fromkeys(said))


def _datasets(datasets: list[dict[str, Any]]) -> Table:
    rows = [
        [
            one["name"],
            f"{one['size']:,}",
            f"{one['data_epoch']} of {one['data_epochs']}" if one["data_epochs"] else str(one["data_epoch"]),
            f"{one['done_ranges']} of {one['ranges']}",
            *(str(one[f"{what}_ranges"]) for what in ("leased", "repeated", "failed")),
        ]
        for one in datasets
    ]
    return make_table(("data set", "samples", "data epoch", "ranges done", "leased", "repeated", "failed"), rows)


def _snapshots(console: Console, snapshots: dict[str, Any]) -> None:
    """Print the location of snapshots, the committed ones, and the running or failed attempt."""
    console.print(Text(f"snapshots: {snapshots['policy']}, in {snapshots['storage']}"))
    if committed := snapshots["committed"]:
        console.print(make_table(SNAPSHOT_COLUMNS, map(snapshot_row, committed[:_SHOWN_SNAPSHOTS])))
    if restored := snapshots["restored"]:
        console.print(Text(f"the run resumed from snapshot {restored['directory']}, step {steps(restored['steps'])}"))
    if attempt := snapshots["attempt"]:
        written = f", {size(attempt['bytes_done'])} of {size(attempt['bytes'])}" if attempt["bytes"] else ""
        waiting = f", waiting {attempt['waiting_for']}" if attempt["waiting_for"] else ""
        console.print(Text(f"snapshot under way: {attempt['phase']}{written}{waiting}", style="yellow"))
    if snapshots["failed"]:
        when = moment(snapshots["last_failure_time"])
        count = f"{snapshots['failed']} given up, the last at {when}"
        console.print(Text(f"snapshots {count}: {snapshots['last_failure']}", style="red"))


def snapshot_row(one: dict[str, Any]) -> list[str]:
    """Return the cells of a committed snapshot."""
    taken, duration_text = moment(one["time"]), f"{one['seconds']:.1f} s"
    return [one["directory"], steps(one["steps"]), size(one["bytes"]), taken, duration_text, one["reason"]]


def steps(by_parameters: dict[str, int]) -> str:
    """Return ``100``, or ``encoder 100, head 90`` if parameter sets are at different steps."""
    if len(set(by_parameters.values())) <= 1:
        return ", ".join(str(step) for step in set(by_parameters.values()))
    return ", ".join(f"{name} {step}" for name, step in by_parameters.items())


def moment(time: float) -> str:
    """Format seconds since 1970 as local time."""
    return datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M:%S")


def _connections(members: list[dict[str, Any]]) -> Table:
    """Return how workers reach servers; one row for all parameter sets that a worker reaches in the same way."""
    reached: dict[tuple[str, str, str, str], list[str]] = {}
    for member in members:
        for one in member["connections"]:
            reasons = [one["reason"], f"compression={one['compression']}" if one["compression"] else ""]
            key = (member["id"], one["server"], one["transport"], "; ".join(filter(None, reasons)))
            reached.setdefault(key, []).append(one["parameters"])
    rows: list[list[str | Text]] = [
        [
            f"{worker} - {server}",
            Text(transport, style="green" if transport == "shm" else ""),
            ", ".join(dict.fromkeys(parameters)),
            reason,
        ]
        for (worker, server, transport, reason), parameters in reached.items()
    ]
    return make_table(("connection", "transport", "parameters", "reason"), rows)


def _state(state: str) -> Text:
    return Text(state, style=STATE_STYLES.get(state, "yellow"))


def member_state(member: dict[str, Any]) -> str:
    """Return the state of a member; a live server may be draining."""
    return "draining" if member["state"] == "live" and member["draining"] else str(member["state"])


def waits(status: dict[str, Any]) -> list[str]:
    """Return why the run and its members wait, each reason once."""
    by_members = [f"{member['id']} waits {reason}" for member in status["members"] for reason in member["waiting_for"]]
    return list(dict.fromkeys([*status["waiting_for"], *by_members]))


def ways(status: dict[str, Any]) -> list[str]:
    """Return a line for each transport and its reason, with the number of connections."""
    found = Counter((one["transport"], one["reason"]) for member in status["members"] for one in member["connections"])
    return [
        f"{transport}: {plural(count, 'connection')}" + (f", {reason}" if reason else "")
        for (transport, reason), count in sorted(found.items())
    ]


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts server-10 after server-9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def clock(time: float) -> str:
    """Format seconds since 1970 as a local time of the day."""
    return datetime.fromtimestamp(time).strftime("%H:%M:%S")


def duration(seconds: float) -> str:
    """Format a number of seconds for people."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{seconds:.1f} s"
