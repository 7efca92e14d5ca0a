"""``psdist status``: the speed of a run, as JSON and as text, and the blocks of --watch in a pipe."""

from __future__ import annotations

import contextlib
import io
import math
import sys
import time
from argparse import Namespace
from types import SimpleNamespace

import pytest

from psdist.cli import status
from psdist.cli.target import SchedulerChoice
from psdist.monitoring.run_json import status_json
from psdist.security.tls import Credentials
from psdist.v1 import scheduler_pb2 as pb
from psdist_scheduler import conversions


def worker(rank: int, seconds: float, waiting: float, pushes: int) -> pb.MemberStatus:
    rates = pb.WorkerRates(seconds=seconds, waiting_seconds=waiting, pushes={"model": pushes})
    return pb.MemberStatus(member_id=f"worker-{rank}", role=pb.ROLE_WORKER, rank=rank, state="live", rates=rates)


def answer(consistency: str = "bsp") -> pb.GetStatusResponse:
    server = pb.MemberStatus(member_id="server-0", role=pb.ROLE_SERVER, state="live")
    report = pb.GetStatusResponse(run_id="digits", phase="training")
    report.members.extend([worker(0, 10.0, 9.0, 20), worker(1, 8.0, 0.4, 16), server])
    parameters = report.parameters.add(state="ready")
    parameters.entry.spec.name = "model"
    parameters.entry.spec.consistency.kind = consistency
    return report


def shown(report: pb.GetStatusResponse) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as file:
        status.print_status(report)
    return file.getvalue()


def table(report: pb.GetStatusResponse) -> list[list[str]]:
    return [line.split() for line in shown(report).splitlines()]


def test_each_member_has_how_much_smaller_its_encoded_pushes_are() -> None:
    report = answer()
    for rank in range(3):
        report.parameters[0].entry.members.add(worker_id=f"worker-{rank}", rank=rank)
    counted = report.members[2].statistics.parameters.add(parameters="model")
    counted.workers.add(worker_id="worker-0", push_bytes=1000, saved_bytes=3010)
    counted.workers.add(worker_id="worker-1", push_bytes=1000)
    (parameters,) = status_json(report)["parameters"]
    assert [member["compression"] for member in parameters["members"]] == [4.01, None, None]


def test_members_cannot_control_the_terminal() -> None:
    """Check every kind of text that a member chooses: an escape sequence, and a new line that looks like psdist's."""
    bad = "\x1b[31m\nforged"
    report = answer()
    report.members.add(member_id="w", state="lost", reason=bad, host=bad, waiting_for=[bad])
    report.waiting_for.append(bad)
    report.events.add(text=bad, time=1.0)
    report.members[0].connections.add(server_id="s", parameters="model", transport=bad, reason=bad)
    text = shown(report)
    assert "\x1b" not in text and not any(line.startswith("forged") for line in text.splitlines())
    assert text.count("?[31m forged") >= 5


def test_each_worker_has_its_speed_and_its_share_of_waiting() -> None:
    members = status_json(answer())["members"]
    assert [member["steps_per_second"] for member in members] == [{"model": 2.0}, {"model": 2.0}, {}]
    assert [member["waiting_share"] for member in members] == [0.9, 0.05, None]
    rows = table(answer())
    assert ["worker-0", "worker", "0", "live", "0.0", "s", "ago", "0", "2.0", "90%"] in rows
    assert ["worker-1", "worker", "1", "live", "0.0", "s", "ago", "0", "2.0", "5%"] in rows


@pytest.mark.parametrize(("consistency", "speed"), [("bsp", 2.0), ("ssp", 4.0), ("asp", 4.0)])
def test_the_version_grows_with_common_steps_or_with_all_pushes(consistency: str, speed: float) -> None:
    assert status_json(answer(consistency))["parameters"][0]["steps_per_second"] == speed


def test_a_version_that_no_server_has_reported_is_not_shown_as_0() -> None:
    """Check the first second after a restart of the scheduler."""
    report = answer()
    (parameters,) = status_json(report)["parameters"]
    assert parameters["version_min"] is None and parameters["version_max"] is None
    assert any(row[:1] == ["model"] and "?" in row for row in table(report)), table(report)
    report.parameters[0].state = "uploading"
    assert status_json(report)["parameters"][0]["version_max"] == 0


