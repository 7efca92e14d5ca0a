"""The table of every call and every role in ``docs/roles.md``, from the table that the processes apply.

    python -m tests.right_reference

``tests/unit/security/test_right_reference.py`` compares the page with this table, and
``tests/integration/wire/test_rights.py`` compares live processes with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from psdist.security import roles
from psdist.security.roles import RIGHTS, TOKEN_ROLES

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "roles.md"
START: Final = "<!-- rights: python -m tests.right_reference -->\n"
END: Final = "<!-- end of rights -->\n"

#: Calls whose request decides, too.
_NOTES: Final = {
    "Register": "as a member of the caller's role",
    "Session": "of a member of the caller's role",
    "Leave": "of a member of the caller's role",
    "SaveSnapshot": "a worker names itself in the request",
    "Check": "needs no token at all",
}
_OTHERS: Final = {
    roles.PEER_LINK: "a link to another worker",
    roles.METRICS_PAGES: "metrics of any process",
    roles.DASHBOARD_PAGES: "the dashboard",
}


def page() -> str:
    """The text of the page, with the table as the code has it."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    rows = [
        f"| call | {' | '.join(TOKEN_ROLES)} | |",
        f"|---|{'---|' * len(TOKEN_ROLES)}---|",
        *map(_row, RIGHTS),
    ]
    return f"{head}{START}{chr(10).join(rows)}\n{END}{rest.partition(END)[2]}"


def _row(call: str) -> str:
    service, _, method = call[1:].partition("/")
    name = _OTHERS.get(call, f"`{service.rpartition('.')[2]}.{method}`")
    marks = " | ".join("yes" if role in RIGHTS[call] else "" for role in TOKEN_ROLES)
    note = _NOTES.get(method, "")
    return f"| {name} | {marks} | {note} |".replace("|  |", "| |").replace("|  |", "| |")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
