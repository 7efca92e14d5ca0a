"""``PsdistStrategy``: Lightning's Trainer with its optimizers on the servers.

The optimizers of ``configure_optimizers`` are replaced by a ``DistributedOptimizer`` each. Lightning keeps its loops,
closures, schedulers, samplers and files, in the world of ``psdist.process_group``.

Invariant: A step counts once. If the run is ahead of the script, because it resumes from a snapshot that is newer than
the checkpoint or because this worker restarted, the script's steps up to the run's are made without effect.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import _update_dataloader
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, SequentialSampler

from psdist.client.context import init, is_open
from psdist.client.session.loop import torch_group_size
from psdist.compression import Codec
from psdist.errors import InvalidArgumentError
from psdist.process_group import broadcast_value, frameworks, is_launched, start
from psdist.process_group.frameworks import refuse
from psdist.settings.other_launchers import check_alone
from psdist.torch import DistributedOptimizer
from psdist.torch.leased_loader import follows_generator, is_divided
from psdist.torch.optimizer import parameters_of


class SharedSampler(Sampler[int]):
    """Yields this worker's share of the indices of ``sampler``.

    With N workers and loaders of B samples, each N * B consecutive indices are a batch of all workers, and each worker
    takes B of them. The last batch may be smaller.

    pads: repeat up to N - 1 of the first indices, so that all workers have as many.

    Each pass starts with a broadcast of rank 0's indices, unless they are in order. Raises InvalidArgumentError for
    indices that are not whole numbers.
    """

    def __init__(self, sampler: Any, batch_size: int, rank: int, world_size: int, *, pads: bool) -> None:
        self._sampler = sampler
        self._batch = batch_size
        self._rank = rank
        self._world_size = world_size
        self._pads = pads

    def __iter__(self) -> Iterator[int]:
        indices = self._indices()
        whole = self._batch * self._world_size
        for at in range(0, len(indices), whole):
            part = indices[at : at + whole]
            if self._pads:
                missing = -len(part) % self._world_size
                part += (indices * -(-missing // len(indices)))[:missing]
            size, more = divmod(len(part), self._world_size)
            first = self._rank * size + min(self._rank, more)
            yield from part[first : first + size + (self._rank < more)]

    def __len__(self) -> int:
        whole = self._batch * self._world_size
        full, rest = divmod(_length(self._sampler), whole)
        share, more = divmod(rest, self._world_size)
        return full * self._batch + share + (more > 0 if self._pads else self._rank < more)

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the data epoch to a sampler that wants it."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)

    def _indices(self) -> list[int]:
        found = list(self._sampler)
        if isinstance(self._sampler, SequentialSampler):
            return found
        if not all(isinstance(one, int) for one in found):
            raise InvalidArgumentError(
                "a loader's sampler yields other values than whole numbers: divide the data by rank in the script, "
                "and pass use_distributed_sampler=False to the Trainer"
            )
        order = torch.tensor(found)
        dist.broadcast(order, 0)
        indices: list[int] = order.tolist()
        return indices


def _length(sampler: Sized) -> int:
    return len(sampler)


logger = logging.getLogger("psdist")

_CLIP: Final = "clips this worker's own gradients, but a single process clips their mean"


class PsdistStrategy(ParallelStrategy):
    """Strategy for ``lightning.Trainer(strategy=PsdistStrategy())``.

    compression: how gradients are sent, as for ``psdist.torch.DistributedOptimizer``.
    max_grad_norm: norm to which the servers clip the mean gradient in manual optimization. In automatic optimization
        it is ``gradient_clip_val`` of the Trainer.
    name: name of the parameter set; those of more optimizers get a number.

    The world is that of ``psdist run``: ``devices`` and ``num_nodes`` of the Trainer do not change it. Without a
    launcher the script trains alone.

    Raises InvalidArgumentError for settings that a single process would treat otherwise, when the Trainer starts.
    """

    strategy_name = "psdist"
    #: Read by Lightning, which then combines logged values.
    is_distributed = True

    def __init__(
        self,
        compression: Codec | str | None = None,
        max_grad_norm: float | None = None,
        name: str = "model",
        **keywords: Any,
    ) -> None:
        environment: ClusterEnvironment = PsdistEnvironment()
        super().__init__(cluster_environment=environment, **keywords)
        self._compression = compression
        self._max_grad_norm = max_grad_norm
        self._name = name
        self._distributed: list[DistributedOptimizer] = []
        self.optimizers: list[Any]
        #: Steps that each optimizer has yet to make without effect.
        self._behind: dict[int, int] = {}
        #: True if loaders are divided, and if they are those of predictions.
        self._divides: bool | None = None
        self._predicts = False

    # --- the world ---

    @property
    def root_device(self) -> torch.device:
        """Device of this worker."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank % len(devices)]

    def setup_environment(self) -> None:
        """Start the process group. Raises ConfigurationError for one of several processes of another launcher."""
        if not start():
            check_alone(os.environ, "set PSDIST_SCHEDULER=HOST:PORT")
            refuse(
                torch_group_size() > 1 or (is_open() and init().world_size > 1),
                "torch.distributed has several ranks, but the world of PsdistStrategy is that of psdist's launchers: "
                "start the script with 'psdist run'",
            )
        rank_zero_only.rank = self.global_rank
        super().setup_environment()

    def model_to_device(self) -> None:
        """Move the model to this worker's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def process_dataloader(self, dataloader: object) -> object:
        """Let a loader yield this worker's share. Raises InvalidArgumentError for a loader with a batch sampler.

        Left as they are: loaders of an IterableDataset, loaders that the script divides by a DistributedSampler of
        torch or psdist, or by leases, and all loaders with ``use_distributed_sampler=False``.
        """
        resumed = max((one.handle.step for one in self._distributed), default=0)
        if resumed and isinstance(dataloader, DataLoader) and follows_generator(dataloader.sampler):
            logger.warning(
                "this run resumes at step %d, but the order of a loader that shuffles follows from a random generator: "
                "some samples of the data epoch come twice, others never. Pass sampler=psdist.data.DistributedSampler("
                "data, seed=0), whose order follows from the data epoch",
                resumed,
            )
        is_whole = (
            isinstance(dataloader, DataLoader)
            and not isinstance(dataloader.dataset, IterableDataset)
            and not is_divided(dataloader)
        )
        if self.world_size == 1 or not is_whole or not self._divides:
            return dataloader
        assert isinstance(dataloader, DataLoader)
        if dataloader.batch_size is None:
            raise InvalidArgumentError(
                "a loader has a batch_sampler, or no batches, so its samples cannot be divided: divide them by rank in "
                "the script, and pass use_distributed_sampler=False to the Trainer"
            )
        sampler = SharedSampler(
            dataloader.sampler, dataloader.batch_size, self.global_rank, self.world_size,
            pads=not self._predicts,
        )  # fmt: skip
        return _update_dataloader(dataloader, sampler)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all workers."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the value of rank ``src``: None, a boolean, a number, text, a path, or a list or dict of them.

        Raises InvalidArgumentError for other values: psdist does not unpickle what comes from a network.
        """
        return broadcast_value(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Combine a tensor of all workers: their mean, sum, or another operation of torch."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        named = {"mean": dist.ReduceOp.AVG, "avg": dist.ReduceOp.AVG}
        operation = reduce_op
        if isinstance(reduce_op, str):
            operation = named.get(reduce_op.lower()) or getattr(dist.ReduceOp, reduce_op.upper())
        is_mean_of_whole = operation == dist.ReduceOp.AVG and not tensor.is_floating_point()
        result = tensor.float() if is_mean_of_whole else tensor.clone()
        dist.all_reduce(result, operation)
        return result

    # --- the optimizers ---

    def setup(self, trainer: LightningTrainer) -> None:
        """Prepare the module, its optimizers, and clipping."""
        refuse(
            self._layer_sync is not None and self.world_size > 1,
            "sync_batchnorm=True is not supported: BatchNorm has the statistics of each worker's own batches; leave it "
            "out, or use a norm without running statistics, such as GroupNorm",
        )
        connector = trainer._accelerator_connector
        if self._divides is None:
            # Lightning would insert its own sampler first.
            self._divides, connector.use_distributed_sampler = connector.use_distributed_sampler, False
        self._predicts = trainer.state.fn == TrainerFn.PREDICTING
        super().setup(trainer)
        plugin: Any = self.precision_plugin
        plugin.clip_gradients = self._check_clipping

    def setup_optimizers(self, trainer: LightningTrainer) -> None:
        """Make the module's optimizers, and give them to the servers."""
        super().setup_optimizers(trainer)
        module = self.lightning_module
        assert module is not None
        refuse(
            module.automatic_optimization and len(self.optimizers) > 1,
            "several optimizers in automatic optimization: set self.automatic_optimization = False in the module, and "
            "step them in training_step",
        )
        clips = self._clipping_of(trainer, module)
        schedulers = {
            config.scheduler.optimizer: config.scheduler
            for config in self.lr_scheduler_configs
            if module.automatic_optimization
            and config.interval == "step"
            and config.frequency == 1
            and frameworks.is_stepped(config.scheduler)
        }
        self._distributed = [
            optimizer
            if isinstance(optimizer, DistributedOptimizer)
            else frameworks.serve(
                _part_of(module, optimizer), optimizer, schedulers.get(optimizer),
                compression=self._compression, max_grad_norm=clips, name=self._name, number=number,
                is_scaled=getattr(self.precision_plugin, "scaler", None) is not None,
            )
            for number, optimizer in enumerate(self.optimizers)
        ]  # fmt: skip
        self._behind = {id(one): one.handle.step for one in self._distributed}
        self.optimizers = list(self._distributed)

    def _clipping_of(self, trainer: LightningTrainer, module: LightningModule) -> float | None:
        if not module.automatic_optimization:
            return self._max_grad_norm
        by_value = str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)) == "value"
        refuse(
            trainer.gradient_clip_val and by_value,
            f"gradient_clip_algorithm='value' {_CLIP}: use gradient_clip_algorithm='norm', which the servers carry out",
        )
        clip = trainer.gradient_clip_val or self._max_grad_norm
        return None if clip is None else float(clip)

    def _check_clipping(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Take the place of the precision plugin's clipping: the servers do it."""
        if not clip_val:
            return
        inner = getattr(optimizer, "optimizer", optimizer)
        given = inner.handle.spec.optimizer.max_grad_norm if isinstance(inner, DistributedOptimizer) else None
        if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value" or given != clip_val:
            raise InvalidArgumentError(
                f"clip_gradients(gradient_clip_val={clip_val}) {_CLIP}: make the strategy with "
                f"PsdistStrategy(max_grad_norm={clip_val}), by whose norm the servers clip"
            )

    # --- a step ---

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Record that the validation after the last step, if any, is over."""
        if self._distributed:
            frameworks.mark_iteration(self._distributed[0].context)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only accumulate gradients."""
        return frameworks.no_sync(self._distributed)

    def backward(self, closure_loss: Tensor, optimizer: Any, *arguments: Any, **keywords: Any) -> Tensor:
        """Run the backward pass."""
        with self.block_backward_sync() if any(self._behind.values()) else nullcontext():
            return super().backward(closure_loss, optimizer, *arguments, **keywords)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **keywords: Any) -> Any:
        """Make a step, or pass a step that the run has already made."""
        if not self._behind.get(id(optimizer)):
            return super().optimizer_step(optimizer, closure, model, **keywords)
        assert self.lightning_module is not None
        buffers = {name: buffer.clone() for name, buffer in self.lightning_module.named_buffers()}
        result = closure()
        for name, buffer in self.lightning_module.named_buffers():
            buffer.copy_(buffers[name])
        for parameter in parameters_of(optimizer) or ():
            parameter.grad = None
        self._behind[id(optimizer)] -= 1
        return result

    # --- checkpoints ---

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write Lightning's checkpoint on rank 0, with a snapshot of the run."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if "optimizer_states" not in checkpoint or not self._distributed:
            return
        frameworks.save_run(self._distributed[0].context, "use ModelCheckpoint(save_weights_only=True)")

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Find out how far the run is ahead of the checkpoint. Raises InvalidArgumentError if it is behind it."""
        for optimizer, state in zip(self._distributed, checkpoint["optimizer_states"], strict=True):
            saved, step = state.get("psdist", {}).get("step"), optimizer.handle.step
            if saved is None or saved >= step:
                optimizer.load_state_dict(state)  # Raises, with the remedy, unless the steps are equal.
            else:
                for group, old in zip(optimizer.param_groups, state["param_groups"], strict=True):
                    group["lr"] = old["lr"]
            self._behind[id(optimizer)] = step - saved

    def on_train_start(self) -> None:
        """Report the steps that will be made without effect."""
        if behind := max(self._behind.values(), default=0):
            logger.warning(
                "the run is %d steps ahead of this script, which makes them without effect; ckpt_path='last' lets it "
                "start at the newest checkpoint",
                behind,
            )

    def teardown(self) -> None:
        """Give the model back to the script."""
        for optimizer in self._distributed:
            optimizer.close()
        self._distributed = []
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the name ``psdist``."""
        strategy_registry.register(cls.strategy_name, cls, description=cls.__name__)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("a PsdistStrategy belongs to this process and cannot be copied")


