"""gRPC channels and servers, with every option that psdist relies on.

* Retries are off. The client numbers pushes and resends them itself; gRPC would do so without its knowledge.
* The HTTP proxy is off. An ``http_proxy`` variable must not reroute cluster traffic.
* ``so_reuseport`` is off. A second process on a taken port must fail instead of sharing the port silently.
* Keepalive sets ``ping_timeout_ms``. Without it grpcio 1.85 takes a minute to notice a frozen peer. Keepalive is the
  second line of defence; application heartbeats are the first.
* A peer has as long to greet as it allows its own clients. gRPC takes ``min_reconnect_backoff_ms`` as the time limit of
  an attempt to connect. If that is shorter than a greeting takes on a busy machine, each attempt fails, forever.
* Stream windows are fixed and the bandwidth probe is off. This bounds how much the transport reads ahead.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partialmethod
from typing import Any, Final, Self

import grpc
import grpc.aio

from psdist import addresses
from psdist.errors import ConfigurationError
from psdist.security.tls import Credentials, TlsFiles, TlsIdentity
from psdist.security.tokens import Audience, Verifier
from psdist.wire import limits
from psdist.wire.auth import RightsInterceptor

#: Time for calls in progress to end, which nothing limits: a session lasts as long as its run.
_UNLIMITED_SECONDS: Final = 1e9


def _shared_options(message_bytes: int, window_bytes: int, silence_seconds: float) -> list[tuple[str, int]]:
    keepalive_ms = round(1e3 * max(silence_seconds, limits.KEEPALIVE_MIN_SECONDS))
    return [
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_metadata_size", limits.METADATA_BYTES),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.http2.ping_timeout_ms", keepalive_ms),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", window_bytes),
        ("grpc.http2.max_frame_size", limits.FRAME_BYTES),
    ]


def open_channel(
    address: str,
    credentials: Credentials,
    message_bytes: int = limits.DATA_MESSAGE_BYTES,
    silence_seconds: float = limits.KEEPALIVE_SECONDS,
    reconnect_seconds: float = 1.0,
) -> grpc.aio.Channel:
    """Return a channel to a scheduler or server at ``address`` (host:port). It connects on first use.

    credentials: with TLS, each new call uses the files as they are then. The token is metadata of each call.
    silence_seconds: ping a peer after this much silence, and disconnect if it stays silent for as long again.
    reconnect_seconds: longest pause after a failed attempt to connect; calls in the pause fail.

    Raises InsecureConnectError if the token would be sent to another machine without encryption.
    """
    credentials.require_private_route(address)
    options = [
        *_shared_options(message_bytes, limits.CLIENT_WINDOW_BYTES, silence_seconds),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", round(1e3 * limits.GREETING_SECONDS)),
        ("grpc.max_reconnect_backoff_ms", round(1e3 * reconnect_seconds)),
    ]
    if (tls := credentials.tls) is None:
        return grpc.aio.insecure_channel(address, options=options)
    host = addresses.parse_address(address)[0]

    def open_with(identity: TlsIdentity) -> grpc.aio.Channel:
        checked = [*options, *identity.channel_options(host)]
        return grpc.aio.secure_channel(address, identity.channel_credentials(), options=checked)

    return RenewedChannel(tls, open_with)


def make_server(
    credentials: Credentials,
    message_bytes: int = limits.DATA_MESSAGE_BYTES,
    interceptors: Sequence[Any] = (),
    silence_seconds: float = limits.KEEPALIVE_SECONDS,
    verifier: Verifier | None = None,
) -> grpc.aio.Server:
    """Return a server that accepts the calls of this run and enforces the limits of ``psdist.wire.limits``.

    silence_seconds: see ``open_channel``.
    verifier: checks the tokens of callers; None for that of a scheduler with these credentials.
    """
    options = [
        *_shared_options(message_bytes, limits.SERVER_WINDOW_BYTES, silence_seconds),
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", limits.CONCURRENT_CALLS_MAX),
        ("grpc.max_allowed_incoming_connections", _connections_max()),
        ("grpc.server_handshake_timeout_ms", round(1e3 * limits.GREETING_SECONDS)),
        ("grpc.http2.settings_timeout", round(1e3 * limits.GREETING_SECONDS)),
        ("grpc.max_connection_idle_ms", round(1e3 * limits.IDLE_CONNECTION_SECONDS)),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
    # Calls waiting for a refusal must not use up the members' share.
    strangers = limits.REFUSALS_HELD_MAX + limits.PROBES_HELD_MAX if credentials.token else 0
    return grpc.aio.server(
        interceptors=(RightsInterceptor(verifier or Verifier(credentials.token, Audience.SCHEDULER)), *interceptors),
        options=options,
        maximum_concurrent_rpcs=limits.CONCURRENT_CALLS_MAX + strangers,
    )


def bind(server: grpc.aio.Server, host: str, port: int, credentials: Credentials, flag: str = "--port") -> int:
    """Bind ``server`` and return its port; port 0 picks a free one. With TLS, clients must show a certificate.

    Raises InsecureBindError for a host beyond loopback with neither TLS nor ``insecure``, ConfigurationError if the
    port is taken or the TLS files are wrong.
    """
    credentials.require_private(host, f"--host {host} listens")
    address = addresses.format_address(host, port)
    try:
        if credentials.tls is None:
            bound: int = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials.tls.server_credentials())
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise ConfigurationError(
            f"{address} cannot be bound (in use, or no address of this machine): choose "
            f"another {flag}, or {flag} 0 for a free one, or another --host",
            host=host,
            port=port,
        )
    return bound


def raise_open_files_limit() -> None:
    """Raise this process's limit on open files as far as the system allows and psdist can use.

    Each connection is an open file. Many systems default to 1,024 files. A thousand idle connections of strangers would
    then keep the process from opening its store, a snapshot, or a connection of its own.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * limits.CONNECTIONS_MAX + limits.FILES_RESERVED
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # Some systems refuse a limit that they report as allowed.
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _connections_max() -> int:
    """Return the number of connections that a gRPC port may accept while leaving files for everything else."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return limits.CONNECTIONS_MAX
    return min(limits.CONNECTIONS_MAX, max(soft // 2, soft - limits.FILES_RESERVED))


class RenewedChannel:
    """gRPC channel over TLS whose calls use the newest certificates. It has the part of ``grpc.aio.Channel`` that stubs
    need.

    A gRPC channel keeps the certificates that it was made with. This one makes another once the files have changed.
    Calls in progress stay on the channel that they began on; it is closed after the last of them.

    open_channel: makes a channel with the given identity.
    """

    def __init__(self, files: TlsFiles, open_channel: Callable[[TlsIdentity], grpc.aio.Channel]) -> None:
        self._files = files
        self._open_channel = open_channel
        self._identity: TlsIdentity = files.identity()
        self._channel = open_channel(self._identity)
        #: Earlier channels with calls in progress, and the tasks that close them.
        self._retiring: dict[grpc.aio.Channel, asyncio.Task[None]] = {}
        self._is_closed = False

    def _method(self, kind: str, *made_with: Any, **options: Any) -> Callable[..., Any]:
        """Return a function that starts a call on the channel of the newest certificates."""
        channel, method = None, None

        def start(*args: Any, **kwargs: Any) -> Any:
            nonlocal channel, method
            if channel is not (current := self._current()):
                channel, method = current, getattr(current, kind)(*made_with, **options)
            assert method is not None
            return method(*args, **kwargs)

        return start

    #: See grpc.aio.
    unary_unary = partialmethod(_method, "unary_unary")
    unary_stream = partialmethod(_method, "unary_stream")
    stream_unary = partialmethod(_method, "stream_unary")
    stream_stream = partialmethod(_method, "stream_stream")

    def _current(self) -> grpc.aio.Channel:
        identity = self._files.identity()
        if identity is not self._identity and not self._is_closed:
            earlier, self._identity = self._channel, identity
            self._channel = self._open_channel(identity)
            task = asyncio.create_task(earlier.close(_UNLIMITED_SECONDS), name="psdist earlier channel")
            self._retiring[earlier] = task
            task.add_done_callback(lambda _: self._retiring.pop(earlier, None))
        return self._channel

    async def channel_ready(self) -> None:
        """See grpc.aio."""
        await self._current().channel_ready()

    async def close(self) -> None:
        """Close the channel, and end all calls."""
        self._is_closed = True
        retiring = dict(self._retiring)
        for task in retiring.values():
            task.cancel()
        await asyncio.gather(*retiring.values(), return_exceptions=True)
        for channel in (self._channel, *retiring):
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
