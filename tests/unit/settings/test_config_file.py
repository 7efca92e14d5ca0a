"""Configuration files: the generated template, precedence of ``--config``, and refused files."""

from __future__ import annotations

import re
import tomllib
from argparse import Namespace
from pathlib import Path

import pytest

from psdist.cli import config, worker
from psdist.cli.commands import Group
from psdist.cli.config import template
from psdist.cli.run import command_line
from psdist.launcher.local import LocalSettings
from psdist.launcher.plan import SchedulerAddress
from psdist.settings.flags import read
from psdist.settings.programs import scheduler_settings, server_settings

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


def test_wrong_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, words in [
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
    ]:
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
    *shown, rest = capsys.readouterr().out.splitlines()
    given = {
        f'keep-last = "5"  # {file}: keep-last', 'nservers = "3"  # --nservers', 'replicas = "2"  # PSDIST_REPLICAS',
    }  # fmt: skip
    assert set(shown) == given and rest.endswith("settings have their defaults: --all prints them, too")
    assert config.CONFIG.run([*argv, "--all"], {"PSDIST_REPLICAS": "2"}) == 0
    everything = capsys.readouterr().out
    assert set(everything.splitlines()) > given | {"nproc-per-node = 1  # default", 'run-id = ""  # default'}
    assert tomllib.loads(everything)["keep-last"] == "5" and "\nall" not in everything


# --- psdist-scheduler, psdist-server and psdist-worker ----------------------------------------------------------------


def test_every_program_has_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    for program in config.PROGRAMS:
        assert call(config.CONFIG, ["template", "--program", program]) == 0
        printed = capsys.readouterr().out
        line = config.PROGRAMS[program]()
        keys = tomllib.loads(re.sub(r"^#([a-z][a-z0-9-]* = )", r"\1", printed, flags=re.MULTILINE))
        assert (
            set(keys) == {flag.name[2:] for flag in line.flags if flag.is_in_file} and f"of {line.program}," in printed
        )


def test_services_read_their_files(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    token = f"token-file = '{tmp_path / 'token'}'\n"
    file = write(tmp_path, f"{token}port = 7000\nmin-workers = 3\nmin-servers = 2\n")
    scheduler = scheduler_settings(["--config", file, "--min-servers", "4"], {"PSDIST_PORT": "7001"})
    assert (scheduler.port, scheduler.workers_min, scheduler.servers_min) == (7001, 3, 4)
    assert scheduler.credentials.token == "secret"
    file = write(tmp_path, f"{token}scheduler = 'h:1'\nkernel-threads = 2\ninsecure = true\nhost = '0.0.0.0'\n")
    server = server_settings([], {"PSDIST_CONFIG": file})
    assert (server.scheduler, server.kernel_threads, server.host) == ("h:1", 2, "0.0.0.0")


def test_variables_with_the_same_purpose_take_precedence_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    file = write(tmp_path, f"token-file = '{tmp_path / 'token'}'\nscheduler = 'h:1'\n")
    server = server_settings(["--config", file], {"PSDIST_TOKEN": "other", "PSDIST_SCHEDULER_FILE": "address"})
    assert server.credentials.token == "other"
    assert (server.scheduler, server.scheduler_file) == ("", Path("address"))
    file = write(tmp_path, "scheduler-file = 'address'\n")
    given = worker.command_line().parse(["--config", file, "x.py"], {"PSDIST_SCHEDULER": "h:2"})
    assert worker.scheduler_of(given, {"PSDIST_SCHEDULER": "h:2"}) == ("h:2", None)


def test_a_launcher_keeps_its_file_from_its_processes() -> None:
    assert "PSDIST_CONFIG" not in SchedulerAddress().environment({"PSDIST_CONFIG": "run.toml"})


def call(group: Group, argv: list[str]) -> int:
    return group.run(argv, {})
