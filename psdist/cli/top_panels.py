"""The panels of ``psdist top`` as lines of text, made from a ``RunHistory``: the last status and samples. Pure.

A panel has heads, which stay, and rows, which a filter selects. State is shown by signs and words, and colour only adds
to them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from rich.text import Text

from psdist.cli import status_table
from psdist.cli.status_table import (
    STATE_STYLES,
    behind,
    clock,
    duration,
    member_state,
    natural,
    rate,
    shard_places,
    steps,
    ways,
)
from psdist.cli.terminal import printable, printable_values
from psdist.launcher.events import plural
from psdist.launcher.scheduler_calls import size
from psdist.monitoring.stragglers import step_times, stragglers

_LEVELS: Final = "▁▂▃▄▅▆▇█"
#: Sign and colour of each phase in a worker's bar.
PHASE_SIGNS: Final = {"compute": ("█", "green"), "push": ("▓", "blue"), "wait": ("░", "yellow"), "pull": ("▒", "cyan")}
#: Seconds without a heartbeat after which a live member is marked: they come about once a second.
_LATE_SECONDS: Final = 3.0
_BAR_COLUMNS: Final = 24
#: A factor that is larger is shown as this: the others computed next to nothing.
_FACTOR_SHOWN: Final = 99.0


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


def title(run: RunHistory) -> list[Text]:
    """Return the lines above all panels: the notice if the scheduler does not answer, and the state of the run."""
    notice = [Text(f"! {printable(run.trouble)}", "bold red")] if run.trouble else []
    status = run.status
    if status is None:
        return [*notice, Text("no status yet")]
    counted = Counter((member["role"], member["state"]) for member in status["members"])
    members = ", ".join(
        f"{count} {role}{'s' * (count > 1)} {state}" for (role, state), count in sorted(counted.items())
    )
    head = f"{status['run_id']}: {status['phase']}"
    facts = f"up {duration(status['uptime_seconds'])}, epoch {status['epoch']}; {members or 'no members'}"
    return [*notice, Text(head, "bold"), Text(facts)]


def waits(run: RunHistory) -> list[Text]:
    """Return a line for each wait, with its reason."""
    if run.status is None:
        return []
    return [Text(f"… waiting: {wait}", "yellow") for wait in status_table.waits(run.status)]


# --- the six panels ---------------------------------------------------------------------------------------------------


def training(run: RunHistory, width: int) -> Panel:
    """Return reported values such as the loss, and throughput, as curves of the last minutes."""
    if run.status is None:
        return Panel([], [])
    rows: list[Text] = []
    for name, values in sorted(run.reported_series().items(), key=lambda item: ("loss" not in item[0], item[0])):
        rows += _curve(name, f"{values[-1]:.4g}", values, width)
    for one in run.status["parameters"]:
        values = run.step_series(one["name"], is_shared=one["consistency"] == "bsp")
        version = "?" if one["version_min"] is None else f"{one['version_min']:,}"
        rows += _curve(
            f"{one['name']}, step {version}", f"{rate(values[-1] if values else 0.0)} steps/s", values, width
        )
    examples = run.sum_series("samples_per_second")
    if any(examples):
        rows += _curve("samples", f"{rate(examples[-1])} samples/s", examples, width)
    return Panel([] if rows else [Text("no parameters yet", "dim")], rows)


def workers(run: RunHistory, width: int) -> Panel:
    """Return the phases of each worker as a bar. A straggler has the sign ``!``."""
    members = _members(run, "worker")
    if not members:
        return Panel([Text("no workers yet", "dim")], [])
    recent = run.recent_workers()
    slow = stragglers(step_times(recent))
    names = max(len(member["id"]) for member in members)
    bar = max(8, min(_BAR_COLUMNS + (width - 80) // 2, 60))
    legend = Text.assemble(*((f"{sign} {phase}  ", style) for phase, (sign, style) in PHASE_SIGNS.items()))
    return Panel([legend], [_worker(member, recent.get(member["id"]), slow, names, bar) for member in members])


def shards(run: RunHistory, width: int) -> Panel:
    """Return the shards of each parameter set by primary, with their copies and lag, and the servers' work."""
    if run.status is None:
        return Panel([], [])
    rows = list(_shard_map(run.status))
    recent = run.recent_servers()
    for member in _members(run, "server"):
        rows.append(_server(member, recent.get(member["id"])))
    return Panel([] if rows else [Text("no servers yet", "dim")], rows)


