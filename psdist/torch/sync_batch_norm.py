"""``SyncBatchNorm``: batch normalization over the batches of all workers, on any device.

torch's own class takes only inputs on a GPU. This one needs nothing but all-gathers, so it works in models on the CPU,
with every process group. One all-gather in the forward pass and one in the backward pass carry float64 sums, which are
added in rank order. So all workers compute the same statistics: those of one process with the whole batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from psdist.errors import ConfigurationError, InvalidArgumentError


class SyncBatchNorm(_BatchNorm):
    """Batch normalization by the mean and the variance of all workers' batches.

    Its arguments, buffers and names are those of ``torch.nn.SyncBatchNorm``. In a world of one, and in evaluation, it
    is ``torch.nn.BatchNorm``. Workers may have batches of different sizes. Gradients of ``weight`` and ``bias`` are
    this worker's, to be averaged like all others.

    process_group: workers that share statistics; None is the default group, which the script has initialized, for
        example by ``torch.distributed.init_process_group("psdist")``.

    The forward pass raises ConfigurationError without a process group among several workers, InvalidArgumentError for
    inputs of less than two dimensions, and for one value per channel.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """Return the model with this class in place of every batch normalization. Their weights and buffers are
        kept."""
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            return cls._from(module, process_group)
        for name, child in module.named_children():
            module.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return module

    @classmethod
    def _from(cls, old: _BatchNorm, process_group: Any) -> Self:
        new = cls(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats, process_group)
        for tensors in ("_parameters", "_buffers"):  # The same objects, since an optimizer may have them.
            getattr(new, tensors).update(getattr(old, tensors))
        return new.train(old.training)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a batch."""
        self._check_input_dim(input)
        if not (self.training or self.running_mean is None) or _world_size(self.process_group) == 1:
            return super().forward(input)
        mean, variance, count = _statistics(input, self.process_group)
        if self.training and self.track_running_stats:
            self._track(mean, variance * (count / (count - 1)))
        dtype = torch.promote_types(input.dtype, torch.float32)
        mean, inverse = mean.to(dtype), torch.rsqrt(variance + self.eps).to(dtype)
        normalize: Callable[..., Tensor] = _Normalize.apply
        return normalize(input, self.weight, self.bias, mean, inverse, count, self.process_group)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise InvalidArgumentError(
                f"SyncBatchNorm({self.num_features}) got an input of shape {tuple(input.shape)}: the second dimension "
                f"must be its {self.num_features} channels"
            )

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics, as torch does."""
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running.lerp_(new.to(running.dtype), factor)


class _Normalize(torch.autograd.Function):
    """(input - mean) * inverse * weight + bias, where mean and inverse depend on the inputs of all workers."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        inverse: Tensor,
        count: int,
        group: Any,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, inverse)
        ctx.count, ctx.group = count, group
        output = (input - _wide(mean, input)) * _wide(inverse if weight is None else inverse * weight, input)
        return (output if bias is None else output + _wide(bias, input)).to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse = ctx.saved_tensors
        normalized = (input - _wide(mean, input)) * _wide(inverse, input)
        of_bias, of_weight = _sum(gradient), _sum(gradient * normalized)
        # Other workers need the sums, also if this one's input needs no gradient.
        sums = _gather(torch.stack([of_bias, of_weight]), ctx.group).sum(0) / ctx.count
        of_input = None
        if ctx.needs_input_grad[0]:
            common, along = (_wide(each.to(mean.dtype), input) for each in sums)
            scale = inverse if weight is None else inverse * weight
            of_input = ((gradient - common - normalized * along) * _wide(scale, input)).to(input.dtype)
        if weight is None:
            return of_input, *[None] * 6
        return of_input, of_weight.to(weight.dtype), of_bias.to(weight.dtype), *[None] * 4


@torch.no_grad()
def _statistics(input: Tensor, group: Any) -> tuple[Tensor, Tensor, int]:
    """Return the mean, the biased variance and the number of values of each channel, over all workers."""
    count = input.numel() // max(1, input.shape[1])
    mean = _sum(input) / max(1, count)
    dtype = torch.promote_types(input.dtype, torch.float32)
    squares = _sum((input - _wide(mean.to(dtype), input)).square())
    local = torch.cat([torch.full((1,), count, dtype=torch.float64, device=input.device), mean, squares])
    found = _gather(local, group)
    counts, means, squared = found[:, :1], *found[:, 1:].chunk(2, dim=1)
    total = int(counts.sum())
    if total < 2:
        raise InvalidArgumentError(
            f"SyncBatchNorm needs two values per channel over all workers to compute a variance, and has {total}: use "
            "larger batches"
        )
    common = (counts * means).sum(0) / total
    return common, (squared + counts * (means - common).square()).sum(0) / total, total


def _sum(values: Tensor) -> Tensor:
    """Return the sum of each channel, float64."""
    return values.sum([dim for dim in range(values.dim()) if dim != 1], dtype=torch.float64)


def _wide(channels: Tensor, like: Tensor) -> Tensor:
    """Return one value per channel in a shape that is broadcast to ``like``."""
    return channels.view(1, -1, *([1] * (like.dim() - 2)))


def _gather(local: Tensor, group: Any) -> Tensor:
    """Return the tensors of all workers, [workers, ...], in rank order."""
    places = [torch.empty_like(local) for _ in range(_world_size(group))]
    dist.all_gather(places, local.contiguous(), group=group)
    return torch.stack(places)


def _world_size(group: Any) -> int:
    """Return the number of workers that share statistics. Raises ConfigurationError if they cannot."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(group)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigurationError(
            f"SyncBatchNorm has no process group for the {os.environ['WORLD_SIZE']} workers of WORLD_SIZE: call "
            'torch.distributed.init_process_group("psdist") before the first batch'
        )
    return 1
