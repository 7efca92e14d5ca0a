"""``psdist status --watch``: its panels, and the application with keys, on made states of a run."""

from __future__ import annotations

import re
from typing import Any

import pytest
from rich.text import Text
from textual.app import App

from psdist.cli import status_panels as panels
from psdist.cli.status_app import PanelView, StatusApp
from psdist.cli.status_panels import RunView
from psdist.errors import SchedulerUnreachableError, UnauthenticatedError
from psdist.monitoring.problems import Watch
from psdist.monitoring.run_json import sample_json, status_json
from psdist.monitoring.run_state import POINTS
from psdist.v1 import scheduler_pb2 as pb

NOW = 1.7e9


def made_status(workers: int = 2, servers: int = 2) -> pb.GetStatusResponse:
    """Status of a run with a copy that lags, a snapshot under way, a wait, and more servers and workers than two."""
    report = pb.GetStatusResponse(run_id="digits", phase="training", epoch=9, replicas=2, time=NOW, uptime_seconds=75)
    for number in range(servers):
        member = report.members.add(member_id=f"server-{number}", role=pb.ROLE_SERVER, state="live")
        counted = member.statistics.parameters.add(parameters="model", version_min=41, version_max=41)
        counted.replicas.add(shard=number, server_id=f"server-{1 - number}", state="live", lag_updates=7 * number)
    for rank in range(workers):
        member = report.members.add(member_id=f"worker-{rank}", role=pb.ROLE_WORKER, rank=rank, state="live")
        member.rates.CopyFrom(pb.WorkerRates(seconds=10, waiting_seconds=rank, pushes={"model": 50}))
        member.connections.add(parameters="model", server_id="server-0", transport="tcp", reason="another host")
    one = report.parameters.add(state="ready", tensors=2)
    one.entry.spec.name, one.entry.spec.consistency.kind, one.entry.spec.optimizer.kind = "model", "bsp", "adam"
    for number in range(2):
        shard = one.entry.shards.add()
        shard.primary.server_id = f"server-{number}"
        shard.backups.add(server_id=f"server-{1 - number}")
    report.waiting_for.append("for server-9 to start")
    for number in range(40):
        report.events.add(number=number, time=NOW + number, kind="join", text=f"worker {number} joined")
    report.events[-1].kind, report.events[-1].text, report.events[-1].warning = "loss", "lost\x1b[31m worker-7", True
    report.snapshots.storage, report.snapshots.policy = "/data/digits", "every 10m"
    report.snapshots.committed.add(
        directory="0000-step-40", sequence=1, steps={"model": 40}, bytes=1 << 20, time=NOW - 90
    )
    report.snapshots.phase, report.snapshots.attempt = "writing", 2
    report.snapshots.bytes_done, report.snapshots.bytes = 1 << 19, 1 << 20
    return report


def made_samples(count: int = 10, workers: int = 2, slow: int = -1, first: int = 1) -> list[pb.RunSample]:
    """Samples in which the loss falls, and one worker computes while the others wait for it."""
    found = []
    for number in range(first, first + count):
        sample = pb.RunSample(number=number, time=NOW + number)
        for rank in range(workers):
            busy = 0.9 if slow in (-1, rank) else 0.2
            one = sample.workers.add(
                worker_id=f"worker-{rank}", seconds=1.0, compute_seconds=busy, wait_seconds=1 - busy,
                pushes={"model": 10}, reported={"loss": 1 / number}, samples_per_second=320,
            )  # fmt: skip
            one.traffic.add(transport="tcp", push_codec="int8", push_bytes=1 << 20, pull_bytes=2 << 20)
        sample.servers.add(server_id="server-0", seconds=1.0, slices_applied=640, apply_seconds=0.25)
        found.append(sample)
    return found


def with_problems(status: pb.GetStatusResponse, samples: list[pb.RunSample]) -> pb.GetStatusResponse:
    found = Watch().look(status_json(status), map(sample_json, samples), 1.5, status.time)
    status.problems.extend(pb.ProblemStatus(**one) for one in found)
    return status


