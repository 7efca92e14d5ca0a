"""Tokens of roles: made and checked without a record, for one audience each, and never another role's."""

from __future__ import annotations

import itertools

import pytest

from psdist.errors import ConfigurationError, InvalidArgumentError, UnauthenticatedError
from psdist.security import tokens
from psdist.security.roles import TOKEN_ROLES, Role
from psdist.security.tokens import Audience, Verifier, audience_key, create, present, read

ROOT = "root-token-of-the-test"


@pytest.mark.parametrize("audience", Audience)
@pytest.mark.parametrize("role", TOKEN_ROLES)
def test_a_token_proves_its_role_to_every_audience(role: Role, audience: Audience) -> None:
    token = create(ROOT, role)
    for verifier in (Verifier(ROOT, audience), Verifier(token, audience, audience_key(ROOT, audience))):
        assert verifier.role(token) is role
        assert verifier.role(present(token, audience)) is role
        assert verifier.role(ROOT) is Role.ALL


def test_what_one_audience_was_shown_proves_nothing_to_another() -> None:
    token = create(ROOT, Role.ADMIN)
    for shown_to, other in itertools.permutations(Audience, 2):
        with pytest.raises(UnauthenticatedError):
            Verifier(ROOT, other).role(present(token, shown_to))


def test_the_key_of_one_audience_makes_no_proof_for_another() -> None:
    """Check that a server, which has the key of servers, cannot pass for an admin at the scheduler."""
    forged = ".".join(["psdist.admin.0", *[tokens._proof(audience_key(ROOT, Audience.SERVER), "psdist.admin.0")] * 3])
    assert Verifier(ROOT, Audience.SERVER).role(forged) is Role.ADMIN
    for audience in (Audience.SCHEDULER, Audience.WORKER):
        with pytest.raises(UnauthenticatedError):
            Verifier(ROOT, audience).role(forged)


def test_a_token_with_any_character_changed_proves_nothing() -> None:
    shown = present(create(ROOT, Role.READER, 5_000_000_000), Audience.SCHEDULER)
    verifier = Verifier(ROOT, Audience.SCHEDULER)
    assert verifier.role(shown) is Role.READER
    # The last character of a proof has bits that no byte uses; the text is compared, so they count.
    for place, other in itertools.product(range(len(shown)), "A0.\u00e9"):
        changed = shown[:place] + other + shown[place + 1 :]
        if changed != shown:
            with pytest.raises(UnauthenticatedError):
                verifier.role(changed)


@pytest.mark.parametrize(
    "shown", ["", "other", f"{ROOT}x", ROOT[:-1], "psdist", "psdist.all.0.x", "psdist.scheduler.0." + "A" * 22, "\x00"]
)
@pytest.mark.parametrize("audience", Audience)
def test_nothing_else_proves_anything(shown: str, audience: Audience) -> None:
    with pytest.raises(UnauthenticatedError, match="PSDIST_TOKEN"):
        Verifier(ROOT, audience).role(shown)
    with pytest.raises(UnauthenticatedError):
        Verifier(ROOT, audience).role(create("another-root", Role.WORKER))


def test_an_expired_token_says_when(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_999_999_999.9
    monkeypatch.setattr("psdist.security.tokens.time.time", lambda: now)
    token, verifier = create(ROOT, Role.READER, 2_000_000_000), Verifier(ROOT, Audience.SCHEDULER)
    assert verifier.role(token) is Role.READER
    now = 2_000_000_000.0
    with pytest.raises(UnauthenticatedError, match=r"expired at 2033-05-18 03:33:20 UTC.*--role reader"):
        verifier.role(token)
    forged = token.replace(".2000000000.", ".2000000001.")
    with pytest.raises(UnauthenticatedError, match="missing or wrong"):
        verifier.role(forged)


def test_a_process_that_has_no_key_yet_refuses_everybody() -> None:
    token = create(ROOT, Role.SERVER)
    verifier = Verifier(token, Audience.SERVER)
    for shown in ("", ROOT, token, create(ROOT, Role.WORKER)):
        with pytest.raises(UnauthenticatedError, match="has not registered"):
            verifier.role(shown)
    verifier.learn(audience_key(ROOT, Audience.SERVER))
    assert verifier.role(create(ROOT, Role.WORKER)) is Role.WORKER


def test_a_key_replaces_no_token() -> None:
    """Check that a process with the run's own token, or without one, ignores the key that a scheduler sends."""
    own, opened = Verifier(ROOT, Audience.SERVER), Verifier("", Audience.SERVER)
    for verifier in (own, opened):
        verifier.learn(audience_key("another-root", Audience.SERVER))
        verifier.learn(b"")
    assert own.role(ROOT) is Role.ALL and opened.role("") is Role.ALL
    with pytest.raises(UnauthenticatedError):
        own.role("another-root")


def test_a_token_of_a_role_is_no_use_in_a_run_without_a_token() -> None:
    with pytest.raises(ConfigurationError, match=r"without a token.*unset PSDIST_TOKEN"):
        Verifier(create(ROOT, Role.WORKER), Audience.WORKER).learn(b"")


def test_only_the_run_s_own_token_makes_others() -> None:
    with pytest.raises(ConfigurationError, match="one of role admin"):
        create(create(ROOT, Role.ADMIN), Role.READER)
    for role in (Role.ALL, Role.SCHEDULER):
        with pytest.raises(InvalidArgumentError, match="use one of worker, server, admin, reader"):
            create(ROOT, role)


def test_claims_are_read_without_a_key() -> None:
    assert read(create(ROOT, Role.ADMIN, 77)) == (Role.ADMIN, 77)
    assert read(ROOT) is None and read("psdist.admin.0") is None
