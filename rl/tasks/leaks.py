"""Held-out problems that are also trained on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

NUM_NAMED = 5


class _HasText(Protocol):
    @property
    def prompt_id(self) -> str: ...

    @property
    def text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Leak:
    held_out_id: str
    training_id: str
    """The first training row with that problem."""


def find_leaks(training: Iterable[_HasText], held_out: Iterable[_HasText]) -> list[Leak]:
    """The held-out problems whose text is that of a training problem, however either is asked.

    White space, dollar signs and case make no difference; a paraphrase is not found.
    """
    wanted: dict[str, list[str]] = {}
    for problem in held_out:
        wanted.setdefault(comparable(problem.text), []).append(problem.prompt_id)
    found: dict[str, str] = {}
    for problem in training:
        key = comparable(problem.text)
        if key in wanted:
            found.setdefault(key, problem.prompt_id)
    return [Leak(held_out_id, found[key]) for key, ids in wanted.items() if key in found for held_out_id in ids]


def comparable(text: str) -> str:
    return "".join(text.split()).replace("$", "").casefold()


def leak_words(leaks: list[Leak]) -> str:
    """For the line that a task prints about its sizes: how many, and the first few by name."""
    names = ", ".join(f"{leak.held_out_id} = {leak.training_id}" for leak in leaks[:NUM_NAMED])
    if len(leaks) > NUM_NAMED:
        names += ", ..."
    return f"held-out problems also trained on: {len(leaks):,}" + (f" ({names})" if names else "")
