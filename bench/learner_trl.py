"""Hugging Face TRL's GRPO step on given samples: its own trainer, loss, padding, accumulation and optimizer step.

Only generation is replaced: ``_generate_and_score_completions`` returns the samples as TRL's own returns them, prompts padded on the
left and completions on the right to the longest of the batch. The rest runs as ``trainer.train()`` runs it; one step is timed from
``on_step_begin`` to ``on_step_end``. Settings are those that are fastest on a CPU: no gradient checkpointing (TRL's default is on), SDPA
attention, the fused AdamW, no reference model, no second forward for the old log-probs, and the micro-batch that is fastest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from services.learner.packing import TrainSample

INSTALL = (
    "trl is not installed, so there is no comparison. It is an optional dependency: install it into an environment of its own"
    " that has torch, e.g. `python -m pip install --group bench`."
)


def have_trl() -> bool:
    """Whether it can be imported."""
    try:
        import trl  # noqa: F401
    except ImportError:
        return False
    return True


def run_steps(
    model_path: Path,
    samples: Sequence[TrainSample],
    *,
    group_size: int,
    microbatch: int,
    dtype: str,
    lr: float,
    num_steps: int,
    folder: Path,
    between: Callable[[], None],
    completions_only: bool = False,
) -> tuple[list[float], list[float]]:
    """Seconds of each step, by the wall and by the CPU; ``between`` is called after each.

    ``completions_only``: with a change of one line in TRL, which then runs its output layer at completion tokens only, as it does on
    GPUs; on a CPU it runs it at every position.
    """
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import utils

    class Trainer(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return padded(samples)

    args = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=len(samples) // microbatch,
        num_generations=group_size,
        max_steps=num_steps,
        learning_rate=lr,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        weight_decay=0.0,
        optim="adamw_torch_fused",
        beta=0.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        temperature=1.0,
        gradient_checkpointing=False,
        bf16=False,
        fp16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    trainer = Trainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=_dataset(num_steps * len(samples)),
        processing_class=_tokenizer(),
    )
    clock = _clock(between)
    trainer.add_callback(clock)
    original = utils._use_triton
    if completions_only:
        # In ``trainer.utils`` the function decides about this alone; the kernels ask their own module's.
        utils._use_triton = lambda device: True
    try:
        trainer.train()
    finally:
        utils._use_triton = original
    return clock.seconds, clock.cpu_seconds


def padded(samples: Sequence[TrainSample]) -> dict[str, Any]:
    """The batch as TRL pads it."""
    longest_prompt = max(len(sample.prompt_ids) for sample in samples)
    longest = max(len(sample.completion_ids) for sample in samples)
    ids, mask = torch.zeros(2, len(samples), longest_prompt + longest, dtype=torch.long)
    for i, sample in enumerate(samples):
        start, end = longest_prompt - len(sample.prompt_ids), longest_prompt + len(sample.completion_ids)
        ids[i, start:longest_prompt] = torch.from_numpy(sample.prompt_ids)
        ids[i, longest_prompt:end] = torch.from_numpy(sample.completion_ids)
        mask[i, start:end] = 1
    return {
        "prompt_ids": ids[:, :longest_prompt],
        "prompt_mask": mask[:, :longest_prompt],
        "completion_ids": ids[:, longest_prompt:],
        "completion_mask": mask[:, longest_prompt:],
        "advantages": torch.tensor([sample.advantage for sample in samples]),
        "num_items_in_batch": mask[:, longest_prompt:].sum(),
    }


def _clock(between: Callable[[], None]) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.cpu_seconds: list[float] = []
            self.start = self.cpu_start = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.start, self.cpu_start = time.perf_counter(), time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)
            self.cpu_seconds.append(time.process_time() - self.cpu_start)
            between()

    return Clock()


def _dataset(count: int) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": ["p"] * count})


def _tokenizer() -> Any:
    """TRL wants one; nothing is tokenized."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "p": 2}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
    )
