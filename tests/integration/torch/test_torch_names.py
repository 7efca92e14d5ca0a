"""Names of parameters with any printable characters: the wire, the errors, and snapshots show them as they are."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import psdist
from psdist.cli.snapshot import SNAPSHOT
from psdist.client.context import Context
from psdist.errors import InvalidNameError, NonFiniteGradientError
from psdist.torch import DistributedOptimizer
from tests.support.contexts import workers
from tests.support.launched import Run
from tests.support.torch_models import distance

FIRST, SECOND = "a/b é [0]*", "en:de 'x' %41 größe"


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({FIRST: nn.Linear(6, 4), SECOND: nn.Linear(4, 3)})

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layers[SECOND](self.layers[FIRST](inputs).tanh())
        return result


def optimizer_of(model: Named) -> torch.optim.Optimizer:
    """Return an optimizer with a group for each layer, whose names become patterns."""
    groups = [
        {"params": model.layers[FIRST].parameters(), "lr": 0.2},
        {"params": model.layers[SECOND].parameters(), "weight_decay": 0.1},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def test_models_with_any_names_train_and_are_exported(tmp_path: Path) -> None:
    with workers(1, servers=2, storage=tmp_path / "storage", run_id="named") as (context,):
        model = Named()
        other = copy.deepcopy(model)
        optimizer = DistributedOptimizer(model, optimizer_of(model), context=context)
        plain = optimizer_of(other)
        for one, by in ((model, optimizer), (other, plain)):
            for step in range(4):
                by.zero_grad()
                (one(torch.ones(2, 6)) - step).square().mean().backward()
                by.step()
        assert distance(model, other) < 1e-5
        optimizer.zero_grad()
        with pytest.raises(NonFiniteGradientError, match=r"a/b é \[0\]\*|größe"):
            (model(torch.ones(2, 6)) * float("nan")).mean().backward()
            optimizer.step()
        context.client.snapshot()
    for suffix in (".safetensors", ".npz"):
        out = tmp_path / f"model{suffix}"
        assert SNAPSHOT.run(["export", str(tmp_path / "storage"), "--out", str(out)], {}) == 0
        found = safetensors.torch.load_file(out) if suffix == ".safetensors" else dict(np.load(out))
        assert set(found) == set(model.state_dict())
        for name, tensor in model.state_dict().items():
            assert torch.equal(torch.as_tensor(found[name]), tensor)


def test_a_run_with_such_names_ends_with_a_snapshot_that_resumes(tmp_path: Path) -> None:
    script = f"""
import numpy, psdist
with psdist.init() as context:
    init = {{{FIRST!r}: numpy.zeros(3), {SECOND!r}: numpy.ones(2)}}
    handle = context.client.parameters("p", init, psdist.optim.SGD(lr=0.5))
    print("starts at", handle.step, flush=True)
    for _ in range(2):
        weights = handle.push_pull({{{FIRST!r}: numpy.ones(3), {SECOND!r}: numpy.ones(2)}})
    print("ends at", handle.step, weights[{FIRST!r}][0], flush=True)
"""
    flags = ("--nservers", "1", "--storage-path", str(tmp_path / "storage"), "--run-id", "any-names")
    seen = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        status, output = Run.ended(tmp_path / str(number), script, flags=flags)
        assert status == 0, output
        seen.append(output)
    assert "starts at 0" in seen[0] and "ends at 2 -1.0" in seen[0]
    assert "starts at 2" in seen[1] and "ends at 4 -2.0" in seen[1]


@pytest.mark.parametrize("name", ["a\nb", "", "é" * 129, "\u202e"])
def test_other_names_are_refused(alone: Context, name: str) -> None:
    with pytest.raises(InvalidNameError, match="printable text of 1 to 256 bytes"):
        alone.client.parameters("refused", {name: np.zeros(1)}, psdist.optim.SGD(lr=0.1))
