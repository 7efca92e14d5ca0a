"""Choice between servers and links for a model's mean gradients."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from psdist.client.context import Context
from psdist.client.sync_client import Parameters
from psdist.compression import Codec, Float32
from psdist.errors import InvalidArgumentError
from psdist.torch.averaging.link_gradients import LinkGradients
from psdist.torch.averaging.link_steps import WISHES, LinkSteps
from psdist.torch.averaging.rank_numbers import RANKS

logger = logging.getLogger("psdist")


def obstacle(context: Context, trained: Mapping[str, Tensor], codec: Codec, *, copies_buffers: bool) -> str:
    """Return why a model's gradients cannot be averaged over links, or an empty string.

    copies_buffers: buffers are copied to all workers in each step.
    """
    if context.is_subset:
        return "the context is that of some workers of the run"
    if context.world_size < 2 or context.world_size > RANKS:
        return f"the run has {context.world_size} workers"
    if {(one.device.type, one.dtype) for one in trained.values()} != {("cpu", torch.float32)}:
        return "not all parameters are float32 on the CPU"
    if codec != Float32():
        return f"gradients are compressed by {codec!r:.80}"
    return "buffers are copied in each step (broadcast_buffers=False copies none)" if copies_buffers else ""


def check_path(path: str, why_not: str) -> None:
    """Raise InvalidArgumentError for an unknown ``path``, and for "collectives" if there is an ``obstacle``."""
    if path not in WISHES:
        raise InvalidArgumentError(f"path={path!r:.60} is unknown: use one of {', '.join(map(repr, WISHES))}")
    if path == "collectives" and why_not:
        raise InvalidArgumentError(f"path='collectives' is impossible, because {why_not}: use path='auto'")


def over_links(
    context: Context, handle: Parameters, buckets: Sequence[Sequence[str]], path: str, why_not: str, *, marker: str
) -> LinkGradients | None:
    """Decide together with all workers if gradients are averaged over links. Returns None for servers.

    handle, buckets, marker: as for ``LinkGradients``.
    path, why_not: as for ``check_path``.

    Raises SettingsMismatchError if the workers disagree.
    """
    if context.world_size < 2 or context.is_subset:
        return None
    steps = LinkSteps.of(context)
    is_over_links = steps.vote(context, "servers" if why_not else path)
    way = "all-reduces over links between the workers" if is_over_links else "the servers"
    logger.info("gradients of %r are averaged by %s%s", handle.name, way, f": {why_not}" if why_not else "")
    return LinkGradients(handle, steps, buckets, context.client, marker=marker) if is_over_links else None
