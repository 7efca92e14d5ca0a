"""``psdist token``: makes tokens of roles from a run's own token, and shows the role of a token.

The run's own token is read as every program reads it, never from the command line. A token that is made goes to
standard output alone, or into a file that only this user may read. Nothing is registered anywhere: the scheduler checks
tokens by the run's own (``psdist.security.tokens``).
"""

from __future__ import annotations

import os
import re
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from psdist.cli.commands import Command, Group, Leaf, show
from psdist.cli.target import choose_run
from psdist.errors import ConfigurationError
from psdist.security import tokens
from psdist.security.roles import TOKEN_ROLES, Role
from psdist.security.tls import utc
from psdist.settings.config import find_token
from psdist.settings.exit_codes import OK
from psdist.settings.flags import CommandLine, Flag, named_file, one_of
from psdist.settings.programs import FORMAT_FLAG, TOKEN_FILE_FLAG, run_id_flag
from psdist.wire.limits import TOKEN_LIFETIME_DAYS_MAX

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LIFETIME: Final = re.compile(r"([0-9]{1,9})([smhd])")


def lifetime(value: str) -> int:
    """Return the seconds of ``30d``, ``12h``, ``5m`` or ``90s``. Raises ValueError."""
    found = _LIFETIME.fullmatch(value.strip().lower())
    if found is None:
        raise ValueError(f"{value!r:.40} is not a lifetime: write 30d, 12h, 5m or 90s")
    seconds = int(found[1]) * _UNITS[found[2]]
    if not 0 < seconds <= TOKEN_LIFETIME_DAYS_MAX * _UNITS["d"]:
        raise ValueError(f"{value} is not possible: a token lives for 1s to {TOKEN_LIFETIME_DAYS_MAX}d")
    return seconds


_FLAGS: Final = (run_id_flag("name of the run on this machine whose token is used"), TOKEN_FILE_FLAG)


def _create_line() -> CommandLine:
    return CommandLine(
        "psdist token create",
        "Prints a token of a role, made from the run's own token: that of --token-file, PSDIST_TOKEN, "
        "PSDIST_TOKEN_FILE or --run-id. Give it to a process as its PSDIST_TOKEN.",
        (
            Flag("--role", "worker, server, admin or reader", one_of(*TOKEN_ROLES), None, "ROLE", twin=False),
            Flag("--expires", "lifetime, such as 30d or 12h", lifetime, None, "TIME", twin=False, shown_default="none"),
            Flag("--out", "new file to write the token to, for this user alone", named_file, None, "FILE", twin=False),
            *_FLAGS,
        ),
        epilog="Example: psdist token create --role reader --expires 30d --token-file token > reader-token",
    )


def _create(given: Namespace, environ: Mapping[str, str]) -> int:
    if given.role is None:
        raise ConfigurationError(f"the role is missing: add --role {' or --role '.join(TOKEN_ROLES)}")
    expiry = 0 if given.expires is None else int(time.time()) + given.expires
    token = tokens.create(_own_token(given, environ), Role(given.role), expiry)
    if given.out is None:
        print(token)
    else:
        _write(given.out, token)
    return OK


def _own_token(given: Namespace, environ: Mapping[str, str]) -> str:
    # In an environment with a token, as that of a job, the variable with the run's name is no choice of another one.
    is_chosen = given.run_id != environ.get("PSDIST_RUN_ID") or not find_token(environ)
    if given.run_id and given.token_file is None and is_chosen:
        environ = {"PSDIST_TOKEN_FILE": choose_run(given.run_id, environ).token_file}
    token = find_token(environ, token_file=given.token_file)
    if not token:
        raise ConfigurationError(
            "no token is set: pass --token-file FILE with the run's own token, or set PSDIST_TOKEN or "
            "PSDIST_TOKEN_FILE, or name a run of this machine by --run-id"
        )
    return token


def _write(path: Path, token: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}. Name a new file by --out") from None
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")


def _show_line() -> CommandLine:
    return CommandLine(
        "psdist token show",
        "Prints the role and the expiry of a token, without checking them: that of --token-file, PSDIST_TOKEN, "
        "PSDIST_TOKEN_FILE or --run-id. The token itself is not printed.",
        (*_FLAGS, FORMAT_FLAG),
    )


def _show(given: Namespace, environ: Mapping[str, str]) -> int:
    claims = tokens.read(_own_token(given, environ)) or tokens.Claims(Role.ALL, 0)
    report = {"role": claims.role.value, "expires": claims.expiry or None}
    show(given.format, report, lambda _: print(_sentence(claims)))
    return OK


def _sentence(claims: tokens.Claims) -> str:
    """Describe a token for people."""
    if claims.role is Role.ALL:
        return "the run's own token, with all roles; it does not expire"
    left = claims.expiry - time.time()
    when = f"expires {utc(claims.expiry)}" if left > 0 else f"expired {utc(claims.expiry)}"
    return f"a token of the role {claims.role}; {when if claims.expiry else 'it does not expire'}"


TOKEN: Final = Group(
    "psdist token",
    "Tokens of roles, for processes that need not do everything in a run.",
    (
        Command("create", "print a token of a role: --role reader", lambda: Leaf(_create_line, _create)),
        Command("show", "print the role and the expiry of a token", lambda: Leaf(_show_line, _show)),
    ),
    "Each command has --help.",
)
