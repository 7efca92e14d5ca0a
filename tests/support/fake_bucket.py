"""S3 server that refuses, delays and spoils requests as a test wants. moto implements more operations."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect before they are answered."""


class FakeBucket:
    """Objects by path, and parts by upload, of one bucket.

    answer: called with the operation ("PUT", "DELETE", "PART", "COMPLETE" ...) in the request's thread before it is
        performed. It may block, and returns the status of a refusal, or 0.
    stored: called with the path and the bytes of an object or a part of one. Returns those that are kept of it.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.answer: Callable[[str], int] = lambda verb: 0
        self.stored: Callable[[str, bytes], bytes] = lambda path, data: data
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def ask(self, verb: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, bytes]:
        """Perform a request. Return its status and answer."""
        upload = query.get("uploadId", [""])[0]
        if "uploads" in query:
            upload = str(len(self.uploads))
            self.uploads[upload] = {}
            return 200, f"<R><UploadId>{upload}</UploadId></R>".encode()
        if verb == "PART":
            self.uploads[upload][int(query["partNumber"][0])] = self.stored(path, body)
        elif verb == "COMPLETE":
            parts = self.uploads.pop(upload)
            self.objects[path] = b"".join(parts[number] for number in sorted(parts))
            return 200, b"<R><ETag>e</ETag></R>"
        elif verb == "ABORT":
            self.uploads.pop(upload, None)
        elif verb == "PUT":
            self.objects[path] = self.stored(path, body)
        elif verb == "DELETE":
            keys = re.findall(rb"<Key>([^<]*)</Key>", body)
            for key in keys:
                self.objects.pop(f"{path.rstrip('/')}/{key.decode()}", None)
            return 200, b"<R>" + b"".join(b"<Deleted><Key>%s</Key></Deleted>" % key for key in keys) + b"</R>"
        elif verb in ("GET", "HEAD"):
            found = self.objects.get(path)
            return (404, b"<Error><Code>NoSuchKey</Code></Error>") if found is None else (200, found)
        return 200, self._listed(path.rstrip("/") + "/", query.get("prefix", [""])[0]) if verb == "LIST" else b""

    def _listed(self, bucket: str, prefix: str) -> bytes:
        found = [(key.removeprefix(bucket), data) for key, data in sorted(self.objects.items())]
        listed = [
            f"<Contents><Key>{key}</Key><LastModified>2020-01-01T00:00:00.000Z</LastModified><ETag>e</ETag>"
            f"<Size>{len(data)}</Size></Contents>"
            for key, data in found
            if key.startswith(prefix)
        ]
        text = f"<R><KeyCount>{len(listed)}</KeyCount><IsTruncated>false</IsTruncated>{''.join(listed)}</R>"
        return text.encode()


def _verb(method: str, query: dict[str, list[str]]) -> str:
    if "uploadId" in query:
        return {"PUT": "PART", "POST": "COMPLETE"}.get(method, "ABORT")
    return "DELETE" if "delete" in query else "LIST" if "list-type" in query else method


def _handler(bucket: FakeBucket) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            url = urlsplit(self.path)
            query = parse_qs(url.query, keep_blank_values=True)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            verb = _verb(self.command, query)
            status, content = bucket.answer(verb), b"<Error><Code>AccessDenied</Code></Error>"
            if not status:
                status, content = bucket.ask(verb, unquote(url.path), query, body)
            total = len(content)
            if status == 200 and (asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))):
                first, last = int(asked[1]), min(int(asked[2]), total - 1)
                status, content = (206, content[first : last + 1]) if first < total else (416, b"")
            self.send_response(status)
            if status == 206:
                self.send_header("Content-Range", f"bytes {first}-{last}/{total}")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", '"e"')
            self.send_header("Last-Modified", "Wed, 01 Jan 2020 00:00:00 GMT")
            self.end_headers()
            if verb != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

        def log_message(self, *arguments: Any) -> None:
            """Suppress the log."""

    return Handler
