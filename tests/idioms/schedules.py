"""Idioms of optimizers: parameter groups, schedulers, and settings that the script changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from tests.idioms.script import Script, loss_of, net, sgd, train
from tests.idioms.table import idiom, refused

STEPS = 6
NO_COUNTERPART = refused(
    "has no counterpart on the servers", "use `DistributedDataParallel`, which keeps the optimizer"
)
DENSE = refused("SparseAdam does not support dense gradients", "use `Adam`")


def in_groups(model: nn.Module) -> torch.optim.SGD:
    """Return an optimizer with a group for each layer, which begin equal."""
    groups = [{"params": layer.parameters()} for layer in model.children() if list(layer.parameters())]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def scheduled(script: Script, make: Callable[[Any], LRScheduler], **settings: Any) -> Any:
    """Train with a scheduler that is stepped after each step."""
    model = net()
    inner = sgd(model, **settings)
    scheduler = make(inner)
    model, optimizer = script.wrap(model, inner)
    return train(script, model, optimizer, STEPS, scheduler)


@idiom("`Adam`")
def adam(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4))
    return train(script, model, optimizer, STEPS)


@idiom("`AdamW` without weight decay for biases: two parameter groups")
def weight_decay_filter(script: Script) -> Any:
    model = net()
    decayed = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
    others = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    model, optimizer = script.wrap(model, torch.optim.AdamW(groups, lr=1e-2, eps=1e-4))
    return train(script, model, optimizer, STEPS)


@idiom("a smaller rate for the backbone: groups that differ in `lr`")
def rates_by_group(script: Script) -> Any:
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}]
    model, optimizer = script.wrap(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    return train(script, model, optimizer, STEPS)


@idiom("keys of the script's own in groups: `lr_scale`, by which it sets the rates, and a name")
def own_keys(script: Script) -> Any:
    model = net()
    groups = [
        {"params": model[0].parameters(), "name": "backbone", "lr_scale": 0.1},
        {"params": model[2].parameters(), "name": "head", "lr_scale": 1.0},
    ]
    wrapped, optimizer = script.wrap(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    for number, batch in enumerate(script.batches(STEPS)):
        for group in optimizer.param_groups:
            assert group["name"] in ("backbone", "head")
            group["lr"] = 0.1 * group["lr_scale"] / (number + 1)
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()
        optimizer.step()
    return model


@idiom("`AdamW` with `decoupled_weight_decay=False`, in one group and in all")
def coupled_decay(script: Script) -> Any:
    model, other = net(), net()
    weights = {"params": [model[0].weight, model[2].weight], "decoupled_weight_decay": False}
    groups = [weights, {"params": [model[0].bias, model[2].bias]}]
    first = script.wrap(model, torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, weight_decay=0.1))
    everything = [{"params": other.parameters(), "decoupled_weight_decay": False}]
    second = script.wrap(other, torch.optim.AdamW(everything, lr=1e-2, eps=1e-3, weight_decay=0.1))
    for batch in script.batches(STEPS):
        for wrapped, optimizer in (first, second):
            optimizer.zero_grad()
            loss_of(wrapped, batch).backward()
            optimizer.step()
    return [model, other]


@idiom("groups that differ in `momentum`")
def momentum_by_group(script: Script) -> Any:
    model = net()
    groups = [{"params": model[0].parameters(), "momentum": 0.0}, {"params": model[2].parameters()}]
    model, optimizer = script.wrap(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    return train(script, model, optimizer, STEPS)


@idiom("`named_parameters()` given to the optimizer")
def named_parameters(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), torch.optim.SGD(model.named_parameters(), lr=0.1))
    return train(script, model, optimizer, STEPS)


@idiom("`RMSprop`")
def rmsprop(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-3))
    return train(script, model, optimizer, STEPS)


@idiom("`Adagrad`")
def adagrad(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), torch.optim.Adagrad(model.parameters(), lr=1e-2, eps=1e-4))
    return train(script, model, optimizer, STEPS)


@idiom("`Adadelta`, as in PyTorch's MNIST example")
def adadelta(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), torch.optim.Adadelta(model.parameters(), lr=1.0, eps=1e-3))
    return train(script, model, optimizer, STEPS)


@idiom("`Adamax`, `NAdam`, `RAdam`, `Rprop`, `ASGD`")
def other_optimizers(script: Script) -> Any:
    models = []
    for make in (
        lambda p: torch.optim.Adamax(p, lr=1e-2, eps=1e-3),
        lambda p: torch.optim.NAdam(p, lr=1e-2, eps=1e-3),
        lambda p: torch.optim.RAdam(p, lr=1e-2, eps=1e-3),
        lambda p: torch.optim.Rprop(p, lr=1e-3),
        lambda p: torch.optim.ASGD(p, lr=1e-2),
    ):
        model, optimizer = script.wrap(model := net(), make(model.parameters()))
        models.append(train(script, model, optimizer, STEPS))
    return models


@idiom("`amsgrad=True`")
def amsgrad(script: Script) -> Any:
    model = net()
    inner = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3, amsgrad=True)
    model, optimizer = script.wrap(model, inner)
    return train(script, model, optimizer, STEPS)


@idiom("`maximize=True`, as in policy gradients")
def maximized(script: Script) -> Any:
    model = net()
    model, optimizer = script.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01, maximize=True))
    return train(script, model, optimizer, STEPS)


def _search(script: Script, make: Callable[[Any], Any]) -> Any:
    """Train by an optimizer that searches by the loss of a closure."""
    model, optimizer = script.wrap(inner := net().double(), make(inner.parameters()))
    inputs, targets = next(script.batches(1))
    batch = inputs.double(), targets.double()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return model


@idiom("`LBFGS` with a closure", optimizer=NO_COUNTERPART)
def lbfgs(script: Script) -> Any:
    return _search(script, lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3))


@idiom("`LBFGS(line_search_fn='strong_wolfe')`, whose closure returns the mean loss", optimizer=NO_COUNTERPART)
def lbfgs_line_search(script: Script) -> Any:
    return _search(script, lambda p: torch.optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe"))


class _Backtracking(torch.optim.Optimizer):
    """Optimizer like those of packages: it halves its step until the loss of the closure falls."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 64.0})

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        with torch.enable_grad():
            first = closure()
        start = [(one.detach().clone(), one.grad.clone()) for one in parameters]
        rate = self.param_groups[0]["lr"]
        for _ in range(12):
            with torch.no_grad():
                for parameter, (weight, gradient) in zip(parameters, start, strict=True):
                    parameter.copy_(weight - rate * gradient)
            with torch.enable_grad():
                if float(closure()) < float(first):
                    break
            rate /= 2
        return first


