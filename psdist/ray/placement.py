"""Room for the actors in the cluster: one placement group for the servers, one for the workers."""

from __future__ import annotations

from collections.abc import Mapping

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from psdist.errors import WaitTimeoutError


def reserve(name: str, bundle: Mapping[str, float], count: int, strategy: str, timeout: float) -> PlacementGroup:
    """Reserve ``count`` bundles of resources, and wait until the cluster has them.

    name: "servers" or "workers", for the error.
    timeout: longest wait in seconds; a cluster that grows on demand needs some.

    Raises WaitTimeoutError, which names the free resources.
    """
    wanted = {resource: amount for resource, amount in bundle.items() if amount}
    group = placement_group([wanted] * count, strategy)
    try:
        ray.get(group.ready(), timeout=timeout)
    except BaseException as error:  # Ctrl-C, too: nobody else knows the group yet.
        remove_placement_group(group)
        if not isinstance(error, GetTimeoutError):
            raise
        free = ray.available_resources()
        needs = ", ".join(f"{amount * count:g} {resource}" for resource, amount in wanted.items())
        has = ", ".join(f"{free.get(resource, 0.0):g} {resource}" for resource in wanted)
        raise WaitTimeoutError(
            f"the cluster has no room for {count} {name} with {_text(wanted)} each ({needs}) after "
            f"placement_timeout={timeout:g} s: free now are {has}. Add nodes, pass a smaller num_{name} or "
            f"resources_per_{name[:-1]}, or wait for other jobs"
        ) from None
    return group


def _text(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {resource}" for resource, amount in resources.items())
