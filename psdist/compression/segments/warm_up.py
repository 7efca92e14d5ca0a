"""What is compiled for segments. A server needs ``DECODERS``; a client that compresses needs all of ``KERNELS``."""

from __future__ import annotations

from typing import Final

from psdist.compression.compiled import Kernel
from psdist.compression.segments import decoding, integers, residuals, sparse

#: ``check`` and ``accumulate``.
DECODERS: Final[tuple[Kernel, ...]] = decoding.KERNELS
#: All kernels of segments.
KERNELS: Final[tuple[Kernel, ...]] = (*DECODERS, *integers.KERNELS, *sparse.KERNELS, *residuals.KERNELS)
