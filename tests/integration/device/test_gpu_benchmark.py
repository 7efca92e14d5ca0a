"""The benchmark of devices, from its command line to its table, on an emulated device. Figures are not judged."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, gpu_codecs, gpu_runs, gpu_updates
from psdist.compression import Int8
from psdist.device.memory import DeviceVector
from tests.support.host_device import HostDevice, needs_compiler

_ROOT = Path(__file__).resolve().parents[3]
_SMALL = ("--elements", "9000", "--rounds", "1", "--times", "1", "--threads", "2", "--steps", "3")


@needs_compiler
@pytest.mark.long
def test_every_case_has_rows_and_every_target_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(_ROOT / "tests" / "support" / "emulated"))  # Its own path to psdist.
    out = tmp_path / "gpu.json"
    status = gpu.main([*_SMALL, "--run-elements", "20000", "--out", str(out)], lambda name: HostDevice())
    results = json.loads(out.read_text())
    assert {row["case"] for row in results["rows"]} == set(gpu.CASES)
    exact = [row for row in results["rows"] if row["case"] == "exact"]
    assert len(exact) == len(gpu_updates.EXACT) and all(row["identical"] and row["relative"] == 0 for row in exact)
    (run,) = (row for row in results["rows"] if row["case"] == "run" and row["what"] == "difference")
    assert run["identical"] and run["step_ratio"] > 0
    lines = {(line["case"], line["target"]): line["met"] for line in results["targets"]}
    assert len(lines) == len(results["targets"]) == 2 + 3 + len(exact) + 1 + 1
    assert lines["fused Adam", "no slower than torch's"] is None
    assert lines["BSP, 2 servers, 2 workers", "1e-06 relative"] is True
    # The bandwidth of a processor that plays a device means nothing: only the presence of its line counts.
    assert status == 1 and lines["Int8 encodes", "1,000 GB/s"] is False
    codecs = [row for row in results["rows"] if row["case"] == "codecs"]
    assert [row["what"] for row in codecs] == [kind.__name__ for kind in gpu_codecs.TARGETS for _ in range(2)]
    assert all(row["kernels"] > 0 and row["whole"] > 0 for row in codecs)
    assert [row["payload"] for row in codecs[:2]] == [16 + 4 * 36 + 9000] * 2
    assert "cuda:0 (on the processor), 9,000 parameters" in capsys.readouterr().out


@needs_compiler
@pytest.mark.parametrize("feedback", [False, True])
def test_what_a_worker_does_not_keep_is_not_cleared_when_an_encoder_is_measured(
    monkeypatch: pytest.MonkeyPatch, feedback: bool
) -> None:
    device = HostDevice()
    values = DeviceVector.allocate(device, 3 << 20, device.stream())
    encoding = gpu_codecs.Encoding(device, Int8(error_feedback=feedback), values)
    cleared: list[int] = []
    monkeypatch.setattr(device, "clear", lambda address, size, stream: cleared.append(address))
    encoding.kernels()
    assert len(cleared) == 2, "flags and payloads"
    assert device.allocated >= 4 * values.size * (3 if feedback else 1) + 3 * (1 << 20)
    assert feedback or device.allocated < 4 * values.size * 2


def test_a_case_that_fails_is_a_row_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, written = tmp_path / "gpu.json", list[list[str]]()

    def fails(device: Any, options: Any) -> Iterator[dict[str, Any]]:
        written.append([row["case"] for row in json.loads(out.read_text())["rows"]])
        yield {"what": "adam", "elements": 1, "bytes": 2}
        raise RuntimeError("the run ended with 71\nwhat it said")

    monkeypatch.setitem(gpu.CASES, "copy", lambda device, options: [{"what": "driver", "bytes_per_second": 3.0}])
    monkeypatch.setitem(gpu.CASES, "memory", fails)
    monkeypatch.setitem(gpu.CASES, "exact", lambda *_: [{"what": "sgd", "identical": True, "relative": 0.0}])
    given = ["--cases", "copy", "memory", "exact", "--out", str(out)]
    assert gpu.main(given, lambda name: HostDevice()) == 1
    results = json.loads(out.read_text())
    assert written == [["copy"]]
    assert [row["case"] for row in results["rows"]] == ["copy", "memory", "failed", "exact"]
    (failure,) = (line for line in results["targets"] if not line["met"])
    assert failure["case"] == "case memory" and failure["measured"] == "RuntimeError: the run ended with 71"
    assert "what it said" in capsys.readouterr().out


def test_a_run_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"warmup did not end within 0\.001 s"):
        gpu_runs._psdist("warmup", folder=_ROOT, timeout=0.001)


def test_a_target_that_is_missed_is_seen() -> None:
    rows = [
        {"case": "copy", "what": "driver", "bytes_per_second": 100.0},
        {"case": "update", "what": "adam", "bytes_per_second": 79.0, "seconds": 2.0},
        {"case": "torch", "what": "adam", "seconds": 1.0},
        {"case": "memory", "what": "adam", "elements": 1000, "bytes": 200_012_001},
        {"case": "codecs", "what": "Int8", "kernels": 999e9, "target": 1000e9},
        {"case": "exact", "what": "sgd", "identical": False, "relative": 2e-6},
    ]
    assert [line["met"] for line in gpu.judged(rows)] == [False] * 5


def test_cases_can_be_chosen_and_others_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    options = gpu.parser().parse_args(["--cases", "copy", "exact", "--elements", "7"])
    assert (options.cases, options.elements, options.device) == (["copy", "exact"], 7, "cuda")
    with pytest.raises(SystemExit):
        gpu.parser().parse_args(["--cases", "speed"])


def test_without_a_device_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert gpu.main(["--cases", "copy"]) == 2
    assert "CuPy is not installed" in capsys.readouterr().err
