"""Runs that resume from a snapshot with other settings: the exact bytes of a numpy reference that changes them at that
step. If asked, another optimizer starts with fresh state; later snapshots, a server that takes over, and a run that is
rolled back must know this. Real processes."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psdist import AsyncClient, AsyncParameters, load_snapshot, optim
from psdist.consistency import ASP, BSP, Consistency
from psdist.errors import SettingsMismatchError
from psdist.launcher.embedded import EmbeddedCluster
from psdist.optim import Optimizer
from tests.support import reference
from tests.support.clients import cluster_of
from tests.support.exact_runs import SLICE, Reference, gradient, initial, joined, split
from tests.support.launched import Run

WORKERS = 2
RUN_ID = "changed"


@asynccontextmanager
async def life(storage: Path, workers: int = WORKERS, **settings: Any) -> AsyncIterator[Life]:
    """One life of the run: a cluster of its own, and its workers."""
    async with cluster_of(*["auto"] * workers, storage=storage, run_id=RUN_ID, **({"servers": 2} | settings)) as run:
        yield Life(*run)


class Life:
    """Running cluster with its clients."""

    def __init__(self, cluster: EmbeddedCluster, clients: list[AsyncClient]) -> None:
        self.cluster = cluster
        self.clients = clients

    async def open(
        self, name: str, spec: Optimizer, consistency: Consistency | None = None, **settings: Any
    ) -> list[AsyncParameters]:
        """Create the parameters in all workers. Raises the refusal of any of them."""
        given = split(initial())
        return await asyncio.gather(
            *(
                client.parameters(name, given, spec, consistency or BSP(), slice_elements=SLICE, **settings)
                for client in self.clients
            )
        )

    async def train(self, handles: list[AsyncParameters], expected: Reference, steps: int = 1) -> None:
        """Make steps and compare each with the reference."""
        for _ in range(steps):
            step = handles[0].step
            assert step == expected.step
            results = await asyncio.gather(
                *(handle.push_pull(split(gradient(step, rank))) for rank, handle in enumerate(handles))
            )
            wanted = expected.train()
            assert [joined(result) for result in results] == [wanted] * len(handles), f"step {step}"

    async def save(self) -> None:
        """Take a snapshot at the step that all workers have reached."""
        await asyncio.gather(*(client.snapshot(timeout=60) for client in self.clients))

    async def events(self) -> list[str]:
        """Return the events that ``psdist status`` reports."""
        return [event.text for event in (await self.clients[0].status()).events]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the workers' log messages about settings, and clear the log."""
    found = [record.getMessage() for record in caplog.records if "resumes from snapshot" in record.getMessage()]
    caplog.clear()
    return found


#: Settings before and after; the state is kept. Every possible change is made together.
CHANGED: dict[str, tuple[Optimizer, Optimizer]] = {
    "sgd": (
        optim.SGD(lr=0.1, momentum=0.9),
        optim.SGD(lr=0.05, momentum=0.5, dampening=0.2, weight_decay=0.1, schedule=optim.Cosine(9, warmup_steps=3)),
    ),
    "adam": (
        optim.Adam(lr=1e-2, max_grad_norm=1.0),
        optim.Adam(lr=1e-3, betas=(0.8, 0.99), eps=1e-4, overrides=(optim.override("w*", lr=0.1, beta1=0.5),)),
    ),
    "ftrl": (optim.FTRL(lr=0.1, l1=0.01), optim.FTRL(lr=0.2, l1=0.1, l2=0.1, beta=0.5, max_grad_norm=0.5)),
}


async def test_other_settings_give_the_bytes_of_the_reference_that_changes_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = {name: Reference(before) for name, (before, _) in CHANGED.items()}
    async with life(tmp_path / "storage") as run:
        for name, (before, _) in CHANGED.items():
            await run.train(await run.open(name, before), expected[name], 2)
        await run.save()
    assert told(caplog) == []
    async with life(tmp_path / "storage", servers=3) as run:
        for name, (_, after) in CHANGED.items():
            expected[name].change(after)
            handles = await run.open(name, after, non_finite="skip")
            lines = told(caplog)
            assert len(lines) == WORKERS and len(set(lines)) == 1, "each worker says it once"
            assert "non_finite 'reject' -> 'skip'" in lines[0] and lines[0] in await run.events()
            await run.train(handles, expected[name], 2)
        assert "lr 0.01 -> 0.001; betas (0.9, 0.999) -> (0.8, 0.99)" in "".join(await run.events())
        await run.save()
    async with life(tmp_path / "storage") as run:
        for name, (_, after) in CHANGED.items():
            await run.train(await run.open(name, after, non_finite="skip"), expected[name])
        assert told(caplog) == [], "nothing has changed since the newest snapshot"


async def test_another_optimizer_begins_its_state_anew_and_keeps_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = optim.SGD(lr=0.1), optim.Adam(lr=1e-2, schedule=optim.Step(3, 0.5))
    expected = Reference(before)
    async with life(tmp_path / "storage") as run:
        await run.train(await run.open("p", before, reset_optimizer=True), expected, 2)
        await run.save()
    async with life(tmp_path / "storage", servers=3, replicas=2) as run:
        with pytest.raises(
            SettingsMismatchError, match=r"optimizer SGD\(lr=0.1\) -> Adam\(lr=0.01\).*reset_optimizer=True"
        ):
            await run.open("p", after)
        assert told(caplog) == []
        handles = await run.open("p", after, reset_optimizer=True)
        lines = told(caplog)
        assert len(lines) == WORKERS and "the optimizer's state is reset" in lines[0]
        expected.begin(after)
        await run.train(handles, expected, 2)
        run.cluster.processes[-1].kill()  # A server: the one that takes over counts from the reset, too.
        await run.train(handles, expected, 2)
        assert {handle.statistics().dropped for handle in handles} == {0}
        await run.save()
    async with life(tmp_path / "storage") as run:
        await run.train(await run.open("p", after), expected)
        assert told(caplog) == []
        await run.save()
    found = load_snapshot(str(tmp_path / "storage"), parameters="p")
    assert b"".join(found[name].tobytes() for name in split(initial())) == expected.weights.tobytes()
    async with life(tmp_path / "storage") as run:
        handles = await run.open("p", after, reset_optimizer=True)
        assert "and the optimizer's state is reset" in told(caplog)[0]
        expected.begin(after)
        await run.train(handles, expected)


