"""The plan's sections on work and disk, in words."""

from __future__ import annotations

import math

from rl.config.build import target_class
from rl.config.check import check_data
from rl.config.reproducible import promise
from rl.config.schema import FullyAsyncConfig, InFlight, RunConfig
from rl.plan.forecast import Forecast
from rl.plan.memory import count
from rl.plan.sizes import RunSizes, Sharing
from rl.plan.time import (
    ALL_WITHIN,
    FITTED,
    HALF_WITHIN,
    OWN_LONGEST,
    OWN_SHORTEST,
    crosses_unknown_network,
    published_bytes,
    score_flops,
    train_flops,
)
from rl.run_folder import BYTES_PER_PARAM


def work_lines(config: RunConfig, found: Forecast | None) -> list[str]:
    algorithm, sampling = config.algorithm, config.task.sampling
    rollouts = algorithm.prompts_per_step * algorithm.group_size
    updates = algorithm.updates_per_step
    most = config.task.max_prompt_tokens + sampling.max_new_tokens
    lines = [
        _steps(config),
        f"per step: {algorithm.prompts_per_step:,} prompts x {algorithm.group_size} = {rollouts:,} rollouts of at most "
        f"{sampling.max_new_tokens:,} new tokens; {updates} update(s)",
        f"per sequence: at most {most:,} tokens; {math.ceil(rollouts * most / updates):,} per update at most",
    ]
    if found is not None:
        lines += _estimates(config, found)
    return [
        *lines,
        _evaluation(config),
        f"a publish every {config.placement.publish_every} step(s); at most {config.max_admitted:,} groups admitted"
        f"{_surplus(config)}, window {config.window:,}: staleness at most {config.staleness_bound}{_in_flight(config)}",
        promise(config).line,
    ]


def num_steps(config: RunConfig) -> tuple[int | None, str]:
    """Of the whole run, and where the number comes from; None where the data is on a hub and nobody knows its rows."""
    rows = check_data(config)
    if config.steps is not None:
        passes = f"{config.steps * config.algorithm.prompts_per_step / rows:.2f} epochs" if rows else ""
        return config.steps, passes
    if rows is not None:
        return config.num_steps(rows), f"{config.num_steps(rows) * config.algorithm.prompts_per_step / rows:.2f} epochs"
    task = target_class(config.task._target_)
    expected = task.expected_rows(config.task) if hasattr(task, "expected_rows") else None
    if expected is None:
        return None, ""
    epochs, step = config.task.epochs, config.algorithm.prompts_per_step
    return config.num_steps(expected), f"{epochs} epochs x ({expected:,} published rows // {step:,})"


def _steps(config: RunConfig) -> str:
    steps, how = num_steps(config)
    if steps is None:
        return f"{config.task.epochs} epoch(s); how many steps is known once the data is loaded"
    return f"{steps:,} steps ({how})" if how else f"{steps:,} steps"


def _estimates(config: RunConfig, found: Forecast) -> list[str]:
    run, step = found.sizes, found.sizes.step
    told = (
        "plan.response_tokens" if config.plan.response_tokens else "half the limit: plan.response_tokens=N knows better"
    )
    trained, scored = train_flops(run), score_flops(run)
    passes = "4 (forward, backward, forward again)" if run.trainer.recompute else "3 (forward, backward)"
    return [
        f"assumed: answers of {step.response_tokens:,.0f} tokens on average ({told}), prompts of "
        f"{step.prompt_tokens:,.0f}: {count(step.tokens)} tokens a step",
        f"arithmetic: {count(trained + scored)}FLOP a step in the trainer; {passes} x 2 x "
        f"{count(run.shape.active_params)} parameters a token, and attention"
        + (f"; {count(scored)}FLOP of it to score log-probs" if scored else ""),
        f"a publish moves {count(published_bytes(run))}B: {run.trainer.compute_bytes} B x {count(run.trainer_params)}",
    ]


