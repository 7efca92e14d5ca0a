"""Checks of this machine for ``psdist doctor``: versions, cores, memory, limits, directories, ports, names and storage.

Each check is one finding, and has a time limit: a dead disk or name server would block it for ever.
"""

from __future__ import annotations

import asyncio
import os
import platform
import queue
import re
import resource
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Final, Literal, NamedTuple

from psdist import addresses, cgroups
from psdist.errors import PsdistError
from psdist.snapshots.format import SNAPSHOTS, directory_path
from psdist.snapshots.local import missing_directories
from psdist.snapshots.opening import open_storage

_GIB: Final = 1 << 30
_MIB: Final = 1 << 20
#: Below this a scheduler, a server and a worker do not fit; below the second, only small models do.
_MEMORY_LEAST: Final = 256 * _MIB
_MEMORY_FEW: Final = 2 * _GIB
#: Container engines give 64 MiB, which data loaders of torch with several processes exceed.
_SHM_FEW: Final = 128 * _MIB
_TEMPORARY_LEAST: Final = 8 * _MIB
_FILES_LEAST: Final = 128
_FILES_FEW: Final = 1024
_LOCKED_FEW: Final = 8 * _MIB
#: For checks that read a disk.
_DISK_REMEDY: Final = "is a disk or network file system dead? See mount and dmesg, and remount or unmount it"


def machine_checks(ports: Iterable[int], device: str = "") -> Iterator[Check]:
    """Yield the checks of this machine.

    ports: ports that must be free.
    device: a CUDA device that a server is to use; empty looks for none.
    """
    yield Check("python", lambda: [check_python()], _DISK_REMEDY)
    yield Check("packages", check_packages, _DISK_REMEDY)
    yield Check("machine", _check_limits, "is the machine overloaded, or /sys/fs/cgroup blocked?")
    yield Check(
        "temporary files", lambda: [check_temporary_directory()], f"set TMPDIR to another disk, or: {_DISK_REMEDY}"
    )
    yield Check("home", lambda: [check_home()], f"set HOME to another disk, or: {_DISK_REMEDY}")
    yield Check("host name", check_names, "add this host to /etc/hosts, or correct the name server in /etc/resolv.conf")
    for port in ports:
        yield Check(f"port {port}", partial(_check_ports, port), "is the machine overloaded?")
    if device or Path("/dev/nvidiactl").exists():
        yield Check(
            "device",
            lambda: [check_device(device or "cuda", required=device != "")],
            "the driver does not answer: see nvidia-smi and dmesg, or train without --server-device",
        )


def _check_limits() -> list[Finding]:
    return [
        check_cores(),
        check_memory(),
        check_shared_directory(),
        check_memory_files(),
        check_open_files(),
        check_locked_memory(),
        check_addresses(),
    ]


def _check_ports(port: int) -> list[Finding]:
    return [check_port(port)]


def check_python() -> Finding:
    """Check the version of Python."""
    version = platform.python_version()
    if tuple(map(int, version.split(".")[:2])) < (3, 11):
        return fail("python", version, "use Python 3.11 or later")
    return ok("python", f"{version}, {platform.system()} {platform.release()} {platform.machine()}")


def check_packages() -> Iterator[Finding]:
    """Check the versions of the packages that psdist requires."""
    try:
        required, version = metadata.requires("psdist") or [], metadata.version("psdist")
    except metadata.PackageNotFoundError:
        yield warn("packages", "psdist is not installed as a package", "pip install psdist, or pip install -e .")
        return
    wrong = []
    for text in required:
        found = re.match(r"([A-Za-z0-9._-]+)\s*>=\s*([0-9.]+)", text)
        if found is None or "extra ==" in text:
            continue
        name, least = found.groups()
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(name)
            yield fail(name, "not installed", f"pip install '{name}>={least}'")
            continue
        if numbers(installed) < numbers(least):
            wrong.append(name)
            yield fail(name, f"version {installed}, older than {least}", f"pip install -U '{name}>={least}'")
    if not wrong:
        yield ok("packages", f"psdist {version}, and all packages that it requires")


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without suffixes such as ``rc1``."""
    return tuple(int(part) for part in re.split(r"[^0-9.]", version)[0].split(".") if part)


def check_cores() -> Finding:
    """Check the cores that this process may use, and the limit of its cgroup."""
    cores, limit = len(os.sched_getaffinity(0)), cgroups.cpu_limit()
    text = f"{cores} of {os.cpu_count()} cores"
    if limit is None:
        return ok("cores", text)
    text = f"{text}, limited to the time of {limit:.1f} (cgroup)"
    if limit < 1:
        remedy = "give it at least one core: --cpus of a container, resources.limits.cpu, CPUQuota= of a systemd unit"
        return warn("cores", text, remedy)
    if limit < cores:
        return ok("cores", f"{text}: servers start no more threads than that")
    return ok("cores", text)


def check_memory() -> Finding:
    """Check the free memory, within the limit of the cgroup."""
    import psutil

    whole: int = psutil.virtual_memory().available
    below_limit = _memory_below_limit()
    is_limited = below_limit is not None and below_limit < whole
    available = min(whole, whole if below_limit is None else below_limit)
    text = f"{available / _GIB:.1f} GiB available{' (cgroup)' if is_limited else ''}"
    remedy = "end other programs, or raise the limit: --memory of a container, resources.limits.memory, MemoryMax="
    if available < _MEMORY_LEAST:
        return fail("memory", text, remedy)
    return warn("memory", text, remedy) if available < _MEMORY_FEW else ok("memory", text)


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


def check_memory_files() -> Finding:
    """Check that this process can make the sealed memory files of the shared-memory transport."""
    try:
        descriptor = os.memfd_create("psdist-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        remedy = "allow memfd_create in the container's seccomp profile; until then psdist uses TCP on one host, too"
        return warn("shared memory", f"no memory files: {error.strerror}", remedy)
    os.close(descriptor)
    return ok("shared memory", "memory files can be made")


def check_open_files() -> Finding:
    """Check the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = "ulimit -n 4096, LimitNOFILE= of a systemd unit, or --ulimit nofile=4096 of a container"
    # Programs of psdist raise the soft limit themselves.
    if resource.RLIM_INFINITY != hard < _FILES_LEAST:
        return fail("open files", f"at most {hard}", remedy)
    if resource.RLIM_INFINITY != hard < _FILES_FEW:
        return warn("open files", f"at most {hard}, enough for a few members only", remedy)
    return ok("open files", f"{_limit(soft)}, may be raised to {_limit(hard)}")