@pytest.mark.long
async def test_steps_and_none_in_turn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Check BSP, then ASP by one worker, then BSP again with the state kept, then ASP with another optimizer."""
    adam, lion = optim.Adam(lr=1e-2), optim.Lion(lr=1e-3)
    expected = Reference(adam, workers=1)
    turns: list[tuple[Optimizer, Consistency, bool]] = [
        (adam, BSP(), False),
        (adam, ASP(), False),
        (adam, BSP(), False),
        (lion, ASP(), True),
    ]
    for spec, consistency, resets in turns:
        async with life(tmp_path / "storage", workers=1) as run:
            (handle,) = await run.open("p", spec, consistency, reset_optimizer=resets)
            if resets:
                expected.begin(spec)
            for _ in range(2):
                values = await handle.push_pull(split(gradient(expected.step, 0)))
                assert joined(values) == expected.train(), f"{consistency}, step {expected.step}"
            await run.save()
    assert [line.split("settings: ")[1].split(",")[0] for line in told(caplog)] == [
        "consistency BSP() -> ASP()",
        "consistency ASP() -> BSP()",
        "optimizer Adam(lr=0.01) -> Lion(lr=0.001); consistency BSP() -> ASP()",
    ]


# --- psdist run: long, since the tests above show the same without the launcher ---------------------------------------

_SCRIPT = """
import json
import pathlib
import sys

import numpy as np

import psdist

run = psdist.init()
kind, settings, reset, steps = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "reset", int(sys.argv[4])
optimizer = getattr(psdist.optim, kind)(**settings)
initial = {"w": np.zeros(20_000, np.float32)}
weights = run.client.parameters("p", initial, optimizer, slice_elements=4096, reset_optimizer=reset)
print(f"rank {run.rank} begins at {weights.step}", flush=True)
told = False
while weights.step < steps:
    gradient = np.random.default_rng([weights.step, run.rank]).standard_normal(20_000).astype(np.float32)
    weights.push_pull({"w": gradient})
    while weights.step == 8 and not pathlib.Path("go").exists():
        weights.pull()
        if not told:
            print(f"rank {run.rank} waits", flush=True)
            told = True
if run.rank == 0:
    np.save("result.npy", weights.pull()["w"])
"""


class Script:
    """Return the script's weights, computed in plain numpy."""

    def __init__(self, spec: Optimizer) -> None:
        self.weights, self.step = np.zeros(20_000, np.float32), 0
        self.begin(spec)

    def begin(self, spec: Optimizer) -> None:
        self.spec, self.since = spec, self.step
        self.states = tuple(np.zeros_like(self.weights) for _ in spec.state_names)

    def train(self, until: int) -> bytes:
        mean = np.empty_like(self.weights)
        for step in range(self.step, until):
            parts = [np.random.default_rng([step, rank]).standard_normal(20_000) for rank in range(WORKERS)]
            reference.combine(mean, [part.astype(np.float32) for part in parts], WORKERS)
            reference.update(self.spec, self.spec.values(), self.weights, self.states, mean, step, 1.0, self.since)
        self.step = until
        return self.weights.tobytes()


class Commands:
    """Consecutive runs of the script by one command."""

    def __init__(self, path: Path, runs: list[Run]) -> None:
        self.path = path
        self.runs = runs

    def start(self, kind: str, settings: dict[str, Any], reset: str, steps: int) -> Run:
        arguments = (kind, json.dumps(settings), reset, str(steps))
        run = Run(self.path, _SCRIPT, *arguments, flags=("--storage-path", "storage", "--run-id", RUN_ID))
        self.runs.append(run)
        return run

    def result(self) -> bytes:
        return np.load(self.path / "result.npy").tobytes()


@pytest.mark.long
def test_what_a_user_of_psdist_run_sees_of_a_reset(tmp_path: Path, runs: list[Run]) -> None:
    """Check that another optimizer is refused and then reset, by the same command. The run then returns to a step
    before the reset, because a server is lost."""
    started = Commands(tmp_path, runs)
    expected = Script(optim.SGD(lr=0.1))
    status, text = started.start("SGD", {"lr": 0.1}, "", 6).end()
    assert status == 0, text
    assert started.result() == expected.train(6)

    status, text = started.start("Adam", {"lr": 0.01}, "", 12).end()
    assert status != 0 and "SettingsMismatchError" in text and "pass reset_optimizer=True" in text, text

    run = started.start("Adam", {"lr": 0.01}, "reset", 12)
    run.until("begins at 6", count=2)
    run.until("rank . waits", count=2)
    run.child("psdist_server").send_signal(signal.SIGKILL)
    run.until("state is reset", count=WORKERS)
    (tmp_path / "go").touch()
    status, text = run.end()
    text = "".join(run.seen) + text
    assert status == 0 and "back to" in text, text
    expected.begin(optim.Adam(lr=0.01))
    assert started.result() == expected.train(12)
