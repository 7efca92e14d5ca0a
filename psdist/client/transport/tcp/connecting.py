"""TCP transport: a connection from one handle to each server that it needs.

A Connect stream returns the port, and stays open as long as the connection (``stream``). The host is that of the
server's address. A firewall may block the port; then gRPC is used. If gRPC is encrypted, so is the connection.

``negotiated`` decides which servers are asked, and when.
"""

from __future__ import annotations

from typing import Any

from psdist.client.core.routing import Route
from psdist.client.session.wait_tracker import Wait
from psdist.client.transport.negotiated.calls import ask
from psdist.client.transport.negotiated.connections import NegotiatedTransport
from psdist.client.transport.requests import Request
from psdist.client.transport.tcp.stream import TcpStream
from psdist.client.transport.transport import ServerLoss
from psdist.errors import TcpUnavailableError
from psdist.settings.config import parse_address
from psdist.v1 import server_pb2


class TcpTransport(NegotiatedTransport[TcpStream]):
    """TCP connections of one handle. Arguments as for ``NegotiatedTransport``."""

    name = "tcp"
    method = "Connect"
    unavailable = TcpUnavailableError
    #: A minute of training over gRPC is little; a port that a firewall drops costs each attempt a few packets.
    retry_seconds = 60.0

    async def exchange(self, request: Request, route: Route, wait: Wait, loss: ServerLoss) -> None:
        """Make one call on the connection to the route's server. See ``Transport.exchange``."""
        stream = self._stream_of(route)
        assert stream is not None, "a transport that is not open was chosen"
        await stream.exchange(request, route, wait)

    async def _connect(self, call: Any, epoch: int, route: Route) -> TcpStream:
        request = server_pb2.ConnectRequest(identity=self._sender.identity(epoch))
        data = await ask(call, request.SerializeToString(), route.peer, "TCP connections", self.unavailable)
        answer = server_pb2.ConnectResponse.FromString(data)
        loss = self._view.loss_of(route.server_id, route.incarnation)
        stream = TcpStream(call, route, self._entry.slicing, loss)
        host = parse_address(route.address)[0]
        tls, dialers = self._grpc.credentials.tls, "workers connect to any port of servers"
        await stream.dial(host, answer.port, answer.nonce, tls=tls, dialers=dialers)
        return stream
