"""Data x pipeline x tensor parallelism: the data dimension by parameter servers, the others by collectives.

psdist run --nproc-per-node 8 --max-restarts 0 examples/torch_hybrid.py                 # 2 x 2 x 2 workers
psdist run --nproc-per-node 4 --max-restarts 0 examples/torch_hybrid.py --tensor 1 --compare   # and in one process

A worker holds a part of every matrix (tensor parallelism) of one stage (pipeline parallelism). The workers with the
same part share a parameter set: servers average their gradients, hold Adam's state and make its steps, as ZeRO does.
Batch normalization has the statistics of the data dimension together.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

import psdist
from psdist.errors import InvalidArgumentError
from psdist.torch import SyncBatchNorm

WIDTH, HIDDEN, BATCH, MICRO_BATCHES, LR = 64, 128, 64, 4, 1e-3
PIXELS, DIGITS = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
NAMES = ("data", "pipeline", "tensor")


class Layer(nn.Module):
    """A normalized network beside a shortcut, from float[batch, WIDTH] to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def make_stages(count: int) -> list[nn.Module]:
    """Return the model in stages of two layers, with the same weights in every process."""
    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Sequential(Layer(), Layer()) for _ in range(count - 1)]
    return [*stages, nn.Sequential(Layer(), Layer(), nn.Linear(WIDTH, 10))]


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Return pixels, float32[BATCH, 64], and digits, int64[BATCH], of scikit-learn's handwritten digits."""
    chosen = torch.randint(len(PIXELS), (BATCH,), generator=torch.Generator().manual_seed(step))
    return PIXELS[chosen].float() / 16, DIGITS[chosen].long()


def count_replicas(workers: int, pipeline: int, tensor: int) -> int:
    """Return the size of the data dimension. Raises InvalidArgumentError unless the workers make up whole models."""
    if pipeline < 1 or tensor < 1 or HIDDEN % tensor:
        raise InvalidArgumentError(f"{pipeline} stages x {tensor} parts of each matrix: use parts that divide {HIDDEN}")
    count, rest = divmod(workers, pipeline * tensor)
    if not count or rest:
        raise InvalidArgumentError(
            f"{workers} workers do not make up models of {pipeline} stages x {tensor} parts of each matrix: use "
            f"--nproc-per-node {pipeline * tensor} or a multiple of it, or change --pipeline and --tensor"
        )
    if BATCH % (count * MICRO_BATCHES):
        raise InvalidArgumentError(
            f"{BATCH} samples cannot be divided among {count} models in {MICRO_BATCHES} micro-batches each: use 1, 2, "
            f"4, 8 or 16 times {pipeline * tensor} workers"
        )
    return count


def make_part(mesh: DeviceMesh) -> nn.Module:
    """Return this worker's stage, with its part of every matrix."""
    part = make_stages(mesh["pipeline"].size())[mesh.get_local_rank("pipeline")]
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in part[:2]:  # its two layers; the last stage has the output, too
        parallelize_module(layer, mesh["tensor"], plan)
    return SyncBatchNorm.convert_sync_batchnorm(part, mesh.get_group("data"))


def local(tensor: Tensor) -> Tensor:
    """Return this worker's part of a tensor, in the same memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def train(part: nn.Module, mesh: DeviceMesh, steps: int) -> None:
    """Train this worker's part, together with the workers of its data dimension."""
    (number, stage, slot), count, last = mesh.get_coordinate(), mesh["data"].size(), mesh["pipeline"].size() - 1
    values = {name: local(tensor).numpy() for name, tensor in part.named_parameters()}
    context = psdist.init()
    replicas = context.subset(dist.get_process_group_ranks(mesh.get_group("data")))
    handle = replicas.client.parameters(f"model/{stage}.{slot}", values, psdist.optim.Adam(lr=LR))
    handle.pull(out=values)
    size = BATCH // count // MICRO_BATCHES
    given = torch.empty(size, WIDTH, requires_grad=stage > 0)
    made = torch.empty(size, WIDTH if stage < last else 10, requires_grad=True)
    pipe = PipelineStage(part, stage, last + 1, torch.device("cpu"), given, made, group=mesh.get_group("pipeline"))
    schedule = Schedule1F1B(pipe, MICRO_BATCHES, loss_fn=cross_entropy)
    for step in range(context.common_step(handle.step), steps):
        pixels, digits = batch_of(step)
        losses: list[Tensor] = []
        inputs = [pixels[number::count]] if stage == 0 else []
        schedule.step(*inputs, target=digits[number::count] if stage == last else None, losses=losses)
        gradients = {name: local(tensor.grad).numpy() for name, tensor in part.named_parameters()}
        handle.push_pull(gradients, out=values)
        part.zero_grad()
        if losses and number == slot == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1:3}  loss {torch.stack(losses).mean().item():.5f}", flush=True)


def difference(part: nn.Module, mesh: DeviceMesh, steps: int) -> float:
    """Train the whole model in this process, and return the relative difference of this worker's weights from it."""
    stages = make_stages(mesh["pipeline"].size())
    model, count = nn.Sequential(*stages), mesh["data"].size()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    for step in range(steps):
        shares = [one[number::count].chunk(MICRO_BATCHES) for one in batch_of(step) for number in range(count)]
        for together in zip(*shares, strict=True):
            loss = cross_entropy(model(torch.cat(together[:count])), torch.cat(together[count:]))
            (loss / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    mine = [one.full_tensor() if isinstance(one, DTensor) else one for one in part.parameters()]
    alone = nn.utils.parameters_to_vector(stages[mesh.get_local_rank("pipeline")].parameters())
    return ((nn.utils.parameters_to_vector(mine) - alone).norm() / alone.norm()).item()


def main() -> None:
    """Train the model in parts, and compare them with training in one process if asked to."""
    parser = argparse.ArgumentParser(description="Hybrid parallelism on parameter servers and collectives.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--pipeline", type=int, default=2, help="stages")
    parser.add_argument("--tensor", type=int, default=2, help="parts of each matrix")
    parser.add_argument("--compare", action="store_true", help="train once more in one process and compare")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = count_replicas(dist.get_world_size(), options.pipeline, options.tensor)
    mesh = init_device_mesh("cpu", (data, options.pipeline, options.tensor), mesh_dim_names=NAMES)
    part = make_part(mesh)
    train(part, mesh, options.steps)
    if options.compare and mesh.get_local_rank("data") == 0:
        print(f"relative difference to one process {difference(part, mesh, options.steps):.1e}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("psdist")
    main()
    dist.destroy_process_group()
