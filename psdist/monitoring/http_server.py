"""HTTP port of one process for scrapers: a few pages, read only, in threads beside the event loop.

Requests carry a token of the run as ``Authorization: Bearer TOKEN``, whose role may read metrics. Without a token only
this machine can reach the port, and the request must name it by an address, so that a page in a browser cannot reach it
by a name of its own.

Invariant: A peer holds one of ``limits.SCRAPES_MAX`` threads for a bounded time, and nothing of the training waits for
it.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

from psdist import addresses
from psdist.errors import InsecureBindError, PermissionDeniedError, UnauthenticatedError
from psdist.security import roles
from psdist.security.tokens import Verifier
from psdist.wire import limits

logger = logging.getLogger("psdist.metrics")

#: Returns the content type and the body of a page. Called in a thread of the port; raises TimeoutError if the process
#: does not answer.
Page = Callable[[], tuple[str, bytes]]


class MetricsServer(ThreadingMixIn, HTTPServer):
    """The port. ``start`` serves until ``close``.

    pages: by path.
    verifier: checks the tokens of requests.

    Raises ConfigurationError if the port cannot be bound, InsecureBindError for a ``host`` beyond this machine without
    a token.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = limits.SCRAPES_MAX

    def __init__(self, host: str, port: int, verifier: Verifier, pages: Mapping[str, Page]) -> None:
        if not addresses.is_loopback(host) and verifier.is_open:
            raise InsecureBindError(
                f"--metrics-host {host} would show the run's metrics to everybody who can reach it: set PSDIST_TOKEN, "
                "or leave the metrics on this machine"
            )
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.pages = pages
        self.verifier = verifier
        self._slots = threading.BoundedSemaphore(limits.SCRAPES_MAX)
        #: Open connections, and the times when they are broken.
        self._deadlines: dict[Any, float] = {}
        self._has_failed = False
        try:
            super().__init__((host.strip("[]"), port), _Handler)
        except OSError as error:
            raise addresses.unbound("metrics", "--metrics", host, port, error) from None
        self._host = host

    @property
    def address(self) -> str:
        """``host:port`` at which others reach the port."""
        host = addresses.own_address() if addresses.is_wildcard(self._host) else self._host
        return addresses.format_address(host, self.server_address[1])

    def start(self) -> None:
        """Serve in a thread of its own."""
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True, args=(0.1,)).start()

    def close(self) -> None:
        """Stop serving, without waiting for anything. Another server can have the port immediately."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        threading.Thread(target=self._close, name="metrics-close", daemon=True).start()

    def _close(self) -> None:
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for the connection, or close it if there are too many."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._deadlines[request] = time.monotonic() + 2 * _Handler.timeout
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self._deadlines[request]
            self._slots.release()

    def service_actions(self) -> None:
        """Break connections that are open for too long: a socket's timeout begins again with each byte."""
        now = time.monotonic()
        for request, deadline in self._deadlines.copy().items():
            if now > deadline:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def server_bind(self) -> None:
        """Bind without the base class's look-up of this host's name, which may take seconds."""
        super(HTTPServer, self).server_bind()
        self.server_name, self.server_port = "", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that broke or took too long. Any other error is a defect, which is logged once: scrapers
        repeat their requests."""
        if not isinstance(sys.exception(), OSError) and not self._has_failed:
            self._has_failed = True
            logger.exception("a request for metrics failed (logged once)")


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    server_version = "psdist"
    sys_version = ""
    #: Limit in seconds for each read, and for writing the whole answer.
    timeout = limits.SCRAPE_SECONDS

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        if not self._is_allowed():
            return
        if page is None:
            known = ", ".join(self.server.pages)
            self.send_error(HTTPStatus.NOT_FOUND, f"the pages are {known}")
            return
        try:
            kind, body = page()
        except TimeoutError:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the event loop of this process does not answer")
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _is_allowed(self) -> bool:
        """Return True if the request may be answered; otherwise refuse it."""
        verifier = self.server.verifier
        try:
            scheme, _, shown = self.headers.get("Authorization", "").partition(" ")
            roles.check(verifier.role(shown if scheme == "Bearer" else ""), roles.METRICS_PAGES)
        except UnauthenticatedError:
            self.send_response(HTTPStatus.UNAUTHORIZED)
            self.send_header("WWW-Authenticate", "Bearer")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return False
        except PermissionDeniedError as error:
            self.send_error(HTTPStatus.FORBIDDEN, error.message)
            return False
        if verifier.is_open and not addresses.is_named_by_address(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.FORBIDDEN, "without a token, name this port by its address")
            return False
        return True

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: anybody who reaches the port could fill the log."""
