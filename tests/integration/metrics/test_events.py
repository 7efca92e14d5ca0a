"""``psdist events`` of a real run: the whole history, without a gap when the scheduler is killed and restarted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launched import Run

#: The workers train until the file exists.
SCRIPT = """
import numpy as np, os, psdist
with psdist.init() as context:
    model = context.client.parameters("model", {"w": np.zeros(5000, np.float32)}, psdist.optim.SGD(lr=0.1))
    values = model.pull()
    while not os.path.exists("enough") or model.step % 10:
        values = model.push_pull({"w": values["w"] - 1})
        if model.step == 20:
            print("trained", flush=True)
"""
EVENTS = [sys.executable, "-m", "psdist.cli.main", "events", "--format", "json", "--run-id", "told", "--timeout", "60"]


def test_the_history_survives_the_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    flags = ("--nservers", "2", "--replicas", "2", "--run-id", "told", "--storage-path", "none")
    run = Run(tmp_path, SCRIPT, flags=flags)
    following = None
    try:
        run.until("trained", 2)
        following = subprocess.Popen([*EVENTS, "--follow"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert following.stdout is not None
        events = [json.loads(following.stdout.readline())]
        while "are ready" not in events[-1]["text"]:
            events.append(json.loads(following.stdout.readline()))
        run.child("psdist_scheduler").kill()
        run.child("psdist_server", "server-1").kill()
        # The next scheduler sees that the server is lost, or its successor first.
        while "server-1 " not in events[-1]["text"]:
            events.append(json.loads(following.stdout.readline()))
        assert [event["number"] for event in events] == list(range(1, len(events) + 1))
        assert {"join", "parameters", "replication"} <= {event["kind"] for event in events}
        shown = subprocess.run([*EVENTS, "--after", "2"], capture_output=True, check=True, timeout=240).stdout
        again = [json.loads(line) for line in shown.splitlines()]
        assert again[: len(events) - 2] == events[2:]
        (tmp_path / "enough").touch()
        assert run.end()[0] == 0
    finally:
        if following is not None:
            following.kill()
            following.communicate()
        run.stop()
