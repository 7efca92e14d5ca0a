"""``psdist snapshot`` on a directory, without a run: all its commands, as text and as JSON, and its refusals."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from psdist.cli import snapshot
from psdist.launcher.scheduler_calls import SaveProgress, committed_text
from psdist.snapshots.format import CommitRecord
from psdist.v1 import scheduler_pb2 as pb
from tests.support.snapshot_files import write

Output = pytest.CaptureFixture[str]


@pytest.fixture
def commits(tmp_path: Path) -> list[CommitRecord]:
    """Snapshots of the steps 10, 20 and 30 in the storage ``runs/digits``, whose weights equal their step."""
    return [
        write(
            str(tmp_path / "runs" / "digits"),
            number,
            10 * number,
            {"model": {"w": ("float32", np.full((4, 6), 10 * number, np.float32))}},
        )
        for number in (1, 2, 3)
    ]


@pytest.fixture
def storage(tmp_path: Path, commits: list[CommitRecord]) -> str:
    return str(tmp_path / "runs" / "digits")


def call(*argv: str) -> int:
    """Return the exit status of ``psdist snapshot``."""
    try:
        return snapshot.SNAPSHOT.run(argv, {})
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code


def loaded(*argv: str, output: Output, status: int = 0) -> Any:
    """Return the command's JSON output."""
    assert call(*argv) == status
    return json.loads(output.readouterr().out)


def spoil(storage: str, commit: CommitRecord) -> str:
    """Flip a bit in a file of the snapshot. Returns the file's name."""
    file = sorted((Path(storage) / "snapshots" / commit.directory).glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    return file.name


def test_list(storage: str, commits: list[CommitRecord], capsys: Output) -> None:
    assert call("list", storage) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        [str(commit.sequence), commit.directory, str(10 * commit.sequence)] for commit in reversed(commits)
    ]
    newest = loaded("list", storage, "--format", "json", output=capsys)[0]
    assert newest["directory"] == commits[-1].directory and newest["steps"] == {"model": 30} and newest["error"] == ""
    assert newest["run_id"] == "digits" and newest["bytes"] == commits[-1].bytes


def test_a_commit_record_that_cannot_be_read_is_listed(
    storage: str, commits: list[CommitRecord], capsys: Output
) -> None:
    path = Path(storage) / commits[1].path
    path.write_bytes(path.read_bytes()[:-7])
    second = loaded("list", storage, "--format", "json", output=capsys)[1]
    assert second["sequence"] == 2 and commits[1].path in second["error"]
    assert call("list", storage) == 0
    assert commits[1].path in capsys.readouterr().out


def test_show(storage: str, commits: list[CommitRecord], capsys: Output) -> None:
    assert call("show", storage, "--step", "20") == 0
    text = capsys.readouterr().out
    for word in (commits[1].directory, "digits", "step 20", "replicas 1", "adam", "bsp", "w ", "4x6", "float32"):
        assert word in text, word
    assert "workers 0" not in text
    shown = loaded("show", storage, "--snapshot", "1", "--format", "json", output=capsys)
    assert shown["directory"] == commits[0].directory
    (model,) = shown["parameters"]
    assert model["tensors"] == [{"name": "w", "shape": [4, 6], "dtype": "float32"}]
    assert len(model["files"]) == 2 and model["state_arrays"] == ["exp_avg", "exp_avg_sq"]


def test_verify_reads_every_snapshot(storage: str, commits: list[CommitRecord], capsys: Output) -> None:
    report = loaded("verify", storage, "--format", "json", output=capsys)
    assert report["ok"] and [one["name"] for one in report["snapshots"]] == [c.directory for c in reversed(commits)]
    file = spoil(storage, commits[0])
    report = loaded("verify", storage, "--format", "json", output=capsys, status=1)
    assert [one["ok"] for one in report["snapshots"]] == [True, True, False] and not report["ok"]
    assert f"{commits[0].directory}/{file}" in report["snapshots"][-1]["error"]
    assert call("verify", storage) == 1
    assert f"{commits[0].directory}: bad: " in capsys.readouterr().out
    assert call("verify", storage, "--step", "20") == 0


def test_export_takes_the_newest_or_the_one_that_is_named(storage: str, tmp_path: Path, capsys: Output) -> None:
    for argv, step in (((), 30), (("--step", "10"), 10)):
        out = tmp_path / f"model-{step}.safetensors"
        report = loaded("export", storage, "--out", str(out), *argv, "--report", "json", output=capsys)
        assert report["steps"] == {"model": step} and report["files"] == [str(out)]
        assert np.all(safetensors.numpy.load_file(out)["w"] == step)
    assert call("export", storage, "--out", str(tmp_path / "model.npz"), "--dtype", "float16") == 0
    assert np.load(tmp_path / "model.npz")["w"].dtype == np.float16
    assert call("export", storage, "--out", str(tmp_path / "model.npz")) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_an_incomplete_newest_snapshot_is_skipped_with_a_warning(
    storage: str, commits: list[CommitRecord], tmp_path: Path, capsys: Output
) -> None:
    manifest = Path(storage) / "snapshots" / commits[2].directory / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert call("export", storage, "--out", str(tmp_path / "model")) == 0
    error = capsys.readouterr().err
    assert "warning: skipped an unusable snapshot" in error and f"{commits[2].directory}/manifest.json" in error
    assert np.all(safetensors.numpy.load_file(tmp_path / "model")["w"] == 20)


