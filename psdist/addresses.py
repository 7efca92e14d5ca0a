"""Network addresses: the address of this host that others can use, and names that do not resolve yet.

A process that listens on every address (``0.0.0.0`` or ``::``) must tell others one of them: the address by which this
host sends to a peer, or, if that is loopback or there is no peer, the one by which it sends anywhere else. ``choose``
decides. The kernel reports the address; nothing is sent.

Invariants: Addresses and ``localhost`` are never looked up, so processes on one machine need no resolver. A lookup
blocks neither an event loop nor the end of its process.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import ipaddress
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from psdist.errors import ConfigurationError, SchedulerUnreachableError, ServerUnreachableError

_WILDCARDS: Final = ("0.0.0.0", "::")
_LOOPBACK: Final = "127.0.0.1"
#: Documentation addresses (RFC 5737 and 3849). A route to one is the default route.
_ELSEWHERE: Final = ("192.0.2.1", "2001:db8::1")
_RETRY_SECONDS: Final = 0.25
#: Longest wait for an answer about this process's own name. Without TLS others can use its address instead.
_ADVERTISED_SECONDS: Final = 5.0
#: Longest wait for one of several names of the scheduler.
_NEXT_SECONDS: Final = 2.0
_SIOCGIFADDR: Final = 0x8915

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


# --- texts ------------------------------------------------------------------------------------------------------------


def parse_address(value: str) -> tuple[str, int]:
    """Parse ``host:port`` or ``[v6]:port``. Raises ConfigurationError."""
    host, separator, port = value.strip().rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not separator or not bare or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"{value!r:.200} is not an address: write HOST:PORT", address=value[:200])
    if ":" in bare and bare == host:
        raise ConfigurationError(f"{value!r:.200} is ambiguous: write an IPv6 address as [ADDRESS]:PORT")
    return bare, int(port)


def split_addresses(value: str) -> list[str]:
    """Return the addresses of ``host:port,host:port``. Raises ConfigurationError."""
    each = [part.strip() for part in value.split(",")]
    for part in each:
        parse_address(part)
    return each


def format_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def literal(host: str) -> Address | None:
    """Return the address that ``host`` means without a lookup, or None for any other name."""
    if host == "localhost":
        return ipaddress.ip_address(_LOOPBACK)
    with suppress(ValueError):
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    return None


def is_named_by_address(host_header: str) -> bool:
    """Return True if the header ``Host`` of a request has an address, and no name, which may be one that a page in a
    browser has chosen for this machine."""
    name = host_header if host_header.endswith("]") else host_header.rpartition(":")[0] or host_header
    return literal(name) is not None


def unbound(what: str, flags: str, host: str, port: int, error: OSError) -> ConfigurationError:
    """Return the error of a port that cannot be bound. flags: beginning of the two flags that name it."""
    is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
    remedy = f"Choose another {flags}-port, or 0 for a free one" if is_port else f"Correct {flags}-host"
    place = format_address(host, port)
    return ConfigurationError(f"{what} cannot be served on {place}: {error.strerror or error}. {remedy}")


def is_loopback(host: str) -> bool:
    """True if only this machine can reach ``host``."""
    address = literal(host)
    return address is not None and address.is_loopback


def is_wildcard(host: str) -> bool:
    """True if ``host`` means every address of this machine."""
    return host.strip("[]") in _WILDCARDS


def choose(candidates: Iterable[str]) -> str:
    """Return the first address that others can use, or an empty string."""
    usable = (each for each in candidates if (address := literal(each)) is not None and _is_usable(address))
    return next(usable, "")


def _is_usable(address: Address) -> bool:
    # A link-local address means something else on each host.
    return not (address.is_loopback or address.is_unspecified or address.is_link_local or address.is_multicast)


def global_addresses(table: str) -> list[str]:
    """Return the addresses of global scope in the text of ``/proc/net/if_inet6``."""
    rows = (line.split() for line in table.splitlines())
    return [str(ipaddress.IPv6Address(int(row[0], 16))) for row in rows if len(row) == 6 and row[3] == "00"]


# --- this host --------------------------------------------------------------------------------------------------------


def own_address(peers: Iterable[str] = ()) -> str:
    """Return the address of this host that others can use.

    This is the one by which it sends to one of ``peers`` if possible, and loopback if no other host can reach it.

    peers: addresses, not names.
    """
    routes = (route_source(peer) for peer in (*peers, *_ELSEWHERE))
    return choose([*filter(None, routes), *_interface_addresses()]) or loopback()


def route_source(peer: str) -> str:
    """Return the address by which this host sends to the address ``peer``, or an empty string without a route."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # Sends nothing: asks the kernel for the route.
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def free_address(peers: Iterable[str], host: str = "") -> str:
    """Return a ``host:port`` of this host that others can use and that is free now.

    host: name of this host for others.
    """
    own = own_address(peers)
    return format_address(host or own, free_port(own))


