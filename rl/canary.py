"""Does the engine sample from the weights that were published to it? A few fixed prompts tell.

    every k-th publish                                  the trainer's next residency
      |                                                   |
      +--> the engine answers the prompts, beside its     +--> the trainer, whose weights are still those that were
           other requests, and digests its parameters          published, scores the answers

Past the bound the same weights are published once more: a parameter whose digest that changes held something else.
A wrong layout, a skipped tensor or a graph on freed memory makes differences of whole nats. One small update that the
engine missed may stay below what kernels and dtypes make of equal weights; missed again and again, it does not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from rl.config.schema import CanaryAction, CanaryConfig, Dtype
from rl.protocols import MAX_LOG_RATIO, RequestError, RolloutEngine, Trainer
from rl.types import FloatArray, Prompt, Rollout, Sampling

FLOAT32_BOUND = 1e-3
"""100 times what equal weights gave: a mean of 1e-5 at most, with SmolLM2-135M on CPU, local engine and vLLM alike."""

BFLOAT16_BOUND = 0.15
"""Equal weights gave means of 0.021 to 0.055 over 64 tokens with the same model and engines, the trainer in bfloat16 or
float32. One wrong layer of 30 gave at least 0.22 (queries all 0), 0.51 (queries a row off), 0.70 (gate and up swapped)
and 3.4 (a norm all 1)."""

PATIENCE_S = 30.0
"""How long the trainer waits for the answers of an engine that is busy with other requests."""

log = logging.getLogger(__name__)


class CanaryError(RuntimeError):
    """The engine's log-probs are too far from the trainer's, and the run is to stop then."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Trainer's minus engine's log-probs of the same tokens under what should be the same weights, in nats."""

    num_tokens: int
    mean: float
    """Of the absolute differences. It decides: one odd token in 64 moves it little, unlike the maximum, and it grows
    linearly with the difference, unlike k3, of which one token far off can be all."""
    largest: float
    kl_k3: float

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], logprobs: Sequence[FloatArray]) -> Comparison:
        differences = np.concatenate(
            [
                (own - rollout.rollout_logprobs)[rollout.loss_mask].astype(np.float64)
                for rollout, own in zip(rollouts, logprobs, strict=True)
            ]
        )
        bounded = differences.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return cls(
            num_tokens=len(differences),
            mean=float(np.abs(differences).mean()),
            largest=float(np.abs(differences).max()),
            kl_k3=float((np.expm1(bounded) - bounded).mean()),
        )


