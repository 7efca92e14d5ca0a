"""Trainings with Transformers and Accelerate that tests compare, with and without psdist."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from psdist.errors import InvalidArgumentError
from tests.support.nursery import serve


def model_of(kind: str) -> Any:
    """Return a tiny model with random weights, the same in each process."""
    set_seed(0)
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, loss_type="ForCausalLM",
        )  # fmt: skip
        return GPT2LMHeadModel(config)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=32, max_position_embeddings=8, **sizes, **dropout)
    return BertForSequenceClassification(config)


def data_of(kind: str, size: int = 48) -> list[dict[str, Tensor]]:
    """Return random sentences. Of GPT-2's some tokens are padding, more in the later sentences."""
    random = torch.Generator().manual_seed(7)
    samples = []
    for number in range(size):
        words = torch.randint(0, 32, (8,), generator=random)
        labels = words.clone() if kind == "gpt2" else torch.randint(0, 2, (), generator=random)
        if kind == "gpt2":
            labels[8 - number % 5 :] = -100
        samples.append({"input_ids": words, "labels": labels})
    return samples


class At(TrainerCallback):
    """Kills processes at the end of a step. pids: 0 is this process."""

    def __init__(self, step: int, pids: list[int]) -> None:
        self._step = step
        self._pids = pids

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            for pid in self._pids:
                os.kill(pid or os.getpid(), signal.SIGKILL)


def train(
    kind: str,
    directory: str,
    batch: int,
    *,
    uses: bool = True,
    kill: tuple[int, list[int]] | None = None,
    kills_rank: int | None = None,
    resume: bool = False,
    **given: Any,
) -> dict[str, Any]:
    """Train, and return weights, log, and files. uses: with psdist. batch: samples of a worker. kills_rank: None for
    all."""
    cls: Any = Trainer
    if uses:
        import psdist.hf

        cls = psdist.hf.Trainer
    settings: dict[str, Any] = {
        "max_steps": 9, "gradient_accumulation_steps": 2, "learning_rate": 3e-3, "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "logging_steps": 1,
        "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3,
    }  # fmt: skip
    arguments = TrainingArguments(
        output_dir=directory, per_device_train_batch_size=batch, per_device_eval_batch_size=4,
        report_to=[], disable_tqdm=True, **(settings | given),
    )  # fmt: skip
    data = data_of(kind)
    model = model_of(kind)
    trainer = cls(
        model=model, args=arguments, train_dataset=data, eval_dataset=data[:16],
        compute_metrics=lambda prediction: {"samples": len(prediction.label_ids)},
        callbacks=[] if kill is None or kills_rank not in (None, arguments.process_index) else [At(*kill)],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume or None)
    return {
        "weights": {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        "log": trainer.state.log_history,
        "files": sorted(os.listdir(directory)),
    }


def loop(
    batch: int, *, uses: bool = True, kill: tuple[int, list[int]] | None = None, accumulate: int = 2, **_: Any
) -> dict[str, Any]:
    """Train by a loop with Accelerate, and return weights, losses, and gathered numbers."""
    from accelerate import Accelerator

    cls: Any = Accelerator
    settings: dict[str, Any] = {}
    if uses:
        import psdist.hf

        cls, settings = psdist.hf.Accelerator, {"max_grad_norm": 0.5}
    accelerator = cls(gradient_accumulation_steps=accumulate, **settings)
    set_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler: Any = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8 * accelerator.num_processes)
    inputs = torch.randn(48, 4)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader: Any = torch.utils.data.DataLoader(data, batch, shuffle=True, generator=torch.Generator().manual_seed(3))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, seen = [], []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.gather(loss.detach()).mean()))
            seen += accelerator.gather_for_metrics(x[:, 0]).tolist()
            if kill is not None and len(losses) == kill[0]:
                for pid in kill[1]:
                    os.kill(pid, signal.SIGKILL)
    return {
        "weights": {name: one.detach().clone() for name, one in model.named_parameters()}, "losses": losses,
        "seen": seen, "rate": scheduler.get_last_lr(), "main": accelerator.is_main_process,
    }  # fmt: skip


