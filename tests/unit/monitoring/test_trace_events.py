"""Trace events: tracks, one time axis from several clocks, and a file that a strict reader takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.monitoring.spans import (
    SpanKind,
    TracedClock,
    TracedProcess,
    WireSpan,
    lanes,
    share_clocks,
    summarize,
    trace_events,
)
from tests.support.trace_format import check_trace


def process(name: str, spans: list[WireSpan], offset: int = 0) -> TracedProcess:
    return TracedProcess(name, TracedClock(offset, 10, "clock"), spans, {})


def text_of(processes: list[TracedProcess]) -> str:
    events = list(trace_events(processes))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {}})


def test_members_are_on_one_axis() -> None:
    """The server's clock is 5 ms ahead: its span began within the worker's request."""
    request: WireSpan = (SpanKind.REQUEST, 1_000_000, 4_000_000, "mlp", 7, -1, "server-0")
    queue: WireSpan = (SpanKind.QUEUE, 7_000_000, 8_000_000, "mlp", 7, 2, "worker-0")
    events = check_trace(text_of([process("worker-0", [request]), process("server-0", [queue], 5_000_000)]))
    by_name = {event["name"]: event for event in events}
    assert (by_name["request 7"]["ts"], by_name["request 7"]["dur"]) == (0, 3000)
    assert (by_name["queue"]["ts"], by_name["queue"]["dur"]) == (1000, 1000)
    assert by_name["queue"]["args"] == {"parameters": "mlp", "step": 7, "slice": 2, "peer": "worker-0"}


spans = st.builds(
    lambda kind, start, size, parameters, step, index, peer: (kind, start, start + size, parameters, step, index, peer),
    st.sampled_from(SpanKind),
    st.integers(10**12, 10**12 + 10_000),
    st.integers(0, 5000),
    st.sampled_from(["", "a", 'with "quotes"\n']),
    st.integers(0, 3),
    st.integers(-1, 2),
    st.sampled_from(["", "server-0"]),
)


@given(st.lists(spans, max_size=30), st.integers(-(10**12), 10**12))
def test_any_spans_make_a_valid_file(found: list[WireSpan], offset: int) -> None:
    events = check_trace(text_of([process("one", found), process("two", found, offset)]))
    assert len(events) == 2 * len(found)


def test_spans_that_overlap_in_part_are_on_different_lanes() -> None:
    def span(start: int, end: int) -> WireSpan:
        return SpanKind.REQUEST, start, end, "mlp", 1, -1, "server-0"

    assert lanes([span(0, 10), span(2, 10), span(10, 20)]) == [[span(0, 10), span(2, 10), span(10, 20)]]
    assert lanes([span(0, 10), span(5, 15), span(12, 20)]) == [[span(0, 10), span(12, 20)], [span(5, 15)]]


def test_members_that_read_one_clock_have_the_offset_that_is_known_best() -> None:
    clocks = {"a": TracedClock(700, 90, "x"), "b": TracedClock(40, 50, "x"), "c": TracedClock(-3, 99, "y")}
    assert {name: clock.offset for name, clock in share_clocks(clocks).items()} == {"a": 40, "b": 40, "c": -3}


def test_the_phases_of_complete_steps_are_summed_up() -> None:
    phases: list[WireSpan] = [
        (SpanKind.COMPUTE, 0, 300, "", 0, -1, ""),
        (SpanKind.PUSH, 300, 400, "", 0, -1, ""),
        (SpanKind.PUSH, 300, 350, "mlp", 2, -1, "server-0"),  # Part of a request.
        (SpanKind.PULL, 400, 500, "", 0, -1, ""),
    ]
    steps: list[WireSpan] = [(SpanKind.STEP, 100, 300, "mlp", 1, -1, ""), (SpanKind.STEP, 300, 500, "mlp", 2, -1, "")]
    (summary,) = summarize([process("worker-0", phases + steps)])
    nanoseconds = {name: round(seconds * 1e9) for name, seconds in summary.phases.items()}
    assert nanoseconds == {"compute": 100, "push": 50, "wait": 0, "pull": 50}
    assert (summary.steps, round(summary.seconds * 1e9)) == (2, 200)
    assert summary.line().startswith("worker-0: 2 steps of 'mlp', 0.0002 ms each: compute 0.0001 ms (50 %), push")


def x(**others: Any) -> dict[str, Any]:
    return {"ph": "X", "name": "a", "cat": "a", "pid": 1, "tid": 1, "ts": 0, "dur": 8, "args": {}} | others


NAMES = [
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "p"}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "t"}},
]


def test_the_check_of_the_format_finds() -> None:
    for events in [
        [x()],
        [*NAMES, x(ts=-1)],
        [*NAMES, x(ts="0")],
        [*NAMES, x(ts=1.001)],
        [*NAMES, x(), x(ts=4)],
        [*NAMES, x(tid=2)],
        [*NAMES, *NAMES, x()],
        [*NAMES, {"ph": "M", "name": "colour", "pid": 1, "tid": 0, "args": {}}],
        [*NAMES, x(ts=float("nan"))],
    ]:
        check_trace(json.dumps({"traceEvents": [*NAMES, x(), x(ts=8)], "displayTimeUnit": "ms", "otherData": {}}))
        with pytest.raises((AssertionError, KeyError)):
            check_trace(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {}}))
