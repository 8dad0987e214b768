"""samples.txt: some rollouts of some steps, for a person to read.

What a model wrote is not trusted: control characters are spelled out, and every line of it is indented, so that it can
neither drive a terminal nor pass for a line of ours.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path

from rl.types import Prompt, Rollout, RolloutGroup

MAX_CHARACTERS = 8_000
"""Of one prompt or response; the middle of a longer one is left out."""


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
    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, groups: Sequence[RolloutGroup], *, step: int, count: int) -> None:
        entries = [describe(group, rollout, step=step) for group, rollout in choose_samples(groups, count)]
        self._append("".join(entries))

    def note_resume(self, step: int) -> None:
        """Marks that samples of later steps above this line belong to steps that are done again."""
        if self._path.exists():
            where = f"resumed after step {step}" if step >= 0 else "started again"
            self._append(f"{'=' * 100}\n{where}: later steps are sampled again below\n")

    def _append(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def describe(group: RolloutGroup, rollout: Rollout, *, step: int) -> str:
    """One entry of samples.txt."""
    versions = str(rollout.min_policy_version)
    if rollout.max_policy_version != rollout.min_policy_version:
        versions += f" to {rollout.max_policy_version}"
    parts = "".join(f", {visible(name)} {value:g}" for name, value in rollout.reward_parts.items())
    facts = (
        f"step {step}   {visible(group.prompt.prompt_id)}   answer {rollout.index + 1} of {len(group.rollouts)}"
        f"   policy version {versions}\n"
        f"reward {rollout.reward:g}{parts}   advantage {rollout.advantage:+.3f}"
        f"   finish {rollout.finish_reason}   {rollout.num_response_tokens} tokens\n"
    )
    return (
        f"{'=' * 100}\n{facts}"
        f"prompt\n{_block(_prompt_text(group.prompt))}"
        f"response\n{_block(rollout.text)}"
        f"expected answer\n{_block(group.prompt.answer)}"
    )


def _block(text: str) -> str:
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return "".join(f"  | {line}\n" for line in visible(text).split("\n"))


def _prompt_text(prompt: Prompt) -> str:
    return "\n".join(f"{message['role']}: {_content_text(message['content'])}" for message in prompt.messages)


def _content_text(content: str | list[dict[str, str]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in content)
