"""Text files of the package with places such as ``@NODES@``, and the values for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

from psdist.errors import InternalError

_PLACE: Final = re.compile(r"@([A-Z][A-Z_]*)@")


def template_names(folder: str) -> list[str]:
    """Return the names of all templates below a folder, in order."""
    return sorted(_names(_root() / folder, folder))


def read_template(name: str) -> str:
    """Return the text of a template."""
    return _root().joinpath(name).read_text(encoding="utf-8")


def places(name: str) -> set[str]:
    """Return the places in a template."""
    return set(_PLACE.findall(read_template(name)))


def fill(name: str, values: Mapping[str, object]) -> str:
    """Return the text of a template with each ``@NAME@`` replaced. A line that a value leaves empty is removed.

    Raises InternalError for a place without a value.
    """
    if missing := places(name) - values.keys():
        raise InternalError(f"the template {name} has no values for {', '.join(sorted(missing))}")
    lines = []
    for line in read_template(name).splitlines():
        filled = _PLACE.sub(lambda found: str(values[found[1]]), line)
        if filled.strip() or not line.strip():
            lines.append(filled)
    return "\n".join(lines) + "\n"


def _root() -> Traversable:
    return resources.files(__package__) / "templates"


def _names(folder: Traversable, path: str) -> list[str]:
    found = []
    for entry in folder.iterdir():
        name = f"{path}/{entry.name}"
        found += _names(entry, name) if entry.is_dir() else [name]
    return found
