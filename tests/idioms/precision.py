"""Idioms of dtypes, devices and mixed precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.idioms.script import GLOO, INPUTS, TARGETS, Script, loss_of, net, sgd, train
from tests.idioms.table import EQUAL, ROUNDED, ROUNDED_MASTERS, idiom

STEPS = 4


@idiom("`torch.autocast('cpu', torch.bfloat16)`", reference=GLOO)
def autocast(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for inputs, targets in script.steps(optimizer, STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            result = model(inputs)
        nn.functional.mse_loss(result.float(), targets).backward()
    return model


@idiom("`GradScaler`: `scale(loss).backward()`, `step(optimizer)`, `update()`")
def scaler(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for batch in script.batches(STEPS):
        optimizer.zero_grad()
        grad_scaler.scale(loss_of(model, batch)).backward()
        grad_scaler.step(optimizer)
        grad_scaler.update()
    return model


@idiom("`GradScaler` with `unscale_` and `clip_grad_norm_`")
def scaler_and_clip(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for batch in script.batches(STEPS):
        optimizer.zero_grad()
        grad_scaler.scale(loss_of(model, batch)).backward()
        grad_scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()
    return model


@idiom("`GradScaler(enabled=False)`")
def disabled_scaler(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    grad_scaler = torch.amp.GradScaler("cpu", enabled=False)
    for batch in script.batches(STEPS):
        optimizer.zero_grad()
        grad_scaler.scale(loss_of(model, batch)).backward()
        grad_scaler.step(optimizer)
        grad_scaler.update()
    return model


@idiom("a float64 model: `model.double()`, `torch.set_default_dtype(torch.float64)`")
def double_model(script: Script) -> Any:
    model, optimizer = script.wrap(model := net().double(), sgd(model))
    return train(script, model, optimizer, STEPS)


class Spectral(nn.Module):
    """Model with a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(INPUTS, INPUTS, dtype=torch.complex64) / 4)
        self.head = nn.Linear(INPUTS, TARGETS)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head((inputs.to(torch.complex64) @ self.mix).abs())


@idiom("a complex64 parameter")
def complex_parameter(script: Script) -> Any:
    model = Spectral()
    model, optimizer = script.wrap(model, sgd(model))
    for batch in script.steps(optimizer, STEPS):
        loss_of(model, batch).backward()
    return model


@idiom("a bfloat16 model", note="master weights are float32", optimizer=ROUNDED_MASTERS, ddp=(EQUAL, ROUNDED))
def bfloat16_model(script: Script) -> Any:
    model, optimizer = script.wrap(model := net().bfloat16(), sgd(model))
    return train(script, model, optimizer, STEPS)


@idiom("`model.to(device)` after the optimizer was made")
def moved_model(script: Script) -> Any:
    model = net()
    inner = sgd(model)
    model = model.to("cpu")
    model, optimizer = script.wrap(model, inner)
    return train(script, model, optimizer, STEPS)


@idiom("`model.to(device)` after wrapping")
def moved_last(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    return train(script, model.to("cpu"), optimizer, STEPS)


@idiom("`model.double().float()` before wrapping")
def cast_twice(script: Script) -> Any:
    model = net().double().float()
    model, optimizer = script.wrap(model, sgd(model))
    return train(script, model, optimizer, STEPS)


@idiom("`.half()` of the inputs alone, `.float()` in the model")
def half_inputs(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for inputs, targets in script.steps(optimizer, STEPS):
        loss_of(model, (inputs.half().float(), targets)).backward()
    return model
