"""Idioms of models: layers, tied and frozen weights, adapters, buffers, parametrizations, and containers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.idioms.script import GLOO, INPUTS, TARGETS, Script, loss_of, net, sgd, train
from tests.idioms.table import idiom, refused

STEPS = 5
CHANGED = refused("change the model first, then wrap it", "freeze and unfreeze layers before wrapping")
UNREACHED = refused("find_unused_parameters=True", "use `find_unused_parameters=True`, as with torch's DDP")
LAZY = refused("run one forward pass before wrapping", "run one forward pass before wrapping")


def trained(script: Script, model: nn.Module, lr: float = 0.1) -> Any:
    """Wrap and train a model."""
    return train(script, *script.wrap(model, sgd(model.parameters(), lr)))


class Tied(nn.Module):
    """Autoencoder whose decoder uses the encoder's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS)
        self.head = nn.Linear(INPUTS, TARGETS)
        self.decoder.weight = self.encoder.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.decoder(self.encoder(inputs).tanh()))


@idiom("tied weights: `decoder.weight = encoder.weight`")
def tied_weights(script: Script) -> Any:
    return trained(script, Tied())


@idiom("weights that share memory: `b.weight.data = a.weight.data`")
def shared_memory(script: Script) -> Any:
    model = nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.Tanh(), nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, TARGETS))
    model[2].weight.data = model[0].weight.data
    trained(script, model)
    return list(model.state_dict().values())


@idiom("a frozen layer: `requires_grad_(False)` before wrapping")
def frozen_layer(script: Script) -> Any:
    model = net()
    model[0].requires_grad_(False)
    return train(script, *script.wrap(model, sgd(filter(lambda p: p.requires_grad, model.parameters()))))


@idiom("a frozen layer whose weights the optimizer holds, too")
def frozen_in_optimizer(script: Script) -> Any:
    model = net()
    model[0].requires_grad_(False)
    return trained(script, model)


@idiom("unfreezing during training: `requires_grad_()` of a layer that the optimizer holds", ddp=CHANGED)
def unfrozen(script: Script) -> Any:
    model = net()
    model[0].requires_grad_(False)
    model, optimizer = script.wrap(model, sgd(model.parameters()))
    train(script, model, optimizer)
    model.requires_grad_(True)
    return train(script, model, optimizer)


@idiom("freezing during training", ddp=UNREACHED)
def frozen_later(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model.parameters()))
    train(script, model, optimizer)
    getattr(model, "module", model)[0].requires_grad_(False)
    return train(script, model, optimizer)


@idiom("only the head is trained: `SGD(model[2].parameters())`, the rest gets gradients as well")
def trained_head(script: Script) -> Any:
    model = net()
    return train(script, *script.wrap(model, sgd(model[2].parameters())))