def transports(run: RunHistory, width: int) -> Panel:
    """Return the bytes by transport and codec, and how workers reach servers, with the reason."""
    if run.status is None:
        return Panel([], [])
    rows: list[Text] = []
    for way in ("push", "pull"):
        values = run.traffic_series(f"{way}_bytes_per_second")
        rows += _curve(way, f"{size(round(values[-1] if values else 0))}/s", values, width)
    return Panel([], [*rows, *_traffic(run), *map(Text, ways(run.status))])


def events(run: RunHistory, width: int) -> Panel:
    """Return the history of the run, the newest event first. A warning has the sign ``!``."""
    found = [] if run.status is None else run.status["events"][::-1]
    rows = []
    for event in found:
        text = f"{clock(event['time'])} {'!' if event['warning'] else ' '} {event['kind']:<9} {event['text']}"
        rows.append(Text(text, "yellow" if event["warning"] else ""))
    return Panel([] if rows else [Text("no events yet", "dim")], rows)


def snapshots(run: RunHistory, width: int) -> Panel:
    """Return the committed snapshots with age and size, and the one under way or the last failure."""
    found = None if run.status is None else run.status["snapshots"]
    if not found:
        return Panel([Text("this run has no storage: it takes no snapshots", "dim")], [])
    heads = [Text(f"{found['policy']}, in {found['storage']}")]
    if attempt := found["attempt"]:
        heads.append(_attempt(attempt, width))
    if found["failed"]:
        text = f"! {plural(found['failed'], 'snapshot')} given up, the last one {found['last_failure']}"
        heads.append(Text(text, "red"))
    if one := found["restored"]:
        heads.append(Text(f"resumed from {one['directory']}, step {steps(one['steps'])}"))
    rows = [
        Text(
            f"{one['directory']}  step {steps(one['steps'])}  {size(one['bytes'])}  "
            f"{duration(max(0.0, run.time - one['time']))} old  taken in {one['seconds']:.1f} s  {one['reason']}"
        )
        for one in found["committed"]
    ]
    return Panel(heads if rows else [*heads, Text("none is committed yet", "dim")], rows)


#: The panels in the order of their keys.
PANELS: Final[dict[str, Callable[[RunHistory, int], Panel]]] = {
    "training": training,
    "workers": workers,
    "shards": shards,
    "transports": transports,
    "events": events,
    "snapshots": snapshots,
}


# --- parts ------------------------------------------------------------------------------------------------------------


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
    bounds = f"  {min(values):.4g} to {max(values):.4g}" if values else ""
    yield Text.assemble((f"{name}  ", "bold"), value, (bounds, "dim"))
    if values:
        yield Text(sparkline(values, width), "cyan")


def _members(run: RunHistory, role: str) -> list[dict[str, Any]]:
    """Return the members of a role: those that are not live first, then in the order of their numbers."""
    members = [] if run.status is None else [one for one in run.status["members"] if one["role"] == role]
    return sorted(members, key=lambda member: (member["state"] == "live", natural(member["id"])))


def _state(member: dict[str, Any], width: int = 5) -> tuple[str, str]:
    state = member_state(member)
    sign = " " if state in ("live", "left") else "✗" if state == "lost" else "…"
    return f"{sign} {state:<{width}} ", STATE_STYLES.get(state, "yellow")


def _late(member: dict[str, Any]) -> str:
    """Return a note about a live member that has been silent; empty if it has not."""
    age = member["heartbeat_age_seconds"]
    return f" ! silent for {age:.0f} s" if member["state"] == "live" and age >= _LATE_SECONDS else ""