@idiom("an optimizer of a package that searches by the loss: `optimizer.step(closure)`", optimizer=NO_COUNTERPART)
def backtracking(script: Script) -> Any:
    return _search(script, _Backtracking)


@idiom("`SparseAdam` and `nn.Embedding(sparse=True)`", optimizer=NO_COUNTERPART, ddp=DENSE)
def sparse_adam(script: Script) -> Any:
    model = nn.Embedding(10, 3, sparse=True)
    model, optimizer = script.wrap(model, torch.optim.SparseAdam(model.parameters(), lr=0.01))
    for step in range(3):
        optimizer.zero_grad()
        rows = script.part(torch.arange(4) + step)
        model(rows).square().mean().backward()
        optimizer.step()
    return model


@idiom("`foreach=True`, `fused=True`")
def foreach(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), torch.optim.SGD(model.parameters(), lr=0.1, foreach=True))
    return train(script, model, optimizer, STEPS)


@idiom("`StepLR` per step")
def step_lr(script: Script) -> Any:
    return scheduled(script, lambda inner: lr_scheduler.StepLR(inner, step_size=2, gamma=0.5))


@idiom("`MultiStepLR`, `ExponentialLR`, `PolynomialLR` per step")
def decaying_schedulers(script: Script) -> Any:
    return [
        scheduled(script, lambda inner: lr_scheduler.MultiStepLR(inner, [2, 4], gamma=0.5)),
        scheduled(script, lambda inner: lr_scheduler.ExponentialLR(inner, gamma=0.9)),
        scheduled(script, lambda inner: lr_scheduler.PolynomialLR(inner, total_iters=8, power=2.0)),
    ]


@idiom("`CosineAnnealingLR(eta_min=...)`")
def cosine(script: Script) -> Any:
    return scheduled(script, lambda inner: lr_scheduler.CosineAnnealingLR(inner, T_max=10, eta_min=0.01))