def epochs(seed: int, stop: int, **_: Any) -> list[tuple[int, list[int]]]:
    """Train up to step ``stop`` by a loop that shuffles, and return the data epoch and samples of each batch."""
    import psdist.hf
    from psdist.process_group import save_run

    accelerator = psdist.hf.Accelerator()
    set_seed(seed + accelerator.process_index)  # Workers and runs with their own seeds have the same order.
    model: Any = torch.nn.Linear(4, 1)
    data: Any = [(torch.full((4,), number / 48), number) for number in range(48)]
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: Any = torch.utils.data.DataLoader(data, 4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    handle, batches, seen = optimizer.optimizer.handle, len(loader), list[tuple[int, list[int]]]()
    while handle.step < stop:
        epoch, skipped = divmod(handle.step, batches)
        for inputs, numbers in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            seen.append((epoch, numbers.tolist()))
            if handle.step == stop:
                break
    save_run(optimizer.optimizer.context)
    return seen


def messages(directory: str) -> dict[str, str]:
    """Return the errors of what is refused."""
    from accelerate.utils import DistributedType

    import psdist.hf
    import psdist.torch
    from psdist.hf.accelerator import check_distributed
    from psdist.hf.trainer import check_arguments

    def arguments(**given: Any) -> Any:
        none = {"fsdp": None, "deepspeed": None, "parallelism_config": None, "auto_find_batch_size": False, "n_gpu": 1}
        return SimpleNamespace(**(none | {"accelerator_config": SimpleNamespace(even_batches=True)} | given))

    def accelerator(**given: Any) -> Any:
        none = {"distributed_type": DistributedType.NO, "parallelism_config": None, "mixed_precision": "no"}
        return SimpleNamespace(**(none | {"num_processes": 1} | given))

    made = psdist.hf.Accelerator(name="loop")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = psdist.hf.Trainer(
        model=model_of("bert"), train_dataset=data_of("bert", 4),
        args=TrainingArguments(directory, max_steps=1, report_to=[], disable_tqdm=True),
    )  # fmt: skip

    def train_wrapped() -> None:
        wrapped = model_of("bert")
        inner = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        taken = psdist.torch.DistributedOptimizer(wrapped, inner, name="taken")
        psdist.hf.Trainer(
            model=wrapped, args=trainer.args, train_dataset=data_of("bert", 4), optimizers=(taken, None)
        ).train()

    def train_twice() -> None:
        trainer.train()
        trainer.train()

    def clip() -> None:
        prepared, _ = made.prepare(model, optimizer)
        made.clip_grad_norm_(prepared.parameters(), 2.0)

    calls: dict[str, Callable[[], Any]] = {
        "fsdp": lambda: check_arguments(arguments(fsdp="full_shard")),
        "deepspeed": lambda: check_arguments(arguments(deepspeed="ds.json")),
        "auto_find_batch_size": lambda: check_arguments(arguments(auto_find_batch_size=True)),
        "even_batches": lambda: check_arguments(arguments(accelerator_config=SimpleNamespace(even_batches=False))),
        "n_gpu": lambda: check_arguments(arguments(n_gpu=4)),
        "search": lambda: trainer.hyperparameter_search(),
        "twice": train_twice,
        "wrapped": train_wrapped,
        "type": lambda: check_distributed(accelerator(distributed_type=DistributedType.FSDP)),
        "fp8": lambda: check_distributed(accelerator(mixed_precision="fp8")),
        "backward": lambda: made.backward(torch.zeros(1)),
        "no model": lambda: made.prepare(optimizer),
        "clip": clip,
        "clip value": lambda: made.clip_grad_value_(model.parameters(), 1.0),
        "uneven": lambda: made.join_uneven_inputs([model]),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except InvalidArgumentError as error:
            found[name] = error.message
    return found


if __name__ == "__main__":
    serve(train, loop, epochs, messages)
