"""The health probe against real gRPC servers, and without a server. It runs as a program, as a container engine runs
it. Also the answers of a scheduler and a server, as real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from psdist.addresses import free_port
from psdist.settings import exit_codes
from psdist.settings.config import await_address
from psdist.v1 import scheduler_pb2, scheduler_pb2_grpc
from psdist.wire import auth, limits
from psdist.wire.services import LIVE, READY


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
    """Run the probe as an engine does."""
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


def test_a_service_is_asked_for_by_name(server: tuple[health.HealthServicer, str]) -> None:
    servicer, address = server
    servicer.set(READY, health_pb2.HealthCheckResponse.SERVING)
    assert probe(address, "3", READY).returncode == exit_codes.OK
    done = probe(address, "3", "ready")
    assert done.returncode == exit_codes.UNAVAILABLE and "no health service is named 'ready'" in done.stdout


def watch(stack: ExitStack, address: str, service: str) -> Iterator[str]:
    """Return the states of a service, as they change."""
    channel = stack.enter_context(grpc.insecure_channel(address))
    request = health_pb2.HealthCheckRequest(service=service)
    watched = health_pb2_grpc.HealthStub(channel).Watch(
        request, metadata=auth.metadata("secret"), wait_for_ready=True, timeout=120
    )
    for answer in watched:
        yield health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def test_a_scheduler_that_waits_is_live_and_not_ready_and_so_is_a_server_without_it(tmp_path: Path) -> None:
    environment = os.environ | {"PSDIST_TOKEN": "secret"}
    file, port = tmp_path / "address", free_port("127.0.0.1")
    with ExitStack() as stack:

        def start(*command: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen([sys.executable, "-m", *command], env=environment)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        scheduler = start("psdist_scheduler", "--address-file", str(file))
        address = await_address(file, 60)
        ready = watch(stack, address, READY)
        assert next(ready) == "NOT_SERVING" and next(watch(stack, address, LIVE)) == "SERVING"
        server = start("psdist_server", "--scheduler", address, "--port", str(port))
        server_ready = watch(stack, f"127.0.0.1:{port}", READY)
        while next(server_ready) != "SERVING":
            pass
        stub = scheduler_pb2_grpc.SchedulerServiceStub(stack.enter_context(grpc.insecure_channel(address)))
        worker = scheduler_pb2.RegisterRequest(
            protocol_version=limits.PROTOCOL_VERSION, role=scheduler_pb2.ROLE_WORKER, host="box", pid=7
        )
        stub.Register(worker, metadata=auth.metadata("secret"))
        assert next(ready) == "SERVING"
        scheduler.send_signal(signal.SIGKILL)
        assert next(server_ready) == "NOT_SERVING" and server.poll() is None
        assert next(watch(stack, f"127.0.0.1:{port}", LIVE)) == "SERVING"