def test_before_the_first_report_nothing_is_known() -> None:
    report = answer()
    for member in report.members:
        member.ClearField("rates")
    form = status_json(report)
    assert [member["waiting_share"] for member in form["members"]] == [None] * 3
    assert form["parameters"][0]["steps_per_second"] == 0.0 and table(report)


def test_watch_shows_blocks_until_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paused: list[float] = []

    def pause(seconds: float) -> None:
        paused.append(seconds)
        if len(paused) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(status, "find_target", lambda given, environ: SchedulerChoice("h:1", Credentials(), "test"))
    monkeypatch.setattr(status, "fetch", lambda target, timeout: answer())
    monkeypatch.setattr(status, "time", SimpleNamespace(sleep=pause))  # Other threads may sleep.
    assert status.run(Namespace(watch=True, timeout=1.0, format="table"), {}) == 0
    written = capsys.readouterr()
    assert paused == [1.0] * 3 and not written.err and "\x1b" not in written.out
    blocks = written.out.removesuffix("\n\n").split("\n\n")
    assert len(blocks) == 3 and all(block.startswith("digits: training\n") for block in blocks)


def test_a_server_has_its_device_and_how_much_of_it_is_taken() -> None:
    report = answer()
    plain = status_json(report)["members"]
    assert [(one["device"], one["device_bytes"]) for one in plain] == [(None, None), (None, None), ("cpu", 0)]
    report.members[2].statistics.device = "cuda:0 (NVIDIA H200)"
    report.members[2].statistics.device_bytes = 1_310_000_000
    (server,) = (one for one in status_json(report)["members"] if one["role"] == "server")
    assert (server["device"], server["device_bytes"]) == ("cuda:0 (NVIDIA H200)", 1_310_000_000)
    text = " ".join(word for row in table(report) for word in row)
    assert "cuda:0" in text and "H200" in text


def test_what_says_nothing_is_not_shown() -> None:
    report = answer()
    report.parameters[0].entry.shards.add().primary.server_id = "server-0"
    text = "\n".join(" ".join(row) for row in table(report))
    assert "servers wanted" not in text and "reason" not in text and "live 0.0 s ago 0 1 shard, 0 B" in text, text
    report.servers_wanted, report.members[2].reason = 3, "its session broke"
    text = "\n".join(" ".join(row) for row in table(report))
    assert "servers wanted 3, copies" in text and "reason" in text, text


def test_the_addresses_of_the_dashboard_and_of_the_metrics_are_shown() -> None:
    report = answer()
    assert ["dashboard:"] not in [line[:1] for line in table(report)] and status_json(report)["dashboard_address"] == ""
    report.dashboard_address, report.metrics_address = "10.0.0.1:9500", "10.0.0.1:9400"
    rows = table(report)
    assert ["dashboard:", "http://10.0.0.1:9500/"] in rows
    assert ["metrics:", "http://10.0.0.1:9400/metrics;"] in [line[:2] for line in rows]
    assert status_json(report)["dashboard_address"] == "10.0.0.1:9500"


def test_certificates_that_end_soon_are_shown() -> None:
    report, now = answer(), time.time()
    assert not any("certificate" in cell for row in table(report) for cell in row)
    report.certificate_not_after = now + 6 * 86400
    report.members[0].certificate_not_after, report.members[1].certificate_not_after = now - 1, now + 8 * 86400
    text = shown(report)
    assert "certificate of the scheduler expires at" in text and "psdist certs issue" in text
    assert f"certificate of {report.members[0].member_id} expired at" in text
    assert f"certificate of {report.members[1].member_id}" not in text


def test_on_a_terminal_without_textual_the_blocks_come_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pause(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "find_target", lambda given, environ: SchedulerChoice("h:1", Credentials(), "test"))
    monkeypatch.setattr(status, "fetch", lambda target, timeout: answer())
    monkeypatch.setattr(status, "time", SimpleNamespace(sleep=pause))  # Other threads may sleep.
    monkeypatch.setattr(status, "find_spec", lambda name: None)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert status.run(Namespace(watch=True, timeout=1.0, format="table"), {}) == 0
    written = capsys.readouterr()
    assert "digits: training" in written.out and "pip install textual" in written.err


def test_times_that_make_no_sense_are_not_kept() -> None:
    for wrong in [math.nan, math.inf, -1.0, 1e18]:
        assert conversions.moment(wrong) == 0.0 and conversions.moment(1.8e9) == 1.8e9
