"""`mode=plan`: what a run will do and where, in a second, without torch and without a GPU."""

from __future__ import annotations

import math
from typing import Any

from rl.config.build import target_class
from rl.config.check import check_data, missing_packages, not_there_yet
from rl.config.replicas import engine_config, num_params, replicas_of
from rl.config.schema import FullyAsyncConfig, InFlight, RunConfig, WeightTransport
from rl.config.transport import weight_transport

NODES = ("model", "algorithm", "backend.trainer", "backend.rollout", "placement", "task", "logger")


def print_plan(config: RunConfig) -> None:
    """Parts, devices, work per step. Raises ConfigError where a part's own check refuses."""
    lines = [f"plan of {config.experiment or 'the defaults'} (starts nothing)", ""]
    for title, body in (
        ("parts", _parts(config)),
        ("devices", _devices(config)),
        ("work", _work(config)),
    ):
        lines += [title, *(f"  {line}" for line in body), ""]
    print("\n".join(lines).rstrip())


def _parts(config: RunConfig) -> list[str]:
    lines = []
    for name in NODES:
        node: Any = config
        for part in name.split("."):
            node = getattr(node, part)
        lines.append(f"{name:<16} {node._target_}")
    lines.append(_model_line(config))
    lines += [f"missing: {package}. {remedy}" for package, remedy in missing_packages(config).items()]
    lines += [f"refused: {message}" for message in not_there_yet(config)]
    return lines


def _model_line(config: RunConfig) -> str:
    shape = target_class(config.model._target_).shape(config.model)
    params = num_params(config)
    size = "size unknown" if params is None else f"{params:,} parameters"
    if shape is None:
        return f"policy {config.model.path}: {size}; its config.json is not here, so no shape"
    return (
        f"policy {config.model.path}: {size}, {shape.layers} layers, hidden {shape.hidden}, {shape.heads} query and "
        f"{shape.kv_heads} key-value heads of {shape.head_dim}, vocabulary {shape.vocab:,}"
    )


def _devices(config: RunConfig) -> list[str]:
    hardware, placement = config.hardware, config.placement
    replicas = replicas_of(config)
    roles = target_class(placement._target_).gpu_map(
        placement,
        gpus_per_engine=replicas.gpus_per_engine,
        num_groups=replicas.num_groups,
        per_device=replicas.per_device,
    )
    is_plain = replicas.count == 1 and config.backend.rollout.replicas_per_device == 1
    lines = [] if is_plain else [_engines_line(config)]
    lines.append(_transport_line(config))
    if hardware.device == "cpu":
        held = ", ".join(role for device in roles for role in device)
        return [*lines, f"{hardware.name}: all on the host's CPU ({held})"]
    num_gpus = hardware.nodes * hardware.gpus_per_node
    lines += [f"{hardware.name}: {num_gpus} GPU(s) of {hardware.memory_gib:g} GiB on {hardware.nodes} node(s)"]
    for gpu in range(num_gpus):
        node, local = divmod(gpu, hardware.gpus_per_node)
        held = ", ".join(roles[gpu]) if gpu < len(roles) else "idle"
        lines.append(f"node {node} GPU {local}: {held}")
    return lines


def _engines_line(config: RunConfig) -> str:
    replicas = replicas_of(config)
    line = f"{replicas.count} engine(s): replicas {replicas.num_groups} x replicas_per_device {replicas.per_device}"
    if config.backend.rollout.replicas_per_device is None:
        line += " (null: by the model's size)"
    fraction = getattr(engine_config(config), "memory_fraction", None)
    return line if fraction is None else f"{line}; memory_fraction {fraction:g} each"


def _transport_line(config: RunConfig) -> str:
    transport = weight_transport(config)
    how = {
        WeightTransport.ipc: "ipc: handed over in this process",
        WeightTransport.collective: "collective: broadcast to all engine workers by "
        + ("gloo" if config.hardware.device == "cpu" else "NCCL or RCCL"),
        WeightTransport.bytes: "bytes: through the host's memory and this process",
        WeightTransport.disk: "disk: through files in the run folder",
    }
    return f"weights go to the engines by {how[transport]}"


def _work(config: RunConfig) -> list[str]:
    algorithm, sampling = config.algorithm, config.task.sampling
    rollouts = algorithm.prompts_per_step * algorithm.group_size
    num_prompts = check_data(config)
    if config.steps is not None or num_prompts is not None:
        num_steps = config.num_steps(num_prompts or 0)
        passes = "" if not num_prompts else f" ({num_steps * algorithm.prompts_per_step / num_prompts:.2f} epochs)"
        steps = f"{num_steps:,} steps{passes}"
    else:
        steps = f"{config.task.epochs} epoch(s); how many steps is known once the data is loaded"
    updates = config.algorithm.updates_per_step
    most = config.task.max_prompt_tokens + sampling.max_new_tokens
    return [
        steps,
        f"per step: {algorithm.prompts_per_step:,} prompts x {algorithm.group_size} = {rollouts:,} rollouts of at most "
        f"{sampling.max_new_tokens:,} new tokens; {updates} update(s)",
        f"per sequence: at most {most:,} tokens; {math.ceil(rollouts * most / updates):,} per update at most",
        _evaluation(config),
        f"a publish every {config.placement.publish_every} step(s); at most {config.max_admitted:,} groups admitted"
        f"{_surplus(config)}, window {config.window:,}: staleness at most {config.staleness_bound}{_in_flight(config)}",
    ]


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
