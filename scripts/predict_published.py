"""What the plan's time model says of published runs, beside what was published, misses included.

    python -m scripts.predict_published > experiments/measurements/predicted_times.md

Its efficiencies are fitted to the three colocated rows of verl's table of Qwen2.5-Math-7B DAPO on H20 and to nothing
else: no asynchronous time enters, and none of another kind of GPU. The assumed mean of 890 tokens is of another run,
AMD's fully asynchronous one on MI300. `scripts/simulate_placements.py` predicts the same rows by the real scheduling
code, with speeds fitted to the same three rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from rl.config.compose import compose_run_config
from rl.config.schema import WeightTransport
from rl.config.shape import ModelShape
from rl.plan.sizes import PROMPT_TOKENS, DeviceSizes, EngineSizes, RunSizes, Sharing, StepSizes, TrainerSizes, sizes_of
from rl.plan.time import (
    BANDWIDTH_SHARE,
    Efficiency,
    exchange_s,
    generate_s,
    predict,
    score_flops,
    train_flops,
)
from scripts import simulate_placements as simulation
from scripts.simulate_placements import ASYNC, COLOCATED, GPUS_PER_REPLICA, REQUIRE_BATCHES, Async, fit

TOKENS_PER_MICRO_BATCH = 61440


def device(hardware: str, *, nodes: int = 1) -> DeviceSizes:
    run = sizes_of(compose_run_config(["model=qwen2_5_math_7b", f"hardware={hardware}", f"hardware.nodes={nodes}"]))
    assert run is not None
    return run.device


H20 = DeviceSizes(
    is_cpu=False,
    count=128,
    nodes=16,
    gpus_per_node=8,
    memory_gib=96,
    bandwidth_tb_s=4.0,  # as the card is sold; the table does not give it
    tflops=148.0,  # verl, utils/flops_counter.py
    link_gb_s=900.0,
    network_gb_s=None,  # not published
)
MI300X, MI350X, MI355X = device("mi300xx8", nodes=4), device("mi350xx8"), device("mi355xx8")


def shape_of_model(name: str) -> ModelShape:
    shape = compose_run_config([f"model={name}"]).model.shape
    assert shape is not None
    return replace(shape, num_params=shape.counted_params())


def dapo_run(
    *,
    on: DeviceSizes,
    training_gpus: int,
    sampling_gpus: int,
    prompts: int = simulation.PROMPTS,
    publish_every: int = 1,
    staleness: float = 0.0,
    sharing: Sharing = Sharing.turns,
    limit: int = simulation.LIMIT,
    gpus_per_engine: int = GPUS_PER_REPLICA,
) -> RunSizes:
    """Qwen2.5-Math-7B as upstream's tables and AMD trained it; colocated, old log-probs are of all tokens."""
    return RunSizes(
        shape=shape_of_model("qwen2_5_math_7b"),
        trainer=TrainerSizes(
            ranks=training_gpus,
            data_ranks=training_gpus,
            is_megatron=False,
            tensor_parallel=1,
            expert_parallel=1,
            compute_bytes=2,
            micro_batch_tokens=TOKENS_PER_MICRO_BATCH,
            budget_tokens=TOKENS_PER_MICRO_BATCH,
            recompute=True,
            chunk_tokens=2048,
            has_reference=False,
            trains_on_images=False,
        ),
        engine=EngineSizes(
            name="vllm",
            count=sampling_gpus // gpus_per_engine,
            gpus=gpus_per_engine,
            per_device=1,
            weight_bytes=2,
            max_num_seqs=simulation.MAX_NUM_SEQS,
            memory_fraction=0.8,
            cpu_cache_gib=0,
        ),
        step=StepSizes(
            prompts=prompts,
            group_size=simulation.GROUP,
            updates=prompts // simulation.MINI_BATCH,
            publish_every=publish_every,
            max_prompt_tokens=2048,
            max_new_tokens=limit,
            prompt_tokens=simulation.PROMPT_TOKENS,
            response_tokens=simulation.MEAN_TOKENS,
            scored_share=1.0 if sharing is Sharing.turns else 0.0,
            max_staleness=staleness,
        ),
        device=on,
        sharing=sharing,
        transport=WeightTransport.ipc if sharing is Sharing.turns else WeightTransport.collective,
    )


