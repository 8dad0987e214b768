"""Predicts the published fully asynchronous step times from the colocated ones, by the real scheduling code.

    python -m scripts.simulate_placements

Loop, stream, placements and engine are those of a run; model server, trainer and clock are simulated. All speeds are
fitted to the three colocated rows of verl's table of Qwen2.5-Math-7B DAPO on H20 (docs/advance/fully_async.md,
2026-05-25), and no asynchronous time enters them. What the table does not say is assumed, and named in the output; the
assumed mean of 890 tokens is from an asynchronous run, AMD's on MI300.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass

import numpy as np

from rl.config.algorithms import GRPOConfig
from rl.config.schema import ColocatedConfig, FullyAsyncConfig, InFlight, RunConfig, StreamConfig
from rl.rollout.engine import Engine
from scripts.simulated_run import (
    LengthOf,
    RowsInMemory,
    SimulatedSampler,
    SimulatedTrainer,
    Speed,
    lognormal_lengths,
    run_to_end,
    simulated_run,
)
from scripts.simulated_time import simulate

PROMPTS, GROUP, MINI_BATCH = 512, 16, 32
"""Of one published step, which is one parameter sync: 8,192 answers."""
LIMIT = 28672
"""New tokens."""
PROMPT_TOKENS = 150
GPUS_PER_REPLICA = 4
MAX_NUM_SEQS = 256
MEAN_TOKENS, SIGMA = 890.0, 1.115
"""Assumed: the mean is the one that AMD's fully asynchronous run of the same recipe began with (blog of 2026-08-14; of
the colocated one none is known), and of 8,192 lognormal answers of this spread the longest is expected to reach the
limit."""
PUBLISHES, WARM_UP = 5, 2
"""Simulated, and of these not measured."""
FOREVER = 1e9


@dataclass(frozen=True, slots=True)
class Colocated:
    """Published seconds per step."""

    gpus: int
    step: float
    gen: float
    old_logprobs: float
    update: float

    @property
    def other(self) -> float:
        return self.step - self.gen - self.old_logprobs - self.update


@dataclass(frozen=True, slots=True)
class Async:
    """Published seconds per step, half of `gpus` for rollouts. `gen` is what the trainer waits for answers."""

    gpus: int
    staleness: float
    step: float
    gen: float
    update: float
    require_batches: int = 4
    is_partial: bool = True


COLOCATED = (
    Colocated(32, 790.10, 357.41, 107.71, 269.80),
    Colocated(64, 365.28, 150.72, 70.26, 133.41),
    Colocated(128, 356.30, 177.85, 53.92, 113.81),
)
ASYNC = (
    Async(32, 0.5, 294.77, 21.26, 313.81),
    Async(64, 0.5, 189.26, 28.46, 156.98),
    Async(128, 0.0, 231.34, 128.47, 98.77, is_partial=False),
    Async(128, 0.1, 171.30, 58.17, 109.12),
    Async(128, 0.3, 146.11, 38.88, 103.22),
    Async(128, 0.5, 150.63, 33.14, 113.16),
)
REQUIRE_BATCHES = (
    Async(128, 0.5, 203.47, 30.88, 181.08, require_batches=1),
    Async(128, 0.5, 158.72, 26.32, 128.08, require_batches=2),
    Async(128, 0.5, 124.64, 25.62, 95.06, require_batches=4),
)
AMD_ASYNC_S, AMD_COLOCATED_S = 219.0, 394.0
"""Medians of the first 64 steps on 32 MI300 (verl on AMD, 2026-08-14), staleness_threshold 0.5, partial rollout."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds. `update` and `old_logprobs` are (fixed, work) of 512 prompts, which on N GPUs take fixed + work / N."""

    step_s: float
    sequence_s: float
    update: tuple[float, float]
    old_logprobs: tuple[float, float]
    publish_s: float

    def speed(self, *, train_s: float) -> Speed:
        return Speed(self.step_s, self.sequence_s, train_s, self.publish_s)

    def update_s(self, gpus: int) -> float:
        return self.update[0] + self.update[1] / gpus

    def old_logprobs_s(self, gpus: int) -> float:
        return self.old_logprobs[0] + self.old_logprobs[1] / gpus


