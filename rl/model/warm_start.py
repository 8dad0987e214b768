"""A short supervised phase on right answers, stopped early, so that reinforcement learning has something to reward."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rl.config.schema import WarmStartConfig
from rl.types import Prompt

if TYPE_CHECKING:
    import torch

BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.01
PRINT_EVERY = 50
"""Steps; a line appears at the checks that fall on them."""
WEIGHTS_FILE = "model.safetensors"
MARKER = "warm_start"
"""Key in the metadata of the weights file. Weights and marker are one file, so one rename brings both."""


class WarmStartError(RuntimeError):
    """The target accuracy was not reached."""


@dataclass(frozen=True, slots=True)
class WarmStartReport:
    steps: int
    accuracy: float
    """Greedy, on the validation problems."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Examples:
    """Demonstrations as tokens, padded on the right."""

    token_ids: torch.Tensor
    """[N, L]"""
    attention_mask: torch.Tensor
    """[N, L]"""
    is_answer: torch.Tensor
    """[N, L] bool, True on the tokens of the answer and the end of text after it."""

    def rows(self, index: NDArray[np.int64]) -> Examples:
        return Examples(self.token_ids[index], self.attention_mask[index], self.is_answer[index])


def is_warm_started(folder: Path) -> bool:
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS_FILE, framework="numpy") as file:
        return MARKER in (file.metadata() or {})


def warm_start(
    folder: Path,
    *,
    demonstrations: Sequence[tuple[Prompt, str]],
    validation: Sequence[tuple[Prompt, str]],
    config: WarmStartConfig,
    seed: int,
) -> WarmStartReport:
    """Trains the model in `folder` until its greedy accuracy on `validation` is `target_accuracy`, then saves it there.

    The loss is the mean over answer tokens. Same folder, seed and number of threads: same weights. Raises
    WarmStartError after `max_steps`; the folder is then as it was.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    started = time.monotonic()
    _print_overlap(demonstrations, validation)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    training_set, validation_set = _examples(demonstrations, tokenizer), _examples(validation, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
    rng = np.random.default_rng(seed)
    batch_size = min(config.batch_size, len(demonstrations))
    best = 0.0
    for step in range(1, config.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, step / max(1, config.lr_warmup_steps))
        batch = training_set.rows(rng.choice(len(demonstrations), batch_size, replace=False))
        loss = _answer_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % config.check_every:
            continue
        accuracy = greedy_accuracy(model, validation_set)
        best = max(best, accuracy)
        reached = accuracy >= config.target_accuracy
        if reached or step % PRINT_EVERY == 0:
            print(
                f"warm start: step {step}, loss {loss.item():.3f}, greedy validation accuracy {accuracy:.3f}",
                flush=True,
            )
        if reached:
            report = WarmStartReport(steps=step, accuracy=accuracy, seconds=time.monotonic() - started)
            _save_weights(model, folder, {"steps": step, "accuracy": accuracy, "seed": seed})
            print(f"warm start: done in {report.seconds:.1f} s", flush=True)
            return report
    raise WarmStartError(
        f"the warm start reached {best:.3f} greedy accuracy on {len(validation)} validation problems in "
        f"{config.max_steps} steps (model.warm_start.max_steps); model.warm_start.target_accuracy is "
        f"{config.target_accuracy}. Raise max_steps, or lower the target."
    )


def greedy_accuracy(model: Any, examples: Examples) -> float:
    """Share of examples whose greedy answer is the demonstrated one, end of text included.

    Greedy decoding gives the demonstrated answer exactly if each of its tokens is the most likely one after those
    before it, so one forward pass answers for all tokens at once.
    """
    import torch

    with torch.no_grad():
        logits = model(input_ids=examples.token_ids, attention_mask=examples.attention_mask).logits
    is_right = logits[:, :-1].argmax(-1) == examples.token_ids[:, 1:]
    return (is_right | ~examples.is_answer[:, 1:]).all(-1).double().mean().item()


def _answer_loss(model: Any, batch: Examples) -> torch.Tensor:
    import torch

    logits = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask).logits[:, :-1]
    targets = batch.token_ids[:, 1:]
    mask = batch.is_answer[:, 1:]
    return torch.nn.functional.cross_entropy(logits[mask], targets[mask])


def _examples(demonstrations: Sequence[tuple[Prompt, str]], tokenizer: Any) -> Examples:
    import torch

    prompts = [prompt.token_ids.tolist() for prompt, _ in demonstrations]
    answers = [
        [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id] for _, text in demonstrations
    ]
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    token_ids = torch.full((len(prompts), length), tokenizer.eos_token_id)
    attention_mask = torch.zeros_like(token_ids)
    is_answer = torch.zeros_like(token_ids, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        token_ids[row, :end] = torch.tensor(prompt + answer)
        attention_mask[row, :end] = 1
        is_answer[row, len(prompt) : end] = True
    return Examples(token_ids, attention_mask, is_answer)


def _print_overlap(demonstrations: Sequence[tuple[Prompt, str]], validation: Sequence[tuple[Prompt, str]]) -> None:
    shown = {prompt.prompt_id for prompt, _ in demonstrations}
    overlap = sum(prompt.prompt_id in shown for prompt, _ in validation)
    print(
        f"warm start: {len(demonstrations):,} demonstrations, {len(validation):,} validation problems, "
        f"overlap {overlap}",
        flush=True,
    )


def _save_weights(model: Any, folder: Path, facts: dict[str, Any]) -> None:
    """Tied weights are stored once, under the name in the file that was there."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(folder / WEIGHTS_FILE, framework="numpy") as file:
        names = list(file.keys())
    state = model.state_dict()
    tensors = {name: state[name].contiguous() for name in names}
    temporary = folder / f".{WEIGHTS_FILE}"
    save_file(tensors, temporary, metadata={"format": "pt", MARKER: json.dumps(facts)})
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, folder / WEIGHTS_FILE)