def colocated_run(gpus: int, on: DeviceSizes = H20) -> RunSizes:
    return dapo_run(on=on, training_gpus=gpus, sampling_gpus=gpus)


def async_run(row: Async, on: DeviceSizes = H20) -> RunSizes:
    prompts = row.require_batches * simulation.MINI_BATCH
    return dapo_run(
        on=on,
        training_gpus=row.gpus // 2,
        sampling_gpus=row.gpus // 2,
        prompts=prompts,
        publish_every=simulation.PROMPTS // prompts,
        staleness=row.staleness,
        sharing=Sharing.apart,
    )


def other_s() -> float:
    """What the colocated rows do not account for, publish included; taken for every row."""
    return float(median(row.other for row in COLOCATED))


def calibrate() -> Efficiency:
    """From the three colocated rows. Peak rates are given; what is left of each phase is an efficiency."""
    gpus = np.array([row.gpus for row in COLOCATED], dtype=float)
    runs = [colocated_run(row.gpus) for row in COLOCATED]
    fixed_s, gpu_s = fit(np.stack([np.ones(3), 1 / gpus], axis=1), [row.update for row in COLOCATED])
    rate = H20.tflops * 1e12  # type: ignore[operator]
    train_share = train_flops(runs[0]) / (gpu_s * rate)
    params = runs[0].shape.num_params
    assert params is not None
    network_gb_s = runs[0].step.updates * 8 * params / fixed_s / 1e9  # 2 + 2 + 4 bytes a parameter and update
    known = Efficiency(train_share, 1.0, 0.0, 0.0, network_gb_s)
    gathered_s = exchange_s(runs[0], known) - fixed_s  # in all passes for log-probs
    scored = [(row.old_logprobs - gathered_s) * row.gpus for row in COLOCATED]
    score_share = score_flops(runs[0]) / (math.exp(np.mean(np.log(scored))) * rate)
    return replace(known, score_share=score_share, **_decoding(runs, known))


def _decoding(runs: list[RunSizes], known: Efficiency) -> dict[str, float]:
    """Seconds of a layer and of a token, from what reading memory and multiplying leave unexplained."""
    columns, left = [], []
    for run, row in zip(runs, COLOCATED, strict=True):
        explained = generate_s(run, known, longest_share=1.0)
        columns.append(
            [
                generate_s(run, replace(known, layer_s=1.0), longest_share=1.0) - explained,
                generate_s(run, replace(known, token_s=1.0), longest_share=1.0) - explained,
            ]
        )
        left.append(row.gen - explained)
    layer_s, token_s = fit(np.array(columns), left)
    return {"layer_s": layer_s, "token_s": token_s}


AMD_ASYNC_355_S = 357.6
"""Mean over 100 syncs on 4 + 4 MI355X, answers of at most 8,192 tokens (Scaling RL with verl on MI355X, 2026-08-18)."""
QWEN3_5_TOKENS_S = {"colocated": 216.0, "fully async": 310.0}
"""Per GPU, prompts included, on 8 MI350X (verl on AMD, 2026-08-14); of which GPUs the source does not say: all here."""


