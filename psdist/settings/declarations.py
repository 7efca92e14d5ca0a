"""Settings declared once: a dataclass field together with the flag that sets it.

``setting`` declares such a field. The class that has it gives its type, and the flag its help, its converter and its
variables. Flag name and ``PSDIST_`` variable follow from the field's name. The programs that take a setting are those
whose class inherits it. Everything else is derived: ``flags_of`` the command line and the reference of flags, ``read``
the settings from parsed flags, and ``arguments`` the command line that passes them on to another process.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import field, fields, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from psdist.settings.flags import Flag, torchrun

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_FLAG: Final = "flag"
_SECONDS: Final = "_seconds"


def setting(
    help_text: str, convert: Callable[[str], Any] | None = None, default: Any = None, metavar: str = "", **others: Any
) -> Any:
    """Declare a field of a dataclass and its flag; without ``convert`` it is a switch.

    The field ``drain_timeout_seconds`` has the flag ``--drain-timeout SECONDS``, unless ``name`` says otherwise.

    others: further fields of ``Flag``.
    """
    others["default"] = False if convert is None else default
    flag = Flag(others.pop("name", ""), help_text, convert, metavar=metavar, **others)
    if flag.default.__hash__ is None:  # Dataclasses demand a factory for mutable defaults.
        return field(default_factory=lambda: flag.default, metadata={_FLAG: flag})
    return field(default=flag.default, metadata={_FLAG: flag})


def torchrun_setting(name: str, help_text: str, *args: Any, **others: Any) -> Any:
    """Declare a setting with torchrun's flag ``name`` and variable; the other arguments are those of ``setting``."""
    return setting(help_text, *args, name=name, variables=torchrun(name), **others)


def flags_of(cls: type[DataclassInstance]) -> tuple[Flag, ...]:
    """Return the flags of a class, in the order of its fields."""
    return tuple(flag for _, flag in _declared(cls))


def read(cls: type[T], given: Namespace, **others: Any) -> T:
    """Return the settings in parsed flags. A flag that the program lacks has its default.

    others: further fields, and those that take precedence.
    """
    parsed = {name: getattr(given, flag.dest) for name, flag in _declared(cls) if hasattr(given, flag.dest)}
    return cls(**parsed | others)


def arguments(cls: type[DataclassInstance], settings: object, **others: Any) -> tuple[str, ...]:
    """Return the command line of a program with the settings ``cls``.

    settings: source of the fields that have the same name there; the rest keep the program's defaults.
    others: fields that take precedence. None omits the flag.
    """
    found: list[str] = []
    for name, flag in _declared(cls):
        value = others.pop(name, getattr(settings, name, None))
        if flag.convert is not None and value is not None:
            found += (flag.name, flag.write(value))
        elif value:
            found.append(flag.name)
    if others:
        raise TypeError(f"{cls.__name__} has no flags for {', '.join(others)}")
    return tuple(found)


def _declared(cls: type[DataclassInstance]) -> Iterator[tuple[str, Flag]]:
    """Yield each field that a flag sets, with this flag."""
    for each in fields(cls):
        if (flag := each.metadata.get(_FLAG)) is not None:
            name = flag.name or "--" + each.name.removesuffix(_SECONDS).replace("_", "-")
            yield each.name, replace(flag, name=name, metavar=flag.metavar or _metavar(each.name))


def _metavar(name: str) -> str:
    return "SECONDS" if name.endswith(_SECONDS) else "VALUE"
