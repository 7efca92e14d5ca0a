"""The host: the norm of a step."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

from psdist.types import Slicing
from psdist_server.holding import Holding
from psdist_server.host import Host
from psdist_server.norms import NormBoard


async def test_a_slice_that_is_aggregated_as_the_norm_becomes_known_is_not_forgotten() -> None:
    """After a promotion the squares of a step are known already, so each of its slices asks for the norm."""
    host = Host("server-0", "run", "", kernel_threads=1)
    loop, told = asyncio.get_running_loop(), list[float]()

    def norm_known(step: int, norm: float) -> None:
        if not told:  # Another slice is aggregated before anything else happens.
            loop.call_soon(host._share_norm, holding, step)
        told.append(norm)

    norms = NormBoard()
    norms.merge(3, {0: 9.0, 1: 16.0})
    entry = SimpleNamespace(spec=SimpleNamespace(name="p"))
    made = SimpleNamespace(entry=entry, slicing=Slicing(2, 1), norms=norms, norm_known=norm_known)
    holding = cast(Holding, made)
    host._holdings["p"] = holding
    host._share_norm(holding, 3)
    for _ in range(5):
        await asyncio.wait({asyncio.ensure_future(asyncio.sleep(0))})
    assert told == [5.0, 5.0]
    del host._holdings["p"]
    await host.close()
