"""Limit on the failures of an address."""

from __future__ import annotations

from psdist.wire.limits import FailureLimit


def test_failures_of_an_address_decay_and_a_success_forgives_them() -> None:
    limit = FailureLimit(per_second=2.0, burst=3, addresses_max=2)
    for _ in range(3):
        assert not limit.is_exceeded("a", 10.0)
        limit.fail("a", 10.0)
    assert limit.is_exceeded("a", 10.0) and not limit.is_exceeded("b", 10.0)
    assert not limit.is_exceeded("a", 10.5), "one failure has decayed"
    limit.fail("a", 10.5)
    assert limit.is_exceeded("a", 10.5)
    limit.succeed("a")
    assert not limit.is_exceeded("a", 10.5)


def test_few_addresses_are_remembered() -> None:
    limit = FailureLimit(per_second=1.0, burst=1, addresses_max=2)
    for address in ("a", "b", "c"):
        limit.fail(address, 0.0)
    assert [limit.is_exceeded(address, 0.0) for address in "abc"] == [False, True, True]
