"""Strict check of a file in the trace-event format, as far as psdist uses it: complete events and metadata.

It follows the format's document and the importers of Perfetto and chrome://tracing, and is stricter than both.
"""

from __future__ import annotations

import json
from collections import defaultdict
from decimal import Decimal
from typing import Any

Event = dict[str, Any]

_FIELDS = {
    "X": {"ph": str, "name": str, "cat": str, "pid": int, "tid": int, "ts": Decimal, "dur": Decimal, "args": dict},
    "M": {"ph": str, "name": str, "pid": int, "tid": int, "args": dict},
}
_METADATA = {
    "process_name": {"name": str},
    "process_sort_index": {"sort_index": int},
    "thread_name": {"name": str},
    "thread_sort_index": {"sort_index": int},
}


def check_trace(text: str) -> list[Event]:
    """Return the complete events of a trace. Raises AssertionError for anything that the format does not allow."""
    trace = json.loads(text, parse_float=Decimal, parse_constant=_refuse, object_pairs_hook=_unique)
    assert trace.keys() <= {"traceEvents", "displayTimeUnit", "otherData"}, trace.keys()
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert isinstance(trace["otherData"], dict)
    threads: dict[int, list[Event]] = defaultdict(list)
    named: dict[str, dict[tuple[int, int], str]] = {"process_name": {}, "thread_name": {}}
    for event in trace["traceEvents"]:
        fields = _FIELDS[event["ph"]]
        assert event.keys() == fields.keys(), event
        for name, kind in fields.items():
            value = event[name]
            assert isinstance(value, int if kind is Decimal and isinstance(value, int) else kind), (name, event)
        assert event["pid"] > 0
        if event["ph"] == "X":
            assert event["tid"] > 0 and event["ts"] >= 0 and event["dur"] >= 0 and event["name"] and event["cat"]
            threads[event["tid"]].append(event)
        else:
            kinds = _METADATA[event["name"]]
            assert {name: type(value) for name, value in event["args"].items()} == kinds, event
            if event["name"] in named:
                key = (event["pid"], event["tid"])
                assert key not in named[event["name"]], f"{event['name']} is given twice"
                named[event["name"]][key] = event["args"]["name"]
    assert len({tid for _, tid in named["thread_name"]}) == len(named["thread_name"]), "a thread of two processes"
    for tid, events in threads.items():
        (pid,) = {event["pid"] for event in events}
        assert (pid, tid) in named["thread_name"] and (pid, 0) in named["process_name"], "a track without a name"
        _check_nesting(events)
    return [event for events in threads.values() for event in events]


def _check_nesting(events: list[Event]) -> None:
    """Check that two spans of a track are nested or do not overlap, in nanoseconds as Perfetto reads them."""
    open_until: list[int] = []
    spans = [(_nanoseconds(event["ts"]), _nanoseconds(event["ts"]) + _nanoseconds(event["dur"])) for event in events]
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or end <= open_until[-1], f"spans overlap in part at {start} ns"
        open_until.append(end)


def _nanoseconds(microseconds: Decimal | int) -> int:
    """Return a time in nanoseconds, with the same result by decimals and by binary floating point."""
    exact = Decimal(microseconds) * 1000
    assert int(float(microseconds) * 1000.0) == exact, f"{microseconds} us depends on the reader's arithmetic"
    return int(exact)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), f"a name is given twice in {pairs}"
    return dict(pairs)