@idiom("`CosineAnnealingWarmRestarts`")
def warm_restarts(script: Script) -> Any:
    return scheduled(script, lambda inner: lr_scheduler.CosineAnnealingWarmRestarts(inner, T_0=2, T_mult=2))


@idiom("`LambdaLR` warm-up")
def lambda_lr(script: Script) -> Any:
    return scheduled(script, lambda inner: lr_scheduler.LambdaLR(inner, lambda step: min(1.0, (step + 1) / 4)))


@idiom("`LambdaLR` with a function for each group")
def lambda_lr_by_group(script: Script) -> Any:
    model = net()
    inner = in_groups(model)
    scheduler = lr_scheduler.LambdaLR(inner, [lambda step: min(1.0, (step + 1) / 4), lambda step: 0.7**step])
    model, optimizer = script.wrap(model, inner)
    return train(script, model, optimizer, STEPS, scheduler)


@idiom("`OneCycleLR`, which cycles the momentum, too")
def one_cycle(script: Script) -> Any:
    return scheduled(script, lambda inner: lr_scheduler.OneCycleLR(inner, max_lr=0.2, total_steps=STEPS + 1))


@idiom("`OneCycleLR` of `AdamW`, which cycles the first of the betas")
def one_cycle_of_betas(script: Script) -> Any:
    model = net()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    scheduler = lr_scheduler.OneCycleLR(inner, max_lr=0.02, total_steps=STEPS + 1)
    model, optimizer = script.wrap(model, inner)
    return train(script, model, optimizer, STEPS, scheduler)


@idiom("`OneCycleLR(cycle_momentum=False)`")
def one_cycle_of_rates(script: Script) -> Any:
    return scheduled(
        script,
        lambda inner: lr_scheduler.OneCycleLR(inner, max_lr=0.2, total_steps=STEPS + 1, cycle_momentum=False),
    )


@idiom("`CyclicLR`")
def cyclic(script: Script) -> Any:
    return scheduled(
        script, lambda inner: lr_scheduler.CyclicLR(inner, 0.01, 0.1, step_size_up=2, cycle_momentum=False)
    )


@idiom("`SequentialLR`: warm-up, then cosine")
def sequential(script: Script) -> Any:
    def make(inner: Any) -> LRScheduler:
        warm_up = lr_scheduler.LinearLR(inner, start_factor=0.25, total_iters=2)
        return lr_scheduler.SequentialLR(inner, [warm_up, lr_scheduler.CosineAnnealingLR(inner, 8)], milestones=[2])

    return scheduled(script, make)


@idiom("`ChainedScheduler`")
def chained(script: Script) -> Any:
    def make(inner: Any) -> Any:
        constant = lr_scheduler.ConstantLR(inner, factor=0.5, total_iters=3)
        return lr_scheduler.ChainedScheduler([constant, lr_scheduler.ExponentialLR(inner, gamma=0.9)], optimizer=inner)

    return scheduled(script, make)