def _part_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """Return the smallest part of the module that has the optimizer's parameters."""
    if not (parts := frameworks.models_of(optimizer, module.modules())):
        raise InvalidArgumentError(
            f"this {type(optimizer).__name__} has parameters that are not the module's: assign their layers to "
            "attributes of the LightningModule"
        )
    return min(parts, key=lambda part: sum(1 for _ in part.parameters()))


class PsdistEnvironment(ClusterEnvironment):
    """Place of a worker that a launcher of psdist, or torchrun, has started; a world of one otherwise."""

    @property
    def creates_processes_externally(self) -> bool:
        """True: the launcher starts the workers."""
        return True

    @property
    def main_address(self) -> str:
        """Address that nothing uses: workers do not connect to each other."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """Port that nothing uses."""
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """True if a launcher of psdist, or torchrun, has started this script."""
        return is_launched()

    def world_size(self) -> int:
        """Workers of the run."""
        return self._number("WORLD_SIZE", 1)

    def set_world_size(self, size: int) -> None:
        """Ignore Lightning's own number."""

    def global_rank(self) -> int:
        """This worker's number."""
        return self._number("RANK", 0)

    def set_global_rank(self, rank: int) -> None:
        """Ignore Lightning's own number."""

    def local_rank(self) -> int:
        """This worker's number on its machine."""
        return self._number("LOCAL_RANK", 0)

    def node_rank(self) -> int:
        """Number of this machine."""
        return self._number("GROUP_RANK", 0)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any numbers: the run has its own."""

    def _number(self, name: str, default: int) -> int:
        return int(os.environ[name]) if is_launched() and name in os.environ else default
