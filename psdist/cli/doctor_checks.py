"""Checks of ``psdist doctor``: what a user cannot see otherwise, and what leads to a slow, wrong or dead run."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, Literal

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from psdist import addresses
from psdist.errors import InsecureConnectError, PermissionDeniedError, PsdistError, UnauthenticatedError
from psdist.launcher.events import plural
from psdist.machine import cpu_limit, python, usable_cores
from psdist.security.tls import Credentials, explain
from psdist.security.tokens import Audience
from psdist.v1 import scheduler_pb2
from psdist.version import __version__
from psdist.wire import auth, status
from psdist.wire.channels import open_channel
from psdist.wire.scheduler_connection import scheduler_at

_MIB: Final = 1 << 20
#: Container engines give 64 MiB, which data loaders of torch with several processes exceed: they die of SIGBUS.
_SHM_FEW: Final = 128 * _MIB
#: Differences of clocks that confuse logs, and that break signed requests to buckets and certificates.
_CLOCK_WARN_SECONDS: Final = 2.0
_CLOCK_FAIL_SECONDS: Final = 300.0
_PINGS: Final = 7
_PROBE_BYTES: Final = 1 << 20
_PROBES: Final = 8
#: Slower links make float32 gradients of ordinary models the bottleneck.
_SLOW_BYTES_PER_SECOND: Final = 50e6
_SLOW_PING_SECONDS: Final = 0.02

Level = Literal["ok", "warn", "fail"]

#: Exit status by level; of several the largest counts.
STATUSES: Final[dict[Level, int]] = {"ok": 0, "warn": 1, "fail": 69}


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check. remedy: what to do about it, unless it is ok."""

    check: str
    level: Level
    text: str
    remedy: str = ""


def ok(check: str, text: str) -> Finding:
    """Return a finding without a remedy."""
    return Finding(check, "ok", text)


def warn(check: str, text: str, remedy: str) -> Finding:
    """Return a finding that may cost speed or a feature."""
    return Finding(check, "warn", text, remedy)


def fail(check: str, text: str, remedy: str) -> Finding:
    """Return a finding that keeps a run from working."""
    return Finding(check, "fail", text, remedy)


def check_shared_directory() -> Finding:
    """Check the space in /dev/shm. psdist does not need it, but torch's data loaders do."""
    remedy = "delete files there, or enlarge it: --shm-size 1g of a container, or an emptyDir of medium Memory"
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return warn("/dev/shm", f"{error.strerror}; data loaders of torch need it", remedy)
    text = f"{usage.free / _MIB:,.0f} of {usage.total / _MIB:,.0f} MiB free"
    if usage.free < _SHM_FEW:
        return warn("/dev/shm", f"{text}; data loaders of torch with several processes need more", remedy)
    return ok("/dev/shm", text)


# --- this machine -----------------------------------------------------------------------------------------------------

#: Runs on this much work for each core are slow.
_LOAD_OF_CORE: Final = 1.5
#: Snapshots, arenas and logs of small runs need more.
_DISK_FEW: Final = 1 << 30
#: A server has a connection to each worker, and a worker one to each server; files of torch come on top.
_FILES_FEW: Final = 4096
_WRITTEN_BYTES: Final = 1 << 20
#: Limits that must not be set, with what meets them.
_UNLIMITED: Final = {
    "RLIMIT_FSIZE": ("-f", "snapshots and memory that processes share"),
    "RLIMIT_AS": ("-v", "memory that processes share, of which only parts are used"),
}
#: The program of the child that looks and writes: a process that waits for a disk cannot be interrupted.
_WRITER: Final = """
import os, shutil, sys, tempfile
place, may_be_made, size = sys.argv[1], sys.argv[2] == "1", int(sys.argv[3])
while may_be_made and not os.path.exists(place):
    place = os.path.dirname(place)
try:
    with tempfile.NamedTemporaryFile(dir=place, prefix=".psdist-doctor-") as file:
        file.write(bytes(size))
        file.flush()
        os.fsync(file.fileno())
except OSError as error:
    sys.exit(error.strerror)
print(shutil.disk_usage(place).free)
"""


def check_load() -> Finding:
    """Compare the work that waits for a core with the cores that this process may use."""
    load, cores = os.getloadavg()[0], usable_cores()
    limit = cpu_limit()
    quota = f", of {len(os.sched_getaffinity(0))} by a quota of {limit:g}" if limit is not None else ""
    text = f"{load:.1f} processes in the last minute for {plural(cores, 'core')}{quota}"
    if load > _LOAD_OF_CORE * cores:
        return warn("load", f"{text}: steps are slow", "end other programs (see top), or take fewer workers")
    return ok("load", text)