def _worker(
    member: dict[str, Any], periods: list[dict[str, Any]] | None, slow: dict[str, float], names: int, bar: int
) -> Text:
    line = Text.assemble(f"{member['id']:<{names}} ", _state(member))
    if member["state"] != "live":
        return line.append(member["reason"])
    speed = ", ".join(map(rate, member["steps_per_second"].values())) or "-"
    line.append(f"{speed:>6} steps/s ")
    if periods:
        shares = phases(periods)
        line.append_text(_phase_bar(shares, bar))
        line.append(f" {shares['compute']:4.0%} compute {shares['wait']:4.0%} wait")
    if (factor := slow.get(member["id"])) is not None:
        line.append(f" ! straggler, {min(factor, _FACTOR_SHOWN):.1f}x", "bold red")
    return line.append(_late(member), "yellow")


def _phase_bar(shares: dict[str, float], columns: int) -> Text:
    """Return a bar of exactly ``columns`` characters."""
    bar, done, drawn = Text(), 0.0, 0
    for phase, (sign, style) in PHASE_SIGNS.items():
        done += shares[phase]
        upto = min(columns, round(columns * done))
        bar.append(sign * (upto - drawn), style)
        drawn = upto
    return bar.append(" " * (columns - drawn))


def _shard_map(status: dict[str, Any]) -> Iterator[Text]:
    for one in status["parameters"]:
        version = "?" if one["version_min"] is None else f"{one['version_min']:,}"
        yield Text(
            f"{one['name']} ({one['optimizer']}, {one['consistency']}) {one['state']}, version {version}, "
            f"{one['elements']:,} elements, {plural(len(one['shards']), 'shard')}",
            "bold",
        )
        for primary, held, numbers, replicas in shard_places(one):
            lag = behind(replicas)
            text = f"  {primary or '✗ lost'}{f' → {held}' if held else ', no copy'}: {_spans(numbers)}"
            yield Text(text, "" if primary else "red").append(f"  ! behind: {lag}" if lag else "", "yellow")


