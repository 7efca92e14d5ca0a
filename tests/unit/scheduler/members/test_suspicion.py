"""The rule that judges silent members, by table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psdist_scheduler.decide.losses import HEARD_LEASES, LAST_COPY_LEASES, Evidence, excuse, is_lost

LEASE = 2.0

#: What is known, and after how many leases of silence the member is lost; None for never.
CASES: list[tuple[dict[str, Any], float | None]] = [
    ({}, 1),
    ({"probe": "accepted"}, 1),
    ({"probe": "silent"}, 1),
    ({"probe": "refused"}, 0),
    ({"probe": "refused", "ended": True, "others": False}, 0),
    ({"others": False}, None),
    ({"others": False, "last_copy": True}, None),
    ({"others": False, "probe": "refused"}, None),
    ({"heard": True}, HEARD_LEASES),
    ({"heard": True, "probe": "silent"}, HEARD_LEASES),
    ({"last_copy": True}, LAST_COPY_LEASES),
    ({"last_copy": True, "probe": "accepted"}, LAST_COPY_LEASES),
    ({"last_copy": True, "probe": "silent"}, LAST_COPY_LEASES),
    ({"last_copy": True, "probe": "refused"}, 0),
    ({"last_copy": True, "heard": True}, None),
    ({"last_copy": True, "ended": True, "probe": "silent"}, LAST_COPY_LEASES),
    ({"last_copy": True, "ended": True, "probe": "accepted"}, LAST_COPY_LEASES),
    ({"last_copy": True, "others": False, "asked_for": LEASE}, 1),
    ({"last_copy": True, "heard": True, "asked_for": LEASE}, 1),
    ({"others": False, "asked_for": 0.9 * LEASE}, None),
    ({"answers": True}, None),
    ({"answers": True, "asked_for": LEASE}, 1),
]


@pytest.mark.parametrize(("known", "leases"), CASES)
def test_when_a_silent_member_is_lost(known: dict[str, Any], leases: float | None) -> None:
    evidence = Evidence(overdue=-LEASE, lease=LEASE, **known)
    if leases == 0:
        assert is_lost(evidence)
        return
    assert not is_lost(replace(evidence, overdue=0.0))
    if leases is None:
        assert not is_lost(replace(evidence, overdue=1e6))
        return
    limit = (leases - 1) * LEASE
    assert not is_lost(replace(evidence, overdue=limit)) and is_lost(replace(evidence, overdue=limit + 0.01))


def test_an_excuse_names_the_reason_and_the_limit() -> None:
    assert "may be cut off itself" in excuse(Evidence(1.0, LEASE, others=False))
    assert excuse(Evidence(1.0, LEASE, heard=True)) == "others hear from it; it is expelled after 6 s"
    assert excuse(Evidence(1.0, LEASE, heard=True, last_copy=True)) == "others hear from it; the run waits for it"
    text = excuse(Evidence(8.0, LEASE, last_copy=True, probe="accepted"))
    assert text == "it may have the last copy of a shard, and its host accepts connections; it is expelled after 60 s"