@idiom("a scheduler that is made on the wrapped optimizer")
def scheduler_made_last(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    return train(script, model, optimizer, STEPS, lr_scheduler.StepLR(optimizer, 2, 0.5))


@idiom("`scheduler=` given to `DistributedOptimizer`")
def given_scheduler(script: Script) -> Any:
    inner = sgd(model := net())
    scheduler = lr_scheduler.CosineAnnealingLR(inner, T_max=10)
    model, optimizer = script.wrap(model, inner, scheduler)
    return train(script, model, optimizer, STEPS, scheduler)


@idiom("`scheduler.step()` once per data epoch")
def scheduler_per_epoch(script: Script) -> Any:
    inner = sgd(model := net())
    scheduler = lr_scheduler.StepLR(inner, step_size=1, gamma=0.7)
    model, optimizer = script.wrap(model, inner)
    for _ in range(3):
        for batch in script.steps(optimizer, 2):
            loss_of(model, batch).backward()
        scheduler.step()
    return model


@idiom("`ReduceLROnPlateau` with a validation loss")
def plateau(script: Script) -> Any:
    inner = sgd(model := net())
    scheduler = lr_scheduler.ReduceLROnPlateau(inner, factor=0.5, patience=0)
    model, optimizer = script.wrap(model, inner)
    for _ in range(3):
        for batch in script.steps(optimizer, 2):
            loss_of(model, batch).backward()
        scheduler.step(1.0)
    return model


@idiom("`for group in optimizer.param_groups: group['lr'] = ...`")
def rates_by_hand(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for number, batch in enumerate(script.batches(STEPS)):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.9**number
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@idiom("the rate set between `backward()` and `step()`")
def rates_set_late(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for number, batch in enumerate(script.steps(optimizer, STEPS)):
        loss_of(model, batch).backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.9**number
    return model


@idiom("rates by hand that differ by group")
def group_rates_by_hand(script: Script) -> Any:
    model = net()
    model, optimizer = script.wrap(model, in_groups(model))
    for number, batch in enumerate(script.batches(STEPS)):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5**number
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@idiom("weight decay that changes: `group['weight_decay'] = ...`")
def weight_decay_by_hand(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model, weight_decay=0.1))
    for number, batch in enumerate(script.batches(STEPS)):
        optimizer.param_groups[0]["weight_decay"] = 0.1 / (1 + number)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@idiom("`ASGD` with a scheduler, and with settings that change by hand")
def asgd_settings(script: Script) -> Any:
    inner = torch.optim.ASGD((model := net()).parameters(), lr=0.05, t0=2)
    scheduler = lr_scheduler.MultiStepLR(inner, [2, 4], gamma=0.5)
    model, optimizer = script.wrap(model, inner)
    for number, batch in enumerate(script.batches(STEPS)):
        optimizer.param_groups[0] |= {"lambd": 0.01 * number, "alpha": 0.75 + 0.1 * number, "t0": 2 - number % 2}
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        scheduler.step()
    return model


@idiom("`lr=torch.tensor(0.1)`")
def tensor_rate(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1)))
    return train(script, model, optimizer, STEPS)


@idiom(
    "`optimizer.add_param_group` for a head that is added during training",
    optimizer=refused("parameters cannot be added", "pass the layers from the start, frozen"),
)
def added_group(script: Script) -> Any:
    model = net()
    optimizer: Any = torch.optim.SGD(model[0].parameters(), lr=0.1)
    model, optimizer = script.wrap(model, optimizer)
    for number, batch in enumerate(script.batches(STEPS)):
        if number == 3:
            optimizer.add_param_group({"params": getattr(model, "module", model)[2].parameters()})
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@idiom("a step hook of the optimizer: `register_step_post_hook`")
def step_hooks(script: Script) -> Any:
    inner = sgd(model := net())
    model, optimizer = script.wrap(model, inner)
    calls: list[int] = []
    inner.register_step_post_hook(lambda *_: calls.append(1))
    train(script, model, optimizer, STEPS)
    return [model, torch.tensor([float(len(calls))])]


@idiom(
    "reading `optimizer.state`: `state[p]['exp_avg']`",
    optimizer=refused("the servers hold the state", "read it from a snapshot by `load_optimizer_state`"),
)
def optimizer_state_read(script: Script) -> Any:
    model = net()
    model, optimizer = script.wrap(model, torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3))
    train(script, model, optimizer, STEPS)
    first = next(iter(model.parameters()))
    return optimizer.state[first]["exp_avg"]


@idiom("`optimizer.state_dict()` saved and loaded again in the same process")
def optimizer_state_dict(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for batch in script.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return model


@idiom(
    "an optimizer that goes back to an earlier state: `load_state_dict(saved)` some steps later",
    optimizer=refused("this state is of step 0", "wrap the model again under another `name=`"),
)
def optimizer_state_restored(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    saved = optimizer.state_dict()
    train(script, model, optimizer, STEPS)
    optimizer.load_state_dict(saved)
    return train(script, model, optimizer, STEPS)


@idiom(
    "`optimizer.state_dict()` loaded into a new optimizer of torch, as by `--resume`",
    optimizer=refused("has settings alone", "wrap first and resume the run, or use `load_optimizer_state`"),
)
def resumed_optimizer(script: Script) -> Any:
    model, optimizer = script.wrap(inner := net(), sgd(inner))
    train(script, model, optimizer, STEPS)
    saved = optimizer.state_dict()
    another = sgd(inner)
    another.load_state_dict(saved)
    return train(script, model, another, STEPS)
