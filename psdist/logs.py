"""Logging of the server programs: structlog over the standard library, one line per event, to standard error.

``console`` is for people who watch one process (coloured on a terminal). ``json`` is for collectors of many: one object
per line with ``timestamp``, ``level``, ``event``, ``logger``, ``role``, ``id``, ``run`` and ``incarnation``, and with
``peer`` if the event is about one other member or address. Messages of other libraries have the same form. Importing
this module configures nothing, and the client library never calls it: a script's logging belongs to the script.
Launchers and commands print their own messages and configure no logging.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Final

import structlog
from structlog.types import Processor

#: Field with the member or address that a line is about.
_PEER: Final = "peer"
#: Codes of a terminal's colours by level.
_COLOURS: Final = {"warning": 33, "error": 31, "critical": 31}


def configure(
    role: str, *, member_id: str = "", run_id: str = "", log_format: str = "auto", level: str = "info"
) -> None:
    """Configure this process's logging; a second call replaces the first.

    log_format: console, json, or auto, which is console on a terminal and json elsewhere.
    level: debug, info, warning or error.
    """
    as_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso" if as_json else "%H:%M:%S", utc=as_json),
        structlog.processors.StackInfoRenderer(),
    ]
    # The text of such a line names its peer, which is enough on a console.
    peer: list[Processor] = [structlog.stdlib.ExtraAdder([_PEER]), _without_empty_peer] if as_json else []
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_Identity(), *peer, *shared], processors=_rendering(as_json)
        )
    )
    handler.addFilter(_is_news)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            _Identity(),
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    _identity.clear()
    identify(role=role, id=member_id, run=run_id)


def identify(**fields: str | int) -> None:
    """Set ``role``, ``id``, ``run`` or ``incarnation`` once they are known; empty ones are omitted from the lines."""
    _identity.update(fields)


def _is_news(record: logging.LogRecord) -> bool:
    """Return True if a line is shown.

    grpc.aio logs a traceback for every call whose peer died before the answer, and for one that was cancelled before
    its handler started, as at the end of this process. The scheduler logs the death of a member in one line, which a
    traceback would hide.
    """
    if not record.name.startswith("grpc."):
        return True
    error = record.exc_info[1] if record.exc_info else None
    is_cancelled = isinstance(error, asyncio.CancelledError)
    return not (is_cancelled or str(record.msg).startswith("ExecuteBatchError raised in core"))


def _rendering(as_json: bool) -> list[Processor]:
    if as_json:
        return [
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            # As text, like the lines of scripts. structlog's other form shows local variables, the token among them.
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    return [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        _without_constants,
        _printable,
        structlog.processors.format_exc_info,
        _console_line,
    ]


def _console_line(logger: structlog.types.WrappedLogger, name: str, event_dict: structlog.types.EventDict) -> str:
    """Return a line of the form of workers' lines: time, level, logger and text, then the fields."""
    given = dict(event_dict)
    time, level, source, event = (str(given.pop(key, "")) for key in ("timestamp", "level", "logger", "event"))
    below = [str(text) for key in ("exception", "stack") if (text := given.pop(key, None))]
    fields = [f"{key}={_shown(value)}" for key, value in sorted(given.items())]
    line = " ".join([time, level.upper(), f"{source}:", event, *fields])
    colour = _COLOURS.get(level) if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else None
    return "\n".join([f"\x1b[{colour}m{line}\x1b[0m" if colour else line, *below])


def _shown(value: object) -> str:
    return value if isinstance(value, str) and value and " " not in value else repr(value)


def _without_empty_peer(
    logger: structlog.types.WrappedLogger, name: str, event_dict: structlog.types.EventDict
) -> structlog.types.EventDict:
    if not event_dict.get(_PEER):
        event_dict.pop(_PEER, None)
    return event_dict


def _without_constants(
    logger: structlog.types.WrappedLogger, name: str, event_dict: structlog.types.EventDict
) -> structlog.types.EventDict:
    # The reader of a console knows which process it shows.
    for name in ("role", "run", "id", "incarnation"):
        event_dict.pop(name, None)
    return event_dict


def _printable(
    logger: structlog.types.WrappedLogger, name: str, event_dict: structlog.types.EventDict
) -> structlog.types.EventDict:
    """Escape control characters: members choose some of the texts, and a terminal would obey them. JSON escapes them
    anyway."""
    for name, value in event_dict.items():
        if isinstance(value, str) and not value.isprintable():
            event_dict[name] = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in value)
    return event_dict


#: Identity of the logging member. A program is one member, so this is per process and not per task.
_identity: dict[str, str | int] = {}


class _Identity:
    def __call__(
        self, logger: structlog.types.WrappedLogger, name: str, event_dict: structlog.types.EventDict
    ) -> structlog.types.EventDict:
        for key, value in _identity.items():
            if value:
                event_dict.setdefault(key, value)
        return event_dict