def check_locked_memory() -> Finding:
    """Check the limit of locked memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if resource.RLIM_INFINITY != soft < _LOCKED_FEW:
        remedy = "ulimit -l unlimited, LimitMEMLOCK=infinity of a systemd unit, or --ulimit memlock=-1 of a container"
        return warn("locked memory", f"at most {soft // 1024:,} KiB; NCCL, RDMA and io_uring need more", remedy)
    return ok("locked memory", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / _MIB:,.0f} MiB")


def check_addresses() -> Finding:
    """Check the limit of the address space."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if resource.RLIM_INFINITY != soft < 64 * _GIB:
        remedy = "ulimit -v unlimited; to bound memory use a cgroup, as MemoryMax= of a systemd unit"
        level = fail if soft < _GIB else warn
        return level("address space", f"at most {soft / _GIB:.1f} GiB, and servers map whole models", remedy)
    return ok("address space", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / _GIB:,.0f} GiB")


def check_temporary_directory() -> Finding:
    """Check that the directory of temporary files can be written."""
    remedy = "free some space, or set TMPDIR to a directory on another disk"
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"psdist")
        directory = tempfile.gettempdir()
        free = shutil.disk_usage(directory).free
    except OSError as error:
        return fail("temporary files", error.strerror or str(error), remedy)
    text = f"{directory}, {free / _MIB:,.0f} MiB free"
    return fail("temporary files", text, remedy) if free < _TEMPORARY_LEAST else ok("temporary files", text)


def check_home() -> Finding:
    """Check that this user's directories can be written: for compiled kernels, and the scheduler's record of runs."""
    home = Path.home()
    wrong = []
    for variable, default in (("XDG_CACHE_HOME", ".cache"), ("XDG_STATE_HOME", ".local/state")):
        directory = Path(os.environ.get(variable) or home / default)
        if reason := _unwritable(directory):
            wrong.append(f"{directory}: {reason}")
    if wrong:
        remedy = (
            "set HOME, or XDG_CACHE_HOME and XDG_STATE_HOME, to directories that can be written. Otherwise kernels may "
            "be compiled in each process, and a scheduler needs --store FILE to be restartable"
        )
        return warn("home", "; ".join(wrong), remedy)
    return ok("home", f"{home} can be written")


def _unwritable(directory: Path) -> str:
    """Return why files cannot be created in a directory, or in the nearest one above it that exists."""
    existing = next((path for path in (directory, *directory.parents) if path.is_dir()), directory)
    try:
        with tempfile.TemporaryFile(dir=existing):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def check_names() -> Iterator[Finding]:
    """Check that this host's name leads to an address of this host, and back."""
    name, own = socket.gethostname(), addresses.own_address()
    try:
        found = sorted({str(place[4][0]) for place in socket.getaddrinfo(name, None)})
    except OSError as error:
        remedy = f"add it to /etc/hosts or DNS, or start with --advertise {own}:PORT"
        yield warn("host name", f"{name} does not resolve: {error.strerror}", remedy)
        return
    text = f"{name} is {', '.join(found)}; others reach this host at {own}"
    # Many systems name a loopback address in /etc/hosts. psdist then shows others the address that it sends from.
    if own not in found and not any(map(addresses.is_loopback, (own, *found))):
        remedy = f"correct /etc/hosts or DNS, or start with --advertise {own}:PORT"
        yield warn("host name", f"{name} is {', '.join(found)}, but this host sends from {own}", remedy)
    else:
        yield ok("host name", text)
    try:
        yield ok("reverse name", f"{own} is {socket.gethostbyaddr(own)[0]}")
    except OSError:
        yield ok("reverse name", f"{own} has none, and psdist needs none")


