"""Idioms of backward passes: accumulation, clipping, hooks, and gradients that the script makes or changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.idioms.script import INPUTS, TARGETS, Script, loss_of, net, sgd, train
from tests.idioms.table import EQUAL, OWN_GRADIENT, idiom, refused


@idiom("the plain loop")
def plain_loop(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    return train(script, model, optimizer, 5)


@idiom("`optimizer.zero_grad(set_to_none=False)`")
def zeroed_gradients(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for batch in script.batches(5):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@idiom("`model.zero_grad()` instead of the optimizer's")
def model_zero_grad(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for batch in script.batches(5):
        loss = loss_of(model, batch)
        model.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@idiom("`for p in model.parameters(): p.grad = None`")
def gradients_set_to_none(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for batch in script.batches(5):
        for parameter in model.parameters():
            parameter.grad = None
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@idiom("`zero_grad()` after `step()`")
def zero_grad_last(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for batch in script.batches(5):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@idiom("gradient accumulation with `no_sync()`", note="`with optimizer.no_sync():` or `model.no_sync()`")
def accumulation_in_no_sync(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for number, batch in enumerate(script.batches(8)):
        if number % 4 == 3:
            (loss_of(model, batch) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with script.no_sync(model, optimizer):
                (loss_of(model, batch) / 4).backward()
    return model


@idiom("gradient accumulation: `if (i + 1) % 4 == 0: optimizer.step(); optimizer.zero_grad()`")
def accumulation(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for number, batch in enumerate(script.batches(12)):
        loss = loss_of(model, batch) / 4
        loss.backward()
        if (number + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


@idiom("gradients added up without `zero_grad()`")
def never_cleared(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), torch.optim.SGD(model.parameters(), lr=0.02))
    for batch in script.batches(4):
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@idiom("`nn.utils.clip_grad_norm_(model.parameters(), 0.1)`")
def clipped_norm(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for batch in script.steps(optimizer, 5):
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return model


@idiom("`optimizer.clip_grad_norm_(0.1)`, which returns the norm", note="instead of `nn.utils.clip_grad_norm_`")
def clipped_mean(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    norms = []
    for batch in script.steps(optimizer, 5):
        loss_of(model, batch).backward()
        if script.face == "optimizer":
            norms.append(optimizer.clip_grad_norm_(0.1))
        else:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    return [model, norms]


@idiom("`max_grad_norm=0.1` of `DistributedOptimizer`", note="instead of `nn.utils.clip_grad_norm_`")
def clipped_on_servers(script: Script) -> Any:
    settings = {"max_grad_norm": 0.1} if script.face == "optimizer" else {}
    model, optimizer = script.wrap(model := net(), sgd(model), **settings)
    for batch in script.steps(optimizer, 5):
        loss_of(model, batch).backward()
        if script.face != "optimizer":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return model


@idiom("`clip_grad_value_` after `optimizer.average_gradients()`")
def clipped_mean_values(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for batch in script.steps(optimizer, 5):
        loss_of(model, batch).backward()
        if script.face == "optimizer":
            optimizer.average_gradients()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
    return model


@idiom("`clip_grad_value_`")
def clipped_values(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for batch in script.steps(optimizer, 5):
        loss_of(model, batch).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
    return model


@idiom("gradient noise: `p.grad += noise`")
def gradient_noise(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    random = torch.Generator().manual_seed(1)
    for batch in script.steps(optimizer, 5):
        loss_of(model, batch).backward()
        for parameter in model.parameters():
            parameter.grad += 0.01 * torch.randn(parameter.shape, generator=random)
    return model


@idiom("`p.grad.mul_(factor)`, scaling by hand")
def scaled_gradients(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for batch in script.steps(optimizer, 5):
        (loss_of(model, batch) * 8).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(1 / 8)
    return model


@idiom("`p.grad.data.clamp_(-1, 1)`", optimizer=(EQUAL, OWN_GRADIENT))
def clamped_gradient_data(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for batch in script.steps(optimizer, 5):
        loss_of(model, batch).backward()
        for parameter in model.parameters():
            parameter.grad.data.clamp_(-0.02, 0.02)
    return model


@idiom("`backward(retain_graph=True)`, two losses of one forward pass")
def retained_graph(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for batch in script.steps(optimizer, 5):
        result = model(batch[0])
        nn.functional.mse_loss(result, batch[1]).backward(retain_graph=True)
        (0.01 * result.square().mean()).backward()
    return model


@idiom("the sum of several losses")
def summed_losses(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for batch in script.steps(optimizer, 5):
        result = model(batch[0])
        losses = [nn.functional.mse_loss(result, batch[1]), 0.01 * result.abs().mean(), result.square().mean() / 100]
        sum(losses).backward()
    return model


@idiom("`torch.autograd.backward([loss_a, loss_b])`")
def several_roots(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for batch in script.steps(optimizer, 5):
        result = model(batch[0])
        torch.autograd.backward([nn.functional.mse_loss(result, batch[1]), 0.01 * result.square().mean()])
    return model


@idiom("gradient penalty: `autograd.grad(..., create_graph=True)`, then `backward()`")
def gradient_penalty(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for inputs, targets in script.steps(optimizer, 5):
        inputs.requires_grad_(True)
        result = model(inputs)
        (slope,) = torch.autograd.grad(result.sum(), inputs, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        (nn.functional.mse_loss(result, targets) + 0.1 * penalty).backward()
    return model


NOT_AVERAGED = refused("no backward\\(\\) averaged it", "use `DistributedOptimizer`, whose `step()` averages `p.grad`")


@idiom("`p.grad = g` from `torch.autograd.grad(loss, parameters)`", ddp=(EQUAL, NOT_AVERAGED))
def assigned_gradients(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for batch in script.batches(5):
        gradients = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return model


@idiom("`torch.func.grad` of `functional_call`", ddp=(EQUAL, NOT_AVERAGED))
def functional_gradients(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    inner = getattr(model, "module", model)

    def loss_at(weights: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(torch.func.functional_call(inner, weights, (batch[0],)), batch[1])

    for batch in script.batches(5):
        weights = {name: parameter.detach() for name, parameter in inner.named_parameters()}
        gradients = torch.func.grad(loss_at)(weights, batch)
        for name, parameter in inner.named_parameters():
            parameter.grad = gradients[name]
        optimizer.step()
    return model


@idiom(
    "gradients from losses at perturbed weights, without a backward pass (MeZO, evolution strategies)",
    ddp=(EQUAL, NOT_AVERAGED),
)
def perturbed_losses(script: Script) -> Any:
    model, optimizer = script.wrap(model := net().double(), sgd(model))
    inner, random, size = getattr(model, "module", model), torch.Generator().manual_seed(1), 1e-3
    for inputs, targets in script.batches(6):
        directions = [torch.randn(one.shape, generator=random, dtype=one.dtype) for one in inner.parameters()]
        losses = []
        with torch.no_grad():
            for change in (size, -2 * size):
                for parameter, direction in zip(inner.parameters(), directions, strict=True):
                    parameter.add_(direction, alpha=change)
                losses.append(float(loss_of(inner, (inputs.double(), targets.double()))))
            for parameter, direction in zip(inner.parameters(), directions, strict=True):
                parameter.add_(direction, alpha=size)
        for parameter, direction in zip(inner.parameters(), directions, strict=True):
            parameter.grad = direction * ((losses[0] - losses[1]) / (2 * size))
        optimizer.step()
    return model


@idiom("`p.register_hook(lambda g: g * 0.5)`")
def tensor_hooks(script: Script) -> Any:
    model = net()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    model, optimizer = script.wrap(model, sgd(model))
    return train(script, model, optimizer, 5)


@idiom("`module.register_full_backward_hook`")
def module_hooks(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    model.register_full_backward_hook(lambda module, inputs, outputs: None)
    seen: list[float] = []
    model.register_full_backward_pre_hook(lambda module, outputs: seen.append(float(outputs[0].norm())))
    train(script, model, optimizer, 5)
    assert len(seen) == 5
    return model


@idiom("`register_post_accumulate_grad_hook` that changes the gradient")
def post_accumulate_hooks(script: Script) -> Any:
    model = net()

    def halve(parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    model, optimizer = script.wrap(model, sgd(model))
    return train(script, model, optimizer, 5)


@idiom("`if loss.isnan(): continue`")
def skipped_batches(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for number, batch in enumerate(script.batches(5)):
        loss = loss_of(model, batch)
        if number == 2:
            loss = loss * float("nan")
        if loss.isnan():
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@idiom("a step that is skipped after `backward()`: `if norm > limit: continue`")
def skipped_steps(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for number, batch in enumerate(script.batches(6)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        norms = [parameter.grad.norm() for parameter in model.parameters()]
        if number == 1 or torch.stack(norms).norm() > 1e6:
            continue
        optimizer.step()
    return model


@idiom("the gradient's norm read for a log: `total += p.grad.norm() ** 2`")
def logged_norms(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for batch in script.steps(optimizer, 5):
        loss_of(model, batch).backward()
        total = sum(float(parameter.grad.norm()) ** 2 for parameter in model.parameters())
        assert total > 0
    return model


@idiom("a closure: `optimizer.step(closure)`")
def closure(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for batch in script.batches(5):

        def evaluate(batch: tuple[Tensor, Tensor] = batch) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        assert optimizer.step(evaluate) > 0
    return model


@idiom("gradients for the inputs, with frozen weights (adversarial examples)")
def adversarial_inputs(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for inputs, targets in script.batches(5):
        inputs.requires_grad_(True)
        loss_of(model, (inputs, targets)).backward()
        disturbed = (inputs + 0.1 * inputs.grad.sign()).detach()
        optimizer.zero_grad()
        loss_of(model, (disturbed, targets)).backward()
        optimizer.step()
    return model


class Scaled(torch.autograd.Function):
    """Multiplies by a factor in both passes."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@idiom("a custom `torch.autograd.Function`")
def custom_function(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model, 0.01))
    for inputs, targets in script.steps(optimizer, 5):
        nn.functional.mse_loss(Scaled.apply(model(inputs)), targets).backward()
    return model


@idiom("`torch.utils.checkpoint`, without reentry")
def recomputed_activations(script: Script) -> Any:
    from torch.utils.checkpoint import checkpoint

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(INPUTS, 8), nn.Linear(8, TARGETS)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.last(checkpoint(self.first, inputs, use_reentrant=False).tanh())

    model, optimizer = script.wrap(model := Recomputed(), sgd(model))
    return train(script, model, optimizer, 5)
