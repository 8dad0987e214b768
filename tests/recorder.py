"""Notes in which order the parts of a run are asked, where on a CPU a wrong one would pass unseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl.protocols import PauseMode


class Recorder:
    """Stands before a part: notes each call, with the mode of a pause, as `prefix` and the method's name."""

    def __init__(self, part: Any, *, calls: list[str] | None = None, prefix: str = "") -> None:
        """`calls`: the list of several recorders, for the order among them. None: one of its own."""
        self.calls: list[str] = [] if calls is None else calls
        self._part, self._prefix = part, prefix

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            modes = (str(argument) for argument in arguments if isinstance(argument, PauseMode))
            self.calls.append(self._prefix + ":".join([name, *modes]))
            return getattr(self._part, name)(*arguments)

        return call
