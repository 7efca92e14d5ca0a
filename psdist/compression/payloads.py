"""Casts of 16-bit payloads on the client: numpy's until numba is loaded, then those of ``psdist.compression.casts``.

numba takes half a second to import, while a client must not miss heartbeats. So a thread loads it from the first use of
a 16-bit dtype on. The first time on a machine another process compiles (``background_compiler``), and numpy is used
until then. Both ways give the same bytes; if numba cannot be loaded, numpy is used on. A client that uses float32 only
never loads numba.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psdist.compression import numpy_casts

_Cast = Callable[[NDArray[Any], NDArray[Any]], None]

logger = logging.getLogger("psdist")


class Casts:
    """Both casts: those of numpy until ``load`` has returned faster ones."""

    def __init__(self, load: Callable[[], tuple[_Cast, _Cast]]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._loading: threading.Thread | None = None
        self._narrow: _Cast = numpy_casts.narrow
        self._widen: _Cast = numpy_casts.widen

    def narrow(self, values: NDArray[np.float32], out: NDArray[Any]) -> None:
        """Writes float32[n] ``values`` to float16[n] or bfloat16[n] ``out``, rounded to nearest, ties to even."""
        self.prepare()
        self._narrow(values, out)

    def widen(self, values: NDArray[Any], out: NDArray[np.float32]) -> None:
        """Writes float16[n] or bfloat16[n] ``values`` to float32[n] ``out``, exactly."""
        self.prepare()
        self._widen(values, out)

    def prepare(self) -> threading.Thread:
        """Begins to load, once. Returns the loading thread."""
        with self._lock:
            if self._loading is None:
                # Not a daemon: at exit the interpreter must wait for the import, which would crash otherwise.
                self._loading = threading.Thread(target=self._run, name="psdist-compile")
                self._loading.start()
            return self._loading

    def _run(self) -> None:
        try:
            self._narrow, self._widen = self._load()
        except Exception as error:  # Whatever failed, numpy's casts work.
            logger.info("16-bit payloads are cast by numpy: %r", error)


def _load_compiled() -> tuple[_Cast, _Cast]:
    from psdist.compression import casts
    from psdist.compression.background_compiler import of_workers

    of_workers().begin(casts.KERNELS, "16-bit payloads")
    return casts.narrow, casts.widen


_casts = Casts(_load_compiled)
narrow, widen, prepare = _casts.narrow, _casts.widen, _casts.prepare
