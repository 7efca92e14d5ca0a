"""A plain PyTorch loop whose weights and Adam live on the servers. Ctrl-C stops it; the same command resumes it.

psdist run --nservers 2 --nproc-per-node 2 --run-id mlp examples/torch_loop.py
"""

import argparse

import torch
from torch import nn

import psdist


def main() -> None:
    """Train a small network to imitate a fixed one, each worker with samples of its own."""
    parser = argparse.ArgumentParser(description="A PyTorch loop on parameter servers.")
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))  # those of rank 0 are the initial values
    teacher = torch.randn(8, 1, generator=torch.Generator().manual_seed(1))
    with psdist.init() as context:
        values = {name: tensor.detach().numpy() for name, tensor in net.named_parameters()}  # the model's own memory
        model = context.client.parameters("mlp", values, psdist.optim.Adam(lr=0.02))
        buffers = model.gradient_buffers()
        for name, tensor in net.named_parameters():
            tensor.grad = torch.from_numpy(buffers[name])
        model.pull(out=values)
        samples = torch.Generator().manual_seed(1000 * context.rank + model.step)
        while model.step < steps:  # counted by the servers, so a resumed run ends at the same step
            x = torch.randn(64, 8, generator=samples)
            net.zero_grad(set_to_none=False)  # the gradients stay in the buffers
            loss = nn.functional.mse_loss(net(x), torch.tanh(x @ teacher))
            loss.backward()
            model.push_pull(buffers, out=values)
            context.report(loss=loss.item(), samples=len(x))
            if context.rank == 0 and model.step % 100 == 0:
                print(f"step {model.step}  loss {loss.item():.5f}", flush=True)


if __name__ == "__main__":
    main()