def geometry_run(*, colocated: bool) -> RunSizes:
    """Qwen3.5-35B-A3B on geometry3k, on 8 MI350X: TP 2, EP 8 and one engine of 8, or 4 + 4 with EP 4 and one of 4.

    Lengths are not published: answers of half the limit and the plan's prompts are assumed. Nor is what the trainer
    moved to the host in between, which is not in this.
    """
    gpus = 8 if colocated else 4
    return RunSizes(
        shape=shape_of_model("qwen3_5_35b_a3b"),
        trainer=TrainerSizes(
            ranks=gpus,
            data_ranks=gpus // 2,
            is_megatron=True,
            tensor_parallel=2,
            expert_parallel=gpus,
            compute_bytes=2,
            micro_batch_tokens=3072,
            budget_tokens=0,
            recompute=True,
            chunk_tokens=2048,
            has_reference=True,
            trains_on_images=True,
        ),
        engine=EngineSizes("vllm", 1, gpus, 1, 2, simulation.MAX_NUM_SEQS, 0.6, 0),
        step=StepSizes(
            prompts=32,
            group_size=5,
            updates=1,
            publish_every=1 if colocated else 4,
            max_prompt_tokens=1024,
            max_new_tokens=2048,
            prompt_tokens=PROMPT_TOKENS,
            response_tokens=1024,
            scored_share=1.0 if colocated else 0.0,
            max_staleness=0.0 if colocated else 0.5,
        ),
        device=MI350X,
        sharing=Sharing.turns if colocated else Sharing.apart,
        transport=WeightTransport.ipc if colocated else WeightTransport.collective,
    )


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    unit: str
    published: float
    plan: float
    simulated: float | None = None
    """By the real scheduling code; None: not simulated."""
    is_fitted: bool = False
    """The row is one that the efficiencies were fitted to."""

    @property
    def factor(self) -> float:
        """At least 1, whichever side the plan misses on."""
        return math.exp(abs(math.log(self.plan / self.published)))


def per_publish_s(run: RunSizes, efficiency: Efficiency) -> float:
    times = predict(run, efficiency, publish_s=other_s())
    assert times is not None
    return times.step * run.step.publish_every


def tokens_s_per_gpu(run: RunSizes, efficiency: Efficiency, *, publish_s: float | None = None) -> float:
    times = predict(run, efficiency, publish_s=publish_s)
    assert times is not None
    return run.step.tokens / times.step / run.device.count


def rows(efficiency: Efficiency, *, simulate: bool = True) -> list[Row]:
    """Every published figure that the time model can say something of. Seconds are of 512 prompts."""
    speeds = simulation.calibrate() if simulate else None
    result = []
    for row in COLOCATED:
        simulated = simulation.predict_colocated(speeds, row.gpus).step if speeds else None
        plan = per_publish_s(colocated_run(row.gpus), efficiency)
        result.append(Row(f"H20, colocated {row.gpus}", "s", row.step, plan, simulated, is_fitted=True))
    for row in (*ASYNC, *REQUIRE_BATCHES):
        half = row.gpus // 2
        name = f"H20, async {half}:{half}, staleness {row.staleness:g}, require_batches {row.require_batches}"
        simulated = simulation.predict_async(speeds, row).step if speeds else None
        result.append(Row(name, "s", row.step, per_publish_s(async_run(row), efficiency), simulated))
    small = dapo_run(
        on=MI355X,
        training_gpus=4,
        sampling_gpus=4,
        prompts=128,
        publish_every=4,
        staleness=0.1,
        sharing=Sharing.apart,
        limit=8192,
        gpus_per_engine=1,
    )
    plan = per_publish_s(colocated_run(32, MI300X), efficiency)
    result.append(Row("MI300X, colocated 32", "s", simulation.AMD_COLOCATED_S, plan))
    plan = per_publish_s(async_run(ASYNC[0], MI300X), efficiency)
    result.append(Row("MI300X, async 16:16, staleness 0.5", "s", simulation.AMD_ASYNC_S, plan))
    plan = per_publish_s(small, efficiency)
    result.append(Row("MI355X, async 4:4, staleness 0.1, 8,192 tokens", "s", AMD_ASYNC_355_S, plan))
    for mode, published in QWEN3_5_TOKENS_S.items():
        run = geometry_run(colocated=mode == "colocated")
        plan = tokens_s_per_gpu(run, efficiency, publish_s=other_s())
        result.append(Row(f"MI350X, Qwen3.5-35B-A3B, {mode}", "tokens/s/GPU", published, plan))
    return result


