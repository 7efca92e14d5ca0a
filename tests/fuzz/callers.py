"""Callers of a fuzzed run: the roles that each proves by token and certificate, and the calls that it may make.

The expectation is the table of ``docs/roles.md``, applied here a second time in a few lines.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psdist.security.roles import CERTIFICATE_ROLES, RIGHTS, TOKEN_ROLES, Role
from psdist.security.tls import TlsFiles
from psdist.security.tokens import create
from tests.support.certificates import make_ca, write_tls

#: Share of the calls that are made by a caller that may make them.
_ALLOWED: Final = 0.7
_FOREVER: Final = 0


@dataclass(frozen=True)
class Caller:
    """Somebody who calls. role: proven by the token. stated: the role in the certificate; None without TLS."""

    token: str
    role: Role = Role.ALL
    stated: Role | None = None

    def may(self, path: str) -> bool:
        """Return True if the table allows a call. Certificates do not matter to health and reflection."""
        stated = self.stated if path.startswith("/psdist.") else None
        proven = [one for one in (self.role, stated) if one not in (None, Role.ALL)]
        return len(set(proven)) <= 1 and all(one in RIGHTS[path] for one in proven)

    def __str__(self) -> str:
        stated = f", and a certificate of a {self.stated}" if self.stated else ""
        return f"the token of role {self.role}{stated}"


def write_certificates(directory: Path) -> dict[Role, TlsFiles]:
    """Write a certificate of each role, all of one CA."""
    ca = make_ca()
    return {Role(role): write_tls(directory / role, ca, role) for role in CERTIFICATE_ROLES}


def every_caller(token: str, certificates: Mapping[Role, TlsFiles]) -> list[Caller]:
    """Return a caller for every token, and for every pair of a token and a certificate. token: the run's own."""
    tokens = {Role.ALL: token} | {role: create(token, role, _FOREVER) for role in TOKEN_ROLES}
    return [Caller(shown, role, stated) for role, shown in tokens.items() for stated in certificates or (None,)]


def choose(rng: random.Random, callers: Sequence[Caller], path: str) -> Caller:
    """Return the next caller: one that may make the call, or any."""
    allowed = [one for one in callers if one.may(path)]
    return rng.choice(allowed if allowed and rng.random() < _ALLOWED else callers)
