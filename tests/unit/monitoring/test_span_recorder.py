"""The recorder of spans: its steps, its bound, and the messages that carry the spans."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.errors import InvalidArgumentError, LimitExceededError
from psdist.monitoring.spans import Span, SpanKind, SpanRecorder
from psdist.monitoring.tracing import check_spans, spans_from_proto, spans_to_proto
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire.limits import TRACE_SPANS_MAX, TRACE_SPANS_PER_MESSAGE


def test_a_recording_is_complete_after_its_steps() -> None:
    """The first end of a step only begins the next one. The set with the most steps counts."""
    recorder = SpanRecorder(2)
    for step in range(3):
        assert not recorder.is_complete
        recorder.add(Span(SpanKind.COMPUTE, step, step + 1.0))
        recorder.end_step("a", step, step + 1.0)
        if step == 1:
            recorder.end_step("b", 9, 1.5)
    assert recorder.is_complete and recorder.steps_done == 2
    recorder.add(Span(SpanKind.COMPUTE, 3.0, 4.0))
    spans = recorder.take(100)
    assert [span[:5] for span in spans if span.kind is SpanKind.STEP] == [
        (SpanKind.STEP, 1.0, 2.0, "a", 1),
        (SpanKind.STEP, 2.0, 3.0, "a", 2),
    ]
    assert len(spans) == recorder.recorded == 5


def test_spans_that_find_no_room_are_counted() -> None:
    recorder = SpanRecorder()
    for _ in range(TRACE_SPANS_MAX + 3):
        recorder.add(Span(SpanKind.APPLY, 1.0, 2.0))
    assert recorder.recorded == TRACE_SPANS_MAX + 3
    assert len(recorder.take(10)) == 10
    assert len(recorder.take(2 * TRACE_SPANS_MAX)) == TRACE_SPANS_MAX - 10
    assert not recorder.is_complete


def test_spans_pass_through_messages() -> None:
    spans = [
        Span(SpanKind.QUEUE, 2.000000001, 3.5, "mlp", 7, 0, "worker-0"),
        Span(SpanKind.COMPUTE, 1.25, 1.5),
    ]
    message = pb.TraceSpans.FromString(check_spans(spans_to_proto(spans)).SerializeToString())
    assert spans_from_proto(message) == [
        (SpanKind.QUEUE, 2_000_000_001, 3_500_000_000, "mlp", 7, 0, "worker-0"),
        (SpanKind.COMPUTE, 1_250_000_000, 1_500_000_000, "", 0, -1, ""),
    ]
    assert spans_from_proto(check_spans(spans_to_proto([]))) == []


def bad(**fields: Any) -> pb.TraceSpans:
    message = spans_to_proto([Span(SpanKind.APPLY, 1.0, 2.0, "mlp", 1, 0)])
    for name, values in fields.items():
        message.ClearField(name)
        getattr(message, name).extend(values)
    return message


def test_a_message_that_cannot_be_read_is_refused() -> None:
    for message, error, words in [
        (bad(kinds=[1, 1]), InvalidArgumentError, "different lengths"),
        (bad(kinds=[99]), InvalidArgumentError, "kind 99"),
        (bad(peers=[2]), InvalidArgumentError, "beyond the 2"),
        (bad(parameters=[7]), InvalidArgumentError, "beyond the 2"),
        (bad(names=["x" * 2000, ""]), LimitExceededError, "too long"),
        (bad(names=["x"] * 99), LimitExceededError, "99 names"),
        (
            spans_to_proto([Span(SpanKind.APPLY, 1.0, 2.0)] * (TRACE_SPANS_PER_MESSAGE + 1)),
            LimitExceededError,
            "over the limit of 4096",
        ),
    ]:
        with pytest.raises(error, match=words):
            check_spans(message)
