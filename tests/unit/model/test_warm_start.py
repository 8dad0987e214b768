from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl.config.schema import ConfigError, TinyModelConfig, WarmStartConfig
from rl.config.tasks import ArithmeticConfig, EvalSamplingConfig, Overlong, SamplingConfig
from rl.model import warm_start as module
from rl.model.renderer import Renderer
from rl.model.tiny import TinyModel
from rl.model.warm_start import WarmStartError, greedy_accuracy, is_warm_started, warm_start
from rl.tasks.arithmetic import Arithmetic
from rl.types import Prompt

SMALL = {"name": "tiny", "layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "ffn": 32}
COPYING = WarmStartConfig(target_accuracy=0.6, max_steps=200, check_every=5, batch_size=16, lr=1e-2, lr_warmup_steps=5)


def made(folder: Path, *, seed: int = 0) -> Path:
    return TinyModel(TinyModelConfig(**SMALL)).prepare(folder, seed=seed)


def demonstrations(folder: Path, problems: list[tuple[str, str]]) -> list[tuple[Prompt, str]]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return [
        (Prompt(text, (), np.array(tokenizer(text).input_ids, dtype=np.int32), answer=right, task="copy"), right)
        for text, right in problems
    ]


def copying(folder: Path) -> tuple[list[tuple[Prompt, str]], list[tuple[Prompt, str]]]:
    """`ab=` is answered by `a`; every fourth problem decides when to stop."""
    problems = [(f"{a}{b}=", a) for a, b in itertools.product("0123456789", "+-*0123")]
    shown = [problem for place, problem in enumerate(problems) if place % 4]
    return demonstrations(folder, shown), demonstrations(folder, problems[::4])


def weights(folder: Path) -> str:
    """Digest of the tensors; the order of the file's metadata is not fixed."""
    from safetensors.numpy import load_file

    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        digest.update(name.encode() + tensor.tobytes())
    return digest.hexdigest()


def run(folder: Path, config: WarmStartConfig = COPYING, *, seed: int = 0) -> module.WarmStartReport:
    shown, validation = copying(folder)
    return warm_start(folder, demonstrations=shown, validation=validation, config=config, seed=seed)


def test_it_stops_at_the_target_and_saves_weights_that_reach_it(tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = made(tmp_path / "model")
    _, validation = copying(folder)
    examples = module._examples(validation, AutoTokenizer.from_pretrained(folder))
    before = greedy_accuracy(AutoModelForCausalLM.from_pretrained(folder), examples)
    assert not is_warm_started(folder)
    report = run(folder)
    after = greedy_accuracy(AutoModelForCausalLM.from_pretrained(folder), examples)
    assert before < 0.3 and report.accuracy == after >= COPYING.target_accuracy
    assert report.steps < COPYING.max_steps and report.steps % COPYING.check_every == 0
    assert is_warm_started(folder)
    out = capsys.readouterr().out
    assert "52 demonstrations, 18 validation problems, overlap 0" in out and f"step {report.steps}, loss" in out


def test_equal_seeds_give_equal_weights_and_others_other_ones(tmp_path):
    folders = [made(tmp_path / name) for name in ("a", "b", "c")]
    for folder, seed in zip(folders, (0, 0, 1), strict=True):
        run(folder, seed=seed)
    first, second, other = (weights(folder) for folder in folders)
    assert first == second != other


def test_a_target_that_is_missed_is_an_error_and_leaves_the_folder(tmp_path):
    folder = made(tmp_path / "model")
    before = weights(folder)
    config = WarmStartConfig(target_accuracy=1.0, max_steps=4, check_every=2, batch_size=4)
    with pytest.raises(WarmStartError, match=r"in 4 steps \(model\.warm_start\.max_steps\).*is 1\.0"):
        run(folder, config)
    assert weights(folder) == before and not is_warm_started(folder)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_the_loss_is_the_mean_over_answers_and_their_end_by_hand(tmp_path):
    """Uniform logits over 19 tokens: ln 19 whatever the answer; padding and prompt tokens do not enter."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = made(tmp_path / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    examples = module._examples(
        demonstrations(folder, [("1=", "1"), ("12+3=", "1234")]), AutoTokenizer.from_pretrained(folder)
    )
    assert examples.is_answer.int().tolist() == [[0, 0, 1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]]
    assert examples.attention_mask.tolist() == [[1] * 4 + [0] * 6, [1] * 10]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert module._answer_loss(model, examples).item() == pytest.approx(np.log(19), rel=1e-6)


def test_only_demonstrations_are_trained_on(tmp_path, monkeypatch):
    """Every row that the loss sees is a demonstration; validation problems only pass through the check."""
    folder = made(tmp_path / "model")
    shown, validation = copying(folder)
    seen: set[tuple[int, ...]] = set()
    loss = module._answer_loss

    def noting(model: Any, batch: module.Examples) -> torch.Tensor:
        seen.update(tuple(row.tolist()) for row in batch.token_ids)
        return loss(model, batch)

    monkeypatch.setattr(module, "_answer_loss", noting)
    run(folder)
    lengths = {len(prompt.token_ids) for prompt, _ in shown}
    assert lengths == {3}
    trained = {row[:3] for row in seen}
    assert trained <= {tuple(prompt.token_ids.tolist()) for prompt, _ in shown}
    assert not trained & {tuple(prompt.token_ids.tolist()) for prompt, _ in validation}


def arithmetic(folder: Path, **values: Any) -> Arithmetic:
    config = ArithmeticConfig(
        digits=1,
        held_out=20,
        sampling=SamplingConfig(max_new_tokens=3),
        eval_sampling=EvalSamplingConfig(max_new_tokens=3),
        **values,
    )
    renderer = Renderer(folder, chat_template_kwargs={}, max_prompt_tokens=16, overlong=Overlong.error)
    return Arithmetic(config, renderer=renderer, seed=0)


def test_the_model_starts_once_on_what_the_task_demonstrates(tmp_path, capsys):
    warm = WarmStartConfig(target_accuracy=0.1, max_steps=300, batch_size=30, lr=5e-3, lr_warmup_steps=5)
    model = TinyModel(TinyModelConfig(**SMALL, warm_start=warm))
    folder = model.prepare(tmp_path / "model", seed=0)
    task = arithmetic(folder, validation=20, warm_start=40)
    model.warm_start(folder, task, seed=0)
    started = weights(folder)
    model.warm_start(folder, task, seed=0)
    assert weights(folder) == started
    assert capsys.readouterr().out.count("warm start: done") == 1


def test_a_task_without_demonstrations_is_refused(tmp_path):
    model = TinyModel(TinyModelConfig(**SMALL, warm_start=WarmStartConfig()))
    folder = model.prepare(tmp_path / "model", seed=0)
    with pytest.raises(ConfigError, match=r"model\.warm_start needs demonstrations.*model\.warm_start=null"):
        model.warm_start(folder, arithmetic(folder, validation=0, warm_start=40), seed=0)


@pytest.mark.slow
def test_the_quickstart_starts_low_and_not_at_zero(tmp_path):
    """Room for reinforcement learning: at most 0.35 on held-out problems, which the run has to lift to 0.90."""
    from transformers import AutoModelForCausalLM

    from rl.config.compose import compose_run_config

    config = compose_run_config(["experiment=quickstart"])
    assert isinstance(config.model, TinyModelConfig) and isinstance(config.task, ArithmeticConfig)
    model = TinyModel(config.model)
    folder = model.prepare(tmp_path / "model", seed=0)
    renderer = Renderer(folder, chat_template_kwargs={}, max_prompt_tokens=16, overlong=Overlong.error)
    task = Arithmetic(config.task, renderer=renderer, seed=0)
    model.warm_start(folder, task, seed=0)
    held_out = [(prompt, prompt.answer) for prompt in task.held_out["arithmetic"]]
    examples = module._examples(held_out, renderer.tokenizer)
    assert len(held_out) == 1000
    assert 0.1 <= greedy_accuracy(AutoModelForCausalLM.from_pretrained(folder), examples) <= 0.35
