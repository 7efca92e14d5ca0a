"""The benchmarks run: small sizes, few rounds, real clusters and peers. Their figures are not judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def call(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environ,
        timeout=240,
    )


def measure(tmp_path: Path, module: str, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "out.json"
    done = call(f"benchmarks.{module}", *arguments, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(path.read_text()))


@pytest.mark.long
@pytest.mark.parametrize("example", ["chargpt", "mnist"])
def test_a_step_of_torch_beside_ddp(tmp_path: Path, example: str) -> None:
    pytest.importorskip("torch")
    small = ("--width", "24", "--layers", "1", "--context", "8", "--rounds", "2", "--steps", "2")
    result = measure(tmp_path, "torch_step", "--example", example, *small)
    names = ["psdist", "averaged", "ddp", "ddp_tuned", "ddp_psdist", "alone"]
    assert list(result["contenders"]) == names
    assert result["contenders"]["psdist"]["ratio"] == 1.0
    assert all(one["backward_ms"] > 0 and one["processor_ms"] > 0 for one in result["contenders"].values())


@pytest.mark.long
@pytest.mark.parametrize(
    ("transport", "peers"), [("shm", {"gloo", "kernel"}), ("tcp", {"tls"}), ("grpc", {"echo_tuned"})]
)
def test_a_step_beside_its_peers(tmp_path: Path, transport: str, peers: set[str]) -> None:
    if "gloo" in peers:
        pytest.importorskip("torch")
    result = measure(
        tmp_path, "step", "--params", "100000", "--transport", transport, "--rounds", "2", "--steps-per-round", "2",
        *(word for peer in peers for word in ("--peer", peer)),
    )  # fmt: skip
    assert set(result["peers"]) == peers
    for peer in result["peers"].values():
        low, high = peer["spread"]
        assert 0 < low <= peer["ratio"] <= high
    assert result["psdist"]["steps"] == 2 * 2 * 2  # rounds, steps, workers
    assert result["psdist_ms"] > 0
    assert {text.split(":")[0] for text in result["psdist"]["transports"].values()} == {transport}


@pytest.mark.long
def test_a_peer_that_fails_says_why(tmp_path: Path) -> None:
    done = call("benchmarks.step", "--params", "0", "--rounds", "1")
    assert done.returncode == 1
    assert "psdist: " in done.stderr and "params=0" in done.stderr


@pytest.mark.long
def test_scaling_hides_communication_in_the_emulated_backward_pass(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    result = measure(
        tmp_path, "scaling", "--workers", "1", "2", "--params", "3000000", "--compute-ms", "60", "--rounds", "1",
        "--steps-per-round", "2", "--peer", "gloo",
    )  # fmt: skip
    for contenders in result["workers"].values():
        assert set(contenders) == {"psdist", "gloo"}
        for one in contenders.values():
            assert one["step_ms"] >= 60 and 0 < one["efficiency"] <= 1
    assert result["workers"]["1"]["psdist"]["relative_efficiency"] == 1


@pytest.mark.long
def test_latency_of_both_clients_beside_raw_grpc(tmp_path: Path) -> None:
    result = measure(tmp_path, "latency", "--rounds", "1", "--calls-per-round", "20")
    assert set(result["milliseconds"]) == {"psdist", "psdist_async", "grpc_unary", "grpc_stream"}
    for points in result["milliseconds"].values():
        assert points["calls"] == 20 and 0 < points["p50"] <= points["p99"]


@pytest.mark.long
def test_memory_of_every_process_is_watched(tmp_path: Path) -> None:
    result = measure(tmp_path, "steady", "--steps", "20", "--params", "20000", "--transport", "grpc")
    processes = result["processes"]["grpc"]
    assert [one["role"] for one in processes] == ["scheduler", "server", "server", "worker", "worker"]
    for one in processes:
        assert len(one["current_bytes"]) == 10 and min(one["current_bytes"]) > 0
        assert min(one["resident_bytes"]) > 0


@pytest.mark.long
def test_growth_of_sessions(tmp_path: Path) -> None:
    result = measure(
        tmp_path, "growth", "sessions", "--sessions", "2", "6", "--processes", "2", "--rest-seconds", "1",
        "--results", str(tmp_path / "results.json"),
    )  # fmt: skip
    assert [one["sessions"] for one in result["sessions"]] == [2, 6]
    for one in result["sessions"]:
        assert 1 <= one["epochs"] <= one["sessions"]
        assert min(one["joined_seconds"], one["told_seconds"], one["left_seconds"], one["resident_bytes"]) > 0


@pytest.mark.long
def test_growth_of_a_step_writes_a_page_and_keeps_other_curves(tmp_path: Path) -> None:
    results, page = tmp_path / "results.json", tmp_path / "growth.md"
    results.write_text('{"other": 1}')
    result = measure(
        tmp_path, "growth", "tensors", "--values", "1", "3", "--params", "20000", "--transport", "shm",
        "--results", str(results), "--page", str(page),
    )  # fmt: skip
    points = result["tensors"]["points"]["shm"]
    assert list(points) == ["1", "3"]
    for one in points.values():
        assert 0 < one["low"] <= one["ms"] <= one["high"]
    assert json.loads(results.read_text()) == result and result["other"] == 1
    assert "growth-tensors.svg" in page.read_text() and (tmp_path / "growth-tensors.svg").exists()
