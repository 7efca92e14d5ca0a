"""Tokens of roles, derived from the run's own token.

A token of a role is text: ``psdist.ROLE.EXPIRY.A.B.C``. EXPIRY is in seconds since 1970, and 0 means never. A, B and C
are proofs of these claims, one for each audience: the scheduler, the servers, and the workers. A proof is an HMAC of
the claims under the audience's key, and that key is an HMAC of the audience's name under the run's own token. So
whoever holds the run's own token makes and checks tokens of roles without a record of them: a scheduler that was
restarted, on any machine and with an empty store, accepts the same ones.

A process shows each audience the proof for that audience alone (``present``). Servers and workers receive the key of
their own audience from the scheduler when they register, so they check callers without the run's own token. A server
could use its key to pass for another role at other servers, which hold the same data. It cannot use the key, or what
it was shown, at the scheduler: to scale or end the run takes an admin's token, which no server ever sees.

The run's own token is not of this form. It proves all roles to everybody: its holder can derive all keys.

A single token cannot be revoked. Give it an expiry; or replace the run's own token, which ends all of them.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
from enum import StrEnum
from typing import Final, NamedTuple

from psdist.errors import ConfigurationError, InvalidArgumentError, UnauthenticatedError
from psdist.security.roles import TOKEN_ROLES, Role
from psdist.security.tls import utc

#: 128 bits: they cannot be guessed, and the token still fits on one line.
_PROOF_BYTES: Final = 16
_PROOF: Final = r"[A-Za-z0-9_-]{22}"
_CLAIMS: Final = rf"(?P<claims>psdist\.(?P<role>{'|'.join(TOKEN_ROLES)})\.(?P<expiry>0|[1-9][0-9]{{0,11}}))"
_TOKEN: Final = re.compile(rf"{_CLAIMS}(?:\.{_PROOF}){{3}}")
_SHOWN: Final = re.compile(rf"{_CLAIMS}\.{_PROOF}")
_WRONG: Final = (
    "the token is missing or wrong: set PSDIST_TOKEN (or PSDIST_TOKEN_FILE) to the token of this run, or to one that "
    "'psdist token create' made from it"
)


class Audience(StrEnum):
    """Processes that a proof is for, in the order of a token's proofs."""

    SCHEDULER = "scheduler"
    SERVER = "server"
    WORKER = "worker"


class Claims(NamedTuple):
    """Content of a role's token. expiry: seconds since 1970; 0 for never."""

    role: Role
    expiry: int


def audience_key(root: str, audience: Audience) -> bytes:
    """Return the key (32 bytes) that proofs for ``audience`` are made and checked with. root: the run's own token."""
    return hmac.digest(root.encode(), f"psdist role tokens for the {audience}".encode(), hashlib.sha256)


def create(root: str, role: Role, expiry: int = 0) -> str:
    """Return a token of ``role``. root: the run's own token. expiry: seconds since 1970; 0 for never.

    Raises InvalidArgumentError for a role without tokens, ConfigurationError if ``root`` is a role's token itself.
    """
    if role not in TOKEN_ROLES:
        raise InvalidArgumentError(f"there are no tokens of the role {role}: use one of {', '.join(TOKEN_ROLES)}")
    require_root(root)
    claims = f"psdist.{role}.{expiry}"
    return ".".join([claims, *(_proof(audience_key(root, audience), claims) for audience in Audience)])


def read(token: str) -> Claims | None:
    """Return the claims of a role's token, which are not checked; None for a run's own token."""
    found = _TOKEN.fullmatch(token)
    return None if found is None else Claims(Role(found["role"]), int(found["expiry"]))


def require_root(token: str) -> None:
    """Raise ConfigurationError for a role's token, which can neither make nor check others."""
    if (claims := read(token)) is not None:
        raise ConfigurationError(
            f"this needs the run's own token, and the token given is one of role {claims.role}: set PSDIST_TOKEN (or "
            "PSDIST_TOKEN_FILE) to the token that it was made from"
        )


def present(token: str, audience: Audience) -> str:
    """Return the part of ``token`` that its holder shows to ``audience``: the claims, and the proof for it. A run's own
    token is shown whole."""
    if read(token) is None:
        return token
    *claims, scheduler, server, worker = token.split(".")
    shown = {Audience.SCHEDULER: scheduler, Audience.SERVER: server, Audience.WORKER: worker}[audience]
    return ".".join([*claims, shown])


class Verifier:
    """Checks the tokens shown to a process.

    token: the process's own. Without one everybody is accepted (loopback only).
    key: of the audience; unused if ``token`` is the run's own. A process that has neither refuses everybody until the
        scheduler has given it the key.
    """

    def __init__(self, token: str, audience: Audience, key: bytes = b"") -> None:
        self.is_open = not token
        self.audience = audience
        #: True if only the scheduler can give this process its key.
        self.needs_key = bool(token) and read(token) is not None
        self.key = key if self.needs_key else audience_key(token, audience)

    @property
    def is_ready(self) -> bool:
        """True if this process can check callers."""
        return self.is_open or bool(self.key)

    def learn(self, key: bytes) -> None:
        """Take the key that the scheduler gave to this process. Raises ConfigurationError if it gave none."""
        if self.needs_key and not key:
            raise ConfigurationError(
                "the scheduler serves a run without a token, and this process has a token of a role: unset "
                "PSDIST_TOKEN, or start the scheduler with the run's own token"
            )
        self.key = key if self.needs_key else self.key

    def role(self, shown: str) -> Role:
        """Return the role that ``shown`` proves. Raises UnauthenticatedError if it proves none, or has expired.

        All comparisons take constant time.
        """
        if self.is_open:
            return Role.ALL
        if not self.key:
            raise UnauthenticatedError("this process has not registered yet: try again once it has")
        # The run's own token is recognized by the key that follows from it.
        if hmac.compare_digest(audience_key(shown, self.audience), self.key):
            return Role.ALL
        found = _SHOWN.fullmatch(present(shown, self.audience))
        if found is None or not hmac.compare_digest(f"{found['claims']}.{_proof(self.key, found['claims'])}", found[0]):
            raise UnauthenticatedError(_WRONG)
        expiry = int(found["expiry"])
        if expiry and time.time() >= expiry:
            raise UnauthenticatedError(
                f"the token of role {found['role']} has expired at {utc(expiry)}: make another one with 'psdist token "
                f"create --role {found['role']}'"
            )
        return Role(found["role"])


def _proof(key: bytes, claims: str) -> str:
    digest = hmac.digest(key, claims.encode(), hashlib.sha256)[:_PROOF_BYTES]
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
