"""A small transformer that learns Python's standard library, character by character.

psdist run --nservers 2 --nproc-per-node 2 examples/torch_chargpt.py
python examples/torch_chargpt.py --plain          # the same script without psdist: plain PyTorch in one process

Only the lines marked with ``psdist`` differ.
"""

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CHARACTERS = 128  # ASCII; others count as 0


class Block(nn.Module):
    """Pre-normalized attention over the preceding characters, and a network for each character."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map float[batch, length, width] to the same shape."""
        batch, length, width = x.shape
        parts = self.attend(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.network(self.norm2(x))


class CharGPT(nn.Module):
    """Decoder-only transformer whose output weights are its embedding's. 10.8 million parameters by default."""

    def __init__(
        self, width: int = 384, layers: int = 6, heads: int = 6, context: int = 128, recompute: bool = False
    ) -> None:
        super().__init__()
        self.context = context
        self.recompute = recompute
        self.embed = nn.Embedding(CHARACTERS, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CHARACTERS, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Map int[batch, length] to the logits of the next characters, float[batch, length, CHARACTERS]."""
        x = self.embed(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            # Activation checkpointing: the block's activations are recomputed in the backward pass.
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def read_text(limit: int = 2_000_000) -> Tensor:
    """Return the first characters of the standard library's sources, uint8."""
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    codes = torch.frombuffer(bytearray(b"".join(parts)[:limit]), dtype=torch.uint8)
    return torch.where(codes < CHARACTERS, codes, 0)


def samples(text: Tensor, batch: int, context: int, step: int) -> Tensor:
    """Return the passages of one step, int64[batch, context + 1]: the same for all workers, which share them out."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - context, (batch,), generator=generator)
    return torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()


def loss_of(model: nn.Module, passages: Tensor) -> Tensor:
    """Return the mean cross entropy of the next character, in nats."""
    logits = model(passages[:, :-1])
    return functional.cross_entropy(logits.reshape(-1, CHARACTERS), passages[:, 1:].reshape(-1))


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="A character transformer on the standard library's sources.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="passages of a step, of all workers together")
    parser.add_argument("--context", type=int, default=128, help="characters of a passage")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--bfloat16", action="store_true", help="mixed precision: compute in bfloat16")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing: less memory, more work")
    parser.add_argument("--plain", action="store_true", help="plain PyTorch in one process")
    return parser.parse_args()


def main() -> None:
    """Train the model and print its loss."""
    options = arguments()
    torch.manual_seed(0)
    text = read_text()
    model = CharGPT(options.width, options.layers, options.heads, options.context, options.recompute)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    rank, world, step = 0, 1, 0
    if not options.plain:
        import psdist.torch  # psdist

        optimizer = psdist.torch.DistributedOptimizer(model, optimizer, max_grad_norm=1.0)  # psdist
        rank, world, step = optimizer.context.rank, optimizer.context.world_size, optimizer.handle.step  # psdist
    began = time.perf_counter()
    while step < options.steps:
        passages = samples(text, options.batch, options.context, step)[rank::world]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.bfloat16):
            loss = loss_of(model, passages)
        optimizer.zero_grad()
        loss.backward()
        if options.plain:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not options.plain:  # metrics
            optimizer.context.report(loss=loss, samples=len(passages))  # metrics
        step = step + 1 if options.plain else optimizer.handle.step  # psdist
        if rank == 0 and step % 20 == 0:
            seconds = time.perf_counter() - began
            bits = loss.item() / math.log(2)
            print(f"step {step:5}  loss {loss.item():.4f}  {bits:.2f} bits/character  {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
