"""Flags: one row each, which gives the option, its underscore spelling, its environment variables and its help.

A flag takes the first of these values that is set: the command line, ``PSDIST_<FLAG>``, the flag's other variables
(``PET_<FLAG>`` if torchrun has the flag), the file of ``--config`` if the program has that flag, the default. One
function converts all of them, and an error names the source of the value. Wrong input ends the program with status 2
before anything is done.

Settings are declared once, as fields of a dataclass (``setting``). The class gives a field's type, and the flag its
help, its converter and its variables. Flag name and ``PSDIST_`` variable follow from the field's name. The programs
that take a setting are those whose class inherits it. Everything else is derived: ``flags_of`` the command line and the
reference of flags, ``read`` the settings from parsed flags, and ``arguments`` the command line that passes them on to
another process.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar

from psdist.errors import ConfigurationError, InvalidArgumentError
from psdist.settings import exit_codes
from psdist.wire.limits import CONFIG_FILE_BYTES_MAX

#: The flag that names a configuration file.
CONFIG_NAME: Final = "--config"
#: Headings of the help: the most used flags, those without a group, and all flags if there are no groups.
_FIRST_TITLE = "most used"
_OTHER_TITLE = "other flags"
_ONLY_TITLE = "flags"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag. ``convert`` turns its text into its value or raises ValueError; a flag without ``convert`` is a switch.

    shown_default: the default as a user would write it, if its ``str`` differs.
    group: heading under which the help lists the flag.
    write: inverse of ``convert``, for the command line of another process.
    file_yields_to: variables of other settings with the same purpose: if one is set, a configuration file does not set
        this flag.
    needs: flags without which this one has no effect; one of those that the program has must be set, or ``acts_unset``.
    acts_unset: True if the program does, without this flag, that for which others need it.
    repeats: True if the flag may be given several times; its texts are then joined by commas.
    former: its deprecated name, which works, too, also as a variable and in a file; empty if there is none.
    """

    name: str
    help: str
    convert: Callable[[str], Any] | None = None
    default: Any = None
    metavar: str = "VALUE"
    short: str = ""
    variables: tuple[str, ...] = ()
    twin: bool = True
    shown_default: str = ""
    group: str = ""
    write: Callable[[Any], str] = str
    file_yields_to: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    acts_unset: bool = False
    repeats: bool = False
    former: str = ""

    @property
    def default_text(self) -> str:
        """The default as the help shows it; empty if there is nothing to show."""
        if self.shown_default or self.default is None or isinstance(self.default, bool | Mapping):
            return self.shown_default
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def dest(self) -> str:
        """The flag's name as an attribute."""
        return _attribute(self.name)

    @property
    def is_in_file(self) -> bool:
        """True if a configuration file may set the flag: not the file itself, and no descriptor of the caller."""
        return self.name != CONFIG_NAME and not self.name.endswith("-fd")

    @property
    def environment(self) -> tuple[str, ...]:
        """Variables that set this flag, in order of precedence."""
        former = (f"PSDIST_{_attribute(self.former).upper()}",) if self.former else ()
        return (*((f"PSDIST_{self.dest.upper()}",) if self.twin else ()), *self.variables, *former)

    @property
    def spellings(self) -> tuple[str, ...]:
        """All spellings on a command line."""
        names = dict.fromkeys((self.short, self.name, "--" + self.dest, self.former))
        return tuple(name for name in names if name)


