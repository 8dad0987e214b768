"""What became of each prompt of the training order that a run has started: none is lost, none is counted twice.

A prompt is meant by its position in the endless order, which is the id of its group: visited again in a later epoch it
has another one, and a group that is sampled again, recalled or after a resume, keeps its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_NAMED = 8


@dataclass(slots=True)
class Accounting:
    """Since the run began: started = trained + dropped + in flight, position by position."""

    started: int = 0
    """The first so many of the order."""
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """For good, by reason."""
    settled_below: int = 0
    """Every position below is settled: trained on or dropped."""
    settled_beyond: set[int] = field(default_factory=set)
    """Settled positions above the first that is not: what has overtaken the oldest group in flight."""

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Accounting:
        return cls(
            started=int(state["next_index"]),
            trained=int(state["trained"]),
            dropped=Counter(state["dropped"]),
            settled_below=int(state["settled_below"]),
            settled_beyond=set(state["settled_beyond"]),
        )

    def state(self) -> dict[str, Any]:
        return {
            "next_index": self.started,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "settled_below": self.settled_below,
            "settled_beyond": sorted(self.settled_beyond),
        }

    def start(self) -> int:
        """The next position of the order."""
        self.started += 1
        return self.started - 1

    def train(self, position: int) -> None:
        self._settle(position)
        self.trained += 1

    def drop(self, position: int, reason: str) -> None:
        self._settle(position)
        self.dropped[reason] += 1

    def _settle(self, position: int) -> None:
        assert position >= self.settled_below and position not in self.settled_beyond, f"{position} is settled twice"
        self.settled_beyond.add(position)
        while self.settled_below in self.settled_beyond:
            self.settled_beyond.remove(self.settled_below)
            self.settled_below += 1

    def problems(self, in_flight: Sequence[int]) -> list[str]:
        """Why trained, dropped and in flight are not the first `started` positions, each once. Empty: they are."""
        num_done = self.trained + self.dropped.total()
        num_settled = self.settled_below + len(self.settled_beyond)
        places = Counter([*in_flight, *self.settled_beyond])
        skipped = [position for position in range(self.settled_below, self.started) if position not in places]
        doubled = [position for position in places if places[position] > 1 or 0 <= position < self.settled_below]
        foreign = [position for position in places if not 0 <= position < self.started]
        problems = []
        if num_done + len(in_flight) != self.started:
            problems.append(f"these are not {self.started:,}, the prompts that were started")
        if num_done != num_settled:
            problems.append(f"trained and dropped are {num_done:,}, but of {num_settled:,} positions")
        if skipped:
            problems.append(f"skipped: {_named(skipped)}")
        if doubled:
            problems.append(f"twice: {_named(doubled)}")
        if foreign:
            problems.append(f"not among the first {self.started:,}: {_named(foreign)}")
        return problems


def _named(positions: list[int]) -> str:
    """As "positions 3, 17"."""
    shown = ", ".join(map(str, sorted(positions)[:MAX_NAMED]))
    return f"position{'s' if len(positions) > 1 else ''} {shown}{', ...' if len(positions) > MAX_NAMED else ''}"
