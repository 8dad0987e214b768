"""Which call of an engine is legal when."""

from __future__ import annotations

from enum import Enum

from rl.protocols import EngineError, EngineUnfit


class Phase(Enum):
    NEW = "not started"
    AWAKE = "awake"
    ASLEEP = "asleep"
    WEIGHTS_AWAKE = "asleep, except for its weights"
    CLOSED = "closed"


_ALLOWED = {
    "start": {Phase.NEW},
    "generate": {Phase.AWAKE},
    "pause": {Phase.AWAKE},
    "resume": {Phase.AWAKE},
    "weight_digests": {Phase.AWAKE, Phase.WEIGHTS_AWAKE},
    "open_update": {Phase.AWAKE, Phase.WEIGHTS_AWAKE},
    "sleep": {Phase.AWAKE},
    "wake_weights": {Phase.ASLEEP},
    "wake": {Phase.ASLEEP, Phase.WEIGHTS_AWAKE},
}


class Lifecycle:
    """Weights are written only where they have memory, and sampled from only if complete. `name` is for errors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.phase = Phase.NEW
        self.is_updating = False
        self.unfit_reason: str | None = "it has received no weights yet"

    def check(self, action: str) -> None:
        """Raises `EngineError` if `action` is illegal now, `EngineUnfit` if it would sample from incomplete weights."""
        if self.phase not in _ALLOWED[action]:
            allowed = " or ".join(sorted(f"'{phase.value}'" for phase in _ALLOWED[action]))
            raise EngineError(f"{action} needs the {self.name} engine to be {allowed}; it is '{self.phase.value}'.")
        if action == "generate":
            if self.unfit_reason is not None and not self.is_updating:
                raise self.unfit()
        elif self.is_updating:
            raise EngineError(f"{action} while a weight update is open; commit or abort it first.")

    def unfit(self) -> EngineUnfit:
        return EngineUnfit(f"the {self.name} engine refuses to sample: {self.unfit_reason}. Publish complete weights.")
