"""Texts of members on a terminal: they must not control it, nor begin lines that psdist seems to have written."""

from __future__ import annotations

from typing import Any


def printable(text: str) -> str:
    """Return ``text`` in one line: with a space for each line break, and a question mark for each other character that
    is not printable."""
    return "".join(one if one.isprintable() else " " if one.isspace() else "?" for one in text)


def printable_values(value: Any) -> Any:
    """Return a JSON value whose texts are all ``printable``."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): printable_values(one) for key, one in value.items()}
    return [printable_values(one) for one in value] if isinstance(value, list) else value
