"""Configuration files: the generated template, precedence of ``--config``, and refused files."""

from __future__ import annotations

import re
import tomllib
from argparse import Namespace
from pathlib import Path

import pytest

from psdist.cli import config
from psdist.cli.run import command_line
from psdist.launcher.local import LocalSettings
from psdist.settings.config_template import template
from psdist.settings.declarations import read

LINE = command_line()


def parse(*argv: str, **environ: str) -> Namespace:
    return LINE.parse([*argv, "train.py"], environ)


def write(path: Path, text: str) -> str:
    file = path / "run.toml"
    file.write_text(text)
    return str(file)


def settings(given: Namespace) -> LocalSettings:
    return read(LocalSettings, given, command=tuple(given.command))


def test_the_template_uncommented_changes_nothing(tmp_path: Path) -> None:
    text = re.sub(r"^#([a-z][a-z0-9-]* = )", r"\1", template(LINE), flags=re.MULTILINE)
    keys = tomllib.loads(text)
    assert set(keys) == {flag.name[2:] for flag in LINE.flags} - {"config", "lifeline-fd"}
    assert settings(parse("--config", write(tmp_path, text))) == settings(parse())


def test_the_template_as_printed_sets_nothing_and_names_help_and_variables() -> None:
    text = template(LINE)
    assert tomllib.loads(text) == {} and max(map(len, text.splitlines())) <= 100
    assert "PSDIST_NPROC_PER_NODE, PET_NPROC_PER_NODE]\n#nproc-per-node = 1\n" in text
    assert text.index("--- most used") < text.index("#nservers = 2") < text.index("--- snapshots")


def test_each_source_takes_precedence_over_the_next(tmp_path: Path) -> None:
    file = write(tmp_path, 'keep-last = 5\nnservers = 4\nnproc_per_node = "3"\nsave-interval = "30s"\nfresh = true\n')
    given = parse("--config", file, "--nservers", "6", PSDIST_NPROC_PER_NODE="7", PSDIST_NSERVERS="8")
    found = settings(given)
    assert (found.servers, found.processes, found.keep_last, found.replicas) == (6, 7, 5, 1)
    assert found.save_interval == (0, 30.0) and found.fresh
    assert given.origins["keep_last"].source == f"{file}: keep-last" and "replicas" not in given.origins
    assert "keep_last" not in given.explicit
    named = parse(PSDIST_CONFIG=file)
    assert settings(named).keep_last == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("keep-lst = 5", "unknown key 'keep-lst': did you mean keep-last?"),
        ("[settings]\nkeep-last = 5", "unknown key 'settings': the keys are"),
        ('config = "other.toml"', "unknown key 'config'"),
        ("lifeline-fd = 3", "unknown key 'lifeline-fd'"),
        ("keep-last = 0", "run.toml: keep-last: 0 is too small"),
        ("fresh = 7", "neither 1 nor 0"),
        (
            "dashboard-port = false",
            "dashboard-port is no switch, so it cannot be false: give its value, or leave it out",
        ),
        ("#" * (1 << 20) + "\n", "bytes: pass another one\n"),
        ("keep-last = [1]", "keep-last is neither a text, a number nor a boolean"),
        ("keep-last = 1\nkeep_last = 2", "sets keep_last twice"),
        ("keep-last = ", "is not valid TOML"),
        ("keep-last = nan", "keep-last: 'nan' is not a whole number"),
    ],
)
def test_wrong_files_are_refused(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse("--config", write(tmp_path, text))
    assert end.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(("content", "words"), [(None, "No such file"), (b"\xff", "not valid TOML")])
def test_unreadable_files_are_refused(
    content: bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "run.toml").write_bytes(content)
    with pytest.raises(SystemExit):
        parse("--config", str(tmp_path / "run.toml"))
    assert words in capsys.readouterr().err


def test_show_prints_values_with_their_origins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "keep-last = 5\n")
    argv = ["show", "--config", file, "--nservers", "3"]
    assert config.CONFIG.run(argv, {"PSDIST_REPLICAS": "2"}) == 0
    shown = capsys.readouterr().out
    assert set(shown.splitlines()) > {
        f'keep-last = "5"  # {file}: keep-last', 'nservers = "3"  # --nservers', 'replicas = "2"  # PSDIST_REPLICAS',
        "nproc-per-node = 1  # default", 'run-id = ""  # default',
    }  # fmt: skip
    assert tomllib.loads(shown)["keep-last"] == "5"
