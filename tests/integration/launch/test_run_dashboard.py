"""``psdist run --dashboard``: the link that it prints opens the page of the run, and a killed worker is on it."""

from __future__ import annotations

import http.client
import json
import signal
from contextlib import closing
from pathlib import Path

import pytest

from psdist.errors import ConfigurationError
from psdist.monitoring.dashboard import listen
from tests.support.launched import Run

SCRIPT = """
import numpy as np, psdist
with psdist.init() as context:
    model = context.client.parameters("model", {"w": np.zeros(10, np.float32)}, psdist.optim.SGD(0.1))
    while True:
        model.push_pull({"w": np.ones(10, np.float32)})
        if model.step == 5: print("trains", flush=True)
"""


def test_the_printed_link_shows_the_run_and_a_killed_worker(tmp_path: Path) -> None:
    run = Run(tmp_path, SCRIPT, flags=("--dashboard", "--nservers", "1", "--storage-path", "none", "--log-dir", "logs"))
    try:
        host, key = run.until(r"dashboard: http://([\d.:]+)/#key=(\w+)").groups()
        run.until("trains", 2)
        with closing(http.client.HTTPConnection(host, timeout=120)) as connection:
            connection.request("GET", "/events", headers={"Authorization": f"Bearer {key}"})
            answer = connection.getresponse()
            with closing(answer):
                events = (json.loads(line[6:]) for line in answer if line.startswith(b"data: "))
                state = next(one["state"] for one in events if one.get("state", {}).get("workers"))
                assert set(state["workers"]) == {"worker-0", "worker-1"} and set(state["parameters"]) == {"model"}
                with closing(http.client.HTTPConnection(host, timeout=120)) as other:
                    other.request("GET", "/logs/worker-1", headers={"Authorization": f"Bearer {key}"})
                    assert other.getresponse().read() == b"trains\n"
                pid = state["workers"]["worker-1"]["pid"]
                next(child for child in run.children() if child.pid == pid).send_signal(signal.SIGKILL)
                texts = (event[2] for one in events for event in one["change"].get("events", {}).values() if event)
                assert next(text for text in texts if "worker-1" in text and "lost" in text)
        run.process.send_signal(signal.SIGINT)
        run.process.communicate(timeout=240)
    finally:
        run.process.kill()
        run.process.communicate()


@pytest.mark.parametrize("host", ["192.0.2.7", "[fe80:"])
def test_a_host_that_is_not_of_this_machine_is_named(host: str) -> None:
    with pytest.raises(ConfigurationError, match="Correct --dashboard-host"):
        listen(host, 0)