def check_port(port: int) -> Finding:
    """Check that a port can be bound on all addresses."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        remedy = "end the program that uses it (ss -tlnp), or choose another port; below 1024 root is needed"
        return fail(f"port {port}", error.strerror or str(error), remedy)
    return ok(f"port {port}", "free")


def check_device(name: str, *, required: bool = True) -> Finding:
    """Check that a server could use a CUDA device. required: False only warns."""
    from psdist.device.device import open_device

    try:
        return ok("device", f"{open_device(name).name}")
    except PsdistError as error:
        level = fail if required else warn
        return level("device", error.message, "see docs/gpu.md, or train without --server-device")


def _memory_below_limit() -> int | None:
    """Return the bytes that the cgroups still allow; None if they do not limit memory. The kernel drops cached files
    first, so these count as free."""
    found = []
    for directory in cgroups.directories():
        if (limit := cgroups.read(directory / "memory.max").strip()).isdigit():
            cached = re.search(r"^inactive_file (\d+)$", cgroups.read(directory / "memory.stat"), re.MULTILINE)
            used = int(cgroups.read(directory / "memory.current").strip() or 0) - int(cached[1] if cached else 0)
            found.append(int(limit) - used)
    return min(found, default=None)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


Level = Literal["ok", "warn", "fail"]

#: Exit status by the worst level.
STATUSES: Final[dict[Level, int]] = {"ok": 0, "warn": 1, "fail": 69}
_ORDER: Final[tuple[Level, ...]] = ("ok", "warn", "fail")


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


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level."""
    return max((finding.level for finding in findings), key=_ORDER.index, default="ok")


class Check(NamedTuple):
    """A check, and the remedy if it does not end."""

    name: str
    run: Callable[[], Iterable[Finding]]
    remedy: str


class TimeLimit:
    """Runs checks one after the other, each for at most ``seconds``. has_abandoned: True if a check still runs."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.has_abandoned = False

    def run(self, check: Check) -> list[Finding]:
        """Return the findings of a check, or that it did not end. Its errors propagate."""
        results: queue.SimpleQueue[list[Finding] | Exception] = queue.SimpleQueue()

        def work() -> None:
            try:
                results.put(list(check.run()))
            except Exception as error:  # The caller raises it.
                results.put(error)

        # Nothing can interrupt a thread that waits for a disk, so nobody waits for it.
        threading.Thread(target=work, name=f"doctor {check.name}", daemon=True).start()
        try:
            result = results.get(timeout=self._seconds)
        except queue.Empty:
            self.has_abandoned = True
            return [fail(check.name, f"no answer within {self._seconds:g} s", check.remedy)]
        if isinstance(result, Exception):
            raise result
        return result


_SIZE: Final = 8 << 20
_SLOW_BYTES_PER_SECOND: Final = 20e6


async def check_storage(path_or_url: str, timeout_seconds: float) -> Finding:
    """Write a file as a snapshot's, read it back, and delete it. Nothing remains of it."""
    remedy = "correct the path, its owner or mode, the mount (ro?), free space, or the bucket's credentials"
    try:
        async with asyncio.timeout(timeout_seconds):
            written, read = await _use(path_or_url)
    except TimeoutError:
        return fail("storage", f"{path_or_url} does not answer within {timeout_seconds:g} s", remedy)
    except PsdistError as error:
        return fail("storage", error.message, remedy)
    text = f"{path_or_url}: written and synced at {written / 1e6:,.0f} MB/s, read at {read / 1e6:,.0f} MB/s"
    if written < _SLOW_BYTES_PER_SECOND:
        return warn("storage", text, "snapshots will take long: use a faster disk or bucket, or save less often")
    return ok("storage", text)


async def _use(path_or_url: str) -> tuple[float, float]:
    """Return the speed of writing and reading, in bytes per second. Raises PsdistError."""
    storage, directory, content = (
        open_storage(path_or_url),
        directory_path(f"probe-{secrets.token_hex(8)}"),
        secrets.token_bytes(_SIZE),
    )
    missing = [] if "://" in storage.url else missing_directories(os.path.join(storage.url, SNAPSHOTS))
    await storage.check_writable(directory)
    path = f"{directory}/doctor"
    began = time.perf_counter()
    try:
        async with storage.writer(path) as file:
            await file.write(content)
        written = time.perf_counter()
        same = await storage.read(path) == content
        ended = time.perf_counter()
    finally:
        await storage.delete([path])
        for made in missing:
            with suppress(OSError):  # A run that started meanwhile uses it.
                os.rmdir(made)
    if not same:
        raise PsdistError(f"{path_or_url} returns other bytes than were written")
    return _SIZE / (written - began), _SIZE / (ended - written)
