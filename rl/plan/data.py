"""`plan.data=true`: the data as the run will see it, without torch: rows, template, over-long prompts, reward."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl.config.build import build, target_class
from rl.config.schema import RunConfig
from rl.config.tasks import Overlong
from rl.grading import grade
from rl.model.light_tokenizer import LightTokenizer
from rl.protocols import Task
from rl.types import FinishReason, IntArray, Prompt, RenderedWithImages, RewardError, Rollout

PHRASINGS = ("{}", "#### {}", "The answer is \\boxed{{{}}}.", "Answer: {}", "<think>\nSo.\n</think> \\boxed{{{}}}")
"""Ways to give an answer, of which the task's rule must take one."""
TESTED_PROMPTS = 3
"""Of each data set."""


class CountingRenderer:
    """`protocols.PromptRenderer` that refuses nothing and counts. Without a tokenizer every prompt is one token."""

    def __init__(self, tokenizer: LightTokenizer | None, config: RunConfig) -> None:
        self._tokenizer, self._task = tokenizer, config.task
        self.num_truncated = self.num_dropped = self.num_changed = self.num_with_images = 0
        self.lengths: list[int] = []
        self.overlong: list[str] = []
        """Names of the prompts."""

    def render(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], *, names: Sequence[str]
    ) -> list[IntArray | None]:
        if self._tokenizer is None:
            return [np.zeros(1, dtype=np.int32) for _ in conversations]
        texts = [self._tokenizer.render(messages, **self._task.chat_template_kwargs) for messages in conversations]
        encoded = self._tokenizer.encode(texts)
        rendered: list[IntArray | None] = []
        for token_ids, text, name in zip(encoded, texts, names, strict=True):
            self.lengths.append(len(token_ids))
            self.num_changed += self._tokenizer.decode(token_ids) != text
            rendered.append(self._within_limit(np.array(token_ids, dtype=np.int32), name))
        return rendered

    def render_with_images(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[bytes], *, name: str
    ) -> RenderedWithImages | None:
        """Of the text alone: what an image becomes is known to a library that takes torch with it."""
        self.num_with_images += 1
        (token_ids,) = self.render([messages], names=[name])
        if token_ids is None:
            return None
        return RenderedWithImages(token_ids, np.zeros((3, len(token_ids)), dtype=np.int32), {})

    def _within_limit(self, token_ids: IntArray, name: str) -> IntArray | None:
        limit = self._task.max_prompt_tokens
        if len(token_ids) <= limit:
            return token_ids
        self.overlong.append(name)
        return None if self._task.overlong is Overlong.drop else token_ids[-limit:]


def data_lines(config: RunConfig) -> list[str]:
    """Raises ConfigError where the data is not what the task reads."""
    read_tokenizer = getattr(target_class(config.model._target_), "light_tokenizer", None)
    tokenizer = None if read_tokenizer is None else read_tokenizer(config.model)
    renderer = CountingRenderer(tokenizer, config)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):  # the task's own lines: sizes, and what is both trained on and held out
        task: Task = build(config.task, renderer=renderer, seed=config.seed)
    lines = [line for line in said.getvalue().splitlines() if line.strip() and not line.endswith(" s left")]
    return [*lines, *_prompt_lines(config, renderer, tokenizer), *_reward_lines(config, task)]


def _prompt_lines(config: RunConfig, renderer: CountingRenderer, tokenizer: LightTokenizer | None) -> list[str]:
    if tokenizer is None:
        return [f"prompts: not tokenized, {config.model.path} has no tokenizer.json here"]
    lengths = renderer.lengths
    limit, what = config.task.max_prompt_tokens, config.task.overlong
    effect = {Overlong.error: "the run would refuse them", Overlong.drop: "dropped", Overlong.truncate_left: "cut"}
    lines = [f"prompts: {len(lengths):,}, of {np.mean(lengths):,.0f} tokens on average and {max(lengths):,} at most"]
    if renderer.num_with_images:
        lines.append(f"images: {renderer.num_with_images:,} prompts have some, whose tokens are not counted here")
    if renderer.overlong:
        lines.append(
            f"over-long: {len(renderer.overlong):,} have more than task.max_prompt_tokens={limit:,} and are "
            f"{effect[what]} (task.overlong={what.value}); first {renderer.overlong[0]}"
        )
    else:
        lines.append(f"over-long: none has more than task.max_prompt_tokens={limit:,}")
    changed = f"{renderer.num_changed:,} come back changed" if renderer.num_changed else "all come back the same"
    return [*lines, f"template: rendered, tokenized and decoded again, {changed}"]


def _reward_lines(config: RunConfig, task: Task) -> list[str]:
    """A right answer must score right, a wrong one in the same words wrong, on the task's own rule."""
    lines = []
    for source, prompts in _sources(task).items():
        results = [
            asyncio.run(_tested(task, prompt, limit_s=config.stream.reward_timeout_s))
            for prompt in prompts[:TESTED_PROMPTS]
        ]
        passed = sum(result is None for result in results)
        problem = next((result for result in results if result is not None), None)
        lines.append(
            f"reward of {source}: {passed} of {len(results)} problems tell their right answer from a wrong one"
            + ("" if problem is None else f"; {problem}")
        )
    return lines


def _sources(task: Task) -> dict[str, list[Prompt]]:
    """The first prompts of each data set that is trained on or evaluated."""
    found: dict[str, list[Prompt]] = {}
    training = [task.prompt(0, index) for index in range(min(task.num_prompts, 200))]
    for prompt in [*training, *(prompt for one in task.eval_sets() for prompt in one.prompts[:TESTED_PROMPTS])]:
        found.setdefault(prompt.task or "the task", []).append(prompt)
    return found


async def _tested(task: Task, prompt: Prompt, *, limit_s: float) -> str | None:
    """What is wrong with the grader of this prompt; None: nothing."""
    wrong = f"{prompt.answer}1"
    answers = [words.format(answer) for answer in (prompt.answer, wrong) for words in PHRASINGS]
    grader = task.eval_sets()[0].grader if task.eval_sets() else task.grade
    try:
        rewards = await grade(grader, prompt, [_answered(text) for text in answers], limit_s=limit_s)
    except RewardError as error:
        return f"{prompt.prompt_id}: {error}"
    right, not_right = rewards[: len(PHRASINGS)], rewards[len(PHRASINGS) :]
    pairs = list(zip(right, not_right, strict=True))
    if not any(one.correct for one, _ in pairs):
        return f"{prompt.prompt_id}: no phrasing of its answer {prompt.answer!r} scores right"
    if any(one.correct and other.correct for one, other in pairs):
        return f"{prompt.prompt_id}: {wrong!r} scores right too, for {prompt.answer!r}"
    return None


def _answered(text: str) -> Rollout:
    """A finished answer, of as many made tokens as matter to nobody."""
    return Rollout(
        group_id=0,
        index=0,
        token_ids=np.zeros(2, dtype=np.int32),
        loss_mask=np.array([False, True]),
        rollout_logprobs=np.zeros(2, dtype=np.float32),
        temperature=1.0,
        policy_versions=np.array([-1, 0]),
        finish_reason=FinishReason.STOP,
        text=text,
    )
