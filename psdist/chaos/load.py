"""Background load: processes that keep the cores of this machine busy during a chaos run."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType
from typing import Final, Self

from psdist.cgroups import usable_cores
from psdist.launcher.process import ReaperProcess

_BUSY: Final = (sys.executable, "-I", "-S", "-c", "while True: pass")


class BackgroundLoad:
    """Context manager that runs ``per_core`` busy processes for each core. A reaper ends them if this process dies."""

    def __init__(self, per_core: int) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._count = per_core * usable_cores()

    def __enter__(self) -> Self:
        if self._count:
            self._reaper = ReaperProcess()
        for _ in range(self._count):
            process = subprocess.Popen(_BUSY, stdin=subprocess.DEVNULL, start_new_session=True)
            self.processes.append(process)
            self._reaper.add(process.pid)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes; a second call has no effect."""
        processes, self.processes = self.processes, []
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        if processes:
            self._reaper.close()