@dataclass(frozen=True, slots=True)
class Predicted:
    """Mean seconds per publish."""

    step: float
    wait: float
    """For answers, while the trainer has nothing to do."""
    max_staleness: float


def lengths() -> LengthOf:
    return lognormal_lengths(mean=MEAN_TOKENS, sigma=SIGMA, limit=LIMIT)


@functools.cache
def calibrate() -> Calibration:
    """Least squares of relative errors over the three colocated rows; no coefficient below zero."""
    shapes = [_decoding_of_one_batch(row.gpus // GPUS_PER_REPLICA) for row in COLOCATED]
    gpus = np.array([row.gpus for row in COLOCATED], dtype=float)
    per_gpu = np.stack([np.ones(len(gpus)), 1 / gpus], axis=1)
    step_s, sequence_s = fit(np.array(shapes, dtype=float), [row.gen for row in COLOCATED])
    return Calibration(
        step_s=step_s,
        sequence_s=sequence_s,
        update=fit(per_gpu, [row.update for row in COLOCATED]),
        old_logprobs=fit(per_gpu, [row.old_logprobs for row in COLOCATED]),
        publish_s=float(np.median([row.other for row in COLOCATED])),
    )


def fit(columns: np.ndarray, values: list[float]) -> tuple[float, float]:
    weighted = columns / np.array(values)[:, None]
    target = np.ones(len(values))
    candidates = [np.linalg.lstsq(weighted, target, rcond=None)[0]]
    for only in (0, 1):  # where the best has one below zero, the best with that one at zero
        one = np.zeros(2)
        one[only] = weighted[:, only] @ target / (weighted[:, only] @ weighted[:, only])
        candidates.append(one)
    allowed = [candidate for candidate in candidates if (candidate >= 0).all()]
    best = min(allowed, key=lambda candidate: float(np.sum((weighted @ candidate - target) ** 2)))
    return float(best[0]), float(best[1])


def _decoding_of_one_batch(num_replicas: int) -> tuple[float, float]:
    """(decoding steps, sequence-steps) of the replica that ends last, by the simulated server itself."""
    row = RunConfig(algorithm=_algorithm(PROMPTS), placement=ColocatedConfig(), stream=_stream())
    steps = _measure(row, Speed(1.0, 0.0, 0.0, 0.0), num_replicas, publishes=1, warm_up=0).step
    tiny = 1e-6
    both = _measure(row, Speed(1.0, tiny, 0.0, 0.0), num_replicas, publishes=1, warm_up=0).step
    return steps, (both - steps) / tiny


def _algorithm(prompts_per_step: int) -> GRPOConfig:
    return GRPOConfig(prompts_per_step=prompts_per_step, group_size=GROUP, prompts_per_mini_batch=MINI_BATCH)


def _stream() -> StreamConfig:
    return StreamConfig(stall_timeout_s=FOREVER)


@functools.cache
def predict_colocated(calibration: Calibration, gpus: int, *, publishes: int = PUBLISHES) -> Predicted:
    config = RunConfig(algorithm=_algorithm(PROMPTS), placement=ColocatedConfig(), stream=_stream())
    speed = calibration.speed(train_s=calibration.update_s(gpus) + calibration.old_logprobs_s(gpus))
    return _measure(config, speed, gpus // GPUS_PER_REPLICA, publishes=publishes, warm_up=WARM_UP)


@functools.cache
def predict_async(calibration: Calibration, row: Async, *, publishes: int = PUBLISHES) -> Predicted:
    """A step holds 512 prompts whatever `require_batches` is: the table's hours say so, its text does not."""
    prompts_per_step = row.require_batches * MINI_BATCH
    placement = FullyAsyncConfig(
        max_staleness=row.staleness,
        publish_every=PROMPTS // prompts_per_step,
        in_flight=InFlight.continue_on_new_weights if row.is_partial else InFlight.finish,
    )
    config = RunConfig(algorithm=_algorithm(prompts_per_step), placement=placement, stream=_stream())
    train_s = calibration.update_s(row.gpus // 2) * prompts_per_step / PROMPTS
    replicas = row.gpus // 2 // GPUS_PER_REPLICA
    return _measure(config, calibration.speed(train_s=train_s), replicas, publishes=publishes, warm_up=WARM_UP)


def _measure(config: RunConfig, speed: Speed, num_replicas: int, *, publishes: int, warm_up: int) -> Predicted:
    async def main() -> Predicted:
        every = config.placement.publish_every
        log = RowsInMemory()
        sampler = SimulatedSampler(speed, num_replicas=num_replicas, max_num_seqs=MAX_NUM_SEQS, length_of=lengths())
        run = simulated_run(
            config,
            steps=publishes * every,
            engine=Engine(sampler),
            trainer=SimulatedTrainer(speed),
            prompt_tokens=PROMPT_TOKENS,
            log=log,
        )
        await run_to_end(run)
        ends = sampler.publish_times  # the first publish is version 0
        busy = every * speed.train_s + speed.publish_s
        step = (ends[-1] - ends[warm_up]) / (publishes - warm_up)
        return Predicted(step, step - busy, max(row["staleness/max"] for row in log.rows))

    return simulate(main())


def report() -> None:
    calibration = calibrate()
    print(
        "assumed: answers lognormal, mean 890 tokens, sigma 1.115, cut at 28,672; 256 sequences per replica of 4 GPUs;"
    )
    print(f"a publish takes {calibration.publish_s:.1f} s, the median of what the colocated rows do not account for")
    print(
        f"fitted to the colocated rows: decoding step {1e3 * calibration.step_s:.3f} ms + "
        f"{1e3 * calibration.sequence_s:.4f} ms a sequence; update {calibration.update[0]:.1f} s + "
        f"{calibration.update[1]:.0f} s / GPUs; old log-probs {calibration.old_logprobs[0]:.1f} s + "
        f"{calibration.old_logprobs[1]:.0f} s / GPUs\n"
    )
    print(f"{'H20, seconds per 512 prompts':<44} {'':>9} {'published':>10} {'simulated':>10} {'error':>7}")
    for row in COLOCATED:
        _line(
            f"colocated {row.gpus}: the fit's own rows", "step", row.step, predict_colocated(calibration, row.gpus).step
        )
    for row in ASYNC:
        _async_lines(calibration, row, f"async {row.gpus // 2}:{row.gpus // 2}, staleness {row.staleness:g}")
    for row in REQUIRE_BATCHES:
        _async_lines(calibration, row, f"async 64:64, require_batches {row.require_batches}")
    print("not simulated: Qwen3-30B-A3B (one colocated row cannot separate its terms), 16 H20 (another length limit)")
    _amd(calibration)


def _async_lines(calibration: Calibration, row: Async, name: str) -> None:
    predicted = predict_async(calibration, row)
    _line(name, "step", row.step, predicted.step)
    _line("", "wait", row.gen, predicted.wait)
    _line("", "update", row.update, calibration.update_s(row.gpus // 2))
    print(f"{'':<44} {'staleness':>9} {'':>10} {predicted.max_staleness:>10.0f}")


def _amd(calibration: Calibration) -> None:
    """One factor makes H20 into MI300: the colocated seconds are given, the asynchronous ones follow."""
    colocated = predict_colocated(calibration, 32).step
    factor = AMD_COLOCATED_S / colocated
    predicted = predict_async(calibration, ASYNC[0]).step
    print(f"\nMI300, 32 GPUs: every speed of the H20 x {1 / factor:.2f}, so that the colocated step takes 394 s")
    _line("colocated 32", "step", AMD_COLOCATED_S, colocated * factor)
    _line("async 16:16, staleness 0.5", "step", AMD_ASYNC_S, predicted * factor)
    _line("colocated / async", "ratio", AMD_COLOCATED_S / AMD_ASYNC_S, colocated / predicted)


def _line(name: str, what: str, published: float, simulated: float) -> None:
    error = 100 * (simulated / published - 1)
    print(f"{name:<44} {what:>9} {published:>10.2f} {simulated:>10.2f} {error:>+6.0f}%", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    report()


if __name__ == "__main__":
    main()
