"""Pages of the dashboard: its files, the exchange of a token for a cookie, and the stream of events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from psdist.wire import limits
from psdist_scheduler.dashboard.access import Access
from psdist_scheduler.dashboard.feed import Feed

_DIRECTORY: Final = Path(__file__).parent / "page"
_FILES: Final = {
    "/": ("index.html", "text/html"),
    "/dashboard.js": ("dashboard.js", "text/javascript"),
    "/dashboard.css": ("dashboard.css", "text/css"),
    "/uplot.js": ("uplot.js", "text/javascript"),
    "/uplot.css": ("uplot.css", "text/css"),
}
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class _EventStream(StreamingResponse):
    """Server-sent events of a feed, until the browser goes away."""

    def __init__(self, feed: Feed) -> None:
        super().__init__(feed.events(), media_type="text/event-stream")
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.reading():
            await super().__call__(scope, receive, send)


def application(feed: Feed, access: Access) -> ASGIApp:
    """Return the dashboard's application."""

    def refusal(request: Request) -> Response | None:
        if not access.may_read(request.headers):
            return _refused()
        if feed.readers >= limits.DASHBOARD_READERS_MAX:
            return Response(f"{feed.readers} pages follow this run already: close one", status_code=503)
        return None

    async def session(request: Request) -> Response:
        if request.method == "GET":
            return refusal(request) or Response(status_code=204)
        cookie = access.set_cookie(request.headers.get("authorization", ""))
        return _refused() if cookie is None else Response(status_code=204, headers={"set-cookie": cookie})

    async def events(request: Request) -> Response:
        return refusal(request) or _EventStream(feed)

    routes = [Route(path, _file(name, kind)) for path, (name, kind) in _FILES.items()]
    routes += [Route("/session", session, methods=["GET", "POST"]), Route("/events", events, methods=["GET"])]
    return _guarded(Starlette(routes=routes), access)


def _file(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    body = (_DIRECTORY / name).read_bytes()

    async def answer(request: Request) -> Response:
        return Response(body, media_type=kind)

    return answer


def _refused() -> Response:
    return Response("this needs the token of the run", status_code=401, headers={"www-authenticate": "Bearer"})


def _guarded(app: ASGIApp, access: Access) -> ASGIApp:
    """Return ``app`` behind the check of the header ``Host``, with headers that restrict the page in all answers."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        if access.names_host(Headers(scope=scope).get("host", "")):
            await app(scope, receive, send_with_headers)
        else:
            refusal = Response("without a token, name this port by its address", status_code=403)
            await refusal(scope, receive, send_with_headers)

    return guard
