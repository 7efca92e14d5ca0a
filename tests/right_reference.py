"""The list of every call and every role in ``docs/roles.md``, from the table that the processes apply.

    python -m tests.right_reference

``tests/unit/security/test_right_reference.py`` compares the page with this list, and
``tests/integration/wire/test_rights.py`` compares live processes with the table.
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
    """The text of the page, with the calls of each set of roles as the code has them."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    calls: dict[tuple[str, ...], list[str]] = {}
    for call in RIGHTS:
        calls.setdefault(tuple(role for role in TOKEN_ROLES if role in RIGHTS[call]), []).append(_name(call))
    lines = [f"- **{', '.join(allowed)}**: {', '.join(names)}" for allowed, names in calls.items()]
    return f"{head}{START}\n{chr(10).join(lines)}\n\n{END}{rest.partition(END)[2]}"


def _name(call: str) -> str:
    service, _, method = call[1:].partition("/")
    name = _OTHERS.get(call, f"`{service.rpartition('.')[2]}.{method}`")
    return f"{name} ({_NOTES[method]})" if method in _NOTES else name


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
