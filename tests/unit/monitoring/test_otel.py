"""OpenTelemetry spans of steps, as its SDK receives them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from psdist.monitoring.metrics import Phase
from psdist.monitoring.phase_timer import PhaseTimer
from psdist.monitoring.tracing import StepTracer, step_tracer

pytest.importorskip("opentelemetry.sdk")


class Api:
    """The functions of ``opentelemetry.trace`` with a provider of its own, since a process has one for ever."""

    def __init__(self) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.get_tracer = provider.get_tracer
        self.set_span_in_context = trace.set_span_in_context


def steps(api: Any, count: int) -> None:
    """Make steps of 4 s compute and 1 s push, from time 10 on."""
    now = 10.0
    timer = PhaseTimer(lambda: now)
    timer.add_sink(StepTracer(api, {"psdist.worker": "worker-0"}, 1_000_000.0))
    for step in range(count):
        now += 4
        with timer.call(Phase.PUSH):
            now += 1
            timer.end_step("mlp", step)


def test_a_step_is_a_span_with_its_phases_as_children() -> None:
    api = Api()
    steps(api, 3)
    spans = api.exporter.get_finished_spans()
    of_steps = [span for span in spans if span.name == "psdist.step"]
    assert [dict(span.attributes or {}) for span in of_steps] == [
        {"psdist.worker": "worker-0", "psdist.parameters": "mlp", "psdist.step": step} for step in (1, 2)
    ]
    last = of_steps[-1]
    assert (last.start_time, last.end_time) == (1_000_020_000_000_000, 1_000_025_000_000_000)
    children = [span for span in spans if span.parent is not None and span.parent.span_id == last.context.span_id]
    seconds = {span.name: ((span.end_time or 0) - (span.start_time or 0)) / 1e9 for span in children}
    assert seconds == {"psdist.compute": 4, "psdist.push": 1}


def test_a_tracer_that_fails_does_not_stop_training(caplog: pytest.LogCaptureFixture) -> None:
    api = Api()
    api.set_span_in_context = lambda span: 1 / 0
    steps(api, 4)
    assert caplog.text.count("because its tracer failed: ZeroDivisionError") == 1


def test_without_a_provider_there_is_no_tracer() -> None:
    """Also nothing is imported."""
    import opentelemetry.trace

    assert opentelemetry.trace and step_tracer("run", "worker-0") is None
    code = "import sys, psdist.client.async_client; print([name for name in sys.modules if 'opentelemetry' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "[]"