@dataclass(frozen=True, slots=True)
class Trip:
    """A comparison past the bound."""

    version: int
    comparison: Comparison
    digests: dict[str, str]
    """Of the engine's parameters as they were when it answered."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """The engine at work on the prompts."""

    version: int
    answers: list[asyncio.Task[Rollout | None]]
    digests: asyncio.Task[dict[str, str]]

    @property
    def tasks(self) -> list[asyncio.Task]:
        return [*self.answers, self.digests]


class Canary:
    """Call `watch` after a publish, `settle` before the next residency, and `check` in it, before the trainer's step.

    If `check` finds a trip, publish the same weights again and call `report`.
    """

    def __init__(
        self,
        config: CanaryConfig,
        *,
        bound: float,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        engine: RolloutEngine,
        trainer: Trainer,
    ) -> None:
        self._every, self._action = config.every, config.action
        self._bound, self._prompts, self._sampling = bound, list(prompts), sampling
        self._engine, self._trainer = engine, trainer
        self._asked: _Asked | None = None
        self._is_first = True
        self._metrics: dict[str, float] = {}

    async def __aenter__(self) -> Canary:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._drop()

    async def watch(self, version: int, *, arrived: Callable[[], Awaitable[None]] | None = None) -> None:
        """Asks the engine, if this publish is due: every k-th, and the first of this process.

        Requests wait for weights that are on their way; for digests of them it waits itself, by `arrived`. None: they
        are there.
        """
        is_due = self._every > 0 and (self._is_first or version % self._every == 0)
        self._is_first = False
        if not is_due:
            return
        assert self._asked is None, "settle and check come between two publishes"
        answers = [asyncio.create_task(self._answer(place)) for place in range(len(self._prompts))]
        self._asked = _Asked(version, answers, asyncio.create_task(self._digests(arrived)))
        # The engine gets them now, so that whatever is asked for later is batched as it would be without them.
        await asyncio.sleep(0)

    async def _digests(self, arrived: Callable[[], Awaitable[None]] | None) -> dict[str, str]:
        if arrived is not None:
            await arrived()
        return await self._engine.weight_digests()

    async def _answer(self, place: int) -> Rollout | None:
        """None: the engine, which lives on, failed on this request. Training asks again; here others answer."""
        # The training stream counts its groups from 0, so no seed and no id is used twice.
        samples = self._engine.generate(self._prompts[place], group_id=-1 - place, n=1, sampling=self._sampling)
        try:
            (rollout,) = [rollout async for rollout in samples]
        except RequestError as error:
            log.warning("canary: the answer to %s is not compared: %s", self._prompts[place].prompt_id, error)
            return None
        return rollout

    @property
    def tasks(self) -> list[asyncio.Task]:
        """What goes on until `check`."""
        return [] if self._asked is None else self._asked.tasks

    async def settle(self) -> None:
        """Waits for the answers. A colocated engine must be idle before it sleeps, and a busy one is not waited for."""
        if self._asked is None:
            return
        _, pending = await asyncio.wait(self._asked.tasks, timeout=PATIENCE_S)
        if pending:
            log.warning(
                "canary: the engine did not answer %d prompts on version %d in %.0f s, so they are not compared.",
                len(self._prompts),
                self._asked.version,
                PATIENCE_S,
            )
            self._metrics["canary/skipped_rollouts"] = len(self._prompts)
            await self._drop()

    async def check(self) -> Trip | None:
        """Scores the answers. None if they are within the bound, or there are none."""
        if self._asked is None:
            return None
        asked, self._asked = self._asked, None
        digests = await asked.digests
        answers = [(prompt, await task) for prompt, task in zip(self._prompts, asked.answers, strict=True)]
        answers = [(prompt, rollout) for prompt, rollout in answers if rollout and _is_of(rollout, asked.version)]
        self._metrics["canary/skipped_rollouts"] = len(self._prompts) - len(answers)
        if not answers:
            return None
        prompts, rollouts = [prompt for prompt, _ in answers], [rollout for _, rollout in answers]
        comparison = Comparison.of(rollouts, await self._trainer.logprobs(prompts, rollouts))
        is_tripped = not comparison.mean <= self._bound  # also where it is not a number
        self._metrics |= {
            "canary/logprob_difference_mean": comparison.mean,
            "canary/logprob_difference_max": comparison.largest,
            "canary/kl_k3": comparison.kl_k3,
            "canary/trips": float(is_tripped),
        }
        if not is_tripped:
            return None
        log.info("canary: version %d, %s; publishing it again.", asked.version, self._in_words(comparison))
        return Trip(asked.version, comparison, digests)

    async def report(self, trip: Trip) -> None:
        """Once the same weights are published again: names what that changed. Raises CanaryError if asked to stop."""
        digests = await self._engine.weight_digests()
        differing = [name for name, digest in digests.items() if trip.digests.get(name) != digest]
        self._metrics["canary/differing_parameters"] = len(differing)
        found = self._in_words(trip.comparison)
        if differing:
            message = (
                f"the engine's weights of version {trip.version} were not the trainer's: {found}; the first of "
                f"{len(differing)} parameters that differ is {differing[0]} (it held other values than a complete "
                "publish of the same weights gives)."
            )
        else:
            message = (
                f"engine and trainer disagree on version {trip.version}: {found}; publishing the same weights again "
                f"changed none of the engine's {len(digests)} parameters. So either it computes otherwise than the "
                "trainer (kernels, dtype, settings of the model), or every publish puts the same wrong values there. "
                "If this is how far the two are apart when all is well, raise canary.max_logprob_difference."
            )
        if self._action is CanaryAction.stop:
            raise CanaryError(message)
        log.warning("canary: %s Going on with what was published again (canary.action=warn).", message)

    def metrics(self) -> dict[str, float]:
        """What was found since the last call, for one row."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _in_words(self, comparison: Comparison) -> str:
        return (
            f"mean |difference| {comparison.mean:.2g} nats (bound {self._bound:g}) over {comparison.num_tokens} tokens"
        )

    async def _drop(self) -> None:
        if self._asked is None:
            return
        tasks, self._asked = self._asked.tasks, None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def default_bound(*, engine: Dtype, trainer: Dtype) -> float:
    """For `canary.max_logprob_difference=null`, by the dtypes that the two compute in."""
    return FLOAT32_BOUND if engine is Dtype.float32 is trainer else BFLOAT16_BOUND


def _is_of(rollout: Rollout, version: int) -> bool:
    return rollout.min_policy_version == rollout.max_policy_version == version