class Branches(nn.Module):
    """Model with a branch that is not used in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = nn.Linear(INPUTS, TARGETS), nn.Linear(INPUTS, TARGETS)
        self.uses_branch = True

    def forward(self, inputs: Tensor) -> Tensor:
        result = self.trunk(inputs)
        return result + self.branch(inputs) if self.uses_branch else result


@idiom("a branch without a gradient in some steps, with momentum", ddp=UNREACHED)
def unused_branch(script: Script) -> Any:
    model = Branches()
    model, optimizer = script.wrap(model, sgd(model.parameters()))
    inner = getattr(model, "module", model)
    for number, batch in enumerate(script.batches(6)):
        inner.uses_branch = number % 2 == 0
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@idiom("the same with `find_unused_parameters=True`")
def unused_branch_found(script: Script) -> Any:
    model = Branches()
    optimizer: Any = sgd(model.parameters())
    if script.face == "optimizer":
        model, optimizer = script.wrap(model, optimizer)
    else:
        model = script.wrap_model(model, "unused-branch", find_unused_parameters=True)
    inner = getattr(model, "module", model)
    for number, batch in enumerate(script.batches(6)):
        inner.uses_branch = number % 2 == 0
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@idiom("a layer that no step uses, with weight decay", ddp=UNREACHED)
def unused_layer(script: Script) -> Any:
    model = Branches()
    model.uses_branch = False
    return train(script, *script.wrap(model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)))


@idiom("`nn.Embedding`")
def embedding(script: Script) -> Any:
    model = nn.Embedding(10, 3)
    model, optimizer = script.wrap(model, sgd(model.parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()
        model(script.part((torch.arange(4) + step) % 10)).square().mean().backward()
        optimizer.step()
    return model


@idiom("`nn.Embedding(sparse=True)` with plain `SGD`")
def sparse_embedding(script: Script) -> Any:
    model = nn.Embedding(10, 3, sparse=True)
    model, optimizer = script.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        optimizer.zero_grad()
        model(script.part((torch.arange(4) + step) % 10)).square().mean().backward()
        optimizer.step()
    return model


@idiom("`nn.Embedding(padding_idx=0)`")
def padded_embedding(script: Script) -> Any:
    model = nn.Embedding(10, 3, padding_idx=0)
    model, optimizer = script.wrap(model, sgd(model.parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()
        model(script.part((torch.arange(4) * step) % 10)).square().mean().backward()
        optimizer.step()
    return model


class Recurrent(nn.Module):
    """Language-model-like LSTM that carries its hidden state from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(INPUTS, 5, batch_first=True), nn.Linear(5, TARGETS)

    def forward(self, inputs: Tensor, state: Any) -> tuple[Tensor, Any]:
        result, state = self.cells(inputs[:, None], state)
        return self.head(result[:, 0]), state


@idiom("an LSTM whose hidden state is detached and carried on")
def carried_state(script: Script) -> Any:
    model = Recurrent()
    model, optimizer = script.wrap(model, sgd(model.parameters()))
    state = None
    for inputs, targets in script.batches(STEPS):
        if state is not None:
            state = tuple(one.detach() for one in state)
        optimizer.zero_grad()
        result, state = model(inputs, state)
        nn.functional.mse_loss(result, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    return model


@idiom("`parametrizations.weight_norm`")
def weight_norm(script: Script) -> Any:
    model = net()
    parametrizations.weight_norm(model[0])
    return trained(script, model)


@idiom("`nn.utils.weight_norm`, the older form")
def old_weight_norm(script: Script) -> Any:
    model = net()
    nn.utils.weight_norm(model[0])
    return trained(script, model)


@idiom("`parametrizations.spectral_norm`", reference=GLOO)
def spectral_norm(script: Script) -> Any:
    model = net()
    parametrizations.spectral_norm(model[0])
    return trained(script, model)


class Symmetric(nn.Module):
    """Parametrization of a symmetric matrix."""

    def forward(self, values: Tensor) -> Tensor:
        return values.triu() + values.triu(1).T


@idiom("`parametrize.register_parametrization`")
def parametrized(script: Script) -> Any:
    model = nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, TARGETS))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return trained(script, model)


@idiom("`prune.l1_unstructured` before wrapping")
def pruned(script: Script) -> Any:
    model = net()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    return trained(script, model)


@idiom("`prune.l1_unstructured` during training")
def pruned_later(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model.parameters()))
    train(script, model, optimizer)
    prune.l1_unstructured(getattr(model, "module", model)[0], "weight", amount=0.5)
    return train(script, model, optimizer)


