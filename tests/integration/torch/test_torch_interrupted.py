"""The launcher's last line after an interrupt says what the user of a DistributedDataParallel can do."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.support.launched import Run

SCRIPT = """
import torch
from torch import nn
import psdist.torch

model = psdist.torch.DistributedDataParallel(nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).mean().backward()
    optimizer.step()
    if model.handle.step == 5:
        print("at step 5", flush=True)
"""


def test_a_script_with_its_own_weights_is_not_told_to_resume_by_the_run(tmp_path: Path) -> None:
    flags = ("--run-id", "own", "--storage-path", str(tmp_path / "runs"), "--nservers", "1", "--nproc-per-node", "1")
    with Run(tmp_path, SCRIPT, flags=flags) as run:
        run.until("at step 5")
        run.process.send_signal(signal.SIGINT)
        status, output = run.end()
    assert status == 130, output
    assert f"the snapshots in {tmp_path / 'runs'} have no weights, because this script keeps its own" in output, output
    assert "start it again from its own checkpoint" in output and "to resume: psdist run" not in output, output