def free_port(host: str) -> int:
    """Return a free TCP port of this host."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


def _interface_addresses() -> list[str]:
    """Return the addresses of all interfaces: a private network may have no default route."""
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):  # no IPv6
        found += global_addresses(Path("/proc/net/if_inet6").read_text())
    return found


def loopback() -> str:
    """Return the loopback address of this host, which may be ``::1`` alone."""
    for family, address in ((socket.AF_INET, _LOOPBACK), (socket.AF_INET6, "::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
            return address
    return _LOOPBACK


# --- names ------------------------------------------------------------------------------------------------------------


async def look_up(host: str) -> tuple[str, ...]:
    """Return the addresses of ``host``. Raises OSError if it does not resolve, at least not now."""
    if (address := literal(host)) is not None:
        return (str(address),)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[str, ...]] = loop.create_future()

    def finish(addresses: tuple[str, ...], error: OSError | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(addresses)

    def ask() -> None:
        addresses, failure = _resolved(host)
        with suppress(RuntimeError):  # The loop has ended meanwhile.
            loop.call_soon_threadsafe(finish, addresses, failure)

    # A thread of the loop's executor would hold up the end of the process until the resolver gives up.
    threading.Thread(target=ask, name="lookup", daemon=True).start()
    return await answer


def _resolved(host: str) -> tuple[tuple[str, ...], OSError | None]:
    try:
        places = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return (), error
    except UnicodeError:
        return (), OSError(0, "is not a name of a host")
    return tuple(dict.fromkeys(str(place[4][0]) for place in places)), None


async def look_up_any(places: str) -> tuple[str, ...]:
    """Return the addresses of the first of ``places`` (HOST:PORT, several divided by commas) whose name resolves: that
    of a lost machine may be gone. Raises OSError of the last one if none does, at least not now."""
    *others, last = _hosts(places)
    for host in others:
        with suppress(OSError):  # TimeoutError is an OSError.
            async with asyncio.timeout(_NEXT_SECONDS):
                return await look_up(host)
    return await look_up(last)


def _hosts(places: str) -> list[str]:
    return [parse_address(place)[0] for place in split_addresses(places)]


async def await_name(scheduler: str, timeout_seconds: float, on_failure: Callable[[str], None]) -> tuple[str, ...]:
    """Return the addresses of the scheduler's host, whose name may not resolve yet: machines and their names start in
    any order.

    scheduler: HOST:PORT, several divided by commas; one is enough.
    on_failure: receives the reason of each failed lookup.

    Raises SchedulerUnreachableError after ``timeout_seconds``.
    """
    reason, host = "the resolver does not answer", " or ".join(dict.fromkeys(_hosts(scheduler)))
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                try:
                    return await look_up_any(scheduler)
                except OSError as error:
                    reason = error.strerror or str(error)
                    on_failure(f"the name {host} does not resolve: {reason}")
                await asyncio.sleep(_RETRY_SECONDS)
    except TimeoutError:
        raise SchedulerUnreachableError(
            f"the scheduler's name {host} did not resolve within {timeout_seconds:g} s (--start-timeout): {reason}. "
            "Check the name, or pass --scheduler with an address in its place",
            host=host,
        ) from None


async def reachable_host(host: str, scheduler: str, timeout_seconds: float, on_failure: Callable[[str], None]) -> str:
    """Return the host by which others reach a process that listens at ``host`` and talks to ``scheduler``.

    Waits for the scheduler's name if the route to it is needed; see ``await_name``.
    """
    if not is_wildcard(host):
        return host
    return own_address(await await_name(scheduler, timeout_seconds, on_failure))


async def advertised_address(
    named: str,
    bound: str,
    scheduler: str,
    timeout_seconds: float,
    on_failure: Callable[[str], None],
    *,
    is_verified: bool = False,
) -> str:
    """Return the ``host:port`` by which others reach a process that listens at ``bound``.

    named: address that the user chose, or empty. Others would wait for a name that does not resolve, so an address of
        this host then replaces it.
    is_verified: True if others compare the host with a certificate. Nothing can replace the name then: raises
        ServerUnreachableError if it does not resolve within ``timeout_seconds``.
    """
    reason = await _unresolved(parse_address(named)[0], timeout_seconds) if named else ""
    deadline = asyncio.get_running_loop().time() + timeout_seconds
    while reason and is_verified:
        on_failure(f"the name in --advertise {named} does not resolve: {reason}")
        if asyncio.get_running_loop().time() >= deadline:
            raise ServerUnreachableError(
                f"the name in --advertise {named} did not resolve within {timeout_seconds:g} s (--start-timeout): "
                f"{reason}. Other processes look for it in the certificate, so no address replaces it: correct the "
                "name, or the DNS (a headless Service of Kubernetes needs publishNotReadyAddresses)",
                address=named,
            )
        await asyncio.sleep(_RETRY_SECONDS)
        reason = await _unresolved(parse_address(named)[0], timeout_seconds)
    if named and not reason:
        return named
    host, port = parse_address(bound)
    address = format_address(await reachable_host(host, scheduler, timeout_seconds, on_failure), port)
    if named:
        on_failure(
            f"the name in --advertise {named} does not resolve: {reason}. This server advertises {address} instead"
        )
    return address


async def _unresolved(host: str, timeout_seconds: float) -> str:
    """Return why ``host`` does not resolve, or an empty string if it does."""
    try:
        async with asyncio.timeout(min(timeout_seconds, _ADVERTISED_SECONDS)):
            await look_up(host)
    except OSError as error:  # TimeoutError is an OSError.
        return error.strerror or "the resolver does not answer"
    return ""
