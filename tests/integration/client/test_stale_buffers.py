"""torch's ``zero_grad()`` takes gradients out of ``gradient_buffers()``: the script gets a warning with the remedy."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import psdist, torch

net = torch.nn.Linear(4, 1)
values = {name: value.detach().numpy() for name, value in net.named_parameters()}
inputs = torch.randn(64, 4)
with psdist.init() as context:
    model = context.client.parameters("model", values, psdist.optim.SGD(lr=0.01))
    buffers = model.gradient_buffers()
    for name, value in net.named_parameters():
        value.grad = torch.from_numpy(buffers[name])
    while model.step < 12:
        net.zero_grad(set_to_none=sys.argv[1] == "none")
        net(inputs).pow(2).mean().backward()
        if sys.argv[2] == "buckets":
            under_way = [model.push_pull_async([name]) for name in reversed(model.names)]
            weights = {name: array for bucket in under_way for name, array in bucket.wait().items()}
        else:
            weights = model.push_pull(buffers)
        with torch.no_grad():
            for name, value in net.named_parameters():
                value.copy_(torch.from_numpy(weights[name].copy()))
    print(net(inputs).pow(2).mean().item() < 1e9)
"""


@pytest.mark.parametrize(
    ("grad", "call"),
    [
        ("none", "push_pull"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("none", "buckets"), ("zeros", "push_pull"))),
    ],
)
def test_torch_that_takes_gradients_out_of_the_buffers(grad: str, call: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, grad, call]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    warnings = re.findall(r"^\d\d:\d\d:\d\d WARNING psdist: (.*)$", done.stderr, re.M)
    if grad == "zeros":
        assert not warnings, done.stderr
        return
    (warning,) = warnings
    assert "gradient_buffers() of 'model'" in warning and "zero_grad(set_to_none=False)" in warning
