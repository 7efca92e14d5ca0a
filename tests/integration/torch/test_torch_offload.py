"""``offload`` in a world of one: the bytes of ``DistributedOptimizer``, loading of weights, and refused arguments.

Tests with separate processes are in ``test_torch_offload_exact``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import psdist
from psdist import optim
from psdist.client.context import Context
from psdist.errors import InvalidArgumentError, PsdistError, UnknownCodecError
from psdist.torch import DistributedOptimizer, OffloadedOptimizer, offload
from tests.support.torch_models import MODELS, loss_of

STEPS = 4

pytestmark = pytest.mark.usefixtures("alone")


class Steps(nn.Module):
    """Blocks that may be recomputed in the backward pass; one is used twice if possible."""

    def __init__(self, *, checkpoints: bool | None = None, width: int = 8, twice: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True)) for _ in range(4)
        )
        self.checkpoints = checkpoints
        self.order = (0, 1, 2, 3, 1) if twice else (0, 1, 2, 3)

    def reset_parameters(self) -> None:
        """Initialize the module's own parameter."""
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """Map float[batch, 8] to the same shape."""
        x = self.first(x) * self.scale
        for block in [self.blocks[number] for number in self.order]:
            x = block(x) if self.checkpoints is None else checkpoint(block, x, use_reentrant=self.checkpoints)
        return x


def batch(step: int, width: int = 8) -> Tensor:
    return torch.randn(6, width, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: Any, steps: int = STEPS, loss: Callable[[nn.Module, int], Tensor] | None = None,
          scheduler: Any = None) -> None:  # fmt: skip
    for step in range(steps):
        optimizer.zero_grad()
        value = model(batch(step)).square().mean() if loss is None else loss(model, step)
        value.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def assert_same(optimizer: OffloadedOptimizer, whole: nn.Module) -> None:
    weights = dict(optimizer.weights())
    expected = {key: one for key, one in whole.named_parameters() if one.requires_grad}
    assert weights.keys() == expected.keys()
    for key, one in expected.items():
        assert np.array_equal(weights[key].astype(np.float32), one.detach().float().numpy()), key


def is_away(model: nn.Module) -> bool:
    """Return True if no weight has memory."""
    return not any(is_here(one) for one in model.parameters() if one.requires_grad)


def is_here(parameter: Tensor) -> bool:
    """Return True if a parameter's memory can be read."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.untyped_storage().nbytes() > 0 and is_readable(parameter.data_ptr())


def gradient_of(parameter: Tensor) -> Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad


def is_readable(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        addresses, rights = line.split()[:2]
        start, stop = (int(one, 16) for one in addresses.split("-"))
        if start <= address < stop:
            return rights.startswith("rw")
    return False


# --- the same bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(MODELS))
def test_it_trains_as_a_whole_model(name: str, kind: str) -> None:
    make, batch_of, optimizer_of = MODELS[kind]
    model = make()
    whole = copy.deepcopy(model)
    layered = offload(model, optimizer_of(model), name=name)
    train(whole, DistributedOptimizer(whole, optimizer_of(whole), name=f"{name}-whole"), STEPS,
          lambda one, step: loss_of(one, batch_of(step)))  # fmt: skip
    train(model, layered, STEPS, lambda one, step: loss_of(one, batch_of(step)))
    assert_same(layered, whole)
    assert layered.handle.step == STEPS


def test_it_does_where_pages_cannot_move(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check systems other than Linux: there torch's allocator allocates and frees the memory."""
    monkeypatch.setattr("psdist.torch.offloaded_memory.is_supported", lambda: False)
    make, batch_of, optimizer_of = MODELS["transformer"]
    model = make()
    whole = copy.deepcopy(model)
    layered = offload(model, optimizer_of(model), name=name)
    assert is_away(model)
    with torch._C.DisableTorchFunctionSubclass():
        assert not any(one.untyped_storage().nbytes() for one in model.parameters())
    train(whole, DistributedOptimizer(whole, optimizer_of(whole), name=f"{name}-whole"), STEPS,
          lambda one, step: loss_of(one, batch_of(step)))  # fmt: skip
    train(model, layered, STEPS, lambda one, step: loss_of(one, batch_of(step)))
    assert_same(layered, whole)


