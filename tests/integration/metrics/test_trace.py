"""``psdist trace`` of a real run: a valid file on one time axis, an early end by Ctrl-C, and refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launched import Run
from perfetto_page import MISSING, perfetto
from trace_format import Event, check_trace

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
TOKEN = "a-token-that-no-file-may-contain"
TRACE = [sys.executable, "-m", "psdist.cli.main", "trace", "--run-id", "traced", "--timeout", "60"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PSDIST_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    flags = ("--nservers", "2", "--replicas", "2", "--run-id", "traced", "--storage-path", "none")
    run = Run(tmp_path, SCRIPT, flags=flags)
    try:
        run.until("trained", 2)
        yield run
        (tmp_path / "enough").touch()
        assert run.end()[0] == 0
    finally:
        run.stop()


def trace(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TRACE, *flags], capture_output=True, text=True, check=False, timeout=240)


def overlap(span: Event, other: Event) -> Any:
    return max(0, min(span["ts"] + span["dur"], other["ts"] + other["dur"]) - max(span["ts"], other["ts"]))


def is_within(inner: Event, outer: Event) -> bool:
    return bool(outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"])


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
    requests = {
        (names[one["pid"]].split()[0], one["args"]["peer"], one["args"]["step"]): one
        for one in events
        if one["cat"] == "request"
    }
    queues = [event for event in events if event["cat"] == "queue"]
    found = [
        is_within(queue, requests[key])
        for queue in queues
        if (key := (queue["args"]["peer"], names[queue["pid"]], queue["args"]["step"])) in requests
    ]
    assert len(found) >= 20 and all(found), "a contribution waits within the request that brought it"


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
