"""Access to the dashboard: who may read it.

Pure. A run's token, or the key of its link, is exchanged for a cookie that holds the key. Without a token only this
machine reaches the port, and requests must name it by an address, so that a page in a browser cannot reach it by a name
of its own.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from psdist import addresses


class Access:
    """The rules of one dashboard. token, key: empty if the run has no token.

    port: cookies belong to a host, so each dashboard of a host has its own name for them.
    """

    def __init__(self, token: str, key: str, port: int) -> None:
        self._token = token.encode()
        self._key = key.encode()
        self.cookie = f"psdist-dashboard-{port}"

    def names_host(self, host: str) -> bool:
        """Return True if the header ``Host`` may be this."""
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        return bool(self._token) or addresses.literal(name) is not None

    def set_cookie(self, authorization: str) -> str | None:
        """Return the header ``Set-Cookie`` for a header ``Authorization``; None if that is wrong."""
        scheme, _, given = authorization.partition(" ")
        found = given.strip().encode()
        right = hmac.compare_digest(found, self._token) | hmac.compare_digest(found, self._key)
        if scheme.lower() != "bearer" or not self._token or not right:
            return None
        return f"{self.cookie}={self._key.decode()}; Path=/; HttpOnly; SameSite=Strict"

    def may_read(self, headers: Mapping[str, str]) -> bool:
        """Return True if a request with these headers may read the state of the run."""
        if not self._token or self.set_cookie(headers.get("authorization", "")) is not None:
            return True
        # Not http.cookies: that drops all cookies if one of them is malformed, and other ports of a host share theirs.
        given = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        return any(name == self.cookie and hmac.compare_digest(value.encode(), self._key) for name, _, value in given)
