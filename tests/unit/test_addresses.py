"""Which address others can use, and names that do not resolve yet. No test looks up a name."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from psdist import addresses
from psdist.errors import InvalidArgumentError, SchedulerUnreachableError, ServerUnreachableError

_LONG = 60.0


@pytest.fixture(autouse=True)
def no_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(host: str, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"{host} was looked up")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def resolver(monkeypatch: pytest.MonkeyPatch, *answers: str | Exception) -> None:
    """Lookups have these outcomes in turn; the last one stays."""
    left = list(answers)

    def getaddrinfo(*_: Any, **__: Any) -> Any:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answer, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def unresolved() -> socket.gaierror:
    return socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_the_first_address_that_others_can_use_is_chosen() -> None:
    for candidates, chosen in [
        (["10.0.0.3", "192.168.0.1"], "10.0.0.3"),
        (["127.0.0.1", "10.0.0.3"], "10.0.0.3"),
        (["127.0.1.1", "169.254.1.1", "fe80::1%eth0", "ff02::1", "::1", "0.0.0.0", "2001:db8::7"], "2001:db8::7"),
        (["fe80::1", "::1"], ""),
        ([], ""),
    ]:
        assert addresses.choose(candidates) == chosen


def test_a_port_is_joined_so_that_it_can_be_parsed() -> None:
    for host, text in [("10.0.0.3", "10.0.0.3:80"), ("::1", "[::1]:80"), ("[::1]", "[::1]:80"), ("box", "box:80")]:
        assert addresses.format_address(host, 80) == text
        assert addresses.parse_address(text) == (host.strip("[]"), 80)
    for wrong in ("", "h", "h:", ":1", "h:0", "h:65536", "::1:80", "h:x", "h:-1", "h:²"):
        with pytest.raises(InvalidArgumentError):
            addresses.parse_address(wrong)


def test_loopback() -> None:
    hosts = {"localhost": True, "127.9.9.9": True, "::1": True, "0.0.0.0": False, "example.org": False}
    assert {host: addresses.is_loopback(host) for host in hosts} == hosts


def test_global_addresses_are_read_from_the_kernels_table() -> None:
    table = (
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fe800000000000000042acfffe110002 05 40 20 80     eth0\n"
        "20010db8000000000000000000000007 05 40 00 80     eth0\n"
    )
    assert addresses.global_addresses(table) == ["2001:db8::7"]


def test_the_route_to_a_peer_comes_before_the_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {"10.0.0.1": "10.0.0.3", "192.0.2.1": "192.168.0.2"}
    monkeypatch.setattr(addresses, "route_source", lambda peer: routes.get(peer, ""))
    monkeypatch.setattr(addresses, "_interface_addresses", lambda: ["127.0.0.1", "172.17.0.1"])
    assert addresses.own_address(["10.0.0.1"]) == "10.0.0.3"
    assert addresses.own_address(["10.9.9.9"]) == "192.168.0.2"
    routes.clear()
    assert addresses.own_address() == "172.17.0.1"


def test_a_peer_on_this_host_is_no_reason_to_advertise_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {"127.0.0.1": "127.0.0.1", "192.0.2.1": "192.168.0.2"}
    monkeypatch.setattr(addresses, "route_source", lambda peer: routes.get(peer, ""))
    assert addresses.own_address(["127.0.0.1"]) == "192.168.0.2"


def test_a_host_without_any_network_has_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_ELSEWHERE", ())
    monkeypatch.setattr(addresses, "_interface_addresses", list)
    assert addresses.own_address(["127.0.0.1"]) == addresses.loopback()
    assert addresses.route_source("not an address") == ""


def test_the_kernel_is_asked() -> None:
    """On any machine, its own address is no wildcard, and can be bound."""
    own = addresses.own_address()
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((own, 0))
    assert addresses.route_source("127.0.0.1") in ("127.0.0.1", "")  # none on a host with ::1 alone


@pytest.mark.parametrize(("host", "found"), [("localhost", "127.0.0.1"), ("10.0.0.3", "10.0.0.3"), ("[::1]", "::1")])
async def test_what_is_an_address_is_not_looked_up(host: str, found: str) -> None:
    assert await addresses.look_up(host) == (found,)


async def test_what_is_bound_to_an_address_advertises_it_without_a_lookup() -> None:
    assert await addresses.reachable_host("10.0.0.3", "scheduler:7000", _LONG, pytest.fail) == "10.0.0.3"


async def test_a_name_that_does_not_resolve_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(addresses, "route_source", lambda peer: {"10.0.0.1": "10.0.0.3"}.get(peer, ""))
    resolver(monkeypatch, unresolved(), OSError(0, "Temporary failure in name resolution"), "10.0.0.1")
    failures: list[str] = []
    assert await addresses.reachable_host("0.0.0.0", "box:7000", _LONG, failures.append) == "10.0.0.3"
    assert failures == [
        "the name box does not resolve: Name or service not known",
        "the name box does not resolve: Temporary failure in name resolution",
    ]


async def test_a_name_that_never_resolves_is_named_with_the_reason_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses, "_RETRY_SECONDS", 0.001)
    resolver(monkeypatch, unresolved())
    with pytest.raises(SchedulerUnreachableError, match=r"box did not resolve within 0\.1 s .*not known.*--scheduler"):
        await addresses.await_name("box:7000", 0.1, lambda _: None)


async def test_of_several_names_one_that_resolves_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Compose a killed container loses its name."""
    monkeypatch.setattr(addresses, "route_source", lambda peer: {"10.0.0.1": "10.0.0.3"}.get(peer, ""))
    resolver(monkeypatch, unresolved(), "10.0.0.1")
    assert await addresses.reachable_host("0.0.0.0", "gone:7000,box:7000", _LONG, pytest.fail) == "10.0.0.3"
    resolver(monkeypatch, unresolved())
    with pytest.raises(OSError, match="not known"):
        await addresses.look_up_any("gone:7000,box:7000")
    with pytest.raises(SchedulerUnreachableError, match=r"name gone or box did not resolve"):
        await addresses.await_name("gone:7000,box:7000", 0.05, lambda _: None)


