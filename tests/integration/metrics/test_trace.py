"""``psdist trace`` of a real run: a valid file on one time axis, an early end by Ctrl-C, and refusals."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import Run
from tests.support.perfetto_page import MISSING, perfetto
from tests.support.trace_format import Event, check_trace

#: The workers train until the file exists.
SCRIPT = """
import numpy as np, os, psdist
with psdist.init() as context:
    optimizer, zeros = psdist.optim.SGD(lr=0.1), np.zeros(50_000, np.float32)
    model = context.client.parameters("model", {"w": zeros}, optimizer, compression="int8")
    values = model.pull()
    while not os.path.exists("enough") or model.step % 10:
        values = model.push_pull({"w": values["w"] - 1})
        if model.step == 20:
            print("trained", flush=True)
"""
#: Rank 1 reads a clock that is an hour ahead, as on another machine.
AHEAD = """
import os, sys
if os.environ["RANK"] == "1" and "AHEAD" not in os.environ:
    os.environ["AHEAD"] = "1"
    os.execvp("unshare", ["unshare", "--time", "--monotonic", "3600", sys.executable, *sys.argv])
"""
TOKEN = "a-token-that-no-file-may-contain"
TRACE = [sys.executable, "-m", "psdist.cli.main", "trace", "--run-id", "traced", "--timeout", "60"]


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PSDIST_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    flags = ("--nservers", "2", "--replicas", "2", "--run-id", "traced", "--storage-path", "none")
    with Run(tmp_path, getattr(request, "param", "") + SCRIPT, flags=flags) as run:
        run.until("trained", 2)
        yield run
        (tmp_path / "enough").touch()
        assert run.end()[0] == 0


def trace(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TRACE, *flags], capture_output=True, text=True, check=False, timeout=240)


def overlap(span: Event, other: Event) -> Any:
    return max(0, min(span["ts"] + span["dur"], other["ts"] + other["dur"]) - max(span["ts"], other["ts"]))


def is_within(inner: Event, outer: Event, error: Decimal = Decimal()) -> bool:
    begin, end = outer["ts"] - error, outer["ts"] + outer["dur"] + error
    return bool(begin <= inner["ts"] and inner["ts"] + inner["dur"] <= end)


def test_a_trace_of_a_run(run: Run, tmp_path: Path) -> None:
    refused = trace("--out", "nowhere/trace.json")
    assert refused.returncode == 2 and "nowhere/trace.json cannot be written: No such file" in refused.stderr
    done = trace("--steps", "5", "--format", "json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["notes"] == []
    assert [(one["steps"], one["parameters"]) for one in report["workers"]] == [(5, "model")] * 2
    text = (tmp_path / "trace.json").read_text()
    assert TOKEN not in text
    check_events(check_trace(text), json.loads(text))
    check_early_end(tmp_path)


def check_events(events: list[Event], trace: Any) -> None:
    """Check that all kinds are present, that phases add up, and that no cause is after its effect."""
    kinds = {event["cat"] for event in events}
    assert kinds == {
        *("compute", "push", "wait", "pull", "step", "gather", "encode", "request"),
        *("queue", "thread", "apply", "replicate"),
    }
    threads = {one["tid"]: one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "thread_name"}
    script = [event for event in events if threads[event["tid"]] == "script"]
    steps = [event for event in events if event["cat"] == "step"]
    assert len(steps) == 10
    for step in steps:
        phases = sum(overlap(phase, step) for phase in script if phase["pid"] == step["pid"])
        assert abs(phases - step["dur"]) <= step["dur"] * 3 / 100
    names = {one["pid"]: one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "process_name"}
    assert list(names.values()) == ["worker-0 (rank 0)", "worker-1 (rank 1)", "server-0", "server-1"]
    assert all(is_within(*pair) for pair in queues_and_requests(events, names))


def queues_and_requests(events: list[Event], names: dict[int, str]) -> list[tuple[Event, Event]]:
    """Return the waits of contributions at servers, each with the worker's request that brought it."""
    requests = {
        (names[one["pid"]].split()[0], one["args"]["peer"], one["args"]["step"]): one
        for one in events
        if one["cat"] == "request"
    }
    queues = [event for event in events if event["cat"] == "queue"]
    found = [
        (queue, requests[key])
        for queue in queues
        if (key := (queue["args"]["peer"], names[queue["pid"]], queue["args"]["step"])) in requests
    ]
    assert len(found) >= 20
    return found