def made_run(status: pb.GetStatusResponse | None = None, samples: list[pb.RunSample] | None = None) -> RunView:
    run, status = RunView(), made_status() if status is None else status
    samples = made_samples() if samples is None else samples
    run.add(with_problems(status, samples), samples)
    return run


def texts(panel: panels.Panel) -> list[str]:
    return [line.plain for line in (*panel.heads, *panel.rows)]


# --- panels -----------------------------------------------------------------------------------------------------------


def test_training_shows_the_loss_first_and_throughput_with_curves() -> None:
    head, sets, loss, curve, steps, _, samples, _ = texts(panels.training(made_run(), 80))
    assert head.startswith("parameters ") and sets.split()[:3] == ["model", "(adam,", "bsp)"]
    assert loss == "loss  0.1  0.1 to 1" and curve.startswith("█▄") and curve.endswith("▁") and len(curve) == 10
    assert steps.startswith("model  10.0 steps/s") and samples.startswith("samples  640 samples/s")


def test_sparklines() -> None:
    for values, columns, curve in [
        ([], 5, ""),
        ([0.0, 0.0], 5, "▁▁"),
        ([3.0], 5, "▄"),
        ([0.0, 7.0], 5, "▁█"),
        ([0.0, 2.0, 7.0, 7.0], 2, "▁█"),
    ]:
        assert panels.sparkline(values, columns) == curve


def test_a_straggler_has_a_sign_and_its_problem_a_sentence() -> None:
    run = made_run(made_status(workers=4), made_samples(workers=4, slow=2))
    lines = {line.split("  ")[0]: line for line in texts(panels.workers(run, 94))}
    assert "! worker-2" in lines and len([name for name in lines if name.startswith("!")]) == 1
    assert lines["! worker-2"].count("█") == 22 and lines["! worker-2"].count("░") == 2  # of 24 columns
    (sentence,) = (line.plain for line in panels.notices(run) if line.plain.startswith("! worker"))
    assert sentence.startswith("! worker worker-2 is slow: it computes for 90% of its time")
    even = made_run(made_status(workers=4), made_samples(workers=4))
    assert not [line for line in texts(panels.workers(even, 80)) if "!" in line]


def test_dead_and_silent_members_come_with_sign_and_reason() -> None:
    status = made_status(workers=3)
    status.members[2].heartbeat_age_seconds = 8
    status.members[4].state, status.members[4].reason = "lost", "killed by\nsignal 9"
    run = made_run(status)
    _, _, dead, silent, _ = texts(panels.workers(run, 80))
    assert re.match(r"! worker-2 +worker 2 +lost .* killed by signal 9$", dead)
    assert re.match(r"! worker-0 +worker 0 +live +8.0 s ago ", silent)
    assert any(line.plain.startswith("! worker worker-0 is silent for 8.0 s") for line in panels.notices(run))


def test_a_live_member_has_its_process() -> None:
    status = made_status(workers=2)
    status.members[3].pid = 4711
    shown = " ".join(texts(panels.overview(made_run(status), 200)))
    assert "  pid" in shown and "4711" in shown


def test_shards_show_copies_and_lag() -> None:
    lines = texts(panels.shards(made_run(), 200))
    assert [line.split() for line in lines[:3]] == [
        ["shards", "number", "primary", "copies", "behind"],
        ["model", "0", "server-0", "server-1"],
        ["model", "1", "server-1", "server-0", "7", "updates,", "0", "B"],
    ]
    assert re.match(r"server-0 +server +live .* 640 +25%$", lines[4])
    lost = made_status()
    lost.parameters[0].entry.shards[1].lost = True
    assert ["model", "1", "lost", "server-0", "7", "updates,", "0", "B"] in [
        line.split() for line in texts(panels.shards(made_run(lost), 80))
    ]


def test_transports_show_bytes_by_codec_and_reasons() -> None:
    lines = texts(panels.transports(made_run(), 80))
    assert lines[0].startswith("payload  6.0 MiB/s")
    assert [line.split() for line in lines[2:4]] == [
        ["transport", "push", "as", "pull", "as", "workers", "pushed", "pulled"],
        ["tcp", "int8", "none", "2", "2.0", "MiB/s", "4.0", "MiB/s"],
    ]
    assert [line.split()[:3] for line in lines[5:]] == [[f"worker-{rank}", "-", "server-0"] for rank in range(2)]
    assert all(line.endswith("another host") for line in lines[5:])