def _spans(numbers: Iterable[int]) -> str:
    """Return ``0-3, 7`` for these numbers, in ascending order."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, span)) for span in spans)


def _server(member: dict[str, Any], periods: list[dict[str, Any]] | None) -> Text:
    line = Text.assemble(f"{member['id']}  ", _state(member))
    if member["state"] != "live":
        return line.append(member["reason"])
    line.append(f"{size(member['resident_bytes'])} in memory")
    if periods:
        line.append(f", {rate(mean(periods, 'slices_per_second'))} slices/s")
        line.append(f", applies {mean(periods, 'apply_share'):.0%} of the time")
        if held := periods[-1]["waiting_bytes"]:
            line.append(f", {size(held)} waiting")
        if lag := periods[-1]["lag_updates"]:
            line.append(f", copies {lag} updates behind")
    return line.append(_late(member), "yellow")


def _traffic(run: RunHistory) -> Iterator[Text]:
    """Yield a line for each transport and pair of codecs that moved bytes lately."""
    totals: dict[tuple[str, str, str], list[float]] = {}
    for periods in run.recent_workers().values():
        seconds = sum(period["seconds"] for period in periods)
        for period in periods:
            for each in period["traffic"]:
                entry = totals.setdefault((each["transport"], each["push_codec"], each["pull_codec"]), [0.0, 0.0])
                entry[0] += each["push_bytes_per_second"] * period["seconds"] / seconds
                entry[1] += each["pull_bytes_per_second"] * period["seconds"] / seconds
    for (transport, push, pull), (pushed, pulled) in sorted(totals.items()):
        yield Text(
            f"{transport}: push {size(round(pushed))}/s ({push or 'none'}), "
            f"pull {size(round(pulled))}/s ({pull or 'none'})"
        )


def _attempt(attempt: dict[str, Any], width: int) -> Text:
    line = Text(f"… snapshot {attempt['number']} under way: {attempt['phase']}", "yellow")
    if attempt["bytes"]:
        columns = max(8, min(_BAR_COLUMNS, width // 4))
        filled = min(columns, columns * attempt["bytes_done"] // attempt["bytes"])
        line.append(
            f" [{'#' * filled}{'.' * (columns - filled)}] {size(attempt['bytes_done'])} of {size(attempt['bytes'])}"
        )
    return line.append(f", waiting {attempt['waiting_for']}" if attempt["waiting_for"] else "")


#: Samples that are kept, one a second: as many as the scheduler keeps.
SAMPLES_KEPT: Final = 300
#: Newest samples over which rates and phases are averaged.
_RECENT_SAMPLES: Final = 5
_PHASES: Final = ("compute", "push", "wait", "pull")


class RunHistory:
    """The JSON forms of a run, whose texts cannot control the terminal: ``status`` is None before the first one,
    ``trouble`` says why it is not the newest."""

    def __init__(self) -> None:
        self.status: dict[str, Any] | None = None
        self.trouble = ""
        #: The scheduler's clock at the last status, in seconds since 1970.
        self.time = 0.0
        self.samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES_KEPT)

    @property
    def newest_number(self) -> int:
        """Number of the newest sample; 0 if there is none."""
        return int(self.samples[-1]["number"]) if self.samples else 0

    def add(self, status: dict[str, Any], samples: Iterable[dict[str, Any]], time: float) -> None:
        """Take an answer of the scheduler. samples: those after ``newest_number``, oldest first."""
        self.status, self.trouble, self.time = printable_values(status), "", time
        for sample in printable_values(list(samples)):
            if sample["number"] <= self.newest_number:  # The scheduler restarted, and counts from 1 again.
                self.samples.clear()
            self.samples.append(sample)

    def recent_workers(self) -> dict[str, list[dict[str, Any]]]:
        """Return the newest periods of each worker, oldest first."""
        return self._recent("workers")

    def recent_servers(self) -> dict[str, list[dict[str, Any]]]:
        """Return the newest periods of each server, oldest first."""
        return self._recent("servers")

    def _recent(self, role: str) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for sample in list(self.samples)[-_RECENT_SAMPLES:]:
            for member_id, period in sample[role].items():
                found.setdefault(member_id, []).append(period)
        return found

    def reported_series(self) -> dict[str, list[float]]:
        """Return, by name, the values that scripts reported: the mean of all workers in each sample."""
        found: dict[str, list[float]] = {}
        for sample in self.samples:
            values: dict[str, list[float]] = {}
            for period in sample["workers"].values():
                for name, value in period["reported"].items():
                    if isinstance(value, int | float):  # NaN and infinities are texts.
                        values.setdefault(name, []).append(value)
            for name, each in values.items():
                found.setdefault(name, []).append(sum(each) / len(each))
        return found

    def step_series(self, parameters: str, *, is_shared: bool) -> list[float]:
        """Return a parameter set's steps per second by sample. is_shared: True if workers take each step together, so
        that the fastest worker's rate counts; otherwise the sum counts."""
        combine = max if is_shared else sum
        return [
            combine([period["steps_per_second"].get(parameters, 0.0) for period in sample["workers"].values()])
            for sample in self.samples
            if sample["workers"]
        ]

    def sum_series(self, key: str) -> list[float]:
        """Return the sum over workers of a number in their periods, by sample."""
        return [sum(one[key] for one in sample["workers"].values()) for sample in self.samples if sample["workers"]]

    def traffic_series(self, key: str) -> list[float]:
        """Return the bytes per second of all workers by sample; ``key`` is push_bytes_per_second or pull_..."""
        return [
            sum(each[key] for period in sample["workers"].values() for each in period["traffic"])
            for sample in self.samples
            if sample["workers"]
        ]


def mean(periods: Sequence[dict[str, Any]], *keys: str) -> float:
    """Return the mean of a number in these periods, weighted by their lengths. keys: the path to the number."""
    total = 0.0
    for period in periods:
        value: Any = period
        for key in keys:
            value = value[key]
        total += value * period["seconds"]
    seconds: float = sum(period["seconds"] for period in periods)
    return total / seconds


def phases(periods: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the shares of a worker's time by phase; they add up to 1."""
    return {phase: mean(periods, "phases", phase) for phase in _PHASES}
