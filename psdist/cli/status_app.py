"""The textual application of ``psdist status --watch``: shows panels, takes keys, and asks for the run every second.

On a wide terminal all panels but the first are shown, on a narrow one the chosen panel. Colours are the terminal's own;
with NO_COLOR there are none.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import ClassVar, Final

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from psdist.cli import status_panels as panels
from psdist.cli.status_panels import RunView
from psdist.errors import PsdistError, SchedulerUnreachableError
from psdist.settings.exit_codes import OK, SIGNAL_BASE
from psdist.v1 import scheduler_pb2 as pb

_ASK_SECONDS: Final = 1.0

KEYS: Final = (
    ("1 to 7", f"show {', '.join(panels.PANELS)}"),
    ("tab, shift+tab", "the next panel, the previous panel; w: problems and waits"),
    ("up, down, page, home, end", "scroll (or k and j)"),
    ("/", "show only lines that contain some words; escape shows all"),
    ("?", "this help"),
    ("q, ctrl+c", "quit"),
)
_SIGNS: Final = "! a problem or a warning; … waiting or under way"

#: Asks for the status, and for the samples after a number. Raises PsdistError.
Ask = Callable[[int], Awaitable[tuple[pb.GetStatusResponse, Sequence[pb.RunSample]]]]


class PanelView(VerticalScroll):
    """One panel, which scrolls."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", show=False),
        Binding("k", "scroll_up", show=False),
    ]

    def __init__(self, name: str, number: int) -> None:
        super().__init__(id=name, classes="panel")
        self.border_title = f"{number} {name}"
        self._lines = Static(expand=True)

    def compose(self) -> ComposeResult:
        yield self._lines

    def show(self, run: RunView, words: str) -> None:
        """Show the panel of this run. words: only rows that contain them."""
        # Before its first layout a panel has no width.
        width = (self.scrollable_content_region.width or self.app.size.width) - 1
        self._lines.update(_joined(panels.PANELS[str(self.id)](run, width).matching(words)))


class HelpScreen(ModalScreen[None]):
    """The keys and signs; any key closes it."""

    def compose(self) -> ComposeResult:
        keys = [Text.assemble((f"{keys:<28}", "bold"), meaning) for keys, meaning in KEYS]
        yield Static(_joined([Text("psdist status --watch", "bold"), Text(), *keys, Text(), Text(_SIGNS)]), id="help")

    def on_key(self, event: events.Key) -> None:
        """Close it."""
        event.stop()
        self.dismiss()


