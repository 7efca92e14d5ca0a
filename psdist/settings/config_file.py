"""Configuration files: TOML with one key per flag, such as ``keep-last = 3``. Only text and numbers, no code."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from psdist.errors import ConfigurationError
from psdist.wire.limits import CONFIG_FILE_BYTES_MAX


class SourcedText(NamedTuple):
    """Text of a setting, with its source for messages: a flag, a variable, or a file and its key."""

    source: str
    text: str


def read_config(path: Path, names: Mapping[str, str], switches: Collection[str]) -> dict[str, SourcedText]:
    """Return the values of a configuration file by the flags' names as attributes. An empty text is no value.

    names: from each accepted key to the flag's name as an attribute.
    switches: those of these names that take a boolean.

    Raises ConfigurationError if the file cannot be read or is too large, a key is unknown or given twice, a value is no
    text, number or boolean, or a boolean is given to a flag that is no switch.
    """
    found: dict[str, SourcedText] = {}
    for key, value in _load(path).items():
        name = names.get(key.replace("_", "-"))
        if name is None:
            near = difflib.get_close_matches(key.replace("_", "-"), names, 1)
            raise ConfigurationError(
                f"{path} has an unknown key {key!r:.80}" + (f": did you mean {near[0]}?" if near else _known(names))
            )
        if name in found:
            raise ConfigurationError(f"{path} sets {key} twice, once as {found[name].source.rpartition(' ')[2]}")
        if isinstance(value, bool) and name not in switches:
            # As a text it would be 1 or 0, and dashboard-port = false would open a port.
            raise ConfigurationError(
                f"{path}: {key} is no switch, so it cannot be {str(value).lower()}: give its value, or leave it out"
            )
        found[name] = SourcedText(f"{path}: {key}", _text(path, key, value))
    return {name: value for name, value in found.items() if value.text}


def _load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(CONFIG_FILE_BYTES_MAX + 1)
        if len(content) <= CONFIG_FILE_BYTES_MAX:
            return tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigurationError(f"the configuration file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # Of the encoding, or of TOML.
        raise ConfigurationError(
            f"the configuration file {path} is not valid TOML: {error}. psdist config template prints a valid one"
        ) from None
    raise ConfigurationError(
        f"the configuration file {path} has more than {CONFIG_FILE_BYTES_MAX} bytes: pass another one"
    )


def _known(names: Mapping[str, str]) -> str:
    return f": the keys are {', '.join(names)}"


def _text(path: Path, key: str, value: Any) -> str:
    """Return a value as it would be written on the command line."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, str | int | float):
        return str(value)
    raise ConfigurationError(
        f"{path}: {key} is neither a text, a number nor a boolean: write the flag's text in quotes, such as "
        f'{key} = "a,b"'
    )