def check_limits() -> list[Finding]:
    """Check the limits of processes (ulimit)."""
    found = []
    files, hardest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < _FILES_FEW:
        remedy = f"ulimit -n {_FILES_FEW}, LimitNOFILE= of systemd, or --ulimit nofile of a container"
        text = f"{files} open files, at most {hardest}: a run of many members needs more"
        found.append(warn("ulimit -n", text, remedy))
    for name, (flag, what) in _UNLIMITED.items():
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            found.append(warn(f"ulimit {flag}", f"{soft / _MIB:,.0f} MiB limit {what}", f"ulimit {flag} unlimited"))
    return found or [ok("ulimit", f"{files:,} open files; sizes of files and memory are unlimited")]


def check_directory(
    check: str, directory: str, remedy: str, timeout_seconds: float, *, may_be_made: bool = False
) -> Finding:
    """Check that a directory takes a file: space, permission, quota, and that its disk answers.

    remedy: names another directory. may_be_made: True if a run makes it, so that its nearest parent counts.
    """
    began = time.perf_counter()
    child = subprocess.Popen(
        [python(), "-I", "-c", _WRITER, directory, str(int(may_be_made)), str(_WRITTEN_BYTES)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        free, reason = child.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):  # It may be gone only once the disk answers.
            child.wait(1.0)
        for stream in (child.stdout, child.stderr):
            if stream is not None:
                stream.close()
        text = f"{directory}: a write of 1 MiB has not ended within {timeout_seconds:g} s"
        return fail(check, text, f"the disk or its server hangs (dmesg, mount): repair it, or {remedy}")
    seconds = time.perf_counter() - began
    if child.returncode:
        reason = (reason.strip().splitlines() or ["no reason known"])[-1]
        return fail(check, f"{directory}: {reason}", f"correct its owner, mode or quota, or {remedy}")
    text = f"{directory} is writable, {int(free) / _MIB:,.0f} MiB free, answered after {seconds:.1f} s"
    return warn(check, text, f"delete files there, or {remedy}") if int(free) < _DISK_FEW else ok(check, text)


# --- a cluster --------------------------------------------------------------------------------------------------------


async def check_cluster(address: str, credentials: Credentials, timeout_seconds: float) -> AsyncIterator[Finding]:
    """Yield the findings about the scheduler at ``address`` (of several, the leading one) and its servers."""
    places = addresses.split_addresses(address)
    ways = await asyncio.gather(*(_way(place, len(places) > 1, timeout_seconds) for place in places))
    reached = any(way[-1].level != "fail" for way in ways)
    for finding in (one for way in ways for one in way):
        yield _as_standby(finding) if reached and finding.level == "fail" else finding
    if not reached:
        return
    before, answer = time.time(), await _status(address, credentials, timeout_seconds)
    if isinstance(answer, Finding):
        yield answer
        return
    yield ok("token", "accepted by the scheduler")
    yield check_version(answer.psdist_version)
    yield check_clock(answer.time, before, time.time())
    servers = [one for one in answer.members if one.role == scheduler_pb2.ROLE_SERVER and one.state == "live"]
    if not servers:
        yield warn("servers", "none is live", "start psdist-server --scheduler " + address)
    for server in servers:
        async for finding in check_server(server.member_id, server.address, credentials, timeout_seconds):
            yield finding


async def _way(place: str, is_one_of_several: bool, timeout_seconds: float) -> list[Finding]:
    """Return the findings about the name and the port of one scheduler, up to the first that fails."""
    host, port = addresses.parse_address(place)
    name = await check_name(host, timeout_seconds)
    if name.level == "fail":
        return [name]
    what = f"scheduler {place}" if is_one_of_several else "scheduler"
    return [name, await check_connection(what, host, port, timeout_seconds)]


def _as_standby(finding: Finding) -> Finding:
    """Soften the failure of one scheduler if another one was reached: a standby listens only once it leads."""
    if os.strerror(errno.ECONNREFUSED) in finding.text:
        return ok(finding.check, f"{finding.text}, as is right for a standby: it listens once it leads")
    return warn(finding.check, finding.text, finding.remedy)


async def check_name(host: str, timeout_seconds: float) -> Finding:
    """Check that a name resolves."""
    check, remedy = "scheduler's name", "correct the name, /etc/hosts or DNS, or use an address"
    try:
        async with asyncio.timeout(timeout_seconds):
            found = await addresses.look_up(host)
    except TimeoutError:
        return fail(check, f"the resolver does not answer for {host} within {timeout_seconds:g} s", remedy)
    except OSError as error:
        return fail(check, f"{host} does not resolve: {error.strerror or error}", remedy)
    return ok(check, f"{host} is {', '.join(found)}")


async def check_connection(what: str, host: str, port: int, timeout_seconds: float) -> Finding:
    """Check that a TCP connection can be opened."""
    check, place = f"port of {what}", addresses.format_address(host, port)
    try:
        async with asyncio.timeout(timeout_seconds):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        remedy = f"a firewall drops packets to port {port}, or the host is down: open the port (nft, security group)"
        return fail(check, f"no answer from {place} within {timeout_seconds:g} s", remedy)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)  # asyncio's own text only repeats the place.
        remedy = (
            "nothing listens there, or only on its loopback address: start it, with --host 0.0.0.0 if it is on another "
            "machine; or a firewall rejects connections"
        )
        return fail(check, f"{place} cannot be reached: {reason}", remedy)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return ok(check, f"{place} can be reached")


