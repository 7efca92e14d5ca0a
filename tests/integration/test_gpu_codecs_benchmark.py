"""The benchmark of encoding on devices runs from its command line to its rows, on an emulated device."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from host_device import HostDevice, needs_compiler

from benchmarks import gpu_codecs


@needs_compiler
def test_every_codec_has_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "codecs.json"
    small = ["--elements", "9000", "--rounds", "1", "--times", "1", "--out", str(out)]
    assert gpu_codecs.main(small, lambda name: HostDevice()) == 1  # A processor that plays a device is slow.
    rows = json.loads(out.read_text())["rows"]
    assert [row["codec"] for row in rows] == [kind.__name__ for kind in gpu_codecs.TARGETS for _ in range(2)]
    assert all(row["kernels"] > 0 and row["whole"] > 0 for row in rows)
    assert [row["payload"] for row in rows[:2]] == [16 + 4 * 36 + 9000] * 2
    assert "target 1,000: NO" in capsys.readouterr().out


def test_without_a_device_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert gpu_codecs.main([]) == 2
    assert "CuPy is not installed" in capsys.readouterr().err
