"""Which call of an engine is legal in which state."""

from __future__ import annotations

import pytest

from rl.protocols import EngineError, EngineUnfit
from rl.rollout.lifecycle import Lifecycle, Phase

LEGAL = {
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


@pytest.mark.parametrize("action", LEGAL)
@pytest.mark.parametrize("phase", Phase)
def test_illegal_transitions_raise_and_legal_ones_do_not(action: str, phase: Phase):
    lifecycle = Lifecycle("test")
    lifecycle.phase, lifecycle.unfit_reason = phase, None
    if phase in LEGAL[action]:
        lifecycle.check(action)
    else:
        with pytest.raises(EngineError, match=phase.value):
            lifecycle.check(action)


def test_an_engine_without_complete_weights_refuses_to_sample():
    lifecycle = Lifecycle("test")
    lifecycle.phase = Phase.AWAKE
    with pytest.raises(EngineUnfit, match="no weights yet"):
        lifecycle.check("generate")


def test_during_an_update_requests_may_queue_and_nothing_else_may_start():
    lifecycle = Lifecycle("test")
    lifecycle.phase, lifecycle.is_updating = Phase.AWAKE, True
    lifecycle.check("generate")
    for action in ("open_update", "sleep"):
        with pytest.raises(EngineError, match="update is open"):
            lifecycle.check(action)
