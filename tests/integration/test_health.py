"""The health probe against real gRPC servers, and against nobody; as a program, because that is what an engine runs."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from psdist.settings import exit_codes


@pytest.fixture
def server() -> Iterator[tuple[health.HealthServicer, str]]:
    """A server with nothing but the health service."""
    servicer = health.HealthServicer()
    own = grpc.server(ThreadPoolExecutor(max_workers=1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, own)
    port = own.add_insecure_port("127.0.0.1:0")
    own.start()
    yield servicer, f"127.0.0.1:{port}"
    own.stop(grace=None).wait()


def probe(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the probe as an engine does."""
    command = [sys.executable, "-m", "psdist.cli.health", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_serving_is_healthy(server: tuple[health.HealthServicer, str]) -> None:
    servicer, address = server
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    done = probe(address)
    assert (done.returncode, done.stdout) == (exit_codes.OK, f"{address}: SERVING\n")


def test_not_serving_is_not(server: tuple[health.HealthServicer, str]) -> None:
    servicer, address = server
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    done = probe(address)
    assert (done.returncode, done.stdout) == (exit_codes.UNAVAILABLE, f"{address}: NOT_SERVING\n")


def test_nobody_is_not() -> None:
    with socket.socket() as taken:  # bound but not listening, so nobody else gets the port meanwhile
        taken.bind(("127.0.0.1", 0))
        done = probe(f"127.0.0.1:{taken.getsockname()[1]}", "0.5")
    assert done.returncode == exit_codes.UNAVAILABLE
    assert "no answer within 0.5 s" in done.stdout


@pytest.mark.parametrize("arguments", [[], ["nowhere"], ["127.0.0.1:1", "soon"]])
def test_a_wrong_command_line_says_how(arguments: list[str]) -> None:
    done = probe(*arguments)
    assert done.returncode == exit_codes.USAGE
    assert "usage: python -m psdist.cli.health HOST:PORT" in done.stderr
