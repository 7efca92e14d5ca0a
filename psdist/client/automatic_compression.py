"""Measurements for ``compression="auto"``: the links to the servers, and encoding.

The speed of the links is the rate at which the servers of other hosts send this worker some slices, all at the same
time, while the other workers mostly do the same.

Not here: the choice (``psdist.compression.regions``).
"""

from __future__ import annotations

import logging
import time
from typing import Final

import numpy as np

from psdist.client.participation import Participation
from psdist.client.session.membership import drop_when_fenced, run_in_incarnation
from psdist.client.transport.buffers import PullTarget
from psdist.compression import Codec, Float32
from psdist.compression.regions import CANDIDATES, Choice, Region, choose
from psdist.off_loop import LARGE_ELEMENTS, off_loop

logger = logging.getLogger("psdist")

#: Limit of one server. On a slow link this takes a while.
_PROBE_ELEMENTS: Final = 1 << 20
#: A link that delivers the first slices faster is measured again: connections are slow at first.
_QUICK_SECONDS: Final = 0.05
#: Measurements; the fastest counts.
_PROBES: Final = 3
_ENCODED_ELEMENTS: Final = 1 << 18


async def choose_codec(part: Participation) -> Choice:
    """Choose a codec for one handle, and log why. Raises as ``Participation.open``."""
    # The worker rejoins later, and the others do not wait for another measurement.
    choice = await run_in_incarnation(lambda: _measure_and_choose(part), drop_when_fenced)
    if choice is None:
        choice = Choice(Float32(), "none: this worker was expelled while it measured the links")
    logger.info("compression of %r: %s", part.name, choice.reason)
    return choice


async def _measure_and_choose(part: Participation) -> Choice:
    remote, link = await _measure_links(part)
    speeds = await _measure_encoding(part.layout.total) if remote else {}
    return choose(part.layout, remote, link, speeds)


async def _measure_links(part: Participation) -> tuple[float, float]:
    """Return the fraction of elements on servers of other hosts, and bytes per second from all of them."""
    await part.open()
    slicing, remote = part.slicing, part.remote_slices()
    elements = sum(slicing.size(index) for slices in remote for index in slices)
    if not elements:
        return 0.0, 1.0
    count = max(1, _PROBE_ELEMENTS // slicing.slice_elements)
    probes = [index for slices in remote for index in slices[:count]]
    target = PullTarget(slicing, np.empty(slicing.total, np.float32))
    seconds: list[float] = []
    while not seconds or (len(seconds) < _PROBES and seconds[-1] < _QUICK_SECONDS):
        begin = time.perf_counter()
        await part.probe(probes, target)
        seconds.append(time.perf_counter() - begin)
    return elements / slicing.total, 4 * sum(slicing.size(index) for index in probes) / min(seconds)


async def _measure_encoding(elements: int) -> dict[Codec, float]:
    """Return, by codec, the bytes of float32 encoded per second. Empty until the kernels are compiled."""
    from psdist.compression import segments

    await segments.prepare_kernels(elements).loaded()
    return await off_loop(LARGE_ELEMENTS, _encoding_speeds)


def _encoding_speeds() -> dict[Codec, float]:
    from psdist.compression import segments

    if not all(kernel.is_compiled for kernel in segments.KERNELS):
        return {}
    values = np.random.default_rng(0).standard_normal(_ENCODED_ELEMENTS, np.float32)
    out, rest = np.empty(segments.payload_limit(values.size), np.uint8), np.empty_like(values)
    found = {}
    for codec in CANDIDATES:
        region, seconds = Region(0, values.size, codec, values.shape), []
        for _ in range(_PROBES):
            begin = time.perf_counter()
            prepared = segments.prepare(region, values, segments.PushNumber(0, 0))
            segments.encode([prepared], 0, values.size, out, rest)
            seconds.append(time.perf_counter() - begin)
        found[codec] = values.nbytes / min(seconds)
    return found
