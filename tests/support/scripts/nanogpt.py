"""Character model in the form of nanoGPT's training script: accumulation, DDP, scaler, clipping and a cosine rate.

Arguments: file for the losses and weights. Starts alone, or under a launcher that sets torchrun's variables.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP

block_size, vocab_size, n_embd, n_head = 8, 17, 16, 2
gradient_accumulation_steps, batch_size, max_iters, eval_interval = 4, 4, 8, 4
learning_rate, min_lr, warmup_iters, lr_decay_iters = 1e-2, 1e-3, 2, 8
weight_decay, beta1, beta2, grad_clip = 1e-1, 0.9, 0.95, 1.0

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master_process, seed_offset = ddp_rank == 0, ddp_rank
    gradient_accumulation_steps //= ddp_world_size
else:
    master_process, seed_offset = True, 0
torch.manual_seed(1337 + seed_offset)
data = torch.arange(2000) ** 2 % vocab_size


def get_batch() -> tuple[Tensor, Tensor]:
    ix = torch.randint(len(data) - block_size, (batch_size,))
    return torch.stack([data[i : i + block_size] for i in ix]), torch.stack(
        [data[i + 1 : i + 1 + block_size] for i in ix]
    )


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.TransformerEncoderLayer(n_embd, n_head, 4 * n_embd, 0.0, "gelu", batch_first=True, norm_first=True)
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        mask = nn.Transformer.generate_square_subsequent_mask(block_size)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        logits = self.lm_head(self.ln_f(self.h(x, src_mask=self.mask, is_causal=True)))
        return logits, functional.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        extra = {"fused": False} if "fused" in inspect.signature(torch.optim.AdamW).parameters else {}
        # With a small eps, AdamW turns rounding into steps where the gradient is zero, as for the keys' bias.
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), eps=1e-4, **extra)


def get_lr(it: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT()
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = model.configure_optimizers()
ctx = nullcontext()
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model
losses = []
X, Y = get_batch()
for iter_num in range(max_iters):
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0 and master_process:
        raw_model.eval()
        with torch.no_grad():
            losses.append(raw_model(data[None, :block_size], data[None, 1 : block_size + 1])[1].item())
        raw_model.train()
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        losses.append(loss.item() * gradient_accumulation_steps)
if master_process:
    torch.save({"losses": losses, "model": raw_model.state_dict()}, sys.argv[1])
if ddp:
    destroy_process_group()
