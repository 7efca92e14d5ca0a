"""BSP through ``psdist.torch`` equals a single process that trains on the workers' batches, and torch's DDP.

It is the same, byte for byte, on any number of servers. Real processes, started by ``psdist run``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launched import Run

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests/support/torch_comparison.py"
MODELS = "mlp,cnn,transformer"


def compare(path: Path, servers: int, *arguments: str, transport: str = "auto") -> dict[str, dict[str, str]]:
    """Return the script's output: values by name, by model."""
    status, output = Run.ended(
        path, SCRIPT.read_text(), str(ROOT), *arguments, transport=transport, flags=("--nservers", str(servers))
    )
    assert status == 0, output
    lines = re.findall(r"^\[worker 0\] (\w+) (digest .*)$", output, re.M)
    return {model: dict(re.findall(r"(\w+) (\S+)", rest)) for model, rest in lines}


@pytest.mark.parametrize("models", ["mlp", pytest.param("cnn,transformer", marks=pytest.mark.long)])
def test_it_equals_one_process_and_ddp(tmp_path: Path, models: str) -> None:
    seen = compare(tmp_path, 2, "60", models, "beside")
    assert list(seen) == models.split(",")
    for model, values in seen.items():
        assert float(values["alone"]) < 1e-5, (model, values)
        assert float(values["ddp"]) < 1e-5, (model, values)
        assert float(values["averaged"]) == 0.0, "sums of two gradients do not depend on the order"


def digests(path: Path, servers: int, transport: str = "auto") -> list[str]:
    """Digests of the weights after some steps."""
    return [values["digest"] for values in compare(path, servers, "20", MODELS, transport=transport).values()]


@pytest.fixture(scope="module")
def on_one_server(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests with one server."""
    return digests(tmp_path_factory.mktemp("one"), 1)


@pytest.mark.long
@pytest.mark.parametrize(("servers", "transport"), [(3, "auto"), (2, "tcp"), (2, "grpc")])
def test_other_numbers_of_servers_and_transports_give_the_same_bytes(
    tmp_path: Path, on_one_server: list[str], servers: int, transport: str
) -> None:
    assert digests(tmp_path, servers, transport) == on_one_server