async def _status(address: str, credentials: Credentials, timeout_seconds: float) -> Any:
    """Return the scheduler's status, or the finding that it gives none."""
    try:
        async with scheduler_at(address, credentials) as call:
            return await call("GetStatus", scheduler_pb2.GetStatusRequest(), timeout_seconds)
    except InsecureConnectError as refused:
        return fail("token", f"not sent: {refused.message}", "use TLS; or --insecure, on a private network")
    except grpc.aio.AioRpcError as failure:
        error: PsdistError = status.from_call(failure, f"the scheduler at {address}")
        if isinstance(error, PermissionDeniedError):
            return fail("token", error.message, "use the token of another role")
        if isinstance(error, UnauthenticatedError):
            return fail("token", error.message, "set PSDIST_TOKEN, or --token-file with the file of the scheduler")
        if (cause := await explain(address, credentials)) is not None:
            return fail("tls", cause.message, "see docs/secure.md, and compare both sides by 'psdist certs show'")
        remedy = "is it a psdist scheduler, of this version, and not frozen?"
        return fail("scheduler", f"{address} gives no status: {error.message}", remedy)


def check_version(version: str) -> Finding:
    """Compare the scheduler's version with this one."""
    if version == __version__:
        return ok("version", f"{version}, as here")
    return fail("version", f"the scheduler has {version}, this machine {__version__}", "install the same on all")


def check_clock(theirs: float, before: float, after: float) -> Finding:
    """Compare the scheduler's clock with this one's, read before and after the call. All in seconds since 1970."""
    if not theirs:
        return ok("clock", "not compared: the scheduler does not show its own")
    ahead = theirs - (before + after) / 2
    uncertain = (after - before) / 2
    off = max(0.0, abs(ahead) - uncertain)
    text = f"the scheduler's is {abs(ahead):.1f} s {'ahead' if ahead > 0 else 'behind'}"
    remedy = "synchronize both by NTP: timedatectl set-ntp true, or start chronyd"
    if off > _CLOCK_FAIL_SECONDS:
        return fail(
            "clock", f"{text}: buckets and certificates refuse such clocks, and logs cannot be compared", remedy
        )
    if off > _CLOCK_WARN_SECONDS:
        return warn("clock", f"{text}: logs of several machines cannot be compared", remedy)
    return ok("clock", f"within {max(abs(ahead), uncertain):.1f} s of the scheduler's")


async def check_server(
    server_id: str, address: str, credentials: Credentials, timeout_seconds: float
) -> AsyncIterator[Finding]:
    """Yield the findings about the link to a server."""
    host, port = addresses.parse_address(address)
    finding = await check_connection(server_id, host, port, timeout_seconds)
    yield finding
    if finding.level == "fail":
        return
    check = f"link to {server_id}"
    try:
        async with asyncio.timeout(timeout_seconds):
            latency, speed = await _measure(address, credentials)
    except InsecureConnectError as refused:
        yield fail(check, f"not measured: {refused.message}", "use TLS; or --insecure, on a private network")
        return
    except (TimeoutError, grpc.aio.AioRpcError) as error:
        reason = f"within {timeout_seconds:g} s" if isinstance(error, TimeoutError) else error.code().name
        yield fail(
            check, f"{address} does not answer calls: {reason}", "is the server frozen, or its machine overloaded?"
        )
        return
    text = f"{1e3 * latency:.1f} ms a call, {speed / 1e6:,.0f} MB/s to it"
    if speed < _SLOW_BYTES_PER_SECOND:
        yield warn(check, text, 'compress gradients: compression="auto", pull_compression="int8"')
    elif latency > _SLOW_PING_SECONDS:
        yield warn(check, text, "place servers closer, or make fewer and larger steps")
    else:
        yield ok(check, text)


async def _measure(address: str, credentials: Credentials) -> tuple[float, float]:
    """Return the time of a small call in seconds, and the speed of large ones in bytes per second.

    The health service answers any name, and its calls change nothing.
    """
    async with open_channel(address, credentials) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def call(size: int) -> float:
            request, began = health_pb2.HealthCheckRequest(service="-" * size), time.perf_counter()
            try:
                await stub.Check(request, metadata=auth.metadata(credentials.token, Audience.SERVER))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
            return time.perf_counter() - began

        latency = median([await call(0) for _ in range(_PINGS)])
        # In flight together, as the slices of a step.
        began = time.perf_counter()
        await asyncio.gather(*(call(_PROBE_BYTES) for _ in range(_PROBES)))
        seconds = max(1e-9, time.perf_counter() - began - latency)
        return latency, _PROBES * _PROBE_BYTES / seconds
