"""The page of the dashboard in a browser: panels, themes, small screens, keyboard, and hostile names."""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from psdist.monitoring.dashboard import dashboard_link, saved_page, view_key
from psdist.monitoring.problems import Watch
from psdist.monitoring.run_json import sample_json, status_json
from psdist.monitoring.run_state import saved_run
from psdist.monitoring.run_summary import (
    EventPart,
    HistoryPart,
    MeanValue,
    Phases,
    Point,
    RunCurves,
    Summary,
    WorkerPart,
)
from psdist.security.tls import Credentials
from psdist.settings.config import DashboardEndpoint
from psdist.v1 import scheduler_pb2
from psdist_scheduler.dashboard import DashboardServer, Reading
from tests.support.dashboard_runs import advance, sample, status

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
pytestmark = [pytest.mark.long, pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium")]
KEY = view_key("secret", "made-up")
HOSTILE = "<script>document.title='broken'</script>"


class MadeUpRun:
    """A run with a hostile name for each kind of name, whose problems a test can make. Read in the server's thread."""

    def __init__(self, workers: int, servers: int, shards: int, slices: int) -> None:
        self.workers, self.servers = workers, servers
        self.status = status(workers, servers, shards, slices)
        self.status.run_id = f"run {HOSTILE}"
        self.status.events.add(number=101, time=1000.0, kind="note", text=HOSTILE, warning=True)
        self.status.waiting_for.append(f"waiting for {HOSTILE}")
        self._rng = random.Random(3)
        self._watch = Watch()

    def read(self, after: int) -> Reading:
        advance(self.status, self._rng)
        made = sample(after + 1, self.workers, self.servers, self._rng)
        for worker in made.workers:
            worker.reported[HOSTILE] = 1.0
        found = self._watch.look(status_json(self.status), [sample_json(made)], 0.5, self.status.time)
        del self.status.problems[:]
        self.status.problems.extend(scheduler_pb2.ProblemStatus(**one) for one in found)
        return Reading(self.status, [made], 0.0)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


class _Serving:
    """The dashboard of a made-up run, whose loop runs in a thread: the browser's driver needs this one."""

    def __init__(self, run: MadeUpRun, logs: Path | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

        async def start() -> DashboardServer:
            return DashboardServer(DashboardEndpoint("127.0.0.1", 0, Credentials("secret"), logs=logs), KEY, run.read)

        self._server = asyncio.run_coroutine_threadsafe(start(), self._loop).result()
        self.link = dashboard_link(self._server.address, KEY)

    def close(self) -> None:
        self._server.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


SMALL, LARGE = (8, 2, 8, 16), (100, 16, 64, 2000)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> MadeUpRun:
    return MadeUpRun(*getattr(request, "param", SMALL))


@pytest.fixture
def page(browser: Any, run: MadeUpRun) -> Iterator[Any]:
    """Yield an open page, which may log no error."""
    serving = _Serving(run)
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    found, errors = context.new_page(), []
    found.on("pageerror", lambda error: errors.append(str(error)))
    found.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    found.link, found.errors = serving.link, errors
    found.goto(serving.link)
    found.wait_for_selector(f"#workers tr:nth-child({run.workers})", timeout=60_000)
    try:
        yield found
    finally:
        context.close()
        serving.close()
    assert errors == []


#: Each look at the clock finds 10 ms gone, more than a frame may spend on panels. Counts the frames that show some.
_SLOW_BROWSER = """
let late = 0; const now = performance.now.bind(performance); performance.now = () => now() + (late += 10);
const request = requestAnimationFrame; window.frames_shown = 0;
requestAnimationFrame = (f) => request((t) => { window.frames_shown += f.name === "show"; f(t); });
"""


@contextmanager
def scripted_page(browser: Any, run: MadeUpRun, script: str, logs: Path | None = None) -> Iterator[Any]:
    """Yield an open page in which ``script`` ran before its own."""
    serving = _Serving(run, logs)
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    try:
        context.add_init_script(script)
        page = context.new_page()
        page.goto(serving.link)
        page.wait_for_selector(f"#workers tr:nth-child({run.workers})", timeout=60_000)
        yield page
    finally:
        context.close()
        serving.close()


def test_a_slow_browser_shows_its_panels_in_several_frames(browser: Any, run: MadeUpRun) -> None:
    with scripted_page(browser, run, _SLOW_BROWSER) as page:
        run.status.waiting_for.append("waiting for one that came late")
        page.wait_for_selector("text=one that came late", timeout=60_000)
        assert page.evaluate("window.frames_shown") >= 13  # Eleven panels of a state, and two of the next one.


@pytest.mark.parametrize("run", [LARGE], indirect=True)
def test_the_page_shows_a_large_run_and_takes_names_as_text(page: Any) -> None:
    assert "#" not in page.url and KEY not in page.url
    assert page.locator("#workers tr").count() == 100 and page.locator("#servers tr").count() == 16
    assert page.locator("#shards tbody tr").count() == 64
    assert "100 of 100 workers" in page.inner_text("#summary")
    # Not inner_text: panels outside the window are not rendered.
    assert HOSTILE in page.text_content("#events") and HOSTILE in page.text_content("#waits")
    assert HOSTILE in page.text_content("#metric") and HOSTILE in page.inner_text("h1")
    assert page.title() != "broken" and page.locator("main script").count() == 0
    assert page.locator("#chart-reported canvas").count() == 1


def test_problems_are_named_and_announced(page: Any, run: MadeUpRun) -> None:
    by_id = {member.member_id: member for member in run.status.members}
    by_id["worker-7"].state, by_id["worker-7"].reason = "lost", "killed"
    # Not wait_for_function: the page's policy forbids the eval by which that polls.
    page.locator("#live", has_text="worker-7 was lost: killed").wait_for(state="attached")
    assert "worker worker-7 was lost: killed" in page.inner_text("#problems")
    page.get_by_label("only those with problems").check()
    page.locator("#workers tr:only-child").wait_for()
    assert page.title().startswith("(1)")


#: Names of members that have more than one line, and parts that are wider than their place.
_CUT_OFF = """
[...document.querySelectorAll(".members tbody th")].filter((one) => {
  const range = document.createRange();
  range.selectNodeContents(one);
  return new Set([...range.getClientRects()].map((each) => Math.round(each.top / 8))).size > 1;
}).map((one) => one.textContent).concat(
  [...document.querySelectorAll(".scroll")].filter((one) => one.scrollWidth > one.clientWidth + 1)
    .map((one) => one.getAttribute("aria-labelledby") || one.getAttribute("aria-label")))
"""


#: Where the name of a flagged worker ends, and its remarks begin.
_NAME_AND_REMARKS = """
["th", "td.remarks"].map((one) => document.querySelector("#workers tr.bad " + one).getBoundingClientRect())
  .map((place, at) => at ? place.top : place.bottom)
"""


@pytest.mark.parametrize("width", [360, 768, 1280, 3840])
def test_no_screen_is_too_narrow(page: Any, run: MadeUpRun, width: int) -> None:
    for member in run.status.members:  # Each is flagged.
        member.draining = True
    page.locator("#workers tr.bad td.remarks", has_text="draining").first.wait_for(state="attached")
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(_CUT_OFF) == []
    bottom, top = page.evaluate(_NAME_AND_REMARKS)
    assert (top >= bottom - 1) == (width < 992), "remarks have a row of their own"


def test_the_version_of_a_set_is_said_once(page: Any, run: MadeUpRun) -> None:
    assert "model at version" in page.inner_text("#summary")
    run.status.phase = "training 'model' at version 7"
    page.locator("#summary", has_text="training 'model' at version 7").wait_for()
    assert page.inner_text("#summary").count("at version") == 1


def test_a_click_on_a_member_shows_its_log(browser: Any, run: MadeUpRun, tmp_path: Path) -> None:
    (tmp_path / "worker-1.log").write_text(f"step 1\n{HOSTILE}\n")
    with scripted_page(browser, run, "", tmp_path) as page:
        page.get_by_role("button", name="worker-1", exact=True).click()
        page.locator("#log-lines", has_text=HOSTILE).wait_for()
        assert page.title() != "broken"
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Log of the scheduler").click()
        page.locator("#log-lines", has_text="scheduler has written no line").wait_for()


def test_themes_follow_the_browser_and_the_button(page: Any) -> None:
    def back() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    page.emulate_media(color_scheme="dark")
    dark = back()
    page.emulate_media(color_scheme="light")
    assert back() != dark
    button = page.get_by_role("button", name="Theme")
    button.click()
    button.click()
    assert back() == dark and "dark" in button.inner_text()
    page.reload()
    assert back() == dark


def test_keyboard_and_screen_readers_find_everything(page: Any) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    names = page.locator("main section").evaluate_all(
        "all => all.map(one => document.getElementById(one.getAttribute('aria-labelledby')).textContent)"
    )
    assert len(names) == 10 and all(names)
    for region in page.locator(".scroll").all():
        assert region.get_attribute("tabindex") == "0"
    bar = page.locator("#workers .bar").first
    assert bar.get_attribute("role") == "img" and "compute" in bar.get_attribute("aria-label")
    assert page.locator("th:not([scope])").count() == 0


def test_without_the_key_the_page_asks_for_the_token(page: Any) -> None:
    page.context.clear_cookies()
    page.clock.install()
    page.goto("about:blank")
    page.goto(page.link.partition("#")[0])
    page.get_by_label("Token of the run").fill("wrong")
    page.get_by_role("button", name="Open").click()
    page.locator("#login-error", has_text="not the token").wait_for()
    page.clock.fast_forward(10_000)
    assert page.inner_text("#connection") == "locked"
    page.get_by_label("Token of the run").fill("secret")
    page.get_by_role("button", name="Open").click()
    page.wait_for_selector(f"#workers tr:nth-child({SMALL[0]})", timeout=60_000)
    assert page.get_by_label("Token of the run").is_hidden()
    assert all("401 (Unauthorized)" in error for error in page.errors)
    page.errors.clear()


#: Keeps the messages of the server, so that they can be sent again.
_RECORDED = """
const Source = EventSource; window.received = [];
EventSource = class extends Source {
  constructor(...rest) {
    super(...rest); window.source = this;
    this.addEventListener("message", (event) => received.push(event.data));
  }
};
"""
#: Replays the recorded changes, two a second for so many seconds from a time on, with a frame for each two minutes.
_REPLAY = """
async ([from, seconds]) => {
  const changes = received.map((data) => JSON.parse(data)).filter((one) => one.change);
  const point = changes.flatMap((one) => one.points || []).at(-1);
  for (let at = 0; at < 2 * seconds; at += 1) {
    const message = { ...changes[at % changes.length], time: from + at / 2, points: [] };
    if (at % 2) message.points.push({ ...structuredClone(point), time: from + at / 2 });
    source.onmessage({ data: JSON.stringify(message) });
    if (at % 240 === 239) await new Promise(requestAnimationFrame);
  }
}
"""


def test_a_report_is_the_same_page_and_runs_no_other_script(browser: Any, tmp_path: Path) -> None:
    reported = {HOSTILE: MeanValue(0.5, 1.0)}
    points = [Point(1e9 + n, 1.0, {HOSTILE: 3.0}, 64.0, 5e6, reported) for n in range(20)]
    summary = Summary(
        run_id=f"run {HOSTILE}", state="ended", started=1e9, written=1e9 + 20, curves=RunCurves(1.0, points),
        workers={HOSTILE: WorkerPart(Phases(3.0, 1.0), 60.0, 1.0, 5e6, 5e6)},
        history=HistoryPart(7, [EventPart(1, 1e9, "loss", True, HOSTILE)]), environment={"processor": HOSTILE},
    )  # fmt: skip
    file = tmp_path / "run.html"
    file.write_text(saved_page(saved_run(summary)))
    page, errors = browser.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: errors.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(file.as_uri())
    page.wait_for_selector("#chart-rate canvas")
    assert page.inner_text("#connection").startswith("saved ")
    assert HOSTILE in page.text_content("#workers") and "60 pushes, 1 dropped" in page.text_content("#workers")
    assert HOSTILE in page.text_content("#events") and "7 older events not shown" in page.text_content("main")
    assert HOSTILE in page.text_content("#facts") and HOSTILE in page.inner_text("h1") and page.title() != "broken"
    assert page.locator("#traffic").is_hidden() and page.locator("#facts").is_visible()
    assert page.locator("#workers .bar").first.get_attribute("aria-label").startswith("compute 75 %")
    page.close()
    assert errors == []


def test_a_page_that_is_open_for_a_day_does_not_grow(browser: Any, run: MadeUpRun) -> None:
    with scripted_page(browser, run, _RECORDED) as page:
        for number in range(5):  # Members and events come and go.
            run.status.events.add(number=200 + number, time=1100.0, kind="note", text=f"event {number} of the day")
            del run.status.events[0]
            run.status.members[0].member_id = f"successor-{number}"
            page.wait_for_selector(f"text=event {number} of the day", timeout=60_000)
            page.wait_for_selector(f"text=successor-{number}", timeout=60_000)
        page.evaluate("source.close()")
        session = page.context.new_cdp_session(page)
        sizes = []
        for hours in (1, 23):
            page.evaluate(_REPLAY, [2000.0 + 3600 * (hours > 1), 3600 * hours])
            session.send("HeapProfiler.collectGarbage")
            used = session.send("Runtime.getHeapUsage")["usedSize"]
            sizes.append((used, page.evaluate("document.querySelectorAll('*').length")))
    (used, nodes), (used_later, nodes_later) = sizes
    assert used_later < used + 1_000_000, sizes
    assert nodes_later <= nodes + 50, sizes