def _attribute(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


#: Taken by every program that is started for a run.
CONFIG_FLAG: Final = Flag(
    CONFIG_NAME, "file with settings (TOML): psdist config template prints one. Flags and variables take precedence",
    Path, None, "FILE",
)  # fmt: skip


def grouped(group: str, *flags: Flag) -> tuple[Flag, ...]:
    """Return the flags under one heading of the help."""
    return tuple(replace(flag, group=group) for flag in flags)


def torchrun(flag: str) -> tuple[str, ...]:
    """Return the variable that sets ``flag`` for torchrun."""
    return ("PET_" + flag.lstrip("-").replace("-", "_").upper(),)


# --- converters -------------------------------------------------------------------------------------------------------


def text(value: str) -> str:
    """Convert a text that must not be empty."""
    if not value:
        raise ValueError("is empty")
    return value


def named_file(value: str) -> Path:
    """Convert the name of a file or directory of a program that does not write to standard output."""
    if value == "-":
        raise ValueError("this command does not write to standard output, which - would be: give a name")
    return Path(text(value))


def integer(minimum: int, maximum: int = 1 << 31) -> Callable[[str], int]:
    """Return a converter for a whole number in [minimum, maximum]."""

    def convert(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            raise ValueError(f"{value!r} is not a whole number") from None
        if number < minimum:
            raise ValueError(f"{number} is too small: it must be at least {minimum}")
        if number > maximum:
            raise ValueError(f"{number} is too large: it must be at most {maximum}")
        return number

    return convert


def seconds(minimum: float = 0.0) -> Callable[[str], float]:
    """Return a converter for a finite number of seconds, at least ``minimum``."""

    def convert(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"{value!r} is not a number of seconds") from None
        if not math.isfinite(number) or number < minimum:
            raise ValueError(f"{value} is not possible: it must be at least {minimum:g} seconds and finite")
        return number

    return convert


@dataclass(frozen=True, slots=True)
class OneOf:
    """A converter for one of a few words, in any case."""

    choices: tuple[str, ...]

    def __call__(self, value: str) -> str:
        """Return the word. Raises ValueError."""
        if value.lower() not in self.choices:
            raise ValueError(f"{value!r} is not one of {', '.join(self.choices)}")
        return value.lower()


def one_of(*choices: str) -> OneOf:
    """Return a converter for one of a few words, in any case."""
    return OneOf(choices)


def _switch(value: str) -> bool:
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise ValueError(f"{value!r} is neither 1 nor 0")


def is_switched_on(environ: Mapping[str, str], variable: str) -> bool:
    """Return the value of a switch in the environment. Raises ConfigurationError if it is none."""
    try:
        return _switch(environ.get(variable, ""))
    except ValueError as error:
        raise ConfigurationError(f"{variable}: {error}") from None


# --- command lines ----------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(self.prog, message)


def fail(program: str, message: str, code: int = exit_codes.USAGE, *, as_json: bool = False) -> NoReturn:
    """Print the error and end the program with ``code``."""
    if as_json:
        import json

        print(json.dumps({"event": message, "level": "error", "logger": program, "status": code}), file=sys.stderr)
        raise SystemExit(code)
    hint = f"\nTry: {program} --help" if code == exit_codes.USAGE else ""
    text = f"{program}: error: {message}"
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        text = f"\x1b[31m{text}\x1b[0m"
    print(text + hint, file=sys.stderr, flush=True)
    raise SystemExit(code)


def _acts(flag: Flag, value: object) -> bool:
    """Return True for a value with an effect. 0 is one: the number of a free port, or of a descriptor."""
    return flag.acts_unset if value is None else value is not False and value != ""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A program's flags.

    script: usage of the script that follows the flags; empty if none may follow.
    """

    program: str
    description: str
    flags: tuple[Flag, ...]
    script: str = ""
    epilog: str = ""
    #: The arguments besides flags, by the name that the help shows; one in brackets may be left out, and is then empty.
    words: tuple[str, ...] = ()
    #: Names of the flags that the help shows first.
    first: tuple[str, ...] = ()
    #: Flags of similar programs that this one lacks, with their replacement.
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def parse(self, argv: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
        """Return the values of all flags, ``command`` (the script that follows them), ``words`` (the other arguments),
        ``explicit`` (the flags given on the command line) and ``origins`` (the sources of the values that are no
        defaults). Wrong input ends the program with status 2."""
        own, command = self.split(argv) if self.script else (list(argv), [])
        if unknown := self.unknown(own):
            fail(self.program, unknown)
        given = vars(self._parser().parse_args(own))
        words = [given.pop(word) for word in self.words]
        try:
            found = self._resolve(given, environ, self._read_file(given, environ))
            self._check_needs(found)
        except InvalidArgumentError as error:
            fail(self.program, str(error))
        origins = {name: one.origin for name, one in found.items() if one.origin is not None}
        values = {name: one.value for name, one in found.items()}
        return argparse.Namespace(command=command, words=words, explicit=frozenset(given), origins=origins, **values)

    def values(self, given: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, Any]:
        """Return the values of all flags by their names as attributes. Raises InvalidArgumentError.

        given: the texts of flags that take precedence over ``environ``.
        """
        return {name: found.value for name, found in self._resolve(given, environ, {}).items()}

    def _resolve(
        self, given: Mapping[str, str], environ: Mapping[str, str], filed: Mapping[str, SourcedText]
    ) -> dict[str, _Resolved]:
        return {flag.dest: _resolve(flag, given.get(flag.dest), environ, filed.get(flag.dest)) for flag in self.flags}

    def _check_needs(self, found: Mapping[str, _Resolved]) -> None:
        """Raise ConfigurationError for a flag that would be ignored.

        A variable may be meant for another program, and the default changes nothing.
        """
        acting = {flag.name for flag in self.flags if _acts(flag, found[flag.dest].value)}
        names = {flag.name for flag in self.flags}
        for flag in self.flags:
            value, origin = found[flag.dest]
            needs = [name for name in flag.needs if name in names]
            if origin is None or origin.source in flag.environment or value == flag.default or not needs:
                continue
            if acting.isdisjoint(needs):
                given = origin.source if flag.convert is None else f"{origin.source} {origin.text}"
                remedy = f"add {needs[0]}, or leave it out"
                raise ConfigurationError(f"{given} has no effect without {' or '.join(needs)}: {remedy}")

    def _read_file(self, given: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, SourcedText]:
        """Return the values in the file of ``--config``; none without that flag. Raises ConfigurationError."""
        for flag in self.flags:
            if flag.name == CONFIG_NAME:
                path: Path | None = _resolve(flag, given.get(flag.dest), environ).value
                names = {one.name.lstrip("-"): one.dest for one in self.flags if one.is_in_file}
                names |= {one.former.lstrip("-"): one.dest for one in self.flags if one.former}
                switches = {one.dest for one in self.flags if one.convert is None}
                return {} if path is None else _read_config(path, names, switches)
        return {}

    def split(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """Split ``argv`` into the program's own flags, and the script with its arguments.

        The script is the first word that is neither a flag nor a flag's value. A bare ``--`` before it is dropped.
        """
        takes_value = {name for flag in self.flags if flag.convert is not None for name in flag.spellings}
        position = 0
        while position < len(argv):
            word = argv[position]
            if word == "--":
                return list(argv[:position]), list(argv[position + 1 :])
            if not word.startswith("-") or word == "-":
                break
            position += 2 if word in takes_value else 1
        return list(argv[:position]), list(argv[position:])

    def unknown(self, own: Sequence[str]) -> str:
        """Return an error for the first unknown flag; empty if there is none."""
        known = {name: flag for flag in self.flags for name in flag.spellings}
        # The value of a short flag may be appended to it.
        short = tuple(name for name in (*known, "-h") if not name.startswith("--"))
        position = 0
        while position < len(own) and own[position] != "--":
            word = own[position].split("=", 1)[0]
            is_known = word in known or word == "--help" or (not word.startswith("--") and word.startswith(short))
            is_flag = word.startswith("-") and word != "-" and not word[1:2].isdigit()
            if is_flag and not is_known:
                return f"there is no flag {word}{self.instead(word.replace('_', '-'))}"
            takes_next = word in known and known[word].convert is not None and "=" not in own[position]
            position += 2 if takes_next else 1
        return ""

    def instead(self, word: str) -> str:
        """Return a suggestion for an unknown flag, as the end of a sentence; empty if nothing is similar."""
        if word in self.elsewhere:
            return f": {self.elsewhere[word]}"
        names = [flag.name for flag in self.flags]
        near = [name for name in names if name.startswith(word)] or _similar(word, names)
        return f": did you mean {near[0]}?" if near else ""

    def misplaced(self, command: Iterable[str]) -> list[str]:
        """Return this program's long flags among the arguments of the script, where this program ignores them."""
        known = {name for flag in self.flags for name in flag.spellings if name.startswith("--")}
        words = (word.split("=", 1)[0] for word in list(command)[1:])
        return list(dict.fromkeys(word for word in words if word in known))

    def _parser(self) -> argparse.ArgumentParser:
        parser = _Parser(
            prog=self.program,
            usage=" ".join(filter(None, (self.program, "[flags]", *self.words, self.script))),
            description=self.description,
            epilog=self.epilog or "Every flag can also be set by a variable: --some-flag by PSDIST_SOME_FLAG.",
            allow_abbrev=False,
            add_help=False,
        )
        for word in self.words:
            parser.add_argument(word, help=argparse.SUPPRESS, nargs="?" if word.startswith("[") else None, default="")
        for title, flags in self.groups().items():
            group = parser.add_argument_group(title)
            for flag in flags:
                for number, names in enumerate(_visible_first(flag)):
                    _add(group, flag, names, hidden=number > 0)
        group.add_argument("-h", "--help", action="help", help="show this help and exit")
        return parser

    def groups(self) -> dict[str, list[Flag]]:
        """Return the flags by heading: ``first`` in its order, then groups in the order of their first flag, then flags
        without a group. ``--help`` joins the last."""
        by_name = {flag.name: flag for flag in self.flags}
        rest = _OTHER_TITLE if self.first or any(flag.group for flag in self.flags) else _ONLY_TITLE
        groups = {_FIRST_TITLE: [by_name.pop(name) for name in self.first]} if self.first else {}
        for flag in sorted(by_name.values(), key=lambda flag: not flag.group):
            groups.setdefault(flag.group or rest, []).append(flag)
        groups.setdefault(rest, [])  # --help has no other place
        return groups


def _similar(word: str, names: Iterable[str]) -> list[str]:
    import difflib  # For errors alone.

    return difflib.get_close_matches(word, list(names), 1)


def _visible_first(flag: Flag) -> list[tuple[str, ...]]:
    shown = tuple(name for name in flag.spellings if name in (flag.name, flag.short))
    hidden = tuple(name for name in flag.spellings if name not in shown)
    return [shown, hidden] if hidden else [shown]


def _add(parser: argparse._ActionsContainer, flag: Flag, names: tuple[str, ...], *, hidden: bool) -> None:
    note = f" (default {flag.default_text})" if flag.default_text else ""
    help_text = argparse.SUPPRESS if hidden else (flag.help + note).replace("%", "%%")
    # argparse gets no default, so that a value from the environment can be distinguished from a given one.
    if flag.convert is None:
        parser.add_argument(
            *names, dest=flag.dest, action="store_const", const="1", default=argparse.SUPPRESS, help=help_text
        )
    else:
        parser.add_argument(
            *names, dest=flag.dest, metavar=flag.metavar, default=argparse.SUPPRESS, help=help_text,
            action=_Joined if flag.repeats else "store",
        )  # fmt: skip


class _Joined(argparse.Action):
    """Stores the values of a repeated flag as one text."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest, "")
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


class SourcedText(NamedTuple):
    """Text of a setting, with its source for messages: a flag, a variable, or a file and its key."""

    source: str
    text: str


class _Resolved(NamedTuple):
    """A flag's value, and its source; None for a default."""

    value: Any
    origin: SourcedText | None


def _resolve(flag: Flag, given: str | None, environ: Mapping[str, str], filed: SourcedText | None = None) -> _Resolved:
    """Return a flag's value. Raises ConfigurationError, which names its source."""
    # An empty variable is the usual way to unset one.
    variables = [(variable, environ.get(variable) or None) for variable in flag.environment]
    filed = None if any(environ.get(variable) for variable in flag.file_yields_to) else filed
    for source, value in [(flag.name, given), *variables, *([filed] if filed is not None else [])]:
        if value is not None:
            try:
                return _Resolved((flag.convert or _switch)(value), SourcedText(source, value))
            except ValueError as error:
                raise ConfigurationError(f"{source}: {error}") from None
    return _Resolved(flag.default if flag.convert is not None else bool(flag.default), None)


# --- configuration files: TOML with one key per flag, such as ``keep-last = 3`` ---------------------------------------


def _read_config(path: Path, names: Mapping[str, str], switches: Collection[str]) -> dict[str, SourcedText]:
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
            near = _similar(key.replace("_", "-"), names)
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
    import tomllib  # Most programs are started without a file.

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


# --- settings ---------------------------------------------------------------------------------------------------------

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
