"""Observation of the contributions that servers hold for an incomplete step."""

from __future__ import annotations

import asyncio

from psdist import AsyncClient


async def until_pushed(client: AsyncClient, name: str) -> None:
    """Wait until two servers have reported that they hold contributions."""
    async with asyncio.timeout(60):
        counted: list[int] = []
        while len(counted) < 2 or not all(counted):
            report = await client.status()
            counted = [
                sum(worker.pushes for worker in one.workers)
                for server in report.members
                for one in server.statistics.parameters
                if one.parameters == name
            ]
            # Heartbeats report it every 2.5 s.
            await client.session.membership.view.changed(0.1)