def time_lines(config: RunConfig, found: Forecast | None) -> list[str]:
    if found is None or found.times is None:
        unknown = "the model's sizes" if found is None else "hardware.memory_bandwidth_tb_s or hardware.bf16_tflops"
        return [f"not predicted: {unknown} are not known here"]
    times = found.times
    parts = f"generate {seconds(times.generate)}, train {seconds(times.train)}, publish {seconds(times.publish)}"
    how = "one after the other" if times.step >= times.generate + times.train else "at the same time"
    lines = [f"a step: {seconds(times.step)} ({parts}; {how})"]
    if (every := config.placement.publish_every) > 1:
        lines.append(f"from one publish to the next: {every} x {seconds(times.step)} = {seconds(every * times.step)}")
    steps, _ = num_steps(config)
    if steps is None:
        lines.append("the run: its steps are not known before the data is loaded; set steps")
    else:
        hours = steps * times.step / 3600
        gpus = "" if found.sizes.device.is_cpu else f", {hours * found.sizes.device.count:,.0f} GPU-hours"
        lines.append(
            f"the run: {steps:,} steps x {seconds(times.step)} = {hours:,.3g} hours{gpus}; {_on_top(found.sizes)} come "
            "on top"
        )
    if crosses_unknown_network(found.sizes):
        lines.append(
            f"assumed: {FITTED.network_gb_s} GB/s a GPU between nodes, as between the H20 of the published rows; "
            "hardware.network_gb_s=N knows better"
        )
    lines.append(
        f"uncertain by a factor of {HALF_WITHIN:g} (half of the published rows that it was not fitted to) to "
        f"{ALL_WITHIN:g} (the worst): experiments/measurements/predicted_times.md. Small models on one H200 took "
        f"{OWN_SHORTEST:g} to {OWN_LONGEST:g} times their plan: placements_one_gpu.md there. How long answers are "
        "comes on top"
    )
    return lines


def _on_top(run: RunSizes) -> str:
    if run.sharing is Sharing.turns and not run.device.is_cpu:
        return "evaluations, checkpoints and handing the GPUs over between trainer and engines"
    return "evaluations and checkpoints"


def disk_lines(config: RunConfig, found: Forecast | None) -> list[str]:
    """A new checkpoint is complete before an old one goes."""
    if found is None:
        return ["not known without the model's sizes"]
    params = found.sizes.trainer_params
    one = BYTES_PER_PARAM * params
    kept = config.checkpoint.keep_last + 1 + (config.checkpoint.keep_best is not None)
    best = " and the best" if config.checkpoint.keep_best else ""
    when = f"every {config.checkpoint.every} steps" if config.checkpoint.every else "at the end"
    return [
        f"checkpoints {when}: {BYTES_PER_PARAM} B x {count(params)} = {count(one)}B each; the last "
        f"{config.checkpoint.keep_last}{best} and the one being written: {count(kept * one)}B"
    ]


def seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{value:.2g} s"


def _surplus(config: RunConfig) -> str:
    return f" and {config.max_surplus:,} over-sampled" if config.max_surplus else ""


def _in_flight(config: RunConfig) -> str:
    if not isinstance(config.placement, FullyAsyncConfig):
        return ""
    meanwhile = {
        InFlight.finish: "finish first",
        InFlight.abort: "start anew on the new weights",
        InFlight.continue_on_new_weights: "continue on the new weights",
    }
    return f"; requests that run at a publish {meanwhile[config.placement.in_flight]}"


def _evaluation(config: RunConfig) -> str:
    sampling, evaluation = config.task.eval_sampling, config.evaluation
    when = [f"every {evaluation.every} steps"] if evaluation.every else []
    when += ["at the start"] if evaluation.at_start else []
    when += ["at the end"] if evaluation.at_end else []
    problems = "all problems" if config.task.eval_limit is None else f"{config.task.eval_limit:,} problems at most"
    return (
        f"evaluation {', '.join(when) or 'never'}: {problems} x {sampling.samples_per_problem} answer(s) of at most "
        f"{sampling.max_new_tokens:,} new tokens"
    )