def test_events_are_newest_first() -> None:
    first, second, *_ = texts(panels.events(made_run(), 80))
    assert first.endswith("! loss        lost?[31m worker-7") and second.endswith("  join        worker 38 joined")


def test_texts_of_members_cannot_control_the_terminal() -> None:
    samples = made_samples()
    samples[-1].workers[0].traffic[0].push_codec = "int8\x1b[2J"
    run = made_run(samples=samples)
    assert not [text for name in panels.PANELS for text in texts(panels.PANELS[name](run, 80)) if "\x1b" in text]


def test_failed_snapshots_are_no_problem_once_one_is_committed() -> None:
    for failed_at, shown in ((NOW - 30, "! 3 snapshots given up"), (NOW - 120, "3 snapshots given up")):
        status = made_status()
        status.snapshots.failed, status.snapshots.last_failure = 3, "No space left on device"
        status.snapshots.last_failure_time = failed_at
        assert any(line.startswith(shown) for line in texts(panels.snapshots(made_run(status), 80)))


def test_snapshots_show_size_and_progress() -> None:
    lines = texts(panels.snapshots(made_run(), 80))
    assert lines[0] == "snapshots: every 10m, in /data/digits"
    assert lines[2].split()[:4] == ["0000-step-40", "40", "1.0", "MiB"]
    assert lines[3] == "… snapshot 2 under way: writing [############............] 512.0 KiB of 1.0 MiB"
    status = made_status()
    status.ClearField("snapshots")
    assert "no storage" in texts(panels.snapshots(made_run(status), 80))[0]


def test_the_first_panel_has_the_rows_of_the_others() -> None:
    rows = texts(panels.overview(made_run(), 80))
    for panel in (panels.shards, panels.snapshots):
        assert set(texts(panel(made_run(), 80))) <= set(rows)
    assert texts(panels.events(made_run(), 80))[:8] == rows[:-9:-1]


def test_a_filter_keeps_heads_and_says_that_nothing_matches() -> None:
    panel = panels.Panel([Text("head")], [Text("Alpha"), Text("beta")])
    assert [line.plain for line in panel.matching("ALPHA")] == ["head", "Alpha"]
    assert [line.plain for line in panel.matching("x")] == ["head", "none of 2 lines contains 'x'"]


def test_nothing_is_known_yet() -> None:
    for panel in panels.PANELS.values():
        assert not panel(RunView(), 80).rows
    assert panels.title(RunView())[0].plain == "no status yet" and panels.notices(RunView()) == []


def test_samples_are_bounded_and_restart_with_the_scheduler() -> None:
    run = made_run(samples=made_samples(POINTS + 50))
    assert len(run.activity.recent) == POINTS and run.activity.last_sample == POINTS + 50
    run.add(made_status(), made_samples(2))
    assert [point.time - NOW for point in run.activity.recent] == [1, 2]


# --- the application --------------------------------------------------------------------------------------------------


class Scheduler:
    """Answers the application; ``error`` is raised instead if it is set."""

    def __init__(self, status: pb.GetStatusResponse, samples: list[pb.RunSample]) -> None:
        self.status, self.samples = status, samples
        self.error: Exception | None = None

    async def ask(self, after: int) -> tuple[pb.GetStatusResponse, list[pb.RunSample]]:
        if self.error is not None:
            raise self.error
        return self.status, [each for each in self.samples if each.number > after]


def make(scheduler: Scheduler) -> StatusApp:
    """Return an application that asks only when a test says so, after its first answer."""
    return StatusApp(scheduler.ask, ask_seconds=1e6)


def screen_text(app: App[Any]) -> str:
    """Return the text on the terminal."""
    strips = app.screen._compositor.render_strips(app.screen.size)
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


def visible_panels(app: App[Any]) -> list[str | None]:
    return [view.id for view in app.screen.query(PanelView) if view.display]


