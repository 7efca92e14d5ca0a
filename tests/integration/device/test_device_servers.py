"""Servers whose weights are on a device, as real programs: the exact bytes of servers without one, in any mixture,
whichever process is killed, and when a device is lost. The device is the processor's
(``tests/support/host_device.py``)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support import host_device
from tests.support.device_runs import TRAIN, digests_of, ended
from tests.support.host_device import needs_compiler
from tests.support.launched import Run

_ROOT = Path(__file__).resolve().parents[3]
#: Digests of a run without a device. Arguments: clip, elements and steps of the script.
Plain = Callable[[str, str, int], set[str]]
_REPLICATED = ("--replicas", "2", "--failure-timeout", "15")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give servers with ``--device cuda`` a device on the processor."""
    folders = [_ROOT / "tests" / "support" / "emulated", _ROOT, _ROOT / "servers"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    monkeypatch.setenv("HOST_DEVICE_FOLDER", str(host_device.FOLDER))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """One run without a device for each clip and slice size."""

    @cache
    def output(clip: str, elements: str) -> str:
        with Run(tmp_path_factory.mktemp("plain"), TRAIN, "40", clip, elements, flags=("--nservers", "1")) as run:
            return ended(run)

    return lambda clip, elements, step: digests_of(output(clip, elements), step)


@needs_compiler
@pytest.mark.parametrize(
    ("clip", "elements", "transport"),
    [("0", "65536", "shm"), pytest.param("1", "8192", "grpc", marks=pytest.mark.long)],
)
def test_a_run_on_devices_gives_the_bytes_of_a_run_without(
    tmp_path: Path, runs: list[Run], emulated: None, plain: Plain, clip: str, elements: str, transport: str
) -> None:
    flags = ("--nservers", "2", "--server-device", "cuda")
    runs.append(Run(tmp_path, TRAIN, "12", clip, elements, transport=transport, flags=flags))
    assert digests_of(ended(runs[-1]), 12) == plain(clip, elements, 12)


@needs_compiler
def test_a_lost_device_ends_its_server_and_the_run_goes_on_from_the_copies(
    tmp_path: Path, runs: list[Run], emulated: None, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = tmp_path / "lost"
    monkeypatch.setenv("HOST_DEVICE_LOST", str(lost))
    monkeypatch.setenv("HOST_DEVICE_OF", "server-1")
    flags = (*_REPLICATED, "--nservers", "2", "--server-device", "cuda")
    runs.append(Run(tmp_path, TRAIN, "40", "0", "65536", flags=flags))
    runs[-1].until("rank 0 made step 9 ")
    lost.touch()
    text = ended(runs[-1])
    assert digests_of(text, 40) == plain("0", "65536", 40)
    assert "the device is lost" in text and "illegal memory access" in text, text
    assert "server 1 died: exit code 71" in text, text


@needs_compiler
@pytest.mark.parametrize("devices", [("cuda", "cpu"), pytest.param(("cpu", "cuda"), marks=pytest.mark.long)])
def test_a_snapshot_of_one_kind_of_server_is_resumed_by_the_other(
    tmp_path: Path, runs: list[Run], emulated: None, plain: Plain, devices: tuple[str, str]
) -> None:
    flags = ("--storage-path", str(tmp_path / "saved"), "--run-id", "moved", "--server-device")
    runs.append(Run(tmp_path, TRAIN, "10", "0", "65536", flags=(*flags, devices[0])))
    ended(runs[-1])
    runs.append(Run(tmp_path, TRAIN, "20", "0", "65536", flags=(*flags, devices[1])))
    text = ended(runs[-1])
    assert digests_of(text, 20) == plain("0", "65536", 20)
    assert "made step 11 " in text and "made step 10 " not in text


def test_without_a_device_the_run_ends_at_once_with_what_is_missing(tmp_path: Path, runs: list[Run]) -> None:
    """Check device 999, which no machine has, with or without CuPy, a driver and other devices."""
    runs.append(Run(tmp_path, TRAIN, "1", "0", "65536", flags=("--server-device", "cuda:999")))
    status, text = runs[-1].end()
    assert status == 78, text
    assert "server 0 cannot begin" in text or "server 1 cannot begin" in text, text
    assert re.search("CuPy is not installed|NVIDIA driver|there is no cuda:999", text), text
    assert "Traceback" not in text, text


def test_a_wrong_name_is_refused_before_anything_starts(tmp_path: Path, runs: list[Run]) -> None:
    runs.append(Run(tmp_path, TRAIN, "1", "0", "65536", flags=("--server-device", "cuda,gpu")))
    status, text = runs[-1].end()
    assert status == 2
    assert "'gpu' is neither cpu, cuda nor cuda:N" in text
