"""Text files of the package with places such as ``@NODES@``, and the values for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from typing import Final

from psdist.errors import InternalError

#: Names of templates, below ``templates``.
_PLACE: Final = re.compile(r"@([A-Z][A-Z_]*)@")


def read_template(name: str) -> str:
    """Return the text of a template."""
    return (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8")


def fill(text: str, values: Mapping[str, object]) -> str:
    """Return the text with each ``@NAME@`` replaced. A line that a value leaves empty is removed.

    Raises InternalError for a place without a value, and for a value without a place.
    """
    places = set(_PLACE.findall(text))
    if places != values.keys():
        raise InternalError(f"a template and its values differ in {', '.join(sorted(places ^ values.keys()))}")
    lines = []
    for line in text.splitlines():
        filled = _PLACE.sub(lambda found: str(values[found[1]]), line)
        if filled.strip() or not line.strip():
            lines.append(filled)
    return "\n".join(lines) + "\n"
