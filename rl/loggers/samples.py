"""Some rollouts of some steps: samples.txt for a person to read, samples.jsonl for trackers and reports.

What a model wrote is not trusted: control characters are spelled out, and in samples.txt every line of it is indented,
so that it can neither drive a terminal nor pass for a line of ours.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rl.loggers.jsonl import read_metrics, set_aside_after
from rl.types import Prompt, Rollout, RolloutGroup

SAMPLES_FILE = "samples.jsonl"
MAX_CHARACTERS = 8_000
"""Of one prompt or response; the middle of a longer one is left out."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout, as a line of samples.jsonl. Its texts are visible and cut, see `visible` and MAX_CHARACTERS."""

    step: int
    prompt_id: str
    answer_number: int
    """In its group, from 1."""
    group_size: int
    oldest_version: int
    newest_version: int
    reward: float
    reward_parts: dict[str, float]
    advantage: float
    finish_reason: str
    num_tokens: int
    prompt: str
    response: str
    expected: str


def visible(text: str) -> str:
    """Text with every control, format and line-separator character but newline and tab spelled out, `\\x1b` for ESC."""
    hidden = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in hidden else char.encode("unicode_escape").decode()
        for char in text
    )


def choose_samples(groups: Sequence[RolloutGroup], count: int) -> list[tuple[RolloutGroup, Rollout]]:
    """The best and the worst rollout of one group after another, groups with unequal rewards first; `count` at most."""
    chosen: list[tuple[RolloutGroup, Rollout]] = []
    for group in sorted((group for group in groups if group.rollouts), key=lambda group: group.is_uniform):
        best = max(group.rollouts, key=lambda rollout: rollout.reward)
        worst = min(group.rollouts, key=lambda rollout: rollout.reward)
        chosen.append((group, best))
        if worst is not best:
            chosen.append((group, worst))
    return chosen[:count]


class SamplesFile:
    """samples.txt and samples.jsonl of a run folder."""

    def __init__(self, run_folder: Path) -> None:
        self._text_path = run_folder / "samples.txt"
        self._lines_path = run_folder / SAMPLES_FILE

    def write(self, groups: Sequence[RolloutGroup], *, step: int, count: int) -> list[Sample]:
        """What was written: `count` rollouts at most."""
        samples = [sample_of(group, rollout, step=step) for group, rollout in choose_samples(groups, count)]
        self._append(self._text_path, "".join(describe(sample) for sample in samples))
        self._append(self._lines_path, "".join(json.dumps(asdict(sample)) + "\n" for sample in samples))
        return samples

    def resume(self, step: int) -> None:
        """Sets samples of later steps aside; samples.txt keeps them above a line that says so."""
        set_aside_after(self._lines_path, step)
        if self._text_path.exists():
            where = f"resumed after step {step}" if step >= 0 else "started again"
            self._append(self._text_path, f"{'=' * 100}\n{where}: later steps are sampled again below\n")

    @staticmethod
    def _append(path: Path, text: str) -> None:
        """In one write call, so that a kill leaves at most the last line torn."""
        with path.open("ab", buffering=0) as file:
            file.write(text.encode())


def read_samples(run_folder: Path) -> list[Sample]:
    """In the order in which they were written; none if there is no file."""
    return [Sample(**row) for row in read_metrics(run_folder / SAMPLES_FILE)]


def sample_of(group: RolloutGroup, rollout: Rollout, *, step: int) -> Sample:
    return Sample(
        step=step,
        prompt_id=visible(group.prompt.prompt_id),
        answer_number=rollout.index + 1,
        group_size=len(group.rollouts),
        oldest_version=rollout.min_policy_version,
        newest_version=rollout.max_policy_version,
        reward=float(rollout.reward),
        reward_parts={visible(name): float(value) for name, value in rollout.reward_parts.items()},
        advantage=float(rollout.advantage),
        finish_reason=str(rollout.finish_reason),
        num_tokens=rollout.num_response_tokens,
        prompt=_cut(visible(_prompt_text(group.prompt))),
        response=_cut(visible(rollout.text)),
        expected=_cut(visible(group.prompt.answer)),
    )


def describe(sample: Sample) -> str:
    """One entry of samples.txt."""
    versions = str(sample.oldest_version)
    if sample.newest_version != sample.oldest_version:
        versions += f" to {sample.newest_version}"
    parts = "".join(f", {name} {value:g}" for name, value in sample.reward_parts.items())
    facts = (
        f"step {sample.step}   {sample.prompt_id}   answer {sample.answer_number} of {sample.group_size}"
        f"   policy version {versions}\n"
        f"reward {sample.reward:g}{parts}   advantage {sample.advantage:+.3f}"
        f"   finish {sample.finish_reason}   {sample.num_tokens} tokens\n"
    )
    return (
        f"{'=' * 100}\n{facts}"
        f"prompt\n{_indented(sample.prompt)}"
        f"response\n{_indented(sample.response)}"
        f"expected answer\n{_indented(sample.expected)}"
    )


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def _indented(text: str) -> str:
    return "".join(f"  | {line}\n" for line in text.split("\n"))


def _prompt_text(prompt: Prompt) -> str:
    return "\n".join(f"{message['role']}: {_content_text(message['content'])}" for message in prompt.messages)


def _content_text(content: str | list[dict[str, str]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in content)
