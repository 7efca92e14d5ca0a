"""Idioms of training loops: several models and optimizers, losses of other kinds, and batches of other sizes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.idioms.script import GLOO, INPUTS, SAMPLES, TARGETS, Script, loss_of, net, sgd
from tests.idioms.table import idiom

STEPS = 4


def gan(script: Script) -> tuple[Any, ...]:
    """Return a generator, a discriminator, their optimizers and random inputs."""
    made, judging = nn.Linear(INPUTS, TARGETS), nn.Linear(TARGETS, 1)
    generator, generates = script.wrap(made, sgd(made, 0.05))
    discriminator, judges = script.wrap(judging, sgd(judging, 0.05))
    return generator, discriminator, generates, judges


@idiom("a GAN: two models, two optimizers, `fake.detach()`")
def adversaries(script: Script) -> Any:
    generator, discriminator, generates, judges = gan(script)
    for noise, real in script.batches(STEPS):
        judges.zero_grad()
        fake = generator(noise)
        loss = (discriminator(real) - 1).square().mean() + discriminator(fake.detach()).square().mean()
        loss.backward()
        judges.step()
        generates.zero_grad()
        (discriminator(fake) - 1).square().mean().backward()
        generates.step()
    return [generator, discriminator]


@idiom("DCGAN's loop: two backward passes for the discriminator, `netD.zero_grad()`")
def dcgan(script: Script) -> Any:
    generator, discriminator, generates, judges = gan(script)
    for noise, real in script.batches(STEPS):
        discriminator.zero_grad()
        (discriminator(real) - 1).square().mean().backward()
        fake = generator(noise)
        discriminator(fake.detach()).square().mean().backward()
        judges.step()
        generator.zero_grad()
        (discriminator(fake) - 1).square().mean().backward()
        generates.step()
    return [generator, discriminator]


def _train_critic(script: Script, critic_steps: int, penalty: float = 0.0) -> Any:
    """Train a Wasserstein GAN: the critic makes several steps for each of the generator's."""
    generator, critic, generates, judges = gan(script)
    mixing = torch.Generator().manual_seed(4)
    for number, (noise, real) in enumerate(script.batches(4 * critic_steps)):
        judges.zero_grad()
        fake = generator(noise).detach()
        loss = critic(fake).square().mean() - critic(real).mean()
        if penalty:
            share = script.part(torch.rand(SAMPLES, 1, generator=mixing))
            mixed = (share * real + (1 - share) * fake).requires_grad_()
            slopes = torch.autograd.grad(critic(mixed).square().sum(), mixed, create_graph=True)[0]
            loss = loss + penalty * (slopes.norm(dim=1) - 1).square().mean()
        loss.backward()
        judges.step()
        if not penalty:
            for parameter in critic.parameters():
                parameter.data.clamp_(-0.3, 0.3)
        if number % critic_steps == critic_steps - 1:
            generates.zero_grad()
            (-critic(generator(noise))).mean().backward()
            generates.step()
    return [generator, critic]


@idiom("a Wasserstein GAN: three steps of the critic for each of the generator, `p.data.clamp_`")
def wasserstein(script: Script) -> Any:
    return _train_critic(script, 3)


@idiom("a Wasserstein GAN with gradient penalty, two steps of the critic for each of the generator")
def wasserstein_penalty(script: Script) -> Any:
    return _train_critic(script, 2, penalty=0.1)


@idiom("two optimizers in turn, each for several steps, whose losses reach both models")
def taking_turns(script: Script) -> Any:
    encoder, decoder, encodes, decodes = gan(script)
    for number, (inputs, targets) in enumerate(script.batches(12)):
        optimizer = encodes if number // 3 % 2 else decodes
        encodes.zero_grad()
        decodes.zero_grad()
        (decoder(encoder(inputs).tanh()) - targets[:, :1]).square().mean().backward()
        optimizer.step()
    return [encoder, decoder]