async def test_keys_switch_panels_in_a_small_terminal() -> None:
    app = make(Scheduler(made_status(), made_samples()))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        shown = screen_text(app)
        assert shown.startswith("digits: training\nup 1 min 15 s, epoch 9, copies of each shard 2, 2 servers live, 2")
        assert "… waiting: for server-9 to start" in shown and "worker-0 " in shown
        assert all(len(line) <= 80 for line in shown.splitlines()) and visible_panels(app) == ["run"]
        for key, name, text in (
            ("2", "training", "loss  0.1"), ("3", "workers", "worker-1"), ("4", "shards", "primary"),
            ("5", "transports", "another host"), ("6", "events", "! loss"), ("7", "snapshots", "0000-step-40"),
            ("tab", "run", "worker-0"), ("shift+tab", "snapshots", "under way"),
        ):  # fmt: skip
            await pilot.press(key)
            await pilot.pause()
            assert visible_panels(app) == [name] and text in screen_text(app), (key, screen_text(app))


async def test_a_wide_terminal_shows_all_panels() -> None:
    app = make(Scheduler(made_status(), made_samples()))
    async with app.run_test(size=(200, 60)) as pilot:
        await pilot.pause()
        shown = screen_text(app)
        assert visible_panels(app) == list(panels.PANELS)[1:]
        for text in ("loss  0.1", "worker-1", "primary", "another host", "! loss", "0000-step-40"):
            assert text in shown, shown
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        assert visible_panels(app) == ["run"]


async def test_a_hundred_workers_scroll_and_can_be_filtered() -> None:
    samples = made_samples(workers=100, slow=77)
    app = make(Scheduler(with_problems(made_status(workers=100), samples), samples))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("3")
        await pilot.pause()
        assert "worker-0 " in screen_text(app) and "worker-99" not in screen_text(app)
        await pilot.press("end")
        await pilot.pause()
        assert "worker-99" in screen_text(app)
        await pilot.press("slash", *"gg")
        await pilot.pause()
        shown = screen_text(app)
        assert "worker-77" in shown and "worker-99" not in shown
        await pilot.press("enter")
        assert app.focused is not None and app.focused.id == "workers"
        await pilot.press("escape")
        await pilot.pause()
        assert "worker-0 " in screen_text(app)


async def test_a_silent_scheduler_leaves_the_last_state_below_a_notice() -> None:
    scheduler = Scheduler(made_status(), made_samples())
    app = make(scheduler)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        scheduler.error = SchedulerUnreachableError("no scheduler answers at 10.0.0.1:29600")
        await app.ask_again()
        await pilot.pause()
        shown = screen_text(app)
        assert re.match(r"! no answer for \d+ s: no scheduler answers at .*\ndigits: training\n", shown)
        assert "worker-0 " in shown
        scheduler.error = None
        scheduler.samples += made_samples(1, first=11)
        await app.ask_again()
        await pilot.pause()
        assert screen_text(app).startswith("digits: training") and app.view.activity.last_sample == 11


async def test_another_error_ends_it() -> None:
    scheduler = Scheduler(made_status(), made_samples())
    app = make(scheduler)
    async with app.run_test() as pilot:
        scheduler.error = UnauthenticatedError("the token is wrong")
        await app.ask_again()
        await pilot.pause()
    assert app.error is scheduler.error


async def test_help_opens_and_any_key_closes_it() -> None:
    app = make(Scheduler(made_status(), made_samples()))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("question_mark")
        await pilot.pause()
        assert "! a problem or a warning" in screen_text(app)
        await pilot.press("x")
        await pilot.pause()
        assert len(app.screen_stack) == 1


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
async def test_keys_quit(key: str) -> None:
    app = make(Scheduler(made_status(), made_samples()))
    async with app.run_test() as pilot:
        await pilot.press("slash" if key == "ctrl+c" else "1")
        await pilot.press(key)
    assert app.return_value == 0


async def test_no_color_leaves_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = make(Scheduler(made_status(), made_samples(workers=4, slow=1)))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("3")
        await pilot.pause()
        lines = app.screen._compositor.render_strips(app.screen.size)
        styles = [
            segment.style
            for line in lines
            for segment in line.apply_filter(app._filters[-1], app.screen.background_colors[1])
            if segment.style
        ]
        assert styles and all(style.color is None or style.color.is_default for style in styles)
