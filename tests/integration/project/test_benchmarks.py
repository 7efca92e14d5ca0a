"""The benchmarks run: small sizes, few rounds, real clusters and peers. Their figures are not judged."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from psdist.cli import bench as bench_command
from psdist.launcher.embedded import EmbeddedCluster

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


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return call("psdist.cli.main", "bench", "--params", "20000", "--steps", "5", *arguments)


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


# --- psdist bench -----------------------------------------------------------------------------------------------------


def test_bench_on_a_cluster_of_its_own() -> None:
    done = bench("--format", "json", "--nservers", "2")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["steps"] == 5 and report["step_ms"] > 0
    assert report["bytes_per_step"] == 2 * 4 * 20000
    assert set(report["transports"]) == {"server-0", "server-1"}


# They differ from the one above only in flags, and in a launcher.
@pytest.mark.long
def test_bench_on_a_cluster_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(EmbeddedCluster(servers=1)) as cluster:
        monkeypatch.setenv("PSDIST_TOKEN", cluster.token)
        for arguments in (("--wire-dtype", "bfloat16"), ("--copy", "--consistency", "asp")):
            done = bench("--scheduler", cluster.address, "--transport", "grpc", *arguments)
            assert done.returncode == 0, done.stderr
            assert "20,000 parameters" in done.stdout and "server-0" in done.stdout and "grpc" in done.stdout
        again = bench("--scheduler", cluster.address, "--wire-dtype", "bfloat16")
        assert again.returncode == 0, again.stderr


@pytest.mark.long
def test_bench_under_a_launcher_reports_once() -> None:
    done = call(
        "psdist.cli.main", "run", "--nservers", "1", "--nproc-per-node", "2", "-m", "psdist.cli.main", "bench",
        "--params", "20000", "--steps", "3",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("20,000 parameters") == 1


def test_bench_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    done = bench("--optimizer", "magic")
    assert done.returncode == 2 and "'magic' is not one of adam" in done.stderr
    done = bench("--scheduler", "127.0.0.1:1", "--timeout", "0.5")
    assert done.returncode == 69 and "127.0.0.1:1" in done.stderr and "Traceback" not in done.stderr
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = bench()
    assert done.returncode == 2 and "WORLD_SIZE is 2" in done.stderr


@pytest.mark.parametrize("quiet_seconds", [0.0, 600.0])
def test_who_compiles_kernels_for_long_says_so(
    quiet_seconds: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_command, "_QUIET_SECONDS", quiet_seconds)
    bench_command._compile_kernels()
    assert ("compiling kernels, once on this machine" in capsys.readouterr().err) is (quiet_seconds == 0.0)
