"""Snapshots of PyTorch models, read without a cluster: ``load_state_dict`` gets the trained state."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import psdist
from psdist.cli.snapshot import SNAPSHOT
from psdist.client.context import Context
from psdist.errors import DTypeMismatchError
from psdist.snapshots.model_tensors import DESCRIPTION
from psdist.torch import DistributedOptimizer, offload
from psdist.torch.inspection import KeptBuffers
from tests.support.contexts import everywhere, workers


class Model(nn.Module):
    """Model with everything that a ``state_dict`` may contain besides float32 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.again = self.norm
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.narrow = nn.Parameter(torch.randn(3, 5).to(torch.bfloat16), requires_grad=False)
        self.none = nn.Parameter(torch.empty(0, 2), requires_grad=False)
        self.l = nn.Linear(4, 6)
        self.l.weight = self.e.weight
        self.heads = nn.ModuleDict({"en:de": nn.Linear(4, 6, bias=False)})
        self.heads["en:de"].weight = self.e.weight
        self.register_buffer("mask", torch.tensor([[True, False], [False, True]]))
        self.register_buffer("scale", torch.tensor(0.1, dtype=torch.float64))
        self.register_buffer("infinite", torch.tensor([float("-inf"), 1.0]))
        self.register_buffer("empty", torch.empty(0, 3, dtype=torch.int32))
        self.register_buffer("scratch", torch.ones(7), persistent=False)

    def forward(self, numbers: Tensor) -> Tensor:
        out: Tensor = self.l(self.norm(self.frozen(self.e(numbers))))
        return out