class Adapted(nn.Module):
    """Linear layer with a trained low-rank addition."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + self.up(self.down(inputs))


@idiom("LoRA-like adapters around frozen layers")
def adapters(script: Script) -> Any:
    model = net()
    model[0] = Adapted(model[0])
    return train(script, *script.wrap(model, sgd([one for one in model.parameters() if one.requires_grad])))


@idiom("`nn.BatchNorm1d`", reference=GLOO, note="each worker's statistics, as with torch's DDP")
def batch_norm(script: Script) -> Any:
    return trained(script, nn.Sequential(nn.Linear(INPUTS, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, TARGETS)))


@idiom("`nn.LayerNorm`, `nn.GroupNorm`")
def other_norms(script: Script) -> Any:
    return trained(
        script, nn.Sequential(nn.Linear(INPUTS, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.Linear(8, TARGETS))
    )


@idiom("`nn.Dropout`", reference=GLOO, note="each worker's masks, as with torch's DDP")
def dropout(script: Script) -> Any:
    torch.manual_seed(11)
    return trained(script, nn.Sequential(nn.Linear(INPUTS, 8), nn.Dropout(0.5), nn.Linear(8, TARGETS)))


@idiom("buffers that the forward pass changes: `self.steps += 1`")
def counting_buffer(script: Script) -> Any:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(inputs) / self.calls

    return trained(script, Counting())


@idiom("parameters that are not in a module: `nn.Parameter` of the root")
def root_parameters(script: Script) -> Any:
    class Polynomial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(TARGETS))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.a * inputs[:, :TARGETS] + self.b

    return trained(script, Polynomial())


@idiom("`nn.ParameterList`, `nn.ParameterDict`")
def parameter_containers(script: Script) -> Any:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ParameterList(nn.Parameter(torch.ones(INPUTS)) for _ in range(2))
            self.named = nn.ParameterDict({"w/x y": nn.Parameter(torch.ones(INPUTS, TARGETS) / 3)})

        def forward(self, inputs: Tensor) -> Tensor:
            return (inputs * self.rows[0] * self.rows[1]) @ self.named["w/x y"]

    return trained(script, Held())


@idiom("names with any characters: `nn.ModuleDict({'a/b é': layer})`")
def unusual_names(script: Script) -> Any:
    layers = nn.ModuleDict({"a/b é [0]": nn.Linear(INPUTS, 8), "größe": nn.Linear(8, TARGETS)})

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layers["größe"](self.layers["a/b é [0]"](inputs).tanh())

    return trained(script, Named())


@idiom("`nn.LazyLinear`, wrapped before the first forward pass", optimizer=LAZY, ddp=LAZY)
def lazy_layers(script: Script) -> Any:
    return trained(script, nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(TARGETS)))


@idiom("`nn.LazyLinear` after a forward pass")
def lazy_layers_initialized(script: Script) -> Any:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(TARGETS))
    model(torch.zeros(1, INPUTS))
    return trained(script, model)


@idiom("`nn.TransformerEncoderLayer`")
def transformer(script: Script) -> Any:
    layer = nn.TransformerEncoderLayer(INPUTS, 2, 8, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Unflatten(1, (1, INPUTS)), layer, nn.Flatten(), nn.Linear(INPUTS, TARGETS))
    return trained(script, model)


@idiom("`nn.Conv2d` in `channels_last`")
def channels_last(script: Script) -> Any:
    model = nn.Sequential(nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(TARGETS))
    model(torch.zeros(1, 1, 3, 2))
    model = nn.Sequential(nn.Unflatten(1, (1, 3, 2)), model).to(memory_format=torch.channels_last)
    return trained(script, model)


@idiom("`torch.compile(model)`")
def compiled(script: Script) -> Any:
    model = torch.compile(net(), backend="eager")
    return trained(script, model)


@idiom("`torch.jit.script(model)`")
def scripted(script: Script) -> Any:
    return trained(script, torch.jit.script(net()))


@idiom("`copy.deepcopy(model)` for evaluation during training")
def copied_model(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model.parameters()))
    train(script, model, optimizer)
    best = copy.deepcopy(getattr(model, "module", model))
    train(script, model, optimizer)
    return [model, best]


@idiom("`nn.DataParallel(model)`, left over on a CPU")
def data_parallel(script: Script) -> Any:
    model = nn.DataParallel(net())
    return trained(script, model)


@idiom("`model.apply(init_weights)` before wrapping")
def initialized_weights(script: Script) -> Any:
    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            module.bias.data.fill_(0.01)

    return trained(script, net().apply(initialize))


@idiom("different seeds on the workers: rank 0's initial values count")
def different_seeds(script: Script) -> Any:
    torch.manual_seed(3 + script.rank)
    return trained(script, net())