def test_export_of_what_is_corrupt_names_the_file(
    storage: str, commits: list[CommitRecord], tmp_path: Path, capsys: Output
) -> None:
    file = spoil(storage, commits[2])
    assert call("export", storage, "--out", str(tmp_path / "model")) == 1
    assert file in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_delete(storage: str, commits: list[CommitRecord], monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    def left() -> list[int]:
        return [one["sequence"] for one in loaded("list", storage, "--format", "json", output=capsys)]

    assert call("delete", storage) == 2
    assert call("delete", storage, "--keep-last", "1") == 2
    assert "--yes" in capsys.readouterr().err and left() == [3, 2, 1]
    assert loaded("delete", storage, "--step", "10", "--yes", "--format", "json", output=capsys)["deleted"] == [
        commits[0].directory
    ]
    assert left() == [3, 2]
    monkeypatch.setattr(sys, "stdin", Terminal("no\n"))
    assert call("delete", storage, "--keep-last", "1") == 1 and left() == [3, 2]
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert call("delete", storage, "--keep-last", "1") == 0
    capsys.readouterr()
    assert left() == [3]
    assert [path.name for path in (Path(storage) / "snapshots").iterdir()] == [commits[2].directory]


class Terminal(io.StringIO):
    """Input from a user who answers."""

    def isatty(self) -> bool:
        return True


def test_a_record_that_cannot_be_read_can_be_deleted(storage: str, commits: list[CommitRecord], capsys: Output) -> None:
    (Path(storage) / commits[1].path).write_bytes(b"{}")
    assert call("delete", storage, "--snapshot", "2", "--yes") == 0
    capsys.readouterr()
    assert [one["sequence"] for one in loaded("list", storage, "--format", "json", output=capsys)] == [3, 1]


def test_records_that_cannot_be_read_do_not_count_as_kept(
    storage: str, commits: list[CommitRecord], capsys: Output
) -> None:
    (Path(storage) / commits[2].path).write_bytes(b"{}")
    for kept, left in (("2", [3, 2, 1]), ("1", [3, 2]), ("0", [])):
        assert call("delete", storage, "--keep-last", kept, "--yes") == 0
        assert [int(file.stem) for file in sorted((Path(storage) / "commits").iterdir(), reverse=True)] == left
    capsys.readouterr()


def test_wrong_use_says_what_is_wrong(tmp_path: Path, commits: list[CommitRecord], capsys: Output) -> None:
    for argv, status, words in [
        ([], 2, ["usage: psdist snapshot COMMAND"]),
        (["frob"], 2, ["'frob'", "verify"]),
        (["list"], 2, ["STORAGE"]),
        (["list", "none"], 2, ["not a storage"]),
        (["list", "ftp://x"], 2, ["s3://"]),
        (["list", "RUNS/nowhere"], 1, ["nowhere has no snapshots"]),
        (["verify", "RUNS"], 1, ["has no snapshots; below it are the runs digits"]),
        (["show", "RUNS/digits", "--step", "11"], 1, ["no snapshot step 11", "10, 20, 30"]),
        (["show", "RUNS/digits", "--step", "-1"], 2, ["--step"]),
        (["export", "RUNS/digits"], 2, ["--out"]),
        (["export", "RUNS/digits", "--out", "x", "--format", "onnx"], 2, ["onnx", "safetensors"]),
        (["export", "RUNS/digits", "--out", "x", "--max-file-size", "5 XB"], 2, ["5GB"]),
        (["delete", "RUNS/digits", "--step", "99", "--yes"], 1, ["no snapshot step 99"]),
    ]:
        assert call(*(word.replace("RUNS", str(tmp_path / "runs")) for word in argv)) == status
        message = capsys.readouterr().err
        assert all(word in message for word in words), message


def test_what_is_said_while_a_snapshot_is_taken() -> None:
    said: list[str] = []
    moved: list[float] = []
    clock = [0.0]
    progress = SaveProgress(said.append, lambda: clock[0])
    progress.moved = lambda: moved.append(clock[0])
    for clock[0], done in ((0.5, 1), (1.5, 2), (2.5, 3), (3.0, 4), (5.0, 4)):
        progress(pb.SaveSnapshotResponse(bytes_done=done << 20, bytes=4 << 20, waiting_for="for the disk"))
    assert said == [
        "3.0 MiB of 4.0 MiB written; waiting for the disk",
        "4.0 MiB of 4.0 MiB written; waiting for the disk",
    ]
    assert moved == [0.5, 1.5, 2.5, 3.0]
    info = pb.SnapshotInfo(directory="d", steps={"a": 7, "b": 7}, bytes=1536, seconds=0.25)
    assert committed_text(pb.SaveSnapshotResponse(committed=info)) == "step 7 saved as d: 1.5 KiB in 0.2 s"
    info.steps["b"] = 9
    unchanged = committed_text(pb.SaveSnapshotResponse(committed=info, unchanged=True))
    assert unchanged == "steps 7, 9 already saved as d: nothing was trained since"


def test_sizes() -> None:
    sizes = {"5GB": 5 * 10**9, "500MiB": 500 << 20, "1000": 1000, "1.5 kB": 1500, "2T": 2 * 10**12}
    assert {text: snapshot.file_size(text) for text in sizes} == sizes
    for wrong in ("", "0", "GB", "5iB", "-1MB"):
        with pytest.raises(ValueError):
            snapshot.file_size(wrong)
