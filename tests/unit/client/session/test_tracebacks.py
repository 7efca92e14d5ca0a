"""Tracebacks of launched scripts: removed frames, and the exit status of errors that would recur."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import numpy as np
import psutil
import pytest

import psdist
from psdist.client.core import flat_vector
from psdist.client.session import script
from psdist.errors import (
    ClosedError,
    ConfigurationError,
    DeviceUnavailableError,
    InternalError,
    LateWorkerError,
    NonFiniteGradientError,
    SchedulerUnreachableError,
    SettingsMismatchError,
    ShapeMismatchError,
    WaitTimeoutError,
)
from psdist.settings.flags import CommandLine, Flag
from psdist.types import Layout, TensorSpec

LAYOUT = Layout((TensorSpec("w", (4,)),))


def ended(path: Path, script: str, **environ: str) -> tuple[int, str]:
    """Return status and standard error of a script that believes that a launcher started it."""
    (path / "train.py").write_text(script)
    environment = {**os.environ, "PSDIST_CONNECTED_FILE": str(path / "connected"), **environ}
    done = subprocess.run(
        [sys.executable, "train.py"], env=environment, cwd=path, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stderr


def printed(call: Callable[[], object]) -> str:
    """Return the shortened traceback of an error of ``call``."""
    with pytest.raises(BaseException) as caught:
        call()
    script.shorten(caught.value)
    return "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("rate", "status", "frames", "message"),
    [
        (0.5, 1, ["line 4, in train"], "ValueError: 0.5"),
        (0.0, 78, [], "the return value of work:train contains a module"),
    ],
)
def test_the_traceback_of_a_launched_function_begins_in_the_function(
    tmp_path: Path, rate: float, status: int, frames: list[str], message: str
) -> None:
    work = "import sys\ndef train(rate):\n    if rate:\n        raise ValueError(rate)\n    return sys\n"
    (tmp_path / "work.py").write_text(work)
    call = "import sys, pathlib, work\nfrom psdist.launcher.function_calls import write_call\n"
    call += f"write_call(pathlib.Path('.'), work.train, [{rate}], {{}})\n"
    assert ended(tmp_path, call) == (0, "")
    environ = {**os.environ, "PSDIST_CONNECTED_FILE": str(tmp_path / "connected"), "RANK": "0"}
    worker = [sys.executable, "-m", "psdist.launcher.function_calls", "."]
    done = subprocess.run(worker, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    shown = [line for line in done.stderr.splitlines() if line.startswith("  File")]
    assert shown == [f'  File "{tmp_path / "work.py"}", {frame}' for frame in frames], done.stderr
    assert done.returncode == status and message in done.stderr


_STOPPED = """
import os, signal, sys
def printing(kind, error, trace):
    print("the beginning", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("and the end of a traceback", file=sys.stderr, flush=True)
sys.excepthook = printing
import psdist
raise ValueError
"""


def test_a_traceback_is_printed_whole_before_the_process_is_stopped(tmp_path: Path) -> None:
    assert ended(tmp_path, _STOPPED) == (-signal.SIGTERM, "the beginning\nand the end of a traceback\n")


def test_an_error_of_psdist_ends_at_the_call_in_the_script(tmp_path: Path) -> None:
    status, text = ended(tmp_path, "import psdist\n\npsdist.optim.SGD(lr=-1.0)\n")
    assert status == 78
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("  File")] == [
        f'  File "{tmp_path}/train.py", line 3, in <module>'
    ]
    assert lines[-1].endswith("of psdist left out; PSDIST_FULL_TRACEBACK=1 shows all)")


def test_all_frames_are_printed_on_request(tmp_path: Path) -> None:
    status, text = ended(tmp_path, "import psdist\npsdist.optim.SGD(lr=-1.0)\n", PSDIST_FULL_TRACEBACK="1")
    assert status == 78 and "in __post_init__" in text and "left out" not in text


def test_an_error_of_the_script_is_untouched(tmp_path: Path) -> None:
    status, text = ended(tmp_path, "import psdist\nraise ValueError('mine')\n")
    assert status == 1 and text.splitlines()[-1] == "ValueError: mine" and "left out" not in text


def test_without_a_launcher_nothing_is_installed() -> None:
    program = "import sys, psdist; print(sys.excepthook is sys.__excepthook__)"
    environ = {name: value for name, value in os.environ.items() if name != "PSDIST_CONNECTED_FILE"}
    assert subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True).stdout == b"True\n"


_ALONE = """
import sys
{before}
import psdist
def of_script():
    psdist.init(scheduler="nowhere")
of_script()
"""


@pytest.mark.parametrize("before", ["", "sys.excepthook = lambda kind, error, trace: print('mine:', kind.__name__)"])
def test_without_a_launcher_init_installs_it_unless_there_is_one(before: str) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PSDIST_")}
    command = [sys.executable, "-c", _ALONE.format(before=before)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 1, "Python's own, since a launcher may restart the script"
    if before:
        assert done.stdout == "mine: ConfigurationError\n" and not done.stderr
    else:
        assert "in of_script" in done.stderr and "context.py" not in done.stderr
        assert "of psdist left out; PSDIST_FULL_TRACEBACK=1 shows all)" in done.stderr


def test_the_hook_before_prints_the_traceback_and_cleanup_runs(tmp_path: Path) -> None:
    script = """
import atexit, sys
sys.excepthook = lambda kind, error, trace: print("mine:", kind.__name__, file=sys.stderr)
import psdist
atexit.register(lambda: print("cleaned", file=sys.stderr))
psdist.optim.SGD(lr=-1.0)
"""
    status, text = ended(tmp_path, script)
    assert status == 78 and text.splitlines() == ["mine: InvalidArgumentError", "cleaned"]


#: Hooks as other libraries install them, each printing "shown: " and the error.
_FOREIGN_HOOKS = {
    # As torch.distributed: it collects the text of the previous hook, and prints it afterwards.
    "collects": """
import io
previous = sys.excepthook
def hook(*error):
    before, sys.stderr = sys.stderr, io.StringIO()
    try:
        previous(*error)
    finally:
        text, sys.stderr = sys.stderr.getvalue(), before
    print("shown: " + text, file=sys.stderr)
sys.excepthook = hook
""",
    # As rich and IPython: it calls no other.
    "replaces": """
sys.excepthook = lambda kind, error, trace: print("shown:", kind.__name__, error, file=sys.stderr)
""",
    # As reporters of crashes: it does its work after the previous one.
    "follows": """
previous = sys.excepthook
def hook(*error):
    previous(*error)
    print("shown:", error[1], file=sys.stderr)
sys.excepthook = hook
""",
    "faulthandler": "import faulthandler; faulthandler.enable(); print('shown:', file=sys.stderr)\n",
}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", _FOREIGN_HOOKS)
def test_another_hook_changes_neither_message_nor_status(tmp_path: Path, name: str, is_first: bool) -> None:
    lines = [_FOREIGN_HOOKS[name], "import psdist\n"]
    script = "import sys\n" + "".join(lines if is_first else reversed(lines)) + "psdist.optim.SGD(lr=-1.0)\n"
    status, text = ended(tmp_path, script)
    assert status == 78 and "InvalidArgumentError" in text and "shown:" in text and "lr" in text, text


def test_the_status_is_chosen_after_all_cleanup_and_output(tmp_path: Path) -> None:
    script = """
import atexit, sys
atexit.register(lambda: print("cleaned last"))
import psdist
sys.excepthook = lambda *error: None
atexit.register(lambda: print("cleaned first"))
psdist.optim.SGD(lr=-1.0)
"""
    (tmp_path / "train.py").write_text(script)
    environment = {**os.environ, "PSDIST_CONNECTED_FILE": str(tmp_path / "connected")}
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (78, "cleaned first\ncleaned last\n")


@pytest.mark.parametrize("launched", [False, True])
def test_a_script_interrupted_by_ctrl_c_ends_by_the_signal(tmp_path: Path, launched: bool) -> None:
    """Methods of dataclasses are compiled at the end, by which Python forgets why it ends."""
    text = "import psdist\ncontext = psdist.init(alone=True)\nprint('printed', end='')\nraise KeyboardInterrupt\n"
    (tmp_path / "train.py").write_text(text)
    environ = {**os.environ, **({"PSDIST_CONNECTED_FILE": str(tmp_path / "connected")} if launched else {})}
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert done.stdout == "printed" and done.stderr.endswith("KeyboardInterrupt\n"), done.stderr


def test_an_error_that_did_not_end_the_script_leaves_its_status(tmp_path: Path) -> None:
    # Libraries in C report an exception of a callback by the interpreter's own function, and continue.
    script = """
import sys, psdist
def callback():
    try:
        psdist.optim.SGD(lr=-1.0)
    except psdist.PsdistError as error:
        sys.last_value, sys.last_traceback = error, error.__traceback__
callback()
"""
    status, text = ended(tmp_path, script)
    assert (status, text) == (0, "")


def test_frames_of_a_callback_are_kept_and_those_between_left_out() -> None:
    def convert(value: str) -> str:
        raise ZeroDivisionError("in the callback")

    line = CommandLine("x", "", (Flag("--some", "", convert),))
    text = printed(lambda: line.parse(["--some", "1"], {}))
    assert "in convert" in text and "flags.py" not in text and "of psdist left out" in text


def test_what_may_be_a_defect_is_printed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_vector, "_shared_vector", None)
    text = printed(lambda: flat_vector.flatten(LAYOUT, {"w": np.zeros(4, np.float32)}))
    assert "flat_vector.py" in text and "left out" not in text


def test_internal_errors_are_printed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_vector, "ShapeMismatchError", InternalError)
    text = printed(lambda: flat_vector.flatten(LAYOUT, {"w": [1.0]}))
    assert "flat_vector.py" in text and "left out" not in text


def test_causes_are_shortened_too() -> None:
    def script() -> None:
        try:
            flat_vector.flatten(LAYOUT, {"w": [1.0]})
        except ShapeMismatchError as error:
            raise RuntimeError("my own") from error

    text = printed(script)
    assert "partition.py" not in text and text.count("Traceback") == 2 and "direct cause" in text


def test_errors_that_would_come_again() -> None:
    for error, status in [
        (ConfigurationError(""), 78),
        (ShapeMismatchError(""), 78),
        (SettingsMismatchError(""), 78),
        (ClosedError(""), 78),
        (DeviceUnavailableError("", missing="device"), 78),
        (LateWorkerError(""), 66),
        (SchedulerUnreachableError(""), 69),
        (NonFiniteGradientError(""), 0),
        (WaitTimeoutError(""), 0),
        (psdist.PsdistError(""), 0),
        (ValueError(""), 0),
    ]:
        assert script.status_of(error) == status


def test_an_error_of_an_installed_library_is_printed_whole() -> None:
    def call() -> None:
        psutil.Process(-1)

    # As if it were in a module of psdist.
    inside = FunctionType(call.__code__, {"__name__": "psdist.somewhere", "psutil": psutil}, "inside_psdist")
    text = printed(inside)
    assert "psutil.Process(-1)" in text and "pid must be a positive integer" in text and "left out" not in text