async def test_a_name_that_cannot_be_one_is_an_error_of_the_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver(monkeypatch, UnicodeError("label too long"))
    with pytest.raises(OSError, match="not a name"):
        await addresses.look_up("x" * 100)


async def test_a_resolver_that_hangs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def getaddrinfo(*_: Any, **__: Any) -> Any:
        release.wait()
        raise unresolved()

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    try:
        with pytest.raises(SchedulerUnreachableError, match="the resolver does not answer"):
            await addresses.await_name("box:7000", 0.05, lambda _: None)
    finally:
        release.set()


@pytest.mark.parametrize(("missing", "found"), [((), "127.0.0.1"), (("127.0.0.1",), "::1")])
def test_a_host_may_have_the_loopback_address_of_one_family_alone(
    missing: tuple[str, ...], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Socket:
        def __init__(self, *_: Any) -> None: ...
        def __enter__(self) -> Socket:
            return self

        def __exit__(self, *_: object) -> None: ...
        def bind(self, place: tuple[str, int]) -> None:
            if place[0] in missing:
                raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "socket", Socket)
    assert addresses.loopback() == found


async def test_an_advertised_name_that_does_not_resolve_is_replaced_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all others wait for this one server."""
    monkeypatch.setattr(addresses, "own_address", lambda peers=(): "10.0.0.3")
    resolver(monkeypatch, unresolved())
    said: list[str] = []
    told = await addresses.advertised_address("box:80", "0.0.0.0:7000", "10.0.0.1:1", _LONG, said.append)
    assert told == "10.0.0.3:7000"
    (text,) = said
    assert "--advertise box:80 does not resolve: Name or service not known" in text and "10.0.0.3:7000" in text
    assert await addresses.advertised_address("box:80", "10.0.0.4:7000", "", _LONG, said.append) == "10.0.0.4:7000"


async def test_an_advertised_name_that_a_certificate_has_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would find no address of this host in the certificate."""
    monkeypatch.setattr(addresses, "_RETRY_SECONDS", 0.001)
    resolver(monkeypatch, *[unresolved()] * 5, "10.0.0.9")
    said: list[str] = []
    told = await addresses.advertised_address("box:80", "0.0.0.0:7000", "", _LONG, said.append, is_verified=True)
    assert told == "box:80" and len(said) == 5 and "box:80 does not resolve: Name or service not known" in said[0]


async def test_an_advertised_name_that_never_resolves_is_refused_with_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver(monkeypatch, unresolved())
    with pytest.raises(ServerUnreachableError, match=r"box:80 did not resolve within 0.01 s .*Name or service.*DNS"):
        await addresses.advertised_address("box:80", "10.0.0.4:7000", "", 0.01, lambda _: None, is_verified=True)


async def test_an_advertised_name_that_resolves_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver(monkeypatch, "10.0.0.9")
    for named in ("box:80", "10.0.0.9:80"):
        assert await addresses.advertised_address(named, "0.0.0.0:7000", "", _LONG, pytest.fail) == named
    assert await addresses.advertised_address("", "[::1]:7000", "", _LONG, pytest.fail) == "[::1]:7000"
