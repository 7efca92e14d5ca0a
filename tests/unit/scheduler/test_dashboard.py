"""Access to the dashboard: the token or the key, once exchanged for a cookie; without a token only by an address."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from psdist.errors import ConfigurationError
from psdist.monitoring.dashboard import dashboard_link, make_key, read_key, view_key
from psdist.security.roles import Role
from psdist.security.tokens import create
from psdist_scheduler.dashboard import Access

KEY = view_key("secret", "run")


def test_the_key_is_not_the_token_and_belongs_to_one_run() -> None:
    assert len(KEY) == 40 and "secret" not in KEY
    assert KEY != view_key("secret", "other") != view_key("other", "run")
    assert view_key("", "run") == ""


def test_the_link_has_the_key_in_its_fragment() -> None:
    assert dashboard_link("h:1", KEY) == f"http://h:1/#key={KEY}"
    assert dashboard_link("h:1", "") == "http://h:1/" and dashboard_link("h:1", "", secure=True) == "https://h:1/"


@pytest.mark.parametrize("secret", ["secret", KEY])
def test_token_and_key_are_exchanged_for_a_cookie(secret: str) -> None:
    access = Access("secret", KEY, 80)
    cookie = access.set_cookie(f"Bearer {secret}")
    assert cookie == f"psdist-dashboard-80={KEY}; Path=/; HttpOnly; SameSite=Strict"
    assert access.may_read({"cookie": f"other=1; {cookie.partition(';')[0]}"})
    assert access.may_read({"cookie": f'other={{"a": [1, 2]}}; {cookie.partition(";")[0]}'})  # Not a valid cookie.
    assert access.may_read({"authorization": f"bearer {secret}"})


def test_a_key_in_a_file_is_revoked_by_replacing_it(tmp_path: Path) -> None:
    file = tmp_path / "key"
    first = make_key(file)
    assert len(first) >= 40 and make_key(file) == first and stat.S_IMODE(file.stat().st_mode) == 0o600
    access = Access("secret", KEY, 80, current=lambda: read_key(file))
    cookie, own = access.set_cookie(f"Bearer {first}"), access.set_cookie("Bearer secret")
    assert cookie is not None and own is not None and access.may_read({"cookie": cookie.partition(";")[0]})
    file.write_text("another\n")
    assert not access.may_read({"cookie": cookie.partition(";")[0]}) and access.set_cookie(f"Bearer {first}") is None
    assert access.set_cookie("Bearer another") is not None
    file.unlink()
    for nothing in ("another", "", KEY):
        assert access.set_cookie(f"Bearer {nothing}") is None and not access.may_read({"cookie": access.cookie + "="})
    assert access.may_read({"cookie": own.partition(";")[0]}), "that of the run's own token stays"


def test_a_file_that_can_have_no_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--dashboard-key-file .* cannot be used: No such file"):
        make_key(tmp_path / "nowhere" / "key")


def test_cookies_of_a_port_with_tls_are_never_sent_without() -> None:
    cookie = Access("secret", KEY, 80, is_secure=True).set_cookie("Bearer secret")
    assert cookie is not None and cookie.endswith("; Secure")


def test_a_reader_reads_until_its_token_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the cookie holds the token and not the key, which never expires."""
    access, now = Access("secret", KEY, 80), 1000.0
    monkeypatch.setattr("psdist.security.tokens.time.time", lambda: now)
    token = create("secret", Role.READER, 2000)
    cookie = access.set_cookie(f"Bearer {token}")
    assert cookie is not None and KEY not in cookie
    assert access.may_read({"cookie": cookie.partition(";")[0]})
    now = 2000.0
    assert not access.may_read({"cookie": cookie.partition(";")[0]})
    assert access.set_cookie(f"Bearer {token}") is None


@pytest.mark.parametrize(("role", "opens"), [(Role.ADMIN, True), (Role.WORKER, False), (Role.SERVER, False)])
def test_members_do_not_look_at_the_run(role: Role, opens: bool) -> None:
    access = Access("secret", KEY, 80)
    assert (access.set_cookie(f"Bearer {create('secret', role)}") is not None) == opens
    assert access.set_cookie(f"Bearer {create('other', role)}") is None


def test_nothing_else_is() -> None:
    for value in ["", "Bearer", "Bearer ", "Bearer other", "Basic secret", "secret", "Bearer \u00e9"]:
        access = Access("secret", KEY, 80)
        assert access.set_cookie(value) is None
        assert not access.may_read({"authorization": value})


def test_other_cookies_open_nothing() -> None:
    for cookie in ["", "psdist-dashboard-80=", "psdist-dashboard-81=" + KEY, "=;;\x00=", "a" * 5000]:
        assert not Access("secret", KEY, 80).may_read({"cookie": cookie})


def test_without_a_token_everybody_who_names_an_address_may_read() -> None:
    access = Access("", "", 80)
    assert access.may_read({})
    for host in ("127.0.0.1:80", "localhost:80", "[::1]:80", "127.0.0.1"):
        assert access.names_host(host)
    for host in ("evil.example:80", "", "127.0.0.1.evil.example"):
        assert not access.names_host(host)
    assert access.set_cookie("Bearer ") is None  # An empty token is none.


def test_with_a_token_the_port_may_have_any_name() -> None:
    assert Access("secret", KEY, 80).names_host("training.example:80")
