"""The context of a script leaves nothing behind when it is closed, forked, or cannot write to standard error."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psdist import torch as psdist_torch
from psdist.client.context import Context

HEAD = """
import gc, logging, numpy as np, os, psdist, sys, warnings, weakref

def train(context):
    weights = context.client.parameters("p", {"w": np.zeros(3, np.float32)}, psdist.optim.SGD(lr=1.0))
    weights.push_pull({"w": np.ones(3)})
    context.report(loss=1.0)
    return weights
"""
NOTE = "no launcher, so this is a world of one"


def run(script: str, error: Any = subprocess.PIPE, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", HEAD + script],
        # An unbuffered stream would forget unwritten data.
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | variables,
        stdout=subprocess.PIPE,
        stderr=error,
        text=True,
        check=False,
        timeout=240,
    )


def test_nothing_keeps_a_context_that_is_closed() -> None:
    done = run("""
kept = []
for _ in range(2):
    with psdist.init() as context:
        kept += [weakref.ref(one) for one in (context, context.client, train(context))]
    del context
gc.collect()
print([reference() for reference in kept])
""")
    assert (done.returncode, done.stdout) == (0, "[None, None, None, None, None, None]\n"), done.stderr


def test_a_script_that_just_ends_closes_its_context() -> None:
    done = run("""
import atexit
context = psdist.init()
atexit._run_exitfuncs()
print(context.client, [child.poll() for child in context._cluster.processes])
""")
    assert (done.returncode, done.stdout) == (0, "<Client closed> []\n"), done.stderr


def test_signals_while_the_interpreter_exits_leave_no_cluster_behind(tmp_path: Path) -> None:
    done = run(
        """
import signal
from psdist.launcher import embedded
stop = embedded._stop

def interrupted(children):
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    stop(children)

embedded._stop = interrupted
psdist.init()
""",
        TMPDIR=str(tmp_path),
        XDG_RUNTIME_DIR=str(tmp_path),
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert NOTE in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["launcher.embedded.await_address", "client.context.Client"])
def test_a_signal_while_the_context_is_made_leaves_no_cluster_behind(tmp_path: Path, place: str) -> None:
    """SIGTERM before the scheduler answers, and before the client connects to it."""
    done = run(
        f"""
import psdist.client.context, psdist.launcher.embedded, signal
psdist.{place} = lambda *_, **__: signal.raise_signal(signal.SIGTERM)
psdist.init()
""",
        TMPDIR=str(tmp_path),
        XDG_RUNTIME_DIR=str(tmp_path),
    )
    assert done.returncode == 143, done.stderr
    assert not list(tmp_path.iterdir())


def test_a_forked_child_that_exits_leaves_the_context_alone() -> None:
    done = run("""
class Log:
    def start(self, run_id):
        pass

    def log(self, values, step):
        print("log", os.getpid() == script)

    def close(self):
        print("close", os.getpid() == script)

script = os.getpid()
context = psdist.init()
context.add_tracker(Log())
weights = train(context)
if (child := os.fork()) == 0:
    warnings.simplefilter("ignore", ResourceWarning)  # Of subprocess: the servers are no children of this process.
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(weights.push_pull({"w": np.ones(3)})["w"].tolist(), flush=True)
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3\n[-2.0, -2.0, -2.0]\nlog True\nclose True\n"
    assert NOTE in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    "state", ["full", *(pytest.param(state, marks=pytest.mark.long) for state in ("closed", "none"))]
)
def test_a_note_that_cannot_be_written_ends_nothing(state: str) -> None:
    lines = {"full": "", "closed": "sys.stderr.close()", "none": "sys.stderr = None"}
    with Path("/dev/full").open("w") as full:
        done = run(
            lines[state] + "\nwith psdist.init() as context:\n    train(context)\nprint('trained')",
            full if state == "full" else subprocess.PIPE,
            PSDIST_PROGRESS="plain",
        )
    assert (done.returncode, done.stdout, done.stderr or "") == (0, "trained\n", "")


def test_a_run_that_went_well_logs_no_error_at_any_level() -> None:
    done = run("""
logging.basicConfig(level=logging.DEBUG)
for _ in range(2):
    with psdist.init() as context:
        train(context)
""")
    assert done.returncode == 0, done.stderr
    assert "DEBUG" in done.stderr
    assert "Traceback" not in done.stderr and "exception" not in done.stderr.lower(), done.stderr


@pytest.mark.parametrize("wrap", ["DistributedOptimizer", "offload", "DistributedDataParallel"])
def test_a_model_whose_statistics_are_not_shared_is_told_of_once(
    alone: Context, name: str, wrap: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.SyncBatchNorm(3), nn.Linear(3, 1))
    with caplog.at_level(logging.WARNING, "psdist"):
        if wrap == "DistributedDataParallel":
            psdist_torch.DistributedDataParallel(model, name=name, context=alone)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            getattr(psdist_torch, wrap)(model, optimizer, name=name, context=alone)
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == ["SyncBatchNorm '1'"]
