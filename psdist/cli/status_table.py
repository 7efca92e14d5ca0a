"""The status of a run as tables for people, made from the JSON form of ``psdist.cli.status``."""

from __future__ import annotations

from datetime import datetime
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_SHOWN_EVENTS = 8
_STATE_STYLES = {"live": "green", "ready": "green", "left": "dim", "lost": "red"}


def show(status: dict[str, Any], file: IO[str]) -> None:
    """Prints ``status``: the phase first, then members, parameters, waits and the newest events."""
    # Tables are not cut to a pipe's guessed 80 columns.
    console = Console(file=file, highlight=False, width=None if file.isatty() else 160)
    console.print(Text(f"{status['run_id']}: {status['phase']}", style="bold"))
    console.print(Text(f"epoch {status['epoch']}, up {duration(status['uptime_seconds'])}, psdist {status['version']}"))
    if status["members"]:
        console.print(_members(status["members"]))
    if status["parameters"]:
        console.print(_parameters(status["parameters"]))
    if any(member["connections"] for member in status["members"]):
        console.print(_connections(status["members"]))
    waits = list(status["waiting_for"])
    waits += [f"{member['id']} waits {reason}" for member in status["members"] for reason in member["waiting_for"]]
    for wait in dict.fromkeys(waits):
        console.print(Text(f"waiting: {wait}", style="yellow"))
    for event in status["events"][-_SHOWN_EVENTS:]:
        time = datetime.fromtimestamp(event["time"]).strftime("%H:%M:%S")
        console.print(Text(f"{time}  {event['text']}", style="dim"))


def _members(members: list[dict[str, Any]]) -> Table:
    table = _table("member", "role", "state", "heartbeat", "epoch", "address", "reason")
    for member in members:
        role = member["role"] if member["rank"] is None else f"worker {member['rank']}"
        live = member["state"] == "live"
        table.add_row(
            Text(member["id"]),
            role,
            _state(member["state"]),
            f"{member['heartbeat_age_seconds']:.1f} s ago" if live else "",
            str(member["epoch"]) if live else "",
            Text(member["address"] or member["host"]),
            Text(member["reason"]),
        )
    return table


def _parameters(parameters: list[dict[str, Any]]) -> Table:
    table = _table("parameters", "state", "elements", "slices", "version", "members", "servers")
    for one in parameters:
        low, high = one["version_min"], one["version_max"]
        held = [
            f"{server['id']}: {server['shards']} shards, {size(server['weight_bytes'])}" for server in one["servers"]
        ]
        table.add_row(
            Text(f"{one['name']} ({one['optimizer']}, {one['consistency']})"),
            _state(one["state"]),
            f"{one['elements']:,}",
            str(one["slices"]),
            str(low) if low == high else f"{low}-{high}",
            str(len(one["members"])),
            Text("\n".join(held)),
        )
    return table


def _connections(members: list[dict[str, Any]]) -> Table:
    """How workers reach servers; one row for all parameters that one of them reaches in the same way."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for member in members:
        for one in member["connections"]:
            key = (member["id"], one["server"], one["transport"], one["reason"])
            rows.setdefault(key, []).append(one["parameters"])
    table = _table("connection", "transport", "parameters", "reason")
    for (worker, server, transport, reason), parameters in rows.items():
        table.add_row(
            Text(f"{worker} - {server}"),
            Text(transport, style="green" if transport == "shm" else ""),
            Text(", ".join(dict.fromkeys(parameters))),
            Text(reason),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _state(state: str) -> Text:
    return Text(state, style=_STATE_STYLES.get(state, "yellow"))


def size(count: int) -> str:
    """A number of bytes for people, in binary units."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """A number of seconds for people."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{seconds:.1f} s"
