"""``Trainer``: Transformers' class, whose model the servers train.

Transformers creates the optimizer and the scheduler as usual, and a ``DistributedOptimizer`` wraps them. Transformers'
own code divides the data, gathers metrics and writes files. Its collectives go through ``psdist.process_group``.

Invariants: ``state.global_step`` is the servers' step, so a run that resumes and a worker that restarts skip the
batches before it. All tokens have the same weight in the mean gradient, whichever worker they are on.

Not here: preparation of the model and the optimizer (``accelerator``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import transformers

from psdist.compression import Codec
from psdist.errors import InvalidArgumentError
from psdist.hf.accelerator import adopt
from psdist.process_group.frameworks import is_stepped, mark_iteration, refuse, save_run, serve
from psdist.process_group.group import open_collectives
from psdist.torch import DistributedOptimizer

logger = logging.getLogger("psdist")


class Trainer(transformers.Trainer):
    """Drop-in replacement for ``transformers.Trainer``.

    compression: how gradients are sent, as for ``psdist.torch.DistributedOptimizer``.
    name: name of the parameter set. Each trainer of a script has its own.

    ``max_grad_norm`` of the training arguments clips the mean gradient, on the servers. With each checkpoint the
    trainer takes a snapshot of the run. The snapshot holds the optimizer's state, so ``resume_from_checkpoint`` needs
    the ``--run-id`` of the earlier run. Gradient norms are not logged.

    Raises InvalidArgumentError for arguments that divide the model, and as ``DistributedOptimizer``.
    """

    def __init__(
        self, *arguments: Any, compression: Codec | str | None = None, name: str = "model", **keywords: Any
    ) -> None:
        self.optimizer: Any
        self._compression = compression
        self._set_name = name
        self._distributed: DistributedOptimizer | None = None
        #: Step at which this process started.
        self._first_step = 0
        #: True if a checkpoint was written in this step, so that the run is saved before the next.
        self._saves = False
        super().__init__(*arguments, **keywords)
        self.callback_handler.callbacks.insert(0, _FollowRun(self))
        #: psdist weights the mean gradient by tokens, so Transformers need not count them over all workers first.
        self._weights_by_tokens = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False

    # --- setup ---

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator from the training arguments. Raises InvalidArgumentError."""
        check_arguments(self.args)
        super().create_accelerator_and_postprocess()
        adopt(self.accelerator, {"_compression": self._compression, "_set_name": self._set_name})

    def _init_training_state(self, max_steps: int, *arguments: Any) -> tuple[int, int]:
        """Wrap the model, and start at the step of the servers. Returns the data epoch and the batch to start from."""
        self._wrap(max_steps)
        assert self._distributed is not None
        steps_per_epoch = arguments[0]
        result: tuple[int, int] = super()._init_training_state(max_steps, *arguments)
        self._first_step = self._distributed.handle.step
        if self._first_step < self.state.global_step:
            raise InvalidArgumentError(
                f"the checkpoint is from step {self.state.global_step}, but the run is at step {self._first_step}: the "
                "optimizer's state is in the run's snapshots. Start the run with its earlier --run-id, or train "
                "without resume_from_checkpoint"
            )
        if self._first_step == self.state.global_step:
            return result
        logger.warning("the run is at step %d; training continues from there", self._first_step)
        self.state.global_step = self._first_step
        epoch, steps = divmod(self._first_step, steps_per_epoch)
        return epoch, 0 if self.args.ignore_data_skip else steps * self.args.gradient_accumulation_steps

    def _wrap(self, max_steps: int) -> None:
        if self._distributed is not None:
            raise InvalidArgumentError(
                "train() was called before, and the servers still hold that training's state: create a new "
                f"psdist.hf.Trainer with another name=, such as name='{self._set_name}-2'"
            )
        if isinstance(self.optimizer, DistributedOptimizer):
            raise InvalidArgumentError(
                "optimizers= has a DistributedOptimizer, but psdist.hf.Trainer wraps the model itself: pass the "
                "optimizer of torch"
            )
        open_collectives()
        if self.accelerator.use_seedable_sampler:
            # Seeds determine the order of the data. A restarted worker would broadcast its generator alone.
            self.accelerator.rng_types = []
        self.create_optimizer_and_scheduler(max_steps)
        self._created_lr_scheduler = False  # Otherwise Transformers would create another.
        self._distributed = self.optimizer = serve(
            self.model, self.optimizer, self.lr_scheduler, compression=self._compression,
            max_grad_norm=self.args.max_grad_norm or None, name=self._set_name, is_scaled=self.args.fp16,
        )  # fmt: skip

    # --- a step ---

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return the batches of a step, and their number of tokens, by which this worker's gradient is weighted."""
        self._end_iteration()
        samples, tokens = super().get_batch_samples(epoch_iterator, num_batches, device)
        if tokens is None or not self._weights_by_tokens or self._distributed is None:
            return samples, tokens
        self._distributed.set_weight(float(tokens))
        return samples, tokens.clamp(min=1) if isinstance(tokens, torch.Tensor) else max(tokens, 1)

    def _end_iteration(self) -> None:
        """Save the run after the last step and its evaluation, if a checkpoint was written."""
        assert self._distributed is not None
        mark_iteration(self._distributed.context)
        saves, self._saves = self._saves, False
        if saves:
            save_run(self._distributed.context, "set save_only_model=True")

    def _clip_grad_norm(self, model: Any) -> None:
        """Leave clipping to the servers."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Return None: only the servers know the norm of the mean gradient."""

    # --- checkpoints ---

    def _run_epoch(self, *, resume_from_checkpoint: str | None, **keywords: Any) -> None:
        # Transformers skips batches only with a checkpoint; any text counts as one.
        is_later = self._first_step > 0 and resume_from_checkpoint is None
        super()._run_epoch(resume_from_checkpoint="" if is_later else resume_from_checkpoint, **keywords)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self._saves = not self.args.save_only_model

    def _finalize_training(self, *arguments: Any) -> Any:
        self._end_iteration()
        return super()._finalize_training(*arguments)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load nothing if the run has restored the optimizer and moved the scheduler to its step."""
        if not is_stepped(self.lr_scheduler) and self._first_step == self.state.global_step:
            super()._load_optimizer_and_scheduler(checkpoint)

    # --- refusals ---

    def hyperparameter_search(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: each trial would continue the training of the one before."""
        raise InvalidArgumentError(
            "hyperparameter_search() would train all trials in one run: start one run of psdist for each trial"
        )


