"""The launchers and ``psdist status`` with the real scheduler, servers and client, and a script that trains."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.programs import Programs, end, until

#: Trains some steps; ``die`` kills worker 1 once, in the middle; ``hold`` stays connected afterwards.
_SCRIPT = """
import os, signal, sys
import numpy as np
import psdist

context = psdist.init()
weights = context.client.parameters(
    "model", init={"w": np.zeros((300, 200), np.float32)}, optimizer=psdist.optim.SGD(lr=1.0), consistency=psdist.BSP()
)
if "wrong" in sys.argv and context.rank == 1:
    weights.push_pull({"w": np.ones(3, np.float32)})
for step in range(4):
    if "die" in sys.argv and step == 2 and (context.rank, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (1, "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    values = weights.push_pull({"w": np.ones((300, 200), np.float32)})
print("rank", context.rank, "of", context.world_size, "local", context.local_rank, "weight", values["w"][0, 0])
if "hold" in sys.argv:
    signal.pause()
"""

#: Raises in step 3 of every start.
_FAILING_SCRIPT = """
import numpy as np
import psdist

context = psdist.init()
weights = context.client.parameters("model", {"w": np.zeros(3, np.float32)}, psdist.optim.SGD(lr=1.0), psdist.BSP())
print("rank", context.rank, "begins at step", weights.step)
while weights.step < 5:
    if weights.step == 3:
        context.client.barrier("failing")
    weights.push_pull({"w": np.full(3, np.nan if weights.step == 3 else 1.0, np.float32)})
print("rank", context.rank, "is done")
"""


class Stage(Programs):
    """A directory with the script, and the programs started in it."""

    def scheduler(self, *arguments: str) -> tuple[subprocess.Popen[str], str]:
        """Start a scheduler that listens. Returns it and its address."""
        scheduler = self.start("psdist-scheduler", "--run-id", "by-hand", *arguments, PSDIST_TOKEN="secret")
        line = until(scheduler, r"listening at (\S+:\d+)")
        return scheduler, line[1]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with closing(Stage(tmp_path, _SCRIPT)) as made:
        yield made


def test_a_run_trains_and_ends_quietly(stage: Stage) -> None:
    status, text = stage.run("psdist", "run", "--nproc-per-node", "2", "train.py")
    assert status == 0, text
    assert "[worker 0] rank 0 of 2 local 0 weight -4.0" in text
    assert "[worker 1] rank 1 of 2 local 1 weight -4.0" in text
    assert "warning" not in text and "[scheduler]" not in text and "[server" not in text, text
    # All lines except the script's own have the time.
    others = [line for line in text.splitlines() if "] rank " not in line]
    assert others and all(re.match(r"(\[\w+\] )?\d\d:\d\d:\d\d ", line) for line in others), text


def test_a_killed_worker_comes_back_and_the_run_ends_well(stage: Stage) -> None:
    status, text = stage.run("psdist", "run", "--nproc-per-node", "2", "train.py", "die")
    assert status == 0, text
    assert "worker 1 failed: killed by SIGKILL; restart 1 of 3" in text
    assert "[worker 1] rank 1 of 2" in text and "[worker 0] rank 0 of 2" in text


def test_a_step_that_nobody_pushed_to_is_not_left_out(stage: Stage) -> None:
    (stage.path / "failing.py").write_text(_FAILING_SCRIPT)
    status, text = stage.run("psdist", "run", "--nproc-per-node", "2", "--max-restarts", "2", "failing.py")
    begins = sorted(re.findall(r"rank (\d) begins at step (\d+)", text))
    assert status == 1 and "is done" not in text, text
    assert set(begins) == {(rank, step) for rank in "01" for step in "03"}, text


def test_wrong_arguments_are_said_once_and_the_others_stopped(stage: Stage) -> None:
    status, text = stage.run("psdist", "run", "--nproc-per-node", "2", "--stop-timeout", "3600", "train.py", "wrong")
    assert status == 78, text
    assert text.count("Traceback") == text.count("expected (300, 200)") == 1 and "restart 1" not in text, text
    assert re.findall(r'File "(.*)", line', text) == [str(stage.path / "train.py")], text
    assert "frames of psdist left out; PSDIST_FULL_TRACEBACK=1 shows all)" in text, text
    failed = "psdist: worker 1 failed: exit code 78 (wrong settings or use of psdist: not restarted)"
    assert text.splitlines()[-1].endswith(failed)


def test_status_of_the_run_on_this_machine_is_shown_and_watched(stage: Stage) -> None:
    run = stage.start("psdist", "run", "--run-id", "shown", "--nservers", "1", "train.py", "hold")
    until(run, r"\[worker 0\] rank 0")
    _watch_until_ctrl_c(stage)  # First, while the steps of the last seconds still have a rate.
    status, table = stage.run("psdist", "status")
    assert status == 0, table
    assert table.startswith("shown: ")
    assert re.search(r"worker-0 +worker 0 +live", table) and re.search(r"server-0 +server +live", table)
    assert re.search(r"model \(sgd, bsp\) +ready +60,000", table)
    status, text = stage.run("psdist", "status", "--format", "json", "--run-id", "shown")
    shown = json.loads(text)
    assert (shown["run_id"], shown["workers_min"], shown["servers_min"]) == ("shown", 1, 1)
    assert {member["role"] for member in shown["members"]} == {"worker", "server"}
    (model,) = shown["parameters"]
    assert (model["name"], model["state"], model["elements"], model["optimizer"]) == ("model", "ready", 60_000, "sgd")
    assert [member["rank"] for member in model["members"]] == [0]
    status, text = stage.run("psdist", "status", "--run-id", "other")
    assert status == 69 and "other" in text and "shown" in text
    run.send_signal(signal.SIGINT)
    assert end(run)[0] == 130
    status, text = stage.run("psdist", "status")
    assert status == 69 and "no run is running on this machine: start one by psdist run, or pass" in text


def _watch_until_ctrl_c(stage: Stage) -> None:
    watch = stage.start("psdist", "status", "--watch")
    until(watch, r"worker-0 +worker 0 +live .* \d+\.\d +\d+% ")
    for _ in range(2):
        until(watch, "^shown: ")
    watch.send_signal(signal.SIGINT)
    status, rest = end(watch)
    assert status == 0 and "Traceback" not in rest and "Interrupt" not in rest, rest


#: Rank 0 listens where torch.distributed would open its store, and rank 1 finds it there.
MEET = """
import os, socket
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    with socket.create_server(place, family=family) as server:
        server.accept()[0].close()
else:
    while True:
        try:
            socket.create_connection(place, 60).close()
            break
        except ConnectionRefusedError:
            pass  # rank 0 starts at the same time
"""


def test_programs_started_by_hand_form_a_world(stage: Stage) -> None:
    """Check two agents without node ranks: they get different ones. A mistake is reported, and harms nobody."""
    scheduler, address = stage.scheduler("--min-workers", "2")
    server = stage.start("psdist-server", "--scheduler", address, PSDIST_TOKEN="secret")
    status, text = stage.run("psdist-worker", "--scheduler", address, "--nnodes", "2", "train.py", PSDIST_TOKEN="wrong")
    assert status == 78 and "token is missing or wrong" in text
    status, text = stage.run("psdist", "status", "--scheduler", address)
    assert status == 78 and "token is missing or wrong" in text
    (stage.path / "meet.py").write_text(MEET + (stage.path / "train.py").read_text())
    flags = ("--rdzv-endpoint", address, "--nnodes", "2", "--rdzv-id", "by-hand")
    agents = [stage.start("psdist-worker", *flags, "meet.py", PSDIST_TOKEN="secret") for _ in range(2)]
    ends = [end(agent) for agent in agents]
    assert [status for status, _ in ends] == [0, 0], ends
    texts = sorted(re.search(r"\[worker \d\] (rank .*)", text)[1] for _, text in ends)
    assert texts == ["rank 0 of 2 local 0 weight -4.0", "rank 1 of 2 local 0 weight -4.0"]
    assert any("waiting for 1 of 2 nodes" in text for _, text in ends)
    for process in (server, scheduler):
        process.terminate()
        assert end(process)[0] == 0


def test_an_unreachable_scheduler_is_named(stage: Stage) -> None:
    with socket.socket() as closed:
        # Bound but not listening: nobody else gets the port, and connections are refused.
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        status, text = stage.run("psdist-worker", "--scheduler", address, "--start-timeout", "0.3", "train.py")
        assert status == 69 and address in text and "0.3 s" in text, text
        status, text = stage.run("psdist", "status", "--scheduler", address)
        assert status == 69 and address in text, text
        status, text = stage.run("psdist-worker", "--scheduler-file", "absent", "--start-timeout", "0", "train.py")
        assert status == 69 and "absent" in text, text


@pytest.mark.parametrize("command", ["psdist-scheduler", "psdist-server"])
def test_programs_refuse_unsafe_and_unknown_flags(stage: Stage, command: str) -> None:
    status, text = stage.run(command, "--host", "0.0.0.0", PSDIST_TOKEN="secret", PSDIST_SCHEDULER="127.0.0.1:9")
    assert status == 2 and "--insecure" in text and "0.0.0.0" in text
    status, text = stage.run(command, "--bogus")
    assert status == 2 and "--bogus" in text
    status, text = stage.run(command, "--help")
    assert status == 0 and text.startswith(f"usage: {command}")
