"""Report of a launcher to the program that started it: how its run ended, in a file named by ``--report-file``."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from psdist.errors import InternalError
from psdist.wire.limits import RUN_REPORT_BYTES_MAX


@dataclass(frozen=True, slots=True)
class RunReport:
    """End of a run.

    status: exit status of the launcher.
    message: cause of a failure; empty if there is none.
    culprit: the process that caused it, such as ``worker 1``; empty if there is none.
    rank: the culprit's rank; None unless it is a worker.
    lines: the culprit's traceback if it printed one, else its last lines.
    """

    run_id: str
    status: int
    message: str = ""
    culprit: str = ""
    rank: int | None = None
    lines: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        """Write the report to a file. An unwritable file is ignored: it must not change how the run ends."""
        with suppress(OSError):
            path.write_text(json.dumps(asdict(self)), encoding="ascii")

    @classmethod
    def read(cls, path: Path) -> RunReport | None:
        """Return the report in a file; None if the launcher wrote none. Raises InternalError."""
        try:
            with path.open("rb") as file:
                data = file.read(RUN_REPORT_BYTES_MAX + 1)
        except FileNotFoundError:
            return None
        try:
            values = json.loads(data)
            return cls(**values | {"lines": tuple(values["lines"])})
        except (ValueError, TypeError, KeyError) as error:
            raise InternalError(f"the report on a run in {path} cannot be read: {error}") from None