class _FollowRun(transformers.TrainerCallback):
    """Sets the trainer's step to the servers'. They differ after this worker was expelled, or joined a run late."""

    def __init__(self, owner: Trainer) -> None:
        self._owner = owner

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._owner._distributed is not None:
            state.global_step = self._owner._distributed.handle.step


def check_arguments(arguments: transformers.TrainingArguments) -> None:
    """Raise InvalidArgumentError for training arguments with which psdist would differ from a single process."""
    for name in ("fsdp", "deepspeed", "parallelism_config"):
        refuse(
            getattr(arguments, name, None),
            f"{name} divides the model among workers, but psdist keeps it on its servers: leave {name} out. "
            "psdist.torch.offload trains models that do not fit into a worker",
        )
    refuse(
        arguments.auto_find_batch_size,
        "auto_find_batch_size starts the training again, but the servers have made steps: set the batch size",
    )
    refuse(
        not arguments.accelerator_config.even_batches,
        "accelerator_config even_batches=False lets workers make different numbers of steps: leave it out",
    )
    refuse(
        arguments.n_gpu > 1,
        f"this process sees {arguments.n_gpu} GPUs, and would use torch's DataParallel: start the script with "
        f"'psdist run --nproc-per-node {arguments.n_gpu}', or let CUDA_VISIBLE_DEVICES name one",
    )