class StatusApp(App[int]):
    """The screen of one run. ``return_value`` is the exit status."""

    TITLE = "psdist status"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (160, "-wide")]  # noqa: RUF012 - textual declares it so
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    #title { height: auto; max-height: 4; }
    #tabs { height: 1; }
    #waits { height: auto; max-height: 4; }
    #waits.hidden { display: none; }
    #waits:focus { border-left: thick ansi_yellow; }
    #panels { height: 1fr; layout: vertical; }
    .panel { border: round ansi_bright_black; height: 1fr; scrollbar-size-vertical: 1; }
    .panel:focus { border: heavy ansi_blue; }
    .-narrow .panel { display: none; }
    .-narrow .panel.chosen { display: block; }
    .-wide #panels { layout: grid; grid-size: 2 3; }
    .-wide #tabs { display: none; }
    .-wide #run { display: none; }
    #filter { dock: bottom; height: 1; border: none; padding: 0; background: ansi_default; }
    #filter.hidden { display: none; }
    #keys { dock: bottom; height: 1; }
    HelpScreen { align: center middle; }
    #help { width: 78; max-width: 100%; height: auto; border: round ansi_blue; padding: 0 1; background: ansi_default; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit_status", "quit"),
        Binding("ctrl+c", "quit_status", priority=True, show=False),
        Binding("ctrl+q", "quit_status", priority=True, show=False),
        Binding("question_mark,h", "show_help", "help"),
        Binding("slash", "filter", "filter"),
        Binding("escape", "clear_filter", show=False),
        Binding("w", "waits", show=False),
        Binding("tab", "turn(1)", show=False, priority=True),
        Binding("shift+tab", "turn(-1)", show=False, priority=True),
        *(Binding(str(number), f"choose({name!r})", name) for number, name in enumerate(panels.PANELS, 1)),
    ]

    def __init__(self, ask: Ask, ask_seconds: float = _ASK_SECONDS) -> None:
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self.view = RunView()
        self.error: PsdistError | None = None
        self._ask = ask
        self._ask_seconds = ask_seconds
        self._answered = 0.0
        self._chosen = next(iter(panels.PANELS))
        self._words = ""

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        yield Static(id="tabs")
        with VerticalScroll(id="waits", classes="hidden"):
            yield Static(id="wait-lines")
        with Grid(id="panels"):
            for number, name in enumerate(panels.PANELS, 1):
                yield PanelView(name, number)
        yield Input(placeholder="show lines with ...", id="filter", classes="hidden", compact=True)
        yield Static("1-7 panel  tab next  / filter  ? help  q quit", id="keys")

    async def on_mount(self) -> None:
        """Show the first status, and begin to ask for newer ones."""
        loop = asyncio.get_running_loop()
        self._answered = loop.time()
        if not self.is_headless:
            loop.add_signal_handler(signal.SIGTERM, self.exit, SIGNAL_BASE + signal.SIGTERM)
            loop.add_signal_handler(signal.SIGINT, self.exit, OK)
        self.action_choose(self._chosen)
        self.run_worker(self._follow(), exit_on_error=True)

    async def _follow(self) -> None:
        while True:
            await self.ask_again()
            await asyncio.sleep(self._ask_seconds)

    async def ask_again(self) -> None:
        """Ask once and show the answer. If the scheduler does not answer it may be restarting: the last state stays,
        below a notice. Any other error ends the application."""
        now = asyncio.get_running_loop().time
        try:
            answer = await self._ask(self.view.activity.last_sample)
        except SchedulerUnreachableError as error:
            self.view.trouble = f"no answer for {now() - self._answered:.0f} s: {error}"
        except PsdistError as error:
            self.error = error
            self.exit()
            return
        else:
            self._answered = now()
            self.view.add(*answer)
        self._show()

    def on_resize(self) -> None:
        """Draw again: curves and bars depend on the width."""
        self.call_after_refresh(self._show)

    def _show(self) -> None:
        run, found = self.view, panels.notices(self.view)
        self.query_one("#title", Static).update(_joined(panels.title(run)))
        self.query_one("#tabs", Static).update(self._tabs())
        self.query_one("#waits").set_class(not found, "hidden")
        self.query_one("#wait-lines", Static).update(_joined(found))
        for view in self.query(PanelView):
            if view.display:
                view.show(run, self._words)

    def _tabs(self) -> Text:
        line = Text()
        for number, name in enumerate(panels.PANELS, 1):
            line.append(f" {number} {name} ", "reverse" if name == self._chosen else "")
        return line

    # --- keys ---------------------------------------------------------------------------------------------------------

    def action_choose(self, name: str) -> None:
        """Show one panel, and let keys scroll it."""
        self._chosen = name
        for view in self.query(PanelView):
            view.set_class(view.id == name, "chosen")
        self.query_one(f"#{name}", PanelView).focus()
        self._show()

    def action_turn(self, count: int) -> None:
        """Show the panel that is ``count`` after the chosen one."""
        names = list(panels.PANELS)
        self.action_choose(names[(names.index(self._chosen) + count) % len(names)])

    def action_waits(self) -> None:
        """Let keys scroll the waits."""
        if panels.notices(self.view):
            self.query_one("#waits").focus()

    def action_show_help(self) -> None:
        """Show the keys."""
        self.push_screen(HelpScreen())

    def action_filter(self) -> None:
        """Let keys change the filter."""
        line = self.query_one("#filter", Input)
        line.remove_class("hidden")
        line.focus()

    def action_clear_filter(self) -> None:
        """Show all lines."""
        line = self.query_one("#filter", Input)
        line.value = ""
        line.add_class("hidden")
        self.action_choose(self._chosen)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter by the words typed so far."""
        self._words = event.value
        self._show()

    def on_input_submitted(self) -> None:
        """Let keys scroll the filtered lines."""
        self.action_choose(self._chosen)

    def action_quit_status(self) -> None:
        """End with status 0."""
        self.exit(OK)


def _joined(lines: Iterable[Text]) -> Text:
    """Return the lines as one text. Long lines are folded, so that reasons can be read whole."""
    return Text("\n").join(lines)