def check_early_end(path: Path) -> None:
    """Check that another recording is refused meanwhile, and that Ctrl-C leaves a whole file."""
    long = subprocess.Popen([*TRACE, "--steps", "10000", "--out", "long.json"], stderr=subprocess.PIPE, text=True)
    try:
        assert long.stderr is not None
        assert "to complete step" in long.stderr.readline()
        second = trace("--steps", "1", "--out", "second.json")
        assert second.returncode != 0 and "a recording of 10000 steps began" in second.stderr
        long.send_signal(signal.SIGINT)
        _, rest = long.communicate(timeout=240)
    finally:
        long.kill()
        long.wait()
    assert long.returncode == 0 and "ended by Ctrl-C" in rest
    assert check_trace((path / "long.json").read_text())
    assert {one.name for one in path.glob("*.json")} == {"trace.json", "long.json"}


@pytest.mark.skipif(
    subprocess.run(["unshare", "--time", "--monotonic", "1", "true"], capture_output=True).returncode != 0,
    reason="needs root and a kernel with time namespaces",
)
@pytest.mark.parametrize("run", [AHEAD], indirect=True, ids=["an hour ahead"])
def test_members_with_other_clocks_are_on_the_same_axis(run: Run, tmp_path: Path) -> None:
    done = trace("--steps", "5")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "trace.json").read_text()
    members = {one["member"]: one for one in json.loads(text)["otherData"]["members"]}
    ahead = members["worker-1"]["clock_offset_us"] - members["worker-0"]["clock_offset_us"]
    assert abs(abs(ahead) - 3_600_000_000) < 1_000_000
    names = {
        one["pid"]: one["args"]["name"] for one in json.loads(text)["traceEvents"] if one["name"] == "process_name"
    }
    error = 2 * Decimal(max(one["clock_uncertainty_us"] for one in members.values()))
    assert error < 60_000_000
    assert all(is_within(*pair, error) for pair in queues_and_requests(check_trace(text), names))


def test_a_trace_ends_with_its_scheduler_and_keeps_what_had_arrived(run: Run, tmp_path: Path) -> None:
    command = [*TRACE, "--steps", "10000"]
    recording = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert recording.stderr is not None
        while not re.search("to complete step ([2-9]|\\d\\d+) of 10000", line := recording.stderr.readline()):
            assert line, "it ended before a step was recorded"
        run.child("psdist_scheduler").kill()
        out, rest = recording.communicate(timeout=240)
    finally:
        recording.kill()
        recording.wait()
    assert recording.returncode == 0, rest
    assert "the scheduler is gone, so spans may be missing" in rest
    assert "spans in trace.json" in out and check_trace((tmp_path / "trace.json").read_text())


@pytest.mark.long  # Perfetto's page is not among the packages of the tests, and takes some seconds to start.
@pytest.mark.skipif(bool(MISSING), reason=MISSING or "nothing is missing")
def test_perfetto_imports_a_trace_without_a_fault(run: Run, tmp_path: Path) -> None:
    done = trace("--steps", "5")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "trace.json").read_text()
    broken = text.replace('"dur"', '"during"', 1)
    faults = "SELECT name FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0"
    with perfetto(text) as query:
        assert query(faults) == []
        assert query("SELECT COUNT(*) FROM slice") == [[str(len(check_trace(text)))]]
        names = {name for (name,) in query("SELECT name FROM process WHERE name IS NOT NULL")}
        assert names == {"worker-0 (rank 0)", "worker-1 (rank 1)", "server-0", "server-1"}
    with perfetto(broken) as query:  # The importer does notice faults.
        assert query(faults) != []
