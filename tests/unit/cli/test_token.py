"""``psdist token``: makes tokens that processes accept, and shows neither a token nor its source by accident."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from psdist.cli.token import TOKEN, lifetime
from psdist.security.roles import TOKEN_ROLES, Role
from psdist.security.tokens import Audience, Verifier, create, read

ROOT = "root-token-of-the-test"
ENVIRON = {"PSDIST_TOKEN": ROOT}


def fails(argv: list[str], environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the message of a command that is refused with exit status 2."""
    with pytest.raises(SystemExit) as ended:
        TOKEN.run(argv, environ)
    output = capsys.readouterr()
    assert ended.value.code == 2 and output.out == "" and ROOT not in output.err
    return output.err


def test_the_printed_token_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    for role in TOKEN_ROLES:
        assert TOKEN.run(["create", "--role", role.value], ENVIRON) == 0
        printed = capsys.readouterr().out
        assert printed == create(ROOT, role) + "\n"
        assert Verifier(ROOT, Audience.SCHEDULER).role(printed.strip()) is role


def test_it_expires_when_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("psdist.cli.token.time.time", lambda: 1000.7)
    TOKEN.run(["create", "--role", "reader", "--expires", "2h"], ENVIRON)
    assert read(capsys.readouterr().out.strip()) == (Role.READER, 1000 + 7200)


def test_a_file_is_new_and_for_this_user_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, out = tmp_path / "root", tmp_path / "reader"
    root.write_text(ROOT + "\n")
    argv = ["create", "--role", "reader", "--token-file", str(root), "--out", str(out)]
    assert TOKEN.run(argv, {"PSDIST_TOKEN": "another"}) == 0
    assert out.read_text() == create(ROOT, Role.READER) + "\n" and capsys.readouterr().out == ""
    assert stat.S_IMODE(os.stat(out).st_mode) == 0o600
    assert "File exists" in fails(argv, {}, capsys) and out.read_text() == create(ROOT, Role.READER) + "\n"


def test_the_token_of_a_job_is_used_beside_the_name_of_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    environ = ENVIRON | {"PSDIST_RUN_ID": "job-7"}
    assert TOKEN.run(["create", "--role", "worker"], environ) == 0
    assert capsys.readouterr().out == create(ROOT, Role.WORKER) + "\n"
    with pytest.raises(SystemExit):
        TOKEN.run(["create", "--role", "worker", "--run-id", "other"], environ)
    assert "no run named other" in capsys.readouterr().err


def test_wrong_input_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, environ, message in [
        (["create"], ENVIRON, "the role is missing: add --role worker"),
        (["create", "--role", "scheduler"], ENVIRON, "'scheduler' is not one of worker, server, admin, reader"),
        (["create", "--role", "reader"], {}, "no token is set: pass --token-file"),
        (["create", "--role", "reader"], {"PSDIST_TOKEN": create(ROOT, Role.ADMIN)}, "is one of role admin"),
        (["create", "--role", "reader", "--expires", "soon"], ENVIRON, "write 30d, 12h, 5m or 90s"),
        (["show"], {}, "no token is set"),
    ]:
        assert message in fails(argv, environ, capsys)


def test_lifetimes() -> None:
    for text, seconds in [("90s", 90), ("5m", 300), ("12H", 43200), (" 30d ", 2592000)]:
        assert lifetime(text) == seconds


def test_other_lifetimes_are_refused() -> None:
    for text in ["", "0d", "-1d", "1.5d", "30", "3651d", "999999999d", "1w", "\u0661d"]:
        with pytest.raises(ValueError, match=r"is not (a lifetime|possible)"):
            lifetime(text)


def test_show_says_the_role_and_never_the_token(capsys: pytest.CaptureFixture[str]) -> None:
    for token, sentence, report in (
        (ROOT, "the run's own token, with all roles", {"role": "all", "expires": None}),
        (create(ROOT, Role.ADMIN), "of the role admin; it does not expire", {"role": "admin", "expires": None}),
        (create(ROOT, Role.READER, 5), "expired 1970-01-01 00:00:05 UTC", {"role": "reader", "expires": 5}),
        (create(ROOT, Role.READER, 4_000_000_000), "expires 2096", {"role": "reader", "expires": 4_000_000_000}),
    ):
        TOKEN.run(["show"], {"PSDIST_TOKEN": token})
        shown = capsys.readouterr().out
        TOKEN.run(["show", "--format", "json"], {"PSDIST_TOKEN": token})
        assert sentence in shown and json.loads(capsys.readouterr().out) == report
        assert token not in shown and token.rpartition(".")[2] not in shown
