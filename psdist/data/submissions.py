"""Samples that tasks submit one by one, and the batches that another task takes, within limits of time and memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from psdist.data.batch_machine import BatchMachine, Item, SampleGroup
from psdist.data.padding import Batch, length_of
from psdist.data.sample_source import ReadSample
from psdist.errors import ClosedError


class Submissions:
    """The submitted samples of one event loop.

    make: makes a batch of samples and a width.

    Invariant: at most ``capacity`` samples are held, waiting or in batches that nobody has taken.
    """

    def __init__(self, machine: BatchMachine, make: Callable[[list[ReadSample], int], Batch]) -> None:
        self._machine = machine
        self._make = make
        self._held: dict[int, ReadSample] = {}
        self._ready: deque[SampleGroup] = deque()
        self._numbers = 0
        self._has_ended = False
        self._changed = asyncio.Condition()

    async def submit(self, arrays: Mapping[str, NDArray[Any]]) -> int:
        """Add a sample, once there is room. Returns its number, from 0. Raises ClosedError after ``end``."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_ended or self._has_room)
            if self._has_ended:
                raise ClosedError("the DynamicBatcher takes no more samples: end() was called")
            read = ReadSample(self._numbers, self._numbers, length_of(arrays), arrays)
            groups = self._machine.add(Item(read.number, read.length, asyncio.get_running_loop().time()))
            self._numbers += 1
            self._held[read.number] = read
            self._ready += groups
            self._changed.notify_all()
            return read.number

    async def end(self) -> None:
        """Take no more samples: the waiting ones are the last batches."""
        async with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    async def take(self) -> Batch | None:
        """Return the next batch; None after the last one."""
        async with self._changed:
            while not self._ready:
                if self._has_ended:
                    self._ready += self._machine.flush()
                    if not self._ready:
                        return None
                elif not await self._wait():
                    self._ready += self._machine.on_time(asyncio.get_running_loop().time())
            group = self._ready.popleft()
            samples = [self._held.pop(number) for number in group.numbers]
            self._changed.notify_all()
        return self._make(samples, group.width)

    async def _wait(self) -> bool:
        """Wait for a change. Returns False once a group's time is over."""
        try:
            async with asyncio.timeout_at(self._machine.deadline):
                return await self._changed.wait()
        except TimeoutError:
            return False

    @property
    def _has_room(self) -> bool:
        # If no batch is ready, the sample that reaches the capacity ends one.
        return len(self._held) < self._machine.limits.capacity
