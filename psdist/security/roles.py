"""Roles of members and callers of a run, and the URI that states one in a certificate."""

from __future__ import annotations

from typing import Final, Literal, get_args

Role = Literal["scheduler", "server", "worker", "admin", "reader"]

ROLES: Final[tuple[Role, ...]] = get_args(Role)
#: Roles of people and programs that dial others alone. Their certificates name no host, so that nobody who dials a
#: scheduler, server or worker can take the holder of one for it.
CLIENT_ROLES: Final[frozenset[Role]] = frozenset({"admin", "reader"})
#: In place of a run's name: any run.
ANY_RUN: Final = "*"
_SCHEME: Final = "psdist://"


def role_uri(run_id: str, role: Role) -> str:
    """Return the URI of a role in a run. run_id: empty for any run."""
    return f"{_SCHEME}{run_id or ANY_RUN}/{role}"


def is_role_uri(name: str) -> bool:
    """True if a name in a certificate is a URI of psdist, whether or not it states a known role."""
    return name.lower().startswith(_SCHEME)


def parse_role_uri(uri: str) -> tuple[str, Role] | None:
    """Return run (empty for any) and role of a URI, or None if it is none of psdist's."""
    run_id, _, name = uri.removeprefix(_SCHEME).partition("/")
    role = next((role for role in ROLES if role == name), None)
    if not uri.startswith(_SCHEME) or not run_id or role is None:
        return None
    return "" if run_id == ANY_RUN else run_id, role
