"""Status and samples of a made-up run."""

from __future__ import annotations

from typing import Any


def samples(*workers: dict[str, Any], busy: float = 0.0, count: int = 12) -> list[dict[str, Any]]:
    by_id = {f"worker-{rank}": worker for rank, worker in enumerate(workers)}
    server = {"seconds": 1.0, "apply_share": busy}
    return [
        {"number": n, "time": float(n), "workers": by_id, "servers": {"server-0": server}} for n in range(1, count + 1)
    ]


def status(workers: int, *, consistency: str = "bsp", threads: int = 1, cores: int = 4, backup: int = 0) -> Any:
    members = [{"id": f"worker-{rank}", "role": "worker", "state": "live"} for rank in range(workers)]
    server = {"id": "server-0", "role": "server", "state": "live", "kernel_threads": threads, "cores": cores}
    parameters = {
        "name": "model",
        "elements": 1_000_000,
        "consistency": consistency,
        "backup_workers": backup,
        "servers": [{"id": "server-0", "shards": 2}],
    }
    return {"members": [*members, server], "parameters": [parameters], "waiting_for": []}
