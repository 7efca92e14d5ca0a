"""``Accelerator``: Accelerate's class, whose prepared models are trained by the servers.

**Order of data.** Samplers of torch draw an order from a random generator, so it depends on all passes before. A run
that resumes, or a worker that restarts, starts with a new generator. ``ReplayedSampler`` makes the passes up to the
current data epoch again, from the generator's first state, so undisturbed runs keep the order of torch.

Invariant: All workers have the same first state; the run's snapshots hold it.

``prepare`` replaces an optimizer by a ``DistributedOptimizer``, and leaves the model as it is, without torch's DDP.
Loaders, gathering, trackers and mixed precision are Accelerate's own, in the world of ``psdist.process_group``.

Invariant: A backward pass is refused before the optimizer is prepared: its gradients would stay in this worker.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, NoReturn

import accelerate
import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Sampler

from psdist.compression import Codec
from psdist.errors import InvalidArgumentError
from psdist.process_group import frameworks
from psdist.torch import DistributedOptimizer, LeasedDataLoader
from psdist.torch.leased_loader import follows_generator, is_divided
from psdist.torch.values import share_fixed


class ReplayedSampler(Sampler[Any]):
    """Yields the indices of ``sampler``, whose ``generator`` follows the number of passes.

    shares_generator: True if the loader draws a number from the same generator before each pass, as torch's does for
        its worker processes.
    """

    def __init__(self, sampler: Any, *, shares_generator: bool) -> None:
        if sampler.generator is None:  # As Accelerate makes it.
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            sampler.generator = torch.Generator().manual_seed(seed)
        self._sampler = sampler
        self._shares_generator = shares_generator
        #: State of the generator before the first pass. Written in place when it is shared.
        self.first_state: torch.Tensor = sampler.generator.get_state()
        #: Number of a pass that was made, and the state before it.
        self._known: tuple[int, torch.Tensor] = 0, self.first_state
        #: Data epoch of the next pass.
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        generator = self._sampler.generator
        number, state = self._known if self._known[0] <= epoch else (0, self.first_state)
        generator.set_state(state)
        while number < epoch:
            self._draw()
            deque(self._sampler, maxlen=0)
            number += 1
        self._known = epoch, generator.get_state()
        self._draw()
        yield from self._sampler
        if self._known[0] == epoch:
            self._known = epoch + 1, generator.get_state()

    def _draw(self) -> None:
        if self._shares_generator:
            torch.empty((), dtype=torch.int64).random_(generator=self._sampler.generator)

    def __len__(self) -> int:
        return len(self._sampler)


def replay(loader: Any) -> ReplayedSampler | None:
    """Replace the sampler of a loader of torch, if it draws the order from a generator. Returns the new sampler."""
    if not isinstance(loader, DataLoader):
        return None
    batches: Any = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    sampler: Any = getattr(batches, "sampler", None)
    if not follows_generator(sampler):
        return None
    shares = sampler.generator is not None and sampler.generator is loader.generator
    batches.sampler = order = ReplayedSampler(sampler, shares_generator=shares)
    return order


def follow_epochs(loader: Any, order: ReplayedSampler) -> None:
    """Let ``set_epoch`` of a loader that Accelerate has prepared set the data epoch.

    The loader calls it for each pass, with its own count, which lacks passes that the script ended early.
    """
    set_iteration = loader.set_epoch

    def set_epoch(epoch: int) -> None:
        if epoch != loader.iteration:
            order.epoch = epoch
        set_iteration(epoch)

    loader.set_epoch = set_epoch


logger = logging.getLogger("psdist")

_TYPES: Final = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Accelerator(accelerate.Accelerator):
    """Takes the place of ``accelerate.Accelerator``, with its arguments.

    max_grad_norm: norm to which the servers clip the mean gradient. ``clip_grad_norm_`` of the loop gets the same
        number, and does nothing.
    compression: how gradients are sent, as for ``psdist.torch.DistributedOptimizer``.
    name: name of the parameter set; those of more models get a number.

    ``prepare`` takes models and optimizers, and an optimizer of psdist that the script has made. Without a launcher the
    script trains alone. Raises InvalidArgumentError for DeepSpeed, FSDP, and everything else that divides the model.
    """

    #: Settings of a class that was put on an accelerator by ``adopt``.
    _max_grad_norm: float | None = None
    _compression: Codec | str | None = None
    _set_name = "model"
    #: True between two backward passes of one step.
    _is_in_step = False
    #: Prepared loaders that shuffle, with their orders, until an optimizer is prepared; and the number of those before.
    _orders: tuple[tuple[Any, ReplayedSampler], ...] = ()
    _orders_shared = 0

    def __init__(
        self,
        *arguments: Any,
        max_grad_norm: float | None = None,
        compression: Codec | str | None = None,
        name: str = "model",
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._max_grad_norm = max_grad_norm
        self._compression = compression
        self._set_name = name
        check_distributed(self)

    @property
    def distributed_optimizers(self) -> list[DistributedOptimizer]:
        """Prepared optimizers whose steps the servers make."""
        found = [getattr(one, "optimizer", None) for one in self._optimizers]
        return [one for one in found if isinstance(one, DistributedOptimizer)]

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in the order in which they are given.

        Raises InvalidArgumentError for an optimizer whose model is neither among them nor prepared before, and for what
        ``DistributedOptimizer`` refuses.
        """
        models = [*self._models, *(one for one in objects if isinstance(one, nn.Module))]
        for model in models:
            self._place(model)
        ready = [self._distributed(one, models) if _is_optimizer(one) else one for one in objects]
        prepared = super().prepare(*ready, device_placement=device_placement)
        self._share_orders()
        return prepared

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare a loader. One that shuffles has an order that follows from the data epoch, also in a run that resumes
        and in a worker that restarts. One that the script has divided is not divided again."""
        is_ready = getattr(data_loader, "_is_accelerate_prepared", False)
        if not is_ready and isinstance(data_loader, DataLoader) and is_divided(data_loader):
            return self._prepare_divided(data_loader, device_placement)
        is_ready = is_ready or self.use_seedable_sampler
        order = None if is_ready else replay(data_loader)
        prepared = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if order is not None:
            follow_epochs(prepared, order)
            self._orders = (*self._orders, (prepared, order))
            self._share_orders()
        return prepared

    def _prepare_divided(self, loader: DataLoader[Any], device_placement: bool | None) -> Any:
        """Prepare a loader that yields this worker's share. One of leased ranges stays as it is."""
        if isinstance(loader, LeasedDataLoader):
            return loader
        prepared = accelerate.data_loader.prepare_data_loader(
            loader, self.device, num_processes=1, process_index=0, rng_types=[], dispatch_batches=False,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            non_blocking=self.non_blocking,
        )  # fmt: skip
        self._dataloaders.append(prepared)
        return prepared

    def _share_orders(self) -> None:
        """Give all workers the same orders, and start them at the run's data epoch."""
        optimizers = self.distributed_optimizers
        if not optimizers:
            return
        orders, self._orders = self._orders, ()
        for loader, order in orders:
            name = f"{self._set_name}/order-{self._orders_shared}"
            self._orders_shared += 1
            share_fixed(optimizers[0].context.client, name, {"state": order.first_state})
            steps = -(-len(loader) // self.gradient_accumulation_steps)
            loader.iteration = order.epoch = optimizers[0].handle.step // max(1, steps)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model without wrapping it in torch's DDP."""
        if self.device_placement if device_placement is None else device_placement:
            self._place(model)
        prepared: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return prepared

    def _place(self, model: nn.Module) -> None:
        # To torch the device cpu:0 is another than cpu, and a model that is moved there gets new memory.
        model.to("cpu" if self.device.type == "cpu" else self.device)

    def backward(self, loss: torch.Tensor, **keywords: Any) -> None:
        """Run the backward pass. Raises InvalidArgumentError before the optimizer is prepared."""
        optimizers = self.distributed_optimizers
        if not optimizers:
            raise InvalidArgumentError(
                "no optimizer of this accelerator is prepared, so gradients would stay in this worker: pass the model "
                "and its optimizer to prepare()"
            )
        if not self._is_in_step:
            frameworks.mark_iteration(optimizers[0].context)
        self._is_in_step = not self.sync_gradients
        super().backward(loss, **keywords)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward passes only accumulate gradients."""
        return frameworks.no_sync(self.distributed_optimizers)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor | None:
        """Check that the servers clip to ``max_norm``. The result is None: the norm of the mean is on the servers.

        Raises InvalidArgumentError for another norm than the accelerator's ``max_grad_norm``.
        """
        clips = [one.handle.spec.optimizer.max_grad_norm for one in self.distributed_optimizers]
        if norm_type != 2 or any(clip != max_norm for clip in clips):
            raise InvalidArgumentError(
                f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}) would clip this worker's own gradients, "
                "but a single process clips their mean, by its 2-norm: make the accelerator with "
                f"psdist.hf.Accelerator(max_grad_norm={max_norm})"
            )
        return None

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> NoReturn:
        """Refuse: only the mean gradient could be clipped as in a single process."""
        raise InvalidArgumentError(
            "clip_grad_value_ would clip this worker's own gradients, but a single process clips their mean: use "
            "psdist.hf.Accelerator(max_grad_norm=...) and clip_grad_norm_"
        )

    def join_uneven_inputs(self, joinables: Any, even_batches: Any = None) -> NoReturn:
        """Refuse: ``join()`` of the prepared optimizer's ``optimizer`` does it."""
        raise InvalidArgumentError(
            "join_uneven_inputs() needs torch's DDP: use 'with optimizer.optimizer.join():' around the loop, where "
            "optimizer is the prepared one"
        )

    def _distributed(self, optimizer: torch.optim.Optimizer, models: list[nn.Module]) -> DistributedOptimizer:
        if isinstance(optimizer, DistributedOptimizer):
            return optimizer
        if not (found := frameworks.models_of(optimizer, models)):
            raise InvalidArgumentError(
                f"the parameters of this {type(optimizer).__name__} are in no model that was given to prepare(): "
                "prepare the model in the same call, or before. For an optimizer over several models make one "
                "optimizer for each"
            )
        made = frameworks.serve(
            found[0], optimizer, compression=self._compression, max_grad_norm=self._max_grad_norm,
            name=self._set_name, number=len(self.distributed_optimizers), is_scaled=self.scaler is not None,
        )  # fmt: skip
        if made.handle.step:
            logger.warning(
                "this run resumes at step %d: let the script skip the batches that it has trained with, by "
                "accelerator.skip_first_batches(), start at its data epoch (loader.set_epoch()), and advance its "
                "scheduler",
                made.handle.step,
            )
        return made


def adopt(accelerator: accelerate.Accelerator, settings: Mapping[str, Any]) -> None:
    """Turn an accelerator that a framework has made into one of psdist.

    settings: attributes of ``Accelerator``. Raises InvalidArgumentError as its constructor.
    """
    check_distributed(accelerator)
    accelerator.__class__ = Accelerator
    vars(accelerator).update(settings)


def check_distributed(accelerator: accelerate.Accelerator) -> None:
    """Raise InvalidArgumentError for an accelerator that divides the model, or has 8-bit arithmetic."""
    if accelerator.distributed_type not in _TYPES or accelerator.parallelism_config is not None:
        raise InvalidArgumentError(
            f"distributed type {accelerator.distributed_type.value} divides the model, but psdist keeps it on its "
            "servers: leave out deepspeed, fsdp, megatron and parallelism_config, also from accelerate's "
            "configuration file. psdist.torch.offload trains models that do not fit into a worker"
        )
    if dist.is_initialized() and accelerator.num_processes != dist.get_world_size():
        raise InvalidArgumentError(
            f"Accelerate sees {accelerator.num_processes} process, but the run has {dist.get_world_size()} workers, "
            "which would all train on the same data: import psdist.hf before TrainingArguments or an accelerator is "
            "made, and unset ACCELERATE_USE_CPU"
        )
    if accelerator.mixed_precision == "fp8":
        raise InvalidArgumentError("mixed_precision='fp8' is not supported: use 'bf16', 'fp16' or 'no'")


def _is_optimizer(found: Any) -> bool:
    return isinstance(found, torch.optim.Optimizer) and not isinstance(found, AcceleratedOptimizer)
