"""Idioms that read or write weights beside the optimizer: averages, restored and re-initialized weights, clamps."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.idioms.script import INPUTS, TARGETS, Script, loss_of, net, sgd
from tests.idioms.table import idiom, refused

STEPS = 4
REPLACED = refused("change the model first, then wrap it", "replace layers before wrapping")


def step(model: Any, optimizer: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Make one step and return the loss."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss


def wrapped(script: Script) -> tuple[Any, Any, Any]:
    """Return the wrapped model, the optimizer, and the model itself."""
    inner = net()
    model, optimizer = script.wrap(inner, sgd(inner))
    return model, optimizer, inner


@idiom("an EMA of the weights: `ema.mul_(0.9).add_(p, alpha=0.1)`")
def ema(script: Script) -> Any:
    model, optimizer, inner = wrapped(script)
    average = copy.deepcopy(inner)
    for batch in script.batches(STEPS):
        step(model, optimizer, batch)
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), inner.parameters(), strict=True):
                mean.mul_(0.9).add_(parameter, alpha=0.1)
    return [model, average]


@idiom("SWA: `AveragedModel`, `SWALR`, `update_bn`")
def swa(script: Script) -> Any:
    inner = net()
    base = sgd(inner)
    model, optimizer = script.wrap(inner, base)
    average, scheduler = AveragedModel(inner), SWALR(base, swa_lr=0.05, anneal_epochs=2)
    for batch in script.batches(STEPS):
        step(model, optimizer, batch)
        average.update_parameters(inner)
        scheduler.step()
    update_bn([batch[0] for batch in script.batches(1)], average)
    return [model, average]


@idiom("`AveragedModel(multi_avg_fn=get_ema_multi_avg_fn(0.9))`")
def averaged_model(script: Script) -> Any:
    model, optimizer, inner = wrapped(script)
    average = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for batch in script.batches(STEPS):
        step(model, optimizer, batch)
        average.update_parameters(inner)
    return [model, average]


@idiom("EMA weights swapped in for evaluation, and back")
def swapped_weights(script: Script) -> Any:
    model, optimizer, inner = wrapped(script)
    average = copy.deepcopy(inner)
    for batch in script.batches(STEPS):
        step(model, optimizer, batch)
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), inner.parameters(), strict=True):
                mean.mul_(0.9).add_(parameter, alpha=0.1)
        kept = copy.deepcopy(inner.state_dict())
        inner.load_state_dict(average.state_dict())
        with torch.no_grad():
            loss_of(inner, batch)
        inner.load_state_dict(kept)
    return [model, average]


@idiom("the best weights restored: `model.load_state_dict(best)` during training")
def restored_weights(script: Script) -> Any:
    model, optimizer, inner = wrapped(script)
    best = copy.deepcopy(inner.state_dict())
    for number, batch in enumerate(script.batches(STEPS)):
        step(model, optimizer, batch)
        if number == 1:
            inner.load_state_dict(best)
    return model


@idiom("`model.load_state_dict` before wrapping")
def loaded_first(script: Script) -> Any:
    inner = net()
    inner.load_state_dict({name: torch.full_like(value, 0.1) for name, value in inner.state_dict().items()})
    model, optimizer = script.wrap(inner, sgd(inner))
    for batch in script.batches(STEPS):
        step(model, optimizer, batch)
    return model


@idiom("a layer that is re-initialized: `layer.reset_parameters()`")
def reset_layer(script: Script) -> Any:
    model, optimizer, inner = wrapped(script)
    for number, batch in enumerate(script.batches(STEPS)):
        step(model, optimizer, batch)
        if number == 1:
            torch.manual_seed(5)
            inner[2].reset_parameters()
    return model


@idiom("a layer that is replaced during training: `model[2] = nn.Linear(...)`", optimizer=REPLACED, ddp=REPLACED)
def replaced_layer(script: Script) -> Any:
    model, optimizer, inner = wrapped(script)
    for number, batch in enumerate(script.batches(STEPS)):
        step(model, optimizer, batch)
        if number == 1:
            torch.manual_seed(5)
            inner[2] = nn.Linear(8, TARGETS)
    return model


@idiom("`with torch.no_grad(): p.clamp_(-c, c)` after `step()`")
def clamped_weights(script: Script) -> Any:
    model, optimizer, inner = wrapped(script)
    for batch in script.batches(STEPS):
        step(model, optimizer, batch)
        with torch.no_grad():
            for parameter in inner.parameters():
                parameter.clamp_(-0.2, 0.2)
    return model


@idiom("`p.data.clamp_(-c, c)` after `step()`: weight clipping of Wasserstein GANs")
def clamped_data(script: Script) -> Any:
    model, optimizer, inner = wrapped(script)
    for batch in script.batches(STEPS):
        step(model, optimizer, batch)
        for parameter in inner.parameters():
            parameter.data.clamp_(-0.2, 0.2)
    return model


@idiom("one row set once: `p.data[row] = 1`", note="`detect_writes='all'` of `DistributedOptimizer`")
def written_row(script: Script) -> Any:
    settings = {"detect_writes": "all"} if script.face == "optimizer" else {}
    model, optimizer = script.wrap(inner := net(), sgd(inner), **settings)
    for number, batch in enumerate(script.batches(STEPS + 3)):
        step(model, optimizer, batch)
        if number == STEPS:
            inner[0].weight.data[5] = 1.0
    return model


@idiom("`vector_to_parameters(vector, model.parameters())`")
def vector(script: Script) -> Any:
    model, optimizer, inner = wrapped(script)
    for batch in script.batches(STEPS):
        step(model, optimizer, batch)
        flat = nn.utils.parameters_to_vector(inner.parameters()).detach()
        nn.utils.vector_to_parameters(flat * 0.9, inner.parameters())
    return model


@idiom("weights that are normalized after each step: `w.div_(w.norm(dim=1, keepdim=True))`")
def normalized_weights(script: Script) -> Any:
    model, optimizer, inner = wrapped(script)
    for batch in script.batches(STEPS):
        step(model, optimizer, batch)
        with torch.no_grad():
            inner[0].weight.div_(inner[0].weight.norm(dim=1, keepdim=True))
    return model


@idiom(
    "SGD by hand: `with torch.no_grad(): p -= lr * p.grad`",
    optimizer=refused("and did not call step", "use `DistributedDataParallel`, which keeps the update"),
)
def manual_sgd(script: Script) -> Any:
    model, _, inner = wrapped(script)
    for batch in script.batches(STEPS):
        loss_of(model, batch).backward()
        with torch.no_grad():
            for parameter in inner.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return model


@idiom("a target network: `target.load_state_dict(model.state_dict())`")
def target_network(script: Script) -> Any:
    model, optimizer, inner = wrapped(script)
    target = copy.deepcopy(inner).requires_grad_(False)
    for number, (inputs, targets) in enumerate(script.batches(STEPS)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets + 0.1 * target(inputs)).backward()
        optimizer.step()
        if number % 2:
            target.load_state_dict(inner.state_dict())
    return [model, target]


@idiom("a soft target network: `t.data.copy_(tau * p.data + (1 - tau) * t.data)`")
def soft_target(script: Script) -> Any:
    model, optimizer, inner = wrapped(script)
    target = copy.deepcopy(inner)
    for batch in script.batches(STEPS):
        step(model, optimizer, batch)
        for mine, theirs in zip(target.parameters(), inner.parameters(), strict=True):
            mine.data.copy_(0.1 * theirs.data + 0.9 * mine.data)
    return [model, target]


@idiom("early stopping that keeps `copy.deepcopy(model.state_dict())`")
def early_stopping(script: Script) -> Any:
    model, optimizer, inner = wrapped(script)
    best: dict[str, Tensor] = {}
    for number, batch in enumerate(script.batches(STEPS)):
        step(model, optimizer, batch)
        if number == 2:
            best = copy.deepcopy(inner.state_dict())
    return [model, list(best.values())]


@idiom("`torch.save` and `torch.load` of the model's `state_dict()`")
def saved_model(script: Script) -> Any:
    import io

    model, optimizer, inner = wrapped(script)
    for batch in script.batches(STEPS):
        step(model, optimizer, batch)
    file = io.BytesIO()
    torch.save(inner.state_dict(), file)
    other = net()
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    return [model, other]


@idiom("evaluation in between: `model.eval()`, `torch.no_grad()`, `model.train()`")
def evaluation(script: Script) -> Any:
    model, optimizer, _ = wrapped(script)
    losses = []
    for batch in script.batches(STEPS):
        step(model, optimizer, batch)
        model.eval()
        with torch.no_grad():
            losses.append(loss_of(model, (torch.ones(1, INPUTS), torch.ones(1, TARGETS))))
        model.train()
    return [model, losses]


@idiom("`torch.inference_mode()` in between")
def inference(script: Script) -> Any:
    model, optimizer, inner = wrapped(script)
    losses = []
    for batch in script.batches(STEPS):
        step(model, optimizer, batch)
        with torch.inference_mode():
            losses.append(float(loss_of(inner, (torch.ones(1, INPUTS), torch.ones(1, TARGETS)))))
    return [model, torch.tensor(losses)]


@idiom("weights noised before the forward pass and restored after it (variational inference, SAM's first half)")
def perturbed_weights(script: Script) -> Any:
    model, optimizer, inner = wrapped(script)
    random = torch.Generator().manual_seed(2)
    for batch in script.batches(STEPS):
        noise = [0.01 * torch.randn(one.shape, generator=random) for one in inner.parameters()]
        with torch.no_grad():
            for parameter, one in zip(inner.parameters(), noise, strict=True):
                parameter.add_(one)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        with torch.no_grad():
            for parameter, one in zip(inner.parameters(), noise, strict=True):
                parameter.sub_(one)
        optimizer.step()
    return model


@idiom("L2 penalty in the loss: `sum(p.pow(2).sum() for p in model.parameters())`")
def penalty_in_loss(script: Script) -> Any:
    model, optimizer, inner = wrapped(script)
    for batch in script.steps(optimizer, STEPS):
        (loss_of(model, batch) + 1e-2 * sum(one.pow(2).sum() for one in inner.parameters())).backward()
    return model
