"""Access to the dashboard: who may read it.

Pure. A run's token, or the key of its link, is exchanged for a cookie that holds the key; a token of a role, for one
that holds the token, so that it ends with the token. Without a token only this
machine reaches the port, and requests must name it by an address, so that a page in a browser cannot reach it by a name
of its own.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from psdist import addresses
from psdist.errors import PermissionDeniedError, UnauthenticatedError
from psdist.security import roles
from psdist.security.roles import Role
from psdist.security.tokens import Audience, Verifier


class Access:
    """The rules of one dashboard. token, key: empty if the run has no token.

    port: cookies belong to a host, so each dashboard of a host has its own name for them.
    """

    def __init__(self, token: str, key: str, port: int) -> None:
        self._verifier = Verifier(token, Audience.SCHEDULER)
        self._key = key.encode()
        self.cookie = f"psdist-dashboard-{port}"

    def names_host(self, host: str) -> bool:
        """Return True if the header ``Host`` may be this."""
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        return not self._verifier.is_open or addresses.literal(name) is not None

    def set_cookie(self, authorization: str) -> str | None:
        """Return the header ``Set-Cookie`` for a header ``Authorization``; None if that is wrong."""
        scheme, _, given = authorization.partition(" ")
        held = self._held(given.strip()) if scheme.lower() == "bearer" and not self._verifier.is_open else ""
        return f"{self.cookie}={held}; Path=/; HttpOnly; SameSite=Strict" if held else None

    def may_read(self, headers: Mapping[str, str]) -> bool:
        """Return True if a request with these headers may read the state of the run."""
        if self._verifier.is_open or self.set_cookie(headers.get("authorization", "")) is not None:
            return True
        # Not http.cookies: that drops all cookies if one of them is malformed, and other ports of a host share theirs.
        given = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        # The run's own token is in no cookie that was set here.
        return any(name == self.cookie and value and self._held(value) == value for name, _, value in given)

    def _held(self, shown: str) -> str:
        """Return the content of the cookie for a browser that has shown the key or a token; empty if neither opens the
        dashboard."""
        if hmac.compare_digest(shown.encode(), self._key):
            return self._key.decode()
        try:
            role = self._verifier.role(shown)
            roles.check(role, roles.DASHBOARD_PAGES)
        except (UnauthenticatedError, PermissionDeniedError):
            return ""
        return self._key.decode() if role is Role.ALL else shown
