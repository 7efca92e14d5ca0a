"""A small GPT-2 with Hugging Face's Trainer, which learns to write as a text file does.

psdist run --nservers 2 --nproc-per-node 2 examples/hf_trainer.py
psdist run --run-id gpt2 --nservers 2 --nproc-per-node 2 examples/hf_trainer.py --resume    # from the last checkpoint
python examples/hf_trainer.py --plain    # the same script without psdist: Transformers in one process

Only the lines marked with ``psdist`` differ, and those with ``metrics``, which ``psdist run`` shows.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

CONTEXT = 32


def sentences(text: Path) -> list[dict[str, torch.Tensor]]:
    """Return parts of a text as numbers of its bytes, int64[CONTEXT], to be learned as they are."""
    content = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long() % 128
    return [{"input_ids": part, "labels": part} for part in content.split(CONTEXT) if len(part) == CONTEXT]


class ReportLoss(transformers.TrainerCallback):  # metrics
    """Reports the mean loss of the last steps, and the speed of this worker."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Report the steps since the last time."""
        if "loss" in logs:
            samples = args.logging_steps * args.per_device_train_batch_size
            self.context.report(loss=logs["loss"], samples=samples, step=state.global_step)


def main() -> None:
    """Train, evaluate, and save the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(__file__), help="file to learn from (default: this one)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", default="psdist-runs/hf-trainer", help="directory of checkpoints and the model")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    parser.add_argument("--plain", action="store_true", help="without psdist")
    given = parser.parse_args()
    Trainer = transformers.Trainer
    if not given.plain:
        import psdist.hf  # psdist

        Trainer = psdist.hf.Trainer  # psdist
    arguments = TrainingArguments(
        output_dir=given.output,
        max_steps=given.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        max_grad_norm=1.0,
        logging_steps=10,
        save_steps=20,
        eval_strategy="steps",
        eval_steps=20,
        report_to=[],
        disable_tqdm=True,
    )
    transformers.set_seed(0)
    config = GPT2Config(
        vocab_size=128, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    data = sentences(given.text)
    trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=data, eval_dataset=data[:16])
    if not given.plain:  # metrics
        trainer.add_callback(ReportLoss(psdist.init()))  # metrics
    trainer.train(resume_from_checkpoint=given.resume or None)
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"loss {loss:.3f} after {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
