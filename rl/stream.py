"""The stream of groups: admission, order, staleness.

                 admits while admitted < max_admitted              takes P finished groups from the window
    task.prompt ------------------------------------> in flight -------------------------------------------> trainer
                  ^                                  (sampled, graded)                                         |
                  +---------------------- release(): trained on and published, slots are free <----------------+

Admission alone bounds staleness: a group cannot start before the release of all but `max_admitted` of its
predecessors. With max_staleness 0 the next batch starts only after `release()`, which follows the publish: strictly
on-policy, with no special case. Taking groups as they finish, without a window, would break the bound; see
RunConfig.staleness_bound.

Over-sampling starts up to `max_surplus` groups more, so that an algorithm that filters need not wait for one round
after another. What the batches up to the next publish have not taken of it has no share in the bound: as the last of
these batches is taken, it is recalled, and starts anew on the next weights, first. So over-sampling changes how soon a
batch is there, and at max_staleness 0 neither which groups it holds nor what they hold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rl.accounting import Accounting
from rl.grading import grade, sample
from rl.protocols import Algorithm, RequestError, RolloutEngine, Task
from rl.types import Reward, RewardError, RolloutGroup, Sampling

FAILED_HISTORY_BATCHES = 10
FILTERED, ENGINE_ERROR = "filtered", "engine_error"
"""Reasons to drop a group, besides those of `RewardError.drop_reason`. All but the first are failures."""


log = logging.getLogger(__name__)


class StreamError(RuntimeError):
    """The stream cannot deliver another batch."""


@dataclass(slots=True, eq=False)
class _Slot:
    """One admitted group, in admission order."""

    group_id: int
    task: asyncio.Task[RolloutGroup | str]
    group: RolloutGroup | None = None
    """None: not finished, or taken."""
    drop_reason: str | None = None
    is_taken: bool = False
    is_recalled: bool = False

    @property
    def is_open(self) -> bool:
        """Holds its place: neither taken nor dropped."""
        return not self.is_taken and self.drop_reason is None


@dataclass(frozen=True, slots=True)
class StreamConfigValues:
    """The numbers that a stream works by."""

    seed: int
    sampling: Sampling
    prompts_per_step: int
    group_size: int
    groups_per_publish: int
    max_admitted: int
    max_surplus: int
    """Over-sampled, on top of `max_admitted`."""
    window: int
    max_failed_fraction: float
    reward_timeout_s: float
    stall_timeout_s: float


class GroupStream:
    """Implements `rl.protocols.RolloutStream` over one engine."""

    def __init__(self, values: StreamConfigValues, *, task: Task, engine: RolloutEngine, algorithm: Algorithm) -> None:
        self._values = values
        self._task, self._engine, self._algorithm = task, engine, algorithm
        self._slots: deque[_Slot] = deque()
        self._held = 0
        """Groups trained on and not yet released."""
        self._num_open = 0
        """Of the slots."""
        self._num_finished = 0
        """Of the open slots: sampled, graded and kept."""
        self._again: deque[int] = deque()
        """Group ids to be admitted first: a restored checkpoint had them in flight, or they were recalled."""
        self._progress = asyncio.Event()
        self._error: BaseException | None = None
        self._has_failed = asyncio.Event()
        self._last_failure: RewardError | RequestError | None = None
        self._recent_failures: deque[str | None] = deque(maxlen=FAILED_HISTORY_BATCHES * values.prompts_per_step)
        self._is_open = False
        self.accounting = Accounting()
        self._num_recalled = 0
        """Since the last call of `metrics`."""
        self._num_retried = 0
        """Likewise."""
        self._grading: set[int] = set()
        """Ids of the groups whose answers are there and whose rewards are not."""
        self._busy = BusyTimer()

    async def __aenter__(self) -> GroupStream:
        self._is_open = True
        self._admit()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        tasks = [slot.task for slot in self._slots]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def next_batch(self) -> list[RolloutGroup]:
        """The first P kept groups, in admission order, as soon as so many in the window have finished.

        Cancelled while it waits, it has taken nothing.
        """
        wanted = self._values.prompts_per_step
        while len(finished := self._finished_in_window()) < wanted:
            self._progress.clear()
            try:
                await asyncio.wait_for(self._progress.wait(), self._values.stall_timeout_s)
            except TimeoutError:
                raise StreamError(self._stall_message()) from None
        await self._recall_surplus(finished)
        return self._take(finished)

    def _finished_in_window(self) -> list[_Slot]:
        """Finished groups that the next batch may take, in admission order, P at most; none while there are fewer.

        The window holds what this batch takes before the oldest unfinished group, that group, and the places after it.
        Groups taken earlier keep their places there: the oldest is overtaken by `window - 1` others at most, over all
        batches, and this is what bounds staleness. A window of one batch is first in, first out. Dropped groups have no
        place in the window and free their slot at once, while the engine is awake.
        """
        self._raise_failure()
        while self._slots and not self._slots[0].is_open:
            self._count_if_dropped(self._slots.popleft())
        self._admit()
        wanted = self._values.prompts_per_step
        if self._num_finished < wanted:
            return []
        finished: list[_Slot] = []
        place, end = 0, None
        for slot in self._slots:
            if len(finished) == wanted or place == end:
                break
            if slot.drop_reason is not None:
                continue
            if slot.group is not None:
                finished.append(slot)
            elif not slot.is_taken and end is None:
                end = place + self._values.window - len(finished)
            place += 1
        return finished

    def _take(self, finished: list[_Slot]) -> list[RolloutGroup]:
        """Drops that this batch passes are final, and count."""
        groups = []
        for slot in finished:
            assert slot.group is not None
            self.accounting.train(slot.group.group_id)
            groups.append(slot.group)
            slot.group, slot.is_taken = None, True
        self._num_open -= len(finished)
        self._num_finished -= len(finished)
        self._held += len(finished)
        rest: deque[_Slot] = deque()
        is_passed = True
        for slot in self._slots:
            if is_passed and slot.drop_reason is not None:
                self._count_if_dropped(slot)
            else:
                rest.append(slot)
            is_passed = is_passed and slot is not finished[-1]
        self._slots = rest
        return groups

    def _count_if_dropped(self, slot: _Slot) -> None:
        if slot.drop_reason is not None:
            self.accounting.drop(slot.group_id, slot.drop_reason)

    async def _recall_surplus(self, finished: list[_Slot]) -> None:
        """Ends what is in flight beyond the room that there is once `finished` are taken, and asks for it again later.

        Before they are taken, so that a batch is either whole or still here, however this ends. Groups beyond that are
        dropped already are recalled with the rest: whether they were judged in time must not decide what is trained on.
        """
        if self._values.max_surplus == 0:
            return
        room = self._room(self._held + len(finished))
        taken, num_left = set(map(id, finished)), len(finished)
        recalled: list[_Slot] = []
        for slot in self._slots:
            if slot.is_taken or id(slot) in taken:
                num_left -= not slot.is_taken
            elif slot.drop_reason is None and room > 0:
                room -= 1
            elif slot.drop_reason is None or (room == 0 and num_left == 0):
                recalled.append(slot)
        for slot in recalled:
            slot.is_recalled = True
            self._num_open -= slot.is_open
            self._num_finished -= slot.group is not None
            slot.task.cancel()
        self._slots = deque(slot for slot in self._slots if not slot.is_recalled)
        self._again.extendleft(slot.group_id for slot in reversed(recalled))
        self._num_recalled += len(recalled)
        await asyncio.gather(*(slot.task for slot in recalled), return_exceptions=True)

    def _room(self, num_held: int) -> int:
        """Groups that may be in flight while `num_held` are taken and not released."""
        is_publish_due = num_held >= self._values.groups_per_publish
        return self._values.max_admitted - num_held + (0 if is_publish_due else self._values.max_surplus)

    def release(self) -> None:
        """Frees the slots of the groups taken since the last release: they are trained on and published."""
        self._held = 0
        self._admit()

    def state(self) -> dict[str, Any]:
        """The position at a step boundary: what was admitted and not taken is asked for again."""
        return {**self.accounting.state(), "in_flight": self.in_flight}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Groups trained on since the last publish that the steps had due keep their slots until the next one."""
        assert not self._is_open, "restore before the stream starts"
        self._again = deque(int(group_id) for group_id in state["in_flight"])
        self.accounting = Accounting.from_state(state)
        self._held = self.accounting.trained % self._values.groups_per_publish

    def metrics(self) -> dict[str, float]:
        """Since the run began, but for surplus and retried groups, which are of one step.

        In every row: groups_started = groups_trained + all of dropped/ + groups_in_flight.
        """
        accounting, in_flight = self.accounting, self.in_flight
        problems = accounting.problems(in_flight)
        assert not problems, f"{'; '.join(problems)}: {accounting}, in flight {in_flight}"
        assert self._num_open == sum(slot.is_open for slot in self._slots), "the slots in use are miscounted"
        num_recalled, self._num_recalled = self._num_recalled, 0
        num_retried, self._num_retried = self._num_retried, 0
        surplus = {"rollout/surplus_groups": float(num_recalled)} if self._values.max_surplus else {}
        return {
            **surplus,
            "rollout/groups_started": float(accounting.started),
            "rollout/groups_trained": float(accounting.trained),
            **{f"rollout/dropped/{reason}": float(count) for reason, count in accounting.dropped.items()},
            "rollout/groups_in_flight": float(len(in_flight)),
            "rollout/retried_groups": float(num_retried),
        }

    async def failure(self) -> BaseException:
        await self._has_failed.wait()
        assert self._error is not None
        return self._error

    def busy_s(self) -> float:
        return self._busy.total_s()

    @property
    def in_flight(self) -> list[int]:
        """Ids of started groups that no batch has taken or passed; one that starts anew is there all the while."""
        return [slot.group_id for slot in self._slots if not slot.is_taken] + list(self._again)

    def _admit(self) -> None:
        """Starts groups while slots are free, in one turn of the event loop, so that the engine gets them together."""
        if not self._is_open or self._error is not None:
            return
        for _ in range(self._room(self._held) - self._num_open):
            group_id = self._again.popleft() if self._again else self.accounting.start()
            task = asyncio.create_task(self._produce(group_id), name=f"group {group_id}")
            slot = _Slot(group_id, task)
            task.add_done_callback(lambda done, slot=slot: self._finish(slot, done))
            self._slots.append(slot)
            self._num_open += 1

    async def _produce(self, group_id: int) -> RolloutGroup | str:
        """The graded group, or the reason to drop it. The engine is asked before this first suspends."""
        values = self._values
        prompt = self._task.prompt(values.seed, group_id)
        try:
            with self._busy:
                rollouts = await sample(
                    self._engine,
                    prompt,
                    group_id=group_id,
                    n=values.group_size,
                    sampling=values.sampling,
                    on_retry=self._count_retry,
                )
            self._grading.add(group_id)
            rewards = await grade(self._task.grade, prompt, rollouts, limit_s=values.reward_timeout_s)
        except (RequestError, RewardError) as error:
            log.warning("group %d (%s) is dropped: %s", group_id, prompt.prompt_id, error)
            self._last_failure = error
            return error.drop_reason if isinstance(error, RewardError) else ENGINE_ERROR
        finally:
            self._grading.discard(group_id)
        group = RolloutGroup(group_id, prompt, rollouts)
        self._judge(group, rewards)
        return group if self._algorithm.keep(group) else FILTERED

    def _count_retry(self) -> None:
        self._num_retried += 1

    def _judge(self, group: RolloutGroup, rewards: list[Reward]) -> None:
        for rollout, reward in zip(group.rollouts, rewards, strict=True):
            rollout.reward = float(reward.value)
            rollout.reward_parts = {"correct": float(reward.correct), **reward.parts}
            rollout.shaped_reward = self._algorithm.shape_reward(rollout)

    def _finish(self, slot: _Slot, done: asyncio.Task[Any]) -> None:
        """Runs when a group's task ends, however it ends."""
        if done.cancelled():
            if self._is_open and not slot.is_recalled:
                self._fail(StreamError(f"group {slot.group_id} was cancelled from outside."))
            return
        error = done.exception()
        if error is not None:
            self._fail(error)
        elif slot.is_recalled:
            return  # it ended in the same moment
        elif isinstance(result := done.result(), str):
            slot.drop_reason = result
            self._num_open -= 1
            self._recent_failures.append(None if result == FILTERED else result)
        else:
            slot.group = result
            self._num_finished += 1
            self._recent_failures.append(None)
        self._progress.set()

    def _fail(self, error: BaseException) -> None:
        """The first error counts."""
        self._error = self._error or error
        self._has_failed.set()
        self._progress.set()

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error
        failures = Counter(reason for reason in self._recent_failures if reason is not None)
        # Of all the groups of that history, not of those seen so far: one early failure in a small batch is no verdict.
        allowed = self._values.max_failed_fraction * FAILED_HISTORY_BATCHES * self._values.prompts_per_step
        if failures.total() > allowed:
            reasons = ", ".join(f"{reason} {count}" for reason, count in failures.items())
            raise StreamError(
                f"{failures.total()} of the last {len(self._recent_failures)} groups failed ({reasons}), more than "
                f"stream.max_failed_fraction={self._values.max_failed_fraction} of the groups of "
                f"{FAILED_HISTORY_BATCHES} batches. These are errors of grader or engine, not wrong answers; the last "
                f"one: {self._last_failure}"
            ) from self._last_failure

    def _stall_message(self) -> str:
        waiting = [slot.group_id for slot in self._slots if slot.group is None and slot.is_open]
        return (
            f"no group finished for {self._values.stall_timeout_s:.0f} s (stream.stall_timeout_s) while the trainer "
            f"waited for {self._values.prompts_per_step} and had {self._num_finished}; in flight: {waiting[:8]}"
            f"{'...' if len(waiting) > 8 else ''} ({len(waiting)} groups, {len(self._grading)} of them being graded)."
        )


class BusyTimer:
    """Wall seconds during which at least one of several overlapping `with` blocks was open."""

    def __init__(self) -> None:
        self._depth, self._since, self._total_s = 0, 0.0, 0.0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._since = time.monotonic()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._total_s += time.monotonic() - self._since

    def total_s(self) -> float:
        return self._total_s + (time.monotonic() - self._since if self._depth else 0.0)
