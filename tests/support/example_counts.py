"""Numbers of hypothesis' examples for tests whose examples are slow."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> settings:
    """Return settings for ``count`` examples under make test, and eight times as many under make long."""
    return settings(max_examples=8 * count if settings.get_current_profile_name() == "full" else count)
