"""``psdist trace`` without a scheduler: the file's place, and a report of every gap."""

from __future__ import annotations

import io
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from psdist.cli import trace
from psdist.cli.trace import Recording, _write
from psdist.errors import InvalidArgumentError
from psdist.monitoring.spans import Span, SpanKind
from psdist.monitoring.tracing import spans_to_proto
from psdist.v1 import scheduler_pb2 as pb
from tests.support.trace_format import check_trace


def member(name: str, role: pb.Role, **fields: Any) -> pb.TraceResponse:
    return pb.TraceResponse(member=pb.TraceMember(member_id=name, role=role, **fields))


def spans(name: str, recorded: int) -> pb.TraceResponse:
    message = spans_to_proto([Span(SpanKind.APPLY, 1.0, 2.0, "mlp", 1, 0)])
    message.recorded = recorded
    return pb.TraceResponse(member_id=name, spans=message)


def test_every_gap_is_reported() -> None:
    recording = Recording(steps=5)
    for answer in (
        member("worker-0", pb.ROLE_WORKER, offset_ns=1000, uncertainty_ns=10, clock_id="a", done=True, steps=4),
        member("worker-1", pb.ROLE_WORKER),
        member("server-0", pb.ROLE_SERVER, offset_ns=0, clock_id="b", missing="it was expelled (\x1b[31mkilled)"),
        *(spans(name, 7) for name in ("worker-0", "worker-1")),
        spans("server-0", 1),
        pb.TraceResponse(ended=True, reason="600 s are over, which is the limit"),
    ):
        recording.on_answer(answer)
    assert recording.warnings() == [
        "600 s are over, which is the limit",
        "server-0 is recorded in part or not at all: it was expelled (?[31mkilled)",
        "worker-0 recorded 4 of 5 steps",
        "6 spans of worker-0 are lost: its buffer was full. Record fewer steps",
        "worker-1 is left out: its clock was not compared yet",
        "6 spans of worker-1 are lost: its buffer was full. Record fewer steps",
    ]
    file = io.StringIO()
    assert _write(file, recording.processes(), recording.facts()) == 2
    assert {event["ts"] for event in check_trace(file.getvalue())} == {0, 1}, "the worker's clock is 1 us ahead"


def test_an_end_before_any_clock_was_compared_keeps_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trace.json").write_text("earlier")

    def record(target: Any, given: Namespace, recording: Recording) -> None:
        recording.on_answer(member("worker-0", pb.ROLE_WORKER))
        recording.on_answer(spans("worker-0", 1))
        raise KeyboardInterrupt

    monkeypatch.setattr(trace, "find_target", lambda given, environ: None)
    monkeypatch.setattr(trace, "_record", record)
    with pytest.raises(InvalidArgumentError, match=r"\(ended by Ctrl-C; worker-0 is left out: its clock was"):
        trace.run(Namespace(steps=5, out=str(tmp_path / "trace.json"), format="text"), {})
    assert (tmp_path / "trace.json").read_text() == "earlier"


def test_the_trace_goes_to_standard_output_on_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def record(target: object, given: Namespace, recording: Recording) -> None:
        recording.on_answer(member("worker-0", pb.ROLE_WORKER, offset_ns=0, steps=1, done=True))
        recording.on_answer(spans("worker-0", 1))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trace, "find_target", lambda given, environ: None)
    monkeypatch.setattr(trace, "_record", record)
    assert trace.run(trace.command_line().parse(["--out", "-", "--steps", "1"], {}), {}) == 0
    written = capsys.readouterr()
    check_trace(written.out)
    assert "1 spans in -" in written.err and list(tmp_path.iterdir()) == []