def scaled(found: list[Row]) -> list[Row]:
    """Asynchronous rows from their own hardware's colocated row: one factor makes that right."""
    named = {row.name: row for row in found}
    pairs = [
        ("MI300X, colocated 32", "MI300X, async 16:16, staleness 0.5"),
        ("MI350X, Qwen3.5-35B-A3B, colocated", "MI350X, Qwen3.5-35B-A3B, fully async"),
    ]
    result = []
    for colocated, other in pairs:
        one, async_row = named[colocated], named[other]
        result.append(replace(async_row, plan=async_row.plan * one.published / one.plan, simulated=None))
    speeds = simulation.calibrate()
    factor = simulation.AMD_COLOCATED_S / simulation.predict_colocated(speeds, 32).step
    amd_async_s = factor * simulation.predict_async(speeds, ASYNC[0]).step
    return [replace(result[0], simulated=amd_async_s), result[1]]


def table(found: list[Row]) -> list[str]:
    lines = ["| run | | published | plan | | simulated | |", "|---|---|---|---|---|---|---|"]
    for row in found:
        name = f"{row.name} (fitted)" if row.is_fitted else row.name
        simulated = ["", ""] if row.simulated is None else [f"{row.simulated:.1f}", _error(row.simulated, row)]
        cells = [name, row.unit, f"{row.published:.1f}", f"{row.plan:.1f}", _error(row.plan, row), *simulated]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _error(value: float, row: Row) -> str:
    return f"{100 * (value / row.published - 1):+.0f} %"


def misses(found: list[Row]) -> tuple[float, float]:
    """(median, largest) factor between prediction and publication over the rows that were not fitted."""
    factors = [row.factor for row in found if not row.is_fitted]
    return median(factors), max(factors)


TEXT = """\
# Published step times, predicted

    python -m scripts.predict_published > experiments/measurements/predicted_times.md

`plan`: the time model of `mode=plan` (rl/plan/time.py), from peak rates of the hardware and efficiencies fitted to the
rows marked so. `simulated`: the real scheduling code on a simulated clock, its speeds fitted to the same rows, see
[placements_simulated.md](placements_simulated.md). Published: verl's tables of Qwen2.5-Math-7B DAPO on H20
(docs/advance/fully_async.md, 2026-05-25), and AMD's blogs (2026-08-14, 2026-08-18). Seconds are of 512 prompts. No
asynchronous time enters, and none of another GPU than the H20; the assumed mean of 890 tokens is of AMD's fully
asynchronous run on MI300.

{table}

Of the {count} rows that were not fitted half are within a factor of {half:.2f}; the worst is off by a factor of
{worst:.2f}.

From the colocated row of the same hardware, which one factor makes right:

{scaled}

Fitted: {train:.3f} of the peak rate in training and {score:.3f} in passes for log-probs; {layer:.1f} us a layer and
{token:.1f} us a token of an engine, beside memory and arithmetic; {network:.1f} GB/s a GPU between nodes. A publish and
all that the colocated rows do not account for take {other:.1f} s, their median. Assumed: {share:g} of the memory's peak
in decoding; 4.0 TB/s for the H20, which the table does not give; answers as in placements_simulated.md, also on MI300X
and MI355X; for Qwen3.5-35B-A3B answers of 1,024 tokens and prompts of 200, neither of which is published, and all 8
GPUs in the denominator. That run took one answer at a time through the trainer, and its public script keeps the
optimizer on the host: the model knows nothing of either."""


def report() -> str:
    efficiency = calibrate()
    found = rows(efficiency)
    half, worst = misses(found)
    return TEXT.format(
        table="\n".join(table(found)),
        count=len([row for row in found if not row.is_fitted]),
        half=half,
        worst=worst,
        scaled="\n".join(table(scaled(found))),
        train=efficiency.train_share,
        score=efficiency.score_share,
        layer=1e6 * efficiency.layer_s,
        token=1e6 * efficiency.token_s,
        network=efficiency.network_gb_s,
        other=other_s(),
        share=BANDWIDTH_SHARE,
    )


if __name__ == "__main__":
    print(report())
