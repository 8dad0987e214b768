"""Arithmetic with a `score` as tasks of one's own may have it: classes of a module, for other processes to import."""

from __future__ import annotations

import os
import re
import time

from rl.tasks.arithmetic import Arithmetic
from rl.types import Prompt, Reward, Rollout


class Moody(Arithmetic):
    """Does what the answer says."""

    def score(self, prompt: Prompt, rollout: Rollout) -> Reward:
        match rollout.text:
            case "hang":
                time.sleep(1000)
            case "fail":
                raise ZeroDivisionError("oops")
            case "crash":
                os.abort()
            case "leave":
                raise SystemExit
        return Reward(1.0, correct=True, parts={"pid": float(os.getpid())})


class Thorough(Arithmetic):
    """Adds up everything that it was sent."""

    def score(self, prompt: Prompt, rollout: Rollout) -> Reward:
        rollout.token_ids[0] += 0  # its own copy, which it may write to
        arrays = (rollout.token_ids, rollout.loss_mask, rollout.rollout_logprobs, rollout.policy_versions)
        return Reward(float(sum(array.astype(float).sum() for array in arrays)) + len(rollout.text), correct=True)


class HoldsTheLock(Arithmetic):
    """A regular expression holds the interpreter's lock: 2^40 ways to fail."""

    def score(self, prompt: Prompt, rollout: Rollout) -> Reward:
        return Reward(float(re.match(r"(a|a)*$", "a" * 40 + "b") is not None), correct=False)


class Unsendable(Arithmetic):
    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.judge = lambda text: True


class BrokenOnArrival(Arithmetic):
    def __setstate__(self, state: dict) -> None:
        raise FileNotFoundError("no word list here")
