"""Whole scripts in the form of well-known public ones: at most three changed lines, and the results of torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.launched import Run
from tests.support.tree import ROOT

SCRIPTS = ROOT / "tests/support/scripts"

#: Lines of the scripts, and the lines that stand for them with psdist.
MNIST = {
    "import torch\n": "import psdist.data, psdist.torch, torch\n",
    "DataLoader(dataset, batch_size=64)": "DataLoader(dataset, batch_size=64 // psdist.init().world_size, "
    "sampler=psdist.data.DistributedSampler(dataset, shuffle=False))",
    "optimizer = optim.Adadelta(model.parameters(), lr=1.0)": "inner = optim.Adadelta(model.parameters(), lr=1.0); "
    "optimizer = psdist.torch.DistributedOptimizer(model, inner)",
}
NANOGPT = {
    "from torch.nn.parallel import DistributedDataParallel as DDP": "from psdist.torch import "
    "DistributedDataParallel as DDP"
}
#: The same as a script of torch's DDP.
MNIST_DDP = {
    "    torch.manual_seed(1)\n": '    torch.distributed.init_process_group("gloo"); torch.manual_seed(1)\n',
    "DataLoader(dataset, batch_size=64)": "DataLoader(dataset, batch_size=32, "
    "sampler=torch.utils.data.DistributedSampler(dataset, shuffle=False))",
    "model = Net()": "model = nn.parallel.DistributedDataParallel(Net())",
}


def changed(text: str, lines: Mapping[str, str]) -> str:
    """Return the script with other lines."""
    assert len(lines) <= 3
    for line, other in lines.items():
        assert text.count(line) == 1, line
        text = text.replace(line, other)
    return text


def launched(path: Path, script: str) -> dict[str, Any]:
    """Run a script on two workers and return what rank 0 saved."""
    path.mkdir()
    status, output = Run.ended(path, script, str(path / "saved.pt"), flags=("--nservers", "1", "--max-restarts", "0"))
    assert status == 0, output
    saved: dict[str, Any] = torch.load(path / "saved.pt", weights_only=True)
    return saved


def assert_equal(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    """Check equality up to the rounding of float32 sums."""
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        assert float((tensor - theirs[name]).norm() / theirs[name].norm()) < 1e-6, name


@pytest.mark.long  # test_torch_exact compares with one process, and test_torch_idioms the lines of such scripts.
def test_mnist_on_two_workers_equals_one_process(tmp_path: Path) -> None:
    text = (SCRIPTS / "mnist.py").read_text()
    done = subprocess.run(
        [sys.executable, SCRIPTS / "mnist.py", tmp_path / "plain.pt"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    mine = launched(tmp_path / "psdist", changed(text, MNIST))
    assert_equal(mine, torch.load(tmp_path / "plain.pt", weights_only=True))


@pytest.mark.long  # Four processes that import torch; the idioms cover each part.
def test_nanogpt_on_two_workers_equals_torchs_ddp(tmp_path: Path) -> None:
    text = (SCRIPTS / "nanogpt.py").read_text()
    plain, mine = launched(tmp_path / "gloo", text), launched(tmp_path / "psdist", changed(text, NANOGPT))
    assert mine["losses"] == pytest.approx(plain["losses"], rel=1e-6) and len(mine["losses"]) == 10
    assert_equal(mine["model"], plain["model"])


@pytest.mark.long  # Four processes that import torch, as below.
def test_mnist_with_the_backend_psdist_equals_gloo(tmp_path: Path) -> None:
    text = changed((SCRIPTS / "mnist.py").read_text(), MNIST_DDP)
    gloo, mine = launched(tmp_path / "gloo", text), launched(tmp_path / "psdist", changed(text, {"gloo": "psdist"}))
    assert_equal(mine, gloo)


@pytest.mark.long
def test_nanogpt_with_the_backend_psdist_equals_gloo(tmp_path: Path) -> None:
    text = (SCRIPTS / "nanogpt.py").read_text()
    gloo, mine = launched(tmp_path / "gloo", text), launched(tmp_path / "psdist", changed(text, {"gloo": "psdist"}))
    assert mine["losses"] == pytest.approx(gloo["losses"], rel=1e-6) and len(mine["losses"]) == 10
    assert_equal(mine["model"], gloo["model"])
