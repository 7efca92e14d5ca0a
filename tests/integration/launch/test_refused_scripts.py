"""Scripts that their run refuses end with a status of their own, and are not restarted: they would be refused again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launched import Run

_SCRIPT = """
import sys
import numpy as np
import psdist
with psdist.init() as context:
    rank = context.rank if "differs" in sys.argv else 0
    weights = context.client.parameters("w", {"w": np.zeros(8, np.float32)}, psdist.optim.SGD(lr=1.0 + rank))
    try:
        context.client.parameters("w", {"w": np.zeros(9, np.float32)}, psdist.optim.SGD(lr=1.0 + rank))
    except psdist.errors.LayoutMismatchError:
        print("caught", flush=True)
    if "raises" in sys.argv:
        raise psdist.errors.StorageError("not there now")
"""


# A script continues after an error that it catches. Another error does not prevent a new attempt.
@pytest.mark.parametrize(
    ("what", "status"),
    [("differs", 78), ("raises", 1), pytest.param("agrees", 0, marks=pytest.mark.long)],
)
def test_a_script_is_not_restarted_that_would_be_refused_again(tmp_path: Path, what: str, status: int) -> None:
    flags = ("--nservers", "1", "--storage-path", "none", "--max-restarts", "1")
    code, text = Run.ended(tmp_path, _SCRIPT, what, flags=flags)
    assert code == status, text
    assert ("restart 1 of 1" in text) == (what == "raises"), text
    assert ("settings differ from" in text and "not restarted" in text) == (what == "differs"), text
    assert "caught" in text or what == "differs", text


_FAILS = """
import os, sys
import numpy as np
import psdist
with psdist.init() as context:
    weights = context.client.parameters("w", {"w": np.zeros(8, np.float32)}, psdist.optim.SGD(lr=0.1))
    print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    if sys.argv[1] == "later":
        weights.push_pull({"w": np.ones(8, np.float32)})
    if sys.argv[1] == "import":
        import a_module_that_does_not_exist
    open("a file that does not exist")
"""


@pytest.mark.parametrize(
    ("when", "attempts", "words"),
    [
        pytest.param("import", 1, "an error of the script itself", marks=pytest.mark.long),
        ("first", 2, "the same error as in the attempt before"),
        pytest.param("later", 4, "--max-restarts 3 used up", marks=pytest.mark.long),
    ],
)
def test_an_error_before_the_first_step_is_not_tried_again_and_again(
    tmp_path: Path, when: str, attempts: int, words: str
) -> None:
    flags = ("--nservers", "1", "--storage-path", "none", "--max-restarts", "3", "--nproc-per-node", "1")
    code, text = Run.ended(tmp_path, _FAILS, when, flags=flags)
    assert code == 1 and text.count("] attempt") == attempts and words in text, text


def test_without_a_launcher_the_status_is_pythons(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("import psdist\nwith psdist.init():\n    raise psdist.errors.WrongRunError('x')\n")
    done = subprocess.run([sys.executable, "x.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and "WrongRunError: x" in done.stderr, done.stderr


#: The exception hook of torch collects the text of those before it, and prints it afterwards.
_WITH_TORCH = """
import sys
import torch.distributed, psdist
from psdist import errors
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
psdist.init()
raise getattr(errors, sys.argv[1])("the full text of the message")
"""


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("LayoutMismatchError", 78),
        # The table of statuses is checked without processes.
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (("LateWorkerError", 66), ("SchedulerUnreachableError", 69))
        ),
    ],
)
def test_an_error_after_init_process_group_is_shown_and_keeps_its_status(
    tmp_path: Path, error: str, status: int
) -> None:
    flags = ("--nservers", "1", "--storage-path", "none", "--max-restarts", "0", "--nproc-per-node", "1")
    code, text = Run.ended(tmp_path, _WITH_TORCH, error, flags=flags)
    assert code == status, text
    assert f"{error}: the full text of the message" in text and "in <module>" in text, text
