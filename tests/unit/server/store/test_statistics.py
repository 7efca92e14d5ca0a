"""Spans of a slice's update: its waits and its kernel, in time order."""

from __future__ import annotations

from psdist.monitoring.spans import SpanKind, SpanRecorder
from psdist_server.store.statistics import SliceSpans


def test_an_update_is_divided_into_its_waits_and_its_kernel() -> None:
    now = 10.0
    spans, recorder = SliceSpans(lambda: now), SpanRecorder()
    assert spans.now() == 0.0
    spans.start(recorder)
    # The first contribution came before the recording began, so its wait is unknown.
    submitted = spans.end_queue("mlp", 3, 7, [("worker-0", 0.0), ("worker-1", 9.0)])
    spans.end_kernel(SpanKind.APPLY, "mlp", 3, 7, submitted, seconds=2.0, ended=13.0)
    now = 14.0
    spans.end_replication("mlp", 3, 7, 13.0)
    assert recorder.take(9) == [
        (SpanKind.QUEUE, 9.0, 10.0, "mlp", 7, 3, "worker-1"),
        (SpanKind.THREAD, 10.0, 11.0, "mlp", 7, 3, ""),
        (SpanKind.APPLY, 11.0, 13.0, "mlp", 7, 3, ""),
        (SpanKind.REPLICATE, 13.0, 14.0, "mlp", 7, 3, ""),
    ]


def test_an_update_that_began_before_the_recording_has_no_spans() -> None:
    spans, recorder = SliceSpans(lambda: 10.0), SpanRecorder()
    spans.start(recorder)
    spans.end_kernel(SpanKind.APPLY, "mlp", 3, 7, 0.0, seconds=2.0, ended=9.0)
    spans.end_replication("mlp", 3, 7, 0.0)
    spans.stop(recorder)
    spans.end_replication("mlp", 3, 7, 9.0)
    assert recorder.take(9) == []
