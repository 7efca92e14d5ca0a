"""Lists of the kernels to compile for segments.

A server needs ``DECODERS``; a client that compresses needs all of ``KERNELS``.
"""

from __future__ import annotations

from typing import Final

from psdist.compression.compiled import Kernel
from psdist.compression.segments import decoding, integers, low_rank, random_places, residuals, signs, sparse

#: Kernels behind ``check`` and ``accumulate``.
DECODERS: Final[tuple[Kernel, ...]] = decoding.KERNELS
#: All kernels of segments.
KERNELS: Final[tuple[Kernel, ...]] = (
    *(*DECODERS, *integers.KERNELS, *sparse.KERNELS, *signs.KERNELS, *random_places.KERNELS, *low_rank.KERNELS),
    *residuals.KERNELS,
)
