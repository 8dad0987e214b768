"""From a RunConfig to the parts of a run: the only file that knows every part."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.canary import Canary, default_bound
from rl.config.build import build, target_class
from rl.config.replicas import engine_config, engine_has_own_process, num_params, replicas_of
from rl.config.schema import ConfigError, RunConfig, WeightTransport
from rl.config.transport import is_handed_over, weight_transport
from rl.evaluation.evaluator import TaskEvaluator
from rl.loggers.facts import RunFacts
from rl.loggers.fanout import RunLog
from rl.loggers.jsonl import read_metrics
from rl.loop import Cadence, Progress, Run
from rl.model.renderer import Renderer
from rl.placement.ray_nodes import Machine, seats_on
from rl.placement.ray_runtime import Seat, is_cluster
from rl.plan.forecast import planned_metrics
from rl.protocols import Placement, RolloutEngine, Task, Trainer
from rl.run_folder import BYTES_PER_PARAM, Checkpoint, Checkpoints
from rl.sentinels import Sentinels
from rl.stream import GroupStream, StreamConfigValues
from rl.tasks.base import ProblemTask, sampling_of
from rl.throughput import Devices
from rl.trainer.group import TrainerGroup
from rl.trainer.packing import pack
from rl.types import Sampling
from rl.weights.transport import Collective, Disk, Handed, HostBytes, Overlapped, Shared, Transport

Machines = list[Machine] | None
"""Of a cluster; None: the run has this machine and a Ray of its own."""


@dataclass(frozen=True)
class Policy:
    """The model before training, ready on disk, with the task rendered for it."""

    folder: Path
    task: Task

    @functools.cached_property
    def task_fingerprint(self) -> str:
        """Reads every training row, once."""
        return self.task.fingerprint()


def prepare_policy(config: RunConfig, run_folder: Path) -> Policy:
    """Makes or fetches the model, renders the task with its tokenizer, and warm-starts the model if asked to."""
    model = build(config.model)
    folder = model.prepare(run_folder / "model", seed=config.seed)
    renderer = Renderer(
        folder,
        chat_template_kwargs=config.task.chat_template_kwargs,
        max_prompt_tokens=config.task.max_prompt_tokens,
        overlong=config.task.overlong,
        chat_template=config.model.chat_template,
    )
    task = build(config.task, renderer=renderer, seed=config.seed)
    if isinstance(task, ProblemTask):
        task.start_grading()
    model.warm_start(folder, task, seed=config.seed)
    return Policy(folder, task)


def claim_cluster(config: RunConfig, folder: Path) -> Machines:
    """The machines of this run, of a cluster that it joins; None where its processes are all on this one, by itself.

    `folder` is one that all of them must see.
    """
    has_actors = config.placement.trainer_ranks > 1 or engine_has_own_process(config)
    if not is_cluster() and config.hardware.nodes > 1:
        raise ConfigError(
            f"hardware.nodes={config.hardware.nodes} needs a Ray cluster of as many machines: start one with "
            "scripts/ray_cluster.sh and name it in ray.address=HOST:PORT, or choose hardware of one node."
        )
    if not is_cluster() or not has_actors:
        return None
    from rl.placement.ray_nodes import claim_machines

    hardware = config.hardware
    return claim_machines(hardware.nodes, gpus_per_node=hardware.gpus_per_node, folder=folder)


def build_trainer(config: RunConfig, model_folder: Path, *, total_steps: int, machines: Machines = None) -> Trainer:
    num_ranks = config.placement.trainer_ranks
    seats = _seats(config, machines, first=0, count=num_ranks) if num_ranks > 1 else None
    return TrainerGroup(
        config.backend.trainer,
        model_folder=model_folder,
        algorithm=config.algorithm,
        device=config.hardware.device,
        num_ranks=num_ranks,
        seed=config.seed,
        total_updates=total_steps * config.algorithm.updates_per_step,
        env=config.hardware.trainer_env,
        seats=seats,
    )


def build_placement(
    config: RunConfig, policy: Policy, run_folder: Path, *, total_steps: int, machines: Machines = None
) -> tuple[Trainer, RolloutEngine, Placement]:
    trainer = build_trainer(config, policy.folder, total_steps=total_steps, machines=machines)
    engine = build_engine(config, policy.folder, machines=machines)
    transport = build_transport(config, run_folder)
    return trainer, engine, build(config.placement, trainer=trainer, engine=engine, transport=transport)


def build_transport(config: RunConfig, run_folder: Path) -> Transport:
    match weight_transport(config):
        case WeightTransport.collective:
            return Collective()
        case WeightTransport.disk:
            return Disk(run_folder.resolve() / "weights")
        case WeightTransport.bytes:
            return HostBytes()
        case WeightTransport.overlapped:
            return Overlapped()
        case _:
            return Handed() if is_handed_over(config) else Shared()


def build_engine(config: RunConfig, model_folder: Path, *, machines: Machines = None) -> RolloutEngine:
    """One engine that is colocated lives in this process; several, or one with devices of its own, in their own."""
    replicas = replicas_of(config)
    if not engine_has_own_process(config):
        return build(config.backend.rollout, model_folder=model_folder, device=config.hardware.device)
    from rl.rollout.liveness import LONE_PROCESS_LIMIT_S, PROCESS_LIMIT_S
    from rl.rollout.remote import RemoteEngine

    def new_engine(index: int) -> RemoteEngine:
        return RemoteEngine(
            engine_config(config),
            model_folder=model_folder,
            device=config.hardware.device,
            env=config.hardware.rollout_env,
            seat=engine_seat(config, machines, index),
            silence_limit_s=PROCESS_LIMIT_S if replicas.count > 1 else LONE_PROCESS_LIMIT_S,
        )

    if replicas.count == 1:
        return new_engine(0)
    from rl.rollout.replicas import ReplicaSet

    return ReplicaSet(new_engine, replicas.count, num_groups=replicas.num_groups)


def engine_seat(config: RunConfig, machines: Machines, index: int) -> Seat:
    """Of engine `index`. Engines' GPUs are those after the trainer's or, where both share, begin with its first."""
    replicas = replicas_of(config)
    own = index if config.hardware.device == "cpu" else replicas.first_gpu(index)
    return _seats(config, machines, first=config.first_engine_gpu + own, count=1, size=replicas.gpus_per_engine)[0]


def _seats(config: RunConfig, machines: Machines, *, first: int, count: int, size: int = 1) -> list[Seat]:
    return seats_on(machines or [_this_machine(config)], first=first, count=count, size=size)


def _this_machine(config: RunConfig) -> Machine:
    """With the GPUs that this process may use. Raises ConfigError where they are too few for the run."""
    if config.hardware.device == "cpu":
        return Machine("this machine", ())
    usable, needed = os.environ.get("CUDA_VISIBLE_DEVICES"), config.num_gpus_used
    if usable is None:
        return Machine("this machine", tuple(str(index) for index in range(config.hardware.gpus_per_node)))
    names = tuple(name for name in usable.split(",") if name)
    if len(names) < needed:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={usable} leaves {len(names)} GPU(s); this run needs {needed}: "
            f"{config.placement.trainer_ranks} for the trainer and {config.backend.rollout.total_gpus} for the engines"
            f"{'' if config.has_engine_devices else ', on the same ones'}. Unset it, or name more."
        )
    return Machine("this machine", names)


def build_evaluator(
    config: RunConfig, task: Task, *, answers_file: Path, shows_progress: bool = False
) -> TaskEvaluator:
    num_seqs = replicas_of(config).count * config.backend.rollout.max_num_seqs
    return TaskEvaluator(
        task,
        max_concurrent_samples=2 * num_seqs,  # the next ones wait in the engine, not here
        reward_timeout_s=config.stream.reward_timeout_s,
        stall_timeout_s=config.stream.stall_timeout_s,
        answers_file=answers_file,
        shows_progress=shows_progress,
    )


def assemble(
    config: RunConfig,
    run_folder: Path,
    *,
    policy: Policy,
    checkpoint: Checkpoint | None,
    facts: RunFacts,
    machines: Machines = None,
) -> Run:
    """Builds every part and starts none."""
    task = policy.task
    total_steps = config.num_steps(task.num_prompts)
    if task.num_prompts == 0:
        raise ConfigError("the task has no training prompts: it is for mode=eval. Choose another, or set task.train.")
    if total_steps == 0:
        raise ConfigError(
            f"{task.num_prompts} training prompts, algorithm.prompts_per_step={config.algorithm.prompts_per_step}: "
            f"0 steps in {config.task.epochs} epoch(s). Lower prompts_per_step, raise task.epochs, or set steps."
        )
    checkpoint_facts = {"task_fingerprint": policy.task_fingerprint}
    progress = Progress() if checkpoint is None else _restored_progress(checkpoint, checkpoint_facts)
    trainer, engine, placement = build_placement(config, policy, run_folder, total_steps=total_steps, machines=machines)
    algorithm = build(config.algorithm)
    stream = GroupStream(_stream_values(config), task=task, engine=engine, algorithm=algorithm)
    if checkpoint is not None:
        stream.restore(checkpoint.state["stream"])
    tracker = build(config.logger, run_folder=run_folder, facts=facts)
    return Run(
        trainer=trainer,
        engine=engine,
        placement=placement,
        stream=stream,
        evaluator=build_evaluator(config, task, answers_file=run_folder / "answers.jsonl"),
        log=RunLog(
            config.logger,
            run_folder=run_folder,
            name=facts.name,
            total_steps=total_steps,
            tracker=tracker,
            planned=planned_metrics(config),
            resume_step=_resume_step(run_folder, checkpoint),
        ),
        canary=_canary(config, task, trainer=trainer, engine=engine),
        algorithm=algorithm,
        sentinels=Sentinels(config.sentinels, compute_dtype=config.backend.trainer.compute_dtype),
        checkpoints=_checkpoints(config, run_folder),
        pack=functools.partial(_pack, config, skip_zero_advantage=algorithm.skips_zero_advantage),
        cadence=_cadence(config, total_steps),
        progress=progress,
        staleness_bound=config.staleness_bound,
        publish_timeout_s=config.stream.stall_timeout_s,
        restore_from=None if checkpoint is None else checkpoint.trainer_folder,
        devices=devices_of(config),
        checkpoint_facts=checkpoint_facts,
    )


def devices_of(config: RunConfig) -> Devices:
    num_gpus, tflops = config.num_gpus_used, config.hardware.bf16_tflops
    return Devices(
        num_gpus,
        training_gpus=config.placement.trainer_ranks if num_gpus else 0,
        peak_flops=None if tflops is None else tflops * 1e12,
        shape=target_class(config.model._target_).shape(config.model),
    )


def _checkpoints(config: RunConfig, run_folder: Path) -> Checkpoints:
    metric = config.checkpoint.keep_best

    def scores() -> dict[int, float]:
        if metric is None:
            return {}
        rows = read_metrics(run_folder / "metrics.jsonl")
        return {row["step"]: row[metric] for row in rows if row.get(metric) is not None}

    return Checkpoints(
        run_folder,
        keep_last=config.checkpoint.keep_last,
        scores=scores,
        first_bytes=BYTES_PER_PARAM * (num_params(config) or 0),
    )


def _resume_step(run_folder: Path, checkpoint: Checkpoint | None) -> int | None:
    """-1 for a run that ended before its first checkpoint: it starts again, and the rows it had are set aside."""
    if checkpoint is not None:
        return checkpoint.step
    return -1 if (run_folder / "metrics.jsonl").exists() else None


def _cadence(config: RunConfig, total_steps: int) -> Cadence:
    return Cadence(
        total_steps=total_steps,
        publish_every=config.placement.publish_every,
        evaluate_every=config.evaluation.every,
        evaluate_at_start=config.evaluation.at_start,
        evaluate_at_end=config.evaluation.at_end,
        checkpoint_every=config.checkpoint.every,
    )


def _stream_values(config: RunConfig) -> StreamConfigValues:
    return StreamConfigValues(
        seed=config.seed,
        sampling=sampling_of(config.task.sampling, seed=config.seed),
        prompts_per_step=config.algorithm.prompts_per_step,
        group_size=config.algorithm.group_size,
        groups_per_publish=config.groups_per_publish,
        max_admitted=config.max_admitted,
        max_surplus=config.max_surplus,
        window=config.window,
        max_failed_fraction=config.stream.max_failed_fraction,
        reward_timeout_s=config.stream.reward_timeout_s,
        stall_timeout_s=config.stream.stall_timeout_s,
    )


def _canary(config: RunConfig, task: Task, *, trainer: Trainer, engine: RolloutEngine) -> Canary:
    bound = config.canary.max_logprob_difference
    if bound is None:
        bound = default_bound(engine=config.backend.rollout.dtype, trainer=config.backend.trainer.compute_dtype)
    num_tokens = min(config.canary.new_tokens, config.task.sampling.max_new_tokens)
    return Canary(
        config.canary,
        bound=bound,
        prompts=[task.prompt(config.seed, index) for index in range(config.canary.prompts)],
        sampling=Sampling(config.task.sampling.temperature, num_tokens, config.seed),
        engine=engine,
        trainer=trainer,
    )


def _pack(config: RunConfig, groups: Any, policy_version: int, *, skip_zero_advantage: bool):
    return pack(
        groups,
        prompts_per_mini_batch=config.algorithm.prompts_per_mini_batch,
        num_ranks=config.placement.trainer_ranks,
        max_tokens_per_micro_batch=config.backend.trainer.max_tokens_per_micro_batch,
        packing=config.backend.trainer.packing,
        policy_version=policy_version,
        skip_zero_advantage=skip_zero_advantage,
    )


def _restored_progress(checkpoint: Checkpoint, facts: Mapping[str, Any]) -> Progress:
    """Where the run continues. Weights that were trained and not published become a version of their own."""
    saved, now = checkpoint.state["task_fingerprint"], facts["task_fingerprint"]
    if saved != now:
        raise ConfigError(
            f"the training data is not what {checkpoint.folder} was trained on (fingerprint {now}, then {saved}): "
            "groups could be trained twice or skipped. Restore the data, or start a new run from an export."
        )
    progress = Progress(**checkpoint.state["progress"])
    if progress.unpublished_steps:
        progress.policy_version += 1
        progress.unpublished_steps = 0
    return progress
