"""Kinds of loaders: those whose data the script has divided among the workers, and those whose order follows from a
random generator."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler

from psdist import data
from psdist.torch.leased_loader import LeasedDataLoader


def is_divided(loader: Any) -> bool:
    """True for a loader of leased ranges, with a sampler that divides, or of a stream that Hugging Face's
    ``split_dataset_by_node`` has split."""
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    samplers = (loader.sampler, getattr(batches, "sampler", None))
    return (
        isinstance(loader, LeasedDataLoader)
        or any(isinstance(sampler, DistributedSampler | data.DistributedSampler) for sampler in samplers)
        or getattr(loader.dataset, "_distributed", None) is not None
    )


def follows_generator(sampler: Any) -> bool:
    """True if the sampler draws its order from a random generator, so that it follows from all passes before."""
    return sampler is not None and hasattr(sampler, "generator") and not hasattr(sampler, "set_epoch")