@idiom("a critic that is frozen for the generator's pass: `requires_grad_(False)`, then `True`")
def frozen_critic(script: Script) -> Any:
    generator, discriminator, generates, judges = gan(script)
    for noise, real in script.batches(STEPS):
        for parameter in discriminator.parameters():
            parameter.requires_grad_(True)
        judges.zero_grad()
        fake = generator(noise)
        ((discriminator(real) - 1).square().mean() + discriminator(fake.detach()).square().mean()).backward()
        judges.step()
        for parameter in discriminator.parameters():
            parameter.requires_grad_(False)
        generates.zero_grad()
        (discriminator(fake) - 1).square().mean().backward()
        generates.step()
    return [generator, discriminator]


class ActorCritic(nn.Module):
    """Policy and value with a common trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.policy, self.value = nn.Linear(INPUTS, 8), nn.Linear(8, TARGETS), nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(inputs).tanh()
        return self.policy(hidden).log_softmax(1), self.value(hidden)[:, 0]


@idiom("actor-critic: policy and value losses added")
def actor_critic(script: Script) -> Any:
    model = ActorCritic()
    model, optimizer = script.wrap(model, sgd(model, 0.05))
    for inputs, rewards in script.batches(STEPS):
        logits, values = model(inputs)
        chosen = logits.gather(1, rewards.argmax(1, keepdim=True))[:, 0]
        advantage = rewards.mean(1) - values.detach()
        optimizer.zero_grad()
        (-(chosen * advantage).mean() + nn.functional.smooth_l1_loss(values, rewards.mean(1))).backward()
        optimizer.step()
    return model


@idiom("two optimizers for two parts of one model")
def parts(script: Script) -> Any:
    inner = net()
    first, last = sgd(inner[0]), torch.optim.Adam(inner[2].parameters(), lr=1e-2, eps=1e-3)
    if script.face == "optimizer":
        _, first = script.wrap(inner[0], first)
        _, last = script.wrap(inner[2], last)
        model: Any = inner
    else:
        model = script.wrap_model(inner, "parts")
    for batch in script.batches(STEPS):
        first.zero_grad()
        last.zero_grad()
        loss_of(model, batch).backward()
        first.step()
        last.step()
    return model


@idiom("an encoder and a decoder in `nn.ModuleList([encoder, decoder])`, one optimizer")
def module_list(script: Script) -> Any:
    encoder, decoder = nn.Linear(INPUTS, 8), nn.Linear(8, TARGETS)
    both = nn.ModuleList([encoder, decoder])
    optimizer: Any = sgd(both)
    if script.face == "optimizer":
        _, optimizer = script.wrap(both, optimizer)
    else:
        encoder, decoder = script.wrap_model(encoder, "encoder"), script.wrap_model(decoder, "decoder")
    for inputs, targets in script.steps(optimizer, STEPS):
        nn.functional.mse_loss(decoder(encoder(inputs).tanh()), targets).backward()
    return both


@idiom("cross entropy with classes")
def cross_entropy(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for inputs, targets in script.steps(optimizer, STEPS):
        nn.functional.cross_entropy(model(inputs), targets.argmax(1)).backward()
    return model


@idiom("`reduction='sum'` divided by the whole batch's size times the workers' number")
def summed(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for inputs, targets in script.steps(optimizer, STEPS):
        (nn.functional.mse_loss(model(inputs), targets, reduction="sum") / (SAMPLES / script.world)).backward()
    return model


@idiom("a variational autoencoder's two losses", note="the same noise on each worker's rows")
def variational(script: Script) -> Any:
    class Variational(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(INPUTS, 4), nn.Linear(2, INPUTS)

        def forward(self, inputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, spread = self.encode(inputs).chunk(2, 1)
            return self.decode(mean + noise * (spread / 2).exp()), mean, spread

    model = Variational()
    model, optimizer = script.wrap(model, sgd(model, 0.02))
    random = torch.Generator().manual_seed(4)
    for inputs, _ in script.steps(optimizer, STEPS):
        result, mean, spread = model(inputs, script.part(torch.randn(SAMPLES, 2, generator=random)))
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1).mean()
        (nn.functional.mse_loss(result, inputs) + 0.1 * divergence).backward()
    return model


@idiom("a last batch that is smaller, but equal on all workers")
def smaller_batch(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for batch in [*script.batches(STEPS), *script.batches(1, samples=4)]:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@idiom("workers' batches of uneven size", note="`set_weight(len(batch))` before `backward()`")
def uneven_batches(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for inputs, targets in script.batches(STEPS, samples=7):
        if script.face == "optimizer":
            optimizer.set_weight(len(inputs))
        elif script.face == "ddp":
            model.set_weight(len(inputs))
        optimizer.zero_grad()
        loss_of(model, (inputs, targets)).backward()
        optimizer.step()
    return model


@idiom("workers with different numbers of batches", note="`with optimizer.join():` or `model.join()`", reference=GLOO)
def uneven_numbers(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), torch.optim.SGD(model.parameters(), lr=0.1))
    joining = {"optimizer": optimizer, "torch": None}.get(script.face, model)
    with nullcontext() if joining is None else joining.join():
        for batch in list(script.batches(STEPS))[: STEPS - script.rank]:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return model


@idiom("a `DataLoader` over a `TensorDataset`")
def data_loader(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    pairs = list(script.batches(STEPS))
    data = TensorDataset(torch.cat([one for one, _ in pairs]), torch.cat([other for _, other in pairs]))
    for inputs, targets in DataLoader(data, batch_size=SAMPLES // script.world):
        optimizer.zero_grad()
        loss_of(model, (inputs, targets)).backward()
        optimizer.step()
    return model


@idiom("`torch.set_grad_enabled(phase == 'train')`, two phases")
def phases(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for batch in script.batches(STEPS):
        for phase in ("train", "val"):
            model.train(phase == "train")
            with torch.set_grad_enabled(phase == "train"):
                loss = loss_of(model, batch)
                if phase == "train":
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
    return model


@idiom("`running_loss += loss.item() * n`, `loss.detach()`, progress output")
def running_loss(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    total = 0.0
    for batch in script.batches(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(batch[0])
    assert total > 0
    return model


@idiom("`torch.autograd.set_detect_anomaly(True)`")
def anomaly(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    with torch.autograd.detect_anomaly(check_nan=True):
        for batch in script.steps(optimizer, STEPS):
            loss_of(model, batch).backward()
    return model


@idiom("the same batch twice: contrastive and siamese networks call the model twice in one step")
def siamese(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    for inputs, targets in script.steps(optimizer, STEPS):
        (model(inputs) - model(inputs.flip(1)) - targets).square().mean().backward()
    return model


@idiom("distillation: a teacher under `no_grad`")
def distillation(script: Script) -> Any:
    teacher = net().eval()
    model, optimizer = script.wrap(model := net(), sgd(model))
    for inputs, targets in script.batches(STEPS):
        with torch.no_grad():
            taught = teacher(inputs)
        optimizer.zero_grad()
        (nn.functional.mse_loss(model(inputs), targets) + nn.functional.mse_loss(model(inputs), taught)).backward()
        optimizer.step()
    return model


@idiom("gradients kept for a log: `kept.append(p.grad)`")
def kept_gradients(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))
    kept = []
    for batch in script.steps(optimizer, STEPS):
        loss_of(model, batch).backward()
        kept.append(next(iter(model.parameters())).grad)
    different = {tuple(gradient.flatten().tolist()) for gradient in kept}
    return [model, torch.tensor([float(len(different))])]


@idiom("`torch.compile` around the whole step: `zero_grad()`, `backward()`, `step()`")
def compiled_step(script: Script) -> Any:
    model, optimizer = script.wrap(model := net(), sgd(model))

    @torch.compile(backend="eager")
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, (inputs, targets))
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch._dynamo.reset()
    for batch in script.batches(STEPS):
        step(*batch)
    return model