@pytest.mark.parametrize("checkpoints", [None, False, True])
def test_layers_come_again_for_checkpoints_and_for_a_second_use(name: str, checkpoints: bool | None) -> None:
    # A reentrant checkpoint has a backward pass of its own, and a layer's gradients must come from one.
    model, whole = (Steps(checkpoints=one, twice=checkpoints is not True) for one in (checkpoints, None))
    whole.load_state_dict(model.state_dict())
    layered = offload(model, adamw(model), name=name)
    assert list(layered.handles) == ["Steps", "first", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    optimizer = DistributedOptimizer(whole, adamw(whole), name=f"{name}-whole")
    if checkpoints is not None:
        whole.checkpoints = False  # so that batch statistics are counted alike
    train(whole, optimizer)
    train(model, layered)
    assert_same(layered, whole)


def test_a_second_use_in_another_reentrant_pass_is_refused(name: str) -> None:
    model = Steps(checkpoints=True)
    layered = offload(model, adamw(model), name=name)
    with pytest.raises(InvalidArgumentError, match=r"'blocks\.1' got gradients twice .* use_reentrant=False"):
        train(model, layered)
    layered.close()


def test_layers_that_are_given(name: str) -> None:
    model = Steps()
    whole = copy.deepcopy(model)
    layered = offload(model, adamw(model), name=name, layers=[model.blocks[0], model.blocks[3][0]])
    assert "blocks.0" in layered.handles and "blocks.3.0" in layered.handles and "blocks.0.0" not in layered.handles
    train(whole, DistributedOptimizer(whole, adamw(whole), name=f"{name}-whole"))
    train(model, layered)
    assert_same(layered, whole)


def test_schedulers_specifications_and_frozen_parameters(name: str) -> None:
    model = Steps()
    model.blocks[1].requires_grad_(False)
    model.first.bias.requires_grad_(False)
    whole = copy.deepcopy(model)

    def made(one: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        return optimizer, lr_scheduler.StepLR(optimizer, 2, 0.5)

    optimizer, scheduler = made(model)
    layered = offload(model, optimizer, scheduler, name=name)
    assert model.blocks[1][0].weight.sum().isfinite(), "what is frozen stays here"
    train(model, layered, scheduler=scheduler)
    plain, its = made(whole)
    train(whole, DistributedOptimizer(whole, plain, its, name=f"{name}-whole"), scheduler=its)
    assert_same(layered, whole)
    assert layered.param_groups[0]["lr"] == pytest.approx(0.025)
    other = Steps()
    train(other, offload(other, optim.SGD(lr=0.1), name=f"{name}-specification"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights(name: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).to(dtype)
    whole = copy.deepcopy(model)

    def loss(one: nn.Module, step: int) -> Tensor:
        out: Tensor = one(batch(step).to(dtype)).float().square().mean()
        return out

    layered = offload(model, adamw(model), name=name)
    train(model, layered, loss=loss)
    train(whole, DistributedOptimizer(whole, adamw(whole), name=f"{name}-whole"), loss=loss)
    assert_same(layered, whole)


def test_gradients_in_fewer_bits(name: str) -> None:
    model = Steps()
    whole = copy.deepcopy(model)
    layered = offload(model, adamw(model), name=name, compression="bfloat16")
    train(model, layered)
    train(whole, DistributedOptimizer(whole, adamw(whole), name=f"{name}-whole", compression="bfloat16"))
    assert_same(layered, whole)


# --- the meta device --------------------------------------------------------------------------------------------------


def test_a_model_on_the_meta_device_is_given_values_layer_by_layer(name: str) -> None:
    with torch.device("meta"):
        model = Steps()
    layered = offload(model, adamw(model), name=name)
    begin = dict(layered.weights())
    assert is_away(model) and begin["blocks.0.0.weight"].std() > 0 and (begin["blocks.0.1.weight"] == 1).all()
    train(model, layered)
    assert not np.array_equal(begin["scale"], dict(layered.weights())["scale"])


def test_values_come_from_a_callable_and_ties_are_kept(name: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 8), nn.Linear(8, 6, bias=False))
        model[2].weight = model[0].weight
    called: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        called.append(module)
        for one in module.parameters(recurse=False):
            one.fill_(0.5)

    layered = offload(model, adamw(model), name=name, init=init)
    assert model[2].weight is model[0].weight and called == list(model)
    assert all((one == 0.5).all() for _, one in layered.weights())
    train(model, layered, loss=lambda one, step: one(torch.tensor([step, 1])).square().mean())
    assert len(dict(layered.weights())) == 3


class NoReset(nn.Module):
    """Module without reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("module", "init", "message"),
    [
        (NoReset, None, "NoReset .* has no reset_parameters"),
        (NoReset, lambda module: None, "init= left it uninitialized"),
        (lambda: nn.Linear(2, 2), lambda module: module.weight.zero_(), "bias of a Linear .* left it uninitialized"),
    ],
)
def test_values_that_are_missing(name: str, module: Any, init: Any, message: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(module(), module())
    with pytest.raises(InvalidArgumentError, match=message):
        offload(model, optim.SGD(lr=0.1), name=name, init=init)


# --- where weights are ------------------------------------------------------------------------------------------------


def test_weights_and_gradients_are_away_between_passes(name: str) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    layered = offload(model, adamw(model), name=name)
    here: list[int] = []
    for layer in model:
        layer.register_forward_hook(lambda *_: here.append(sum(map(is_here, weights))))
    weights = [layer.weight for layer in model]
    assert is_away(model)
    with torch.no_grad():
        seen = model(batch(0))
    assert max(here) <= 2, "the layer itself and the next"
    model(batch(0)).sum().backward()
    assert is_away(model) and all(gradient_of(one) is None for one in model.parameters())
    layered.step()
    model.eval()
    with torch.no_grad():
        assert not torch.equal(model(batch(0)), seen)
    layered.close()
    assert is_away(model)


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model[0].weight.sum(),
        lambda model: model[0].weight + 1,
        lambda model: model[0].weight.data,
        lambda model: model[0].weight.detach(),
        lambda model: nn.functional.linear(batch(0), model[0].weight),
        lambda model: model.state_dict(),
        lambda model: copy.deepcopy(model),
        lambda model: model.half(),
        lambda model: nn.utils.parameters_to_vector(model.parameters()),
        lambda model: nn.utils.clip_grad_norm_([model[0].weight], 1.0) if model[0].weight.mean() else None,
    ],
)
def test_a_weight_that_is_away_is_never_read(use: Callable[[nn.Module], Any], model: nn.Module) -> None:
    with pytest.raises(InvalidArgumentError, match=r"'0\.weight'"):
        use(model)


@pytest.fixture(scope="module")
def model(alone: Context) -> nn.Module:
    """An offloaded model that nobody trains."""
    made = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    offload(made, adamw(made), name="untrained")
    return made


def test_what_an_offloaded_parameter_still_has(model: nn.Module) -> None:
    weight = model[0].weight
    assert weight.shape == (8, 8) and weight.requires_grad and weight.grad is None and weight.dtype == torch.float32
    assert "'0.weight'" in repr(weight) and sum(one.numel() for one in model.parameters()) == 3 * 72


# --- what is refused --------------------------------------------------------------------------------------------------


def pair() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"consistency": psdist.ASP()}, "Use psdist.BSP"),
        ({"consistency": psdist.BSP(backup_workers=1)}, "Use psdist.BSP"),
        ({"compression": "int8"}, "as large as the model"),
        ({"compression": "auto"}, "as large as the model"),
        ({"layers": []}, "layers= is empty"),
        ({"layers": [nn.Linear(1, 1)]}, "not a module of the model"),
        ({"layers": ["0"]}, "not a module of the model"),
        ({"optimizer": optim.SGD(lr=0.1, max_grad_norm=1.0)}, "max_grad_norm=1 needs"),
        ({"optimizer": "sgd"}, "optimizer is of type str"),
        ({"device": "nowhere"}, "not a torch device"),
        ({"device": "meta"}, "has no values"),
        ({"model": nn.Linear(2, 2)}, "the model has one layer"),
        ({"model": pair().requires_grad_(False)}, "no parameter to train"),
        ({"model": "model"}, "give a torch.nn.Module"),
        (
            {
                "name": "untrained",
                "model": nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))),
                "optimizer": optim.AdamW(lr=0.01, weight_decay=0.01),
            },
            "another name=",
        ),
    ],
)
def test_bad_arguments(name: str, model: nn.Module, arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"model": pair(), "optimizer": optim.SGD(lr=0.1), "name": name} | arguments
    with pytest.raises(PsdistError, match=message):
        offload(given.pop("model"), given.pop("optimizer"), **given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="this process sees none"):
        offload(pair(), optim.SGD(lr=0.1), name=name, device="cuda")


def test_layers_within_each_other(name: str) -> None:
    model = Steps()
    with pytest.raises(InvalidArgumentError, match=r"'blocks\.0' and 'blocks\.0\.1', which is a part"):
        offload(model, adamw(model), name=name, layers=[model.blocks[0], model.blocks[0][1]])


def test_an_unknown_codec(name: str) -> None:
    with pytest.raises(UnknownCodecError):
        offload(pair(), optim.SGD(lr=0.1), name=name, compression="zip")


def test_a_loop_that_is_not_possible(name: str) -> None:
    model = pair()
    optimizer = offload(model, adamw(model), name=name)
    kept = model(batch(0)).sum() * 2
    model(batch(0)).sum().backward()
    with pytest.raises(InvalidArgumentError, match="gradients twice before step"):
        kept.backward()
    with pytest.raises(InvalidArgumentError, match="after backward\\(\\) and before step"):
        model(batch(0))
    with pytest.raises(InvalidArgumentError, match="comes after gradients"):
        optimizer.set_weight(2.0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # of weights from before the step
        graph = model(batch(0)).sum()
        model(batch(0)).sum().backward()
        optimizer.step()
        graph.backward()
    with pytest.raises(InvalidArgumentError, match="no_sync"):
        optimizer.no_sync()
    with pytest.raises(InvalidArgumentError, match="cannot be added"):
        optimizer.add_param_group({"params": []})
    with pytest.raises(InvalidArgumentError, match="--run-id"):
        optimizer.load_state_dict(optimizer.state_dict())


class Hidden(nn.Module):
    """Module that returns its result in an object that cannot be inspected."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        """Return an iterator."""
        return iter([self.linear(x)])


def test_results_without_tensors_and_weights_of_other_layers(name: str) -> None:
    hidden = nn.ModuleList([Hidden(), Hidden()])
    offload(hidden, optim.SGD(lr=0.1), name=name)
    with pytest.raises(InvalidArgumentError, match="return tensors in tuples"):
        hidden[0](batch(0))
    with torch.no_grad():
        assert next(hidden[0](batch(0))).shape == (6, 8)


def test_an_error_in_a_pass_leaves_nothing_behind(name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = offload(model, adamw(model), name=name)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.zeros(2, 9))
    train(model, optimizer, 2)
    assert optimizer.handle.step == 2
