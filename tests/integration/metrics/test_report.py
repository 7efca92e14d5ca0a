"""``psdist explain`` and ``psdist report`` of a real run, live, finished, and continued by another scheduler."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

import psdist
from psdist.cli.main import PSDIST
from psdist.launcher.embedded import EmbeddedCluster
from psdist.monitoring.dashboard import view_key
from psdist.snapshots.policy import SavePolicy


def train(cluster: EmbeddedCluster, enough: threading.Event, pushes: list[int]) -> None:
    with psdist.Client(cluster.address, token=cluster.token) as client:
        model = client.parameters("model", {"w": np.zeros(1000, np.float32)}, psdist.optim.SGD(lr=0.1))
        while not enough.is_set():
            model.push_pull({"w": np.ones(1000, np.float32)})
            pushes.append(model.step)


def assert_no_secret(path: Path, token: str) -> None:
    """Check that a file, which its user may send to others, opens nothing."""
    content = path.read_text()
    assert token and token not in content and view_key(token, "digits") not in content


def test_a_run_is_explained_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pushes: list[int] = []
    out, storage = tmp_path / "run.html", str(tmp_path / "storage")
    for number in (1, 2):
        cluster = EmbeddedCluster(storage=storage, policy=SavePolicy(seconds=3600.0), run_id="digits")
        enough = threading.Event()
        worker = threading.Thread(target=train, args=(cluster, enough, pushes))
        worker.start()
        environ = {"PSDIST_SCHEDULER": cluster.address, "PSDIST_TOKEN": cluster.token}
        try:
            flags = ["--format", "json", "--timeout", "100"]
            assert PSDIST.run(["explain", *flags, "--seconds", "1", "--wait", "200"], environ) == 0
            found = json.loads(capsys.readouterr().out)
            assert found["parameters"] == "model" and found["bottleneck"] in found["parts"]
            assert PSDIST.run(["report", *flags, "--out", str(out)], environ) == 0
            live = json.loads(out.read_text())
            assert_no_secret(out, cluster.token)
            assert (live["state"], live["schedulers"]) == ("running", number)
            assert live["members"][0]["host"] and live["workers"]["worker-0"]["pushes"] > 0
        finally:
            enough.set()
            worker.join()
            cluster.close()
        capsys.readouterr()
    # Its scheduler is gone.
    assert PSDIST.run(["report", "--storage-path", storage, "--out", str(out)], {}) == 0
    assert_no_secret(out, cluster.token)
    page = out.read_text()
    assert '"id":"digits"' in page and "updates of model" in page
    assert PSDIST.run(["report", "--storage-path", storage, "--out", str(out), "--format", "json"], {}) == 0
    done = json.loads(out.read_text())
    assert done["workers"]["worker-0"]["pushes"] == len(pushes), "those after the last heartbeats, too"
    assert done["schedulers"] == 2 and len(done["curves"]["points"]) >= len(live["curves"]["points"])
