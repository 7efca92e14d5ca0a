"""psdist's own worker process in the benchmarks; ``psdist run`` starts it, scheduler and servers.

Roles: ``""`` makes steps with ``psdist.Client``, overlapped with an emulated backward pass if ``compute_ms`` is set;
``async`` makes them with ``psdist.AsyncClient`` in an asyncio program.
"""

from __future__ import annotations

import asyncio
import time

import psdist
from benchmarks import emulation, turns
from benchmarks.codec_choice import CODECS
from benchmarks.psdist_step import BenchSettings, StepBench, vary


def bench_settings(settings: turns.Settings) -> BenchSettings:
    """Return psdist's part of the settings."""
    return BenchSettings(
        params=settings.params,
        wire_dtype=settings.wire_dtype,
        consistency=settings.consistency,
        optimizer=settings.optimizer,
        copy=settings.copy,
        layer_elements=settings.layer_elements,
        slice_elements=settings.slice_elements,
        compression=CODECS.get(settings.codec, settings.codec),
        pull_compression=CODECS.get(settings.pull_codec, settings.pull_codec),
    )


class OverlappedBench(StepBench):
    """Steps whose gradients become ready bucket by bucket, a tensor each, the last layers first."""

    def __init__(self, client: psdist.Client, settings: turns.Settings) -> None:
        super().__init__(client, bench_settings(settings))
        self.names = list(self.gradients)[::-1]
        self.schedule = emulation.Schedule(settings.compute_ms / 1e3, len(self.names))

    def step(self) -> None:
        """Make one step: push each tensor as it becomes ready, beside the rest of the backward pass."""
        vary(self.gradients)
        begin = time.perf_counter()
        handles = []
        for name, ready in zip(self.names, self.schedule.ready_seconds, strict=True):
            emulation.compute_until(begin + ready)
            handles.append(self.parameters.push_pull_async([name]))
        for handle in handles:
            handle.wait()


def main() -> None:
    """Take turns until the benchmark ends."""
    settings = turns.settings()
    if settings.role == "async":
        asyncio.run(_main_async(settings))
        return
    with psdist.Client() as client:
        bench = (
            OverlappedBench(client, settings) if settings.compute_ms else StepBench(client, bench_settings(settings))
        )
        bench.step()
        facts = {"transports": bench.parameters.statistics().transports}
        turns.serve(lambda steps: turns.timed(bench.step, steps), facts)


async def _main_async(settings: turns.Settings) -> None:
    """Take turns in a thread, because a client's loop must never be blocked."""
    own = bench_settings(settings)
    async with psdist.AsyncClient() as client:
        parameters = await client.parameters(**own.arguments())
        gradients = own.gradients(None if own.copy else await parameters.gradient_buffers(), client.rank)

        async def turn(steps: int) -> list[float]:
            times = []
            for _ in range(steps):
                vary(gradients)
                begin = time.perf_counter()
                await parameters.push_pull(gradients, copy=own.copy)
                times.append(time.perf_counter() - begin)
            return times

        await turn(1)
        loop = asyncio.get_running_loop()
        facts = {"transports": parameters.statistics().transports}
        await asyncio.to_thread(
            turns.serve, lambda steps: asyncio.run_coroutine_threadsafe(turn(steps), loop).result(), facts
        )


if __name__ == "__main__":
    main()