def train(context: Context, wrap: Callable[..., Any], steps: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(context.rank)
    model = Model()
    optimizer = wrap(model, psdist.optim.SGD(lr=0.1), context=context)
    data = torch.Generator().manual_seed(context.rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(6, (8,), generator=data)).square().mean().backward()
        optimizer.step()
    context.client.snapshot()
    weights = {} if wrap is DistributedOptimizer else {name: torch.tensor(array) for name, array in optimizer.weights()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = model.state_dict(keep_vars=True)
    return {
        name: weights[names[one]] if names.get(one) in weights else one.detach().clone() for name, one in state.items()
    }


@pytest.fixture(scope="module", params=[DistributedOptimizer, offload])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """A storage, and the state of rank 0 when its snapshot was taken."""
    storage = tmp_path_factory.mktemp("storage")
    with workers(2, servers=2, storage=storage, run_id="bn") as contexts:
        states = everywhere(contexts, lambda context: train(context, request.param))
    assert not torch.equal(states[0]["norm.running_mean"], states[1]["norm.running_mean"])
    yield str(storage), states[0]


def same(read: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    assert read.keys() == state.keys()
    for name, value in state.items():
        assert read[name].dtype == value.dtype and torch.equal(read[name], value), name
    Model().load_state_dict(read, strict=True)


@pytest.mark.parametrize("suffix", ["pt", "safetensors", "npz"])
def test_an_export_is_the_state_dict_of_the_lowest_rank(
    trained: tuple[str, dict[str, Tensor]], tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    storage, state = trained
    out = tmp_path / f"bn.{suffix}"
    assert SNAPSHOT.run(["export", storage, "--out", str(out), "--report", "json"], {}) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == []
    if suffix == "pt":
        same(torch.load(out, weights_only=True), state)
    elif suffix == "safetensors":
        same(safetensors.torch.load_file(out), state)
    else:
        with np.load(out) as read:
            arrays = {name: torch.from_numpy(read[name]) for name in read.files}
        assert arrays["narrow"].dtype == torch.float32  # numpy has no bfloat16.
        same(arrays | {"narrow": arrays["narrow"].to(torch.bfloat16)}, state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_dtype_is_that_of_floating_point_tensors(
    trained: tuple[str, dict[str, Tensor]], tmp_path: Path, dtype: torch.dtype
) -> None:
    """Check that dtype applies to these alone, as in ``module.to(dtype)``."""
    storage, state = trained
    arguments = ["--out", str(tmp_path / "m.safetensors"), "--dtype", str(dtype).removeprefix("torch.")]
    assert SNAPSHOT.run(["export", storage, *arguments], {}) == 0
    read = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert read.keys() == state.keys()
    for name, value in state.items():
        wanted = value.to(dtype) if value.is_floating_point() else value
        assert read[name].dtype == wanted.dtype and torch.equal(read[name], wanted), name


def test_load_snapshot_gives_the_state_dict(trained: tuple[str, dict[str, Tensor]]) -> None:
    storage, state = trained
    snapshot = psdist.load_snapshot(storage)
    narrow = torch.from_numpy(snapshot["narrow"].view(np.int16)).view(torch.bfloat16)
    same({name: narrow if name == "narrow" else torch.from_numpy(array) for name, array in snapshot.items()}, state)

    # A dtype is for floating-point numbers alone, as with module.half().
    half = psdist.load_snapshot(storage, dtype="float16")
    assert half["norm.running_var"].dtype == half["scale"].dtype == half["l.weight"].dtype == np.float16
    assert half["mask"].dtype == np.bool_ and half["norm.num_batches_tracked"].dtype == np.int64

    halves = {"narrow": np.zeros((3, 5), np.float16)}
    psdist.load_snapshot(storage, into=halves, strict=False)
    assert np.array_equal(halves["narrow"], state["narrow"].half().numpy())
    into = {"norm.num_batches_tracked": np.zeros((), np.int64), "narrow": np.zeros((3, 5), np.float32)}
    filled = psdist.load_snapshot(storage, into=into, strict=False)
    assert into["norm.num_batches_tracked"] == state["norm.num_batches_tracked"] and not filled.missing
    assert np.array_equal(into["narrow"], state["narrow"].float().numpy())
    with pytest.raises(DTypeMismatchError, match=r"'l.weight'.*int64, but the tensor is float32"):
        psdist.load_snapshot(storage, into={"l.weight": np.zeros((6, 4), np.int64)}, strict=False)


def test_parameter_sets_are_chosen_by_name(trained: tuple[str, dict[str, Tensor]]) -> None:
    storage, state = trained
    sets = psdist.load_snapshot(storage).steps
    (fixed,) = (name for name in sets if name.endswith("/fixed"))
    assert set(psdist.load_snapshot(storage, parameters=fixed)) == {"frozen.weight", "frozen.bias", "narrow"}
    others = [set(psdist.load_snapshot(storage, parameters=name)) for name in sets if name != fixed]
    assert set.union(*others) == state.keys()


def test_what_workers_agree_by_is_not_of_the_model(tmp_path: Path) -> None:
    """Check that the parameter sets of join(), of a GradScaler and of mean gradients are left out."""
    with workers(1, storage=tmp_path, run_id="uneven") as (context,):
        model = nn.Linear(3, 1)
        optimizer = DistributedOptimizer(model, psdist.optim.SGD(lr=0.1), overlap=False, context=context)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with optimizer.join():
            scaler.scale(model(torch.ones(2, 3)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        model(torch.ones(2, 3)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        context.client.snapshot()
    snapshot = psdist.load_snapshot(str(tmp_path))
    assert snapshot.keys() == model.state_dict().keys()
    assert set(snapshot.steps) == {"model", "model/join", "model/overflows", "model/means"}


def test_a_snapshot_without_a_description_gives_no_bytes_as_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check older snapshots, which have no description. Tensors that may be bytes are omitted and named."""
    save = KeptBuffers._save
    monkeypatch.setattr(KeptBuffers, "_save", lambda self: {n: a for n, a in save(self).items() if n != DESCRIPTION})
    with workers(1, storage=tmp_path / "storage", run_id="old") as (context,):
        state = train(context, DistributedOptimizer)
    with pytest.warns(RuntimeWarning, match=r"narrow, frozen.bias, mask.* left out: .*take another snapshot"):
        snapshot = psdist.load_snapshot(str(tmp_path / "storage"))
    trained = {"e.weight", "norm.weight", "norm.bias", "l.bias"}
    assert snapshot.keys() == trained | {"frozen.weight"}
    assert all(np.array_equal(snapshot[name], state[name].numpy()) for name in snapshot)
    assert SNAPSHOT.run(["export", str(tmp_path / "storage"), "--out", str(tmp_path / "old.pt")], {}) == 0
    assert "warning: narrow, frozen.bias, mask" in capsys.readouterr().out
    assert torch.load(tmp_path / "old.pt").keys() == snapshot.keys()
