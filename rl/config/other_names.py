"""What other suites call our settings, for people who come from them: only to tell them our name.

verl's names are those of its ppo_trainer.yaml and fully async trainer, 0.9; the others are words that one tries first.
"""

from __future__ import annotations

from rl.config.load import nearest

OURS = {
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_high",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.clip_low",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coef",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_coef",
    "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl_estimator",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.aggregation",
    "actor_rollout_ref.actor.optim.clip_grad": "backend.trainer.optimizer.grad_clip",
    "actor_rollout_ref.actor.optim.lr": "backend.trainer.optimizer.lr",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "backend.trainer.optimizer.lr_warmup_updates",
    "actor_rollout_ref.actor.optim.weight_decay": "backend.trainer.optimizer.weight_decay",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "backend.trainer.max_tokens_per_micro_batch",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "algorithm.prompts_per_mini_batch",
    "actor_rollout_ref.actor.strategy": "backend/trainer",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "backend.trainer.recompute",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.rollout.enforce_eager": "backend.rollout.enforce_eager",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "backend.rollout.memory_fraction",
    "actor_rollout_ref.rollout.max_num_seqs": "backend.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.n": "algorithm.group_size",
    "actor_rollout_ref.rollout.name": "backend/rollout",
    "actor_rollout_ref.rollout.temperature": "task.sampling.temperature",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "backend.rollout.tensor_parallel",
    "actor_rollout_ref.rollout.top_k": "task.sampling.top_k",
    "actor_rollout_ref.rollout.top_p": "task.sampling.top_p",
    "actor_rollout_ref.rollout.val_kwargs.n": "task.eval_sampling.samples_per_problem",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "task.eval_sampling.temperature",
    "algorithm.adv_estimator": "algorithm",
    "async_training.partial_rollout": "placement.in_flight",
    "async_training.require_batches": "algorithm.prompts_per_step",
    "async_training.staleness_threshold": "placement.max_staleness",
    "async_training.trigger_parameter_sync_step": "placement.publish_every",
    "data.max_prompt_length": "task.max_prompt_tokens",
    "data.max_response_length": "task.sampling.max_new_tokens",
    "data.train_batch_size": "algorithm.prompts_per_step",
    "data.train_files": "task",
    "data.val_files": "task",
    "rollout.n": "algorithm.group_size",
    "rollout.total_rollout_steps": "steps",
    "trainer.experiment_name": "output_dir",
    "trainer.default_local_dir": "output_dir",
    "trainer.logger": "logger",
    "trainer.n_gpus_per_node": "hardware.gpus_per_node",
    "trainer.nnodes": "hardware.nodes",
    "trainer.project_name": "logger.project",
    "trainer.save_freq": "checkpoint.every",
    "trainer.test_freq": "evaluation.every",
    "trainer.total_epochs": "task.epochs",
    "trainer.total_training_steps": "steps",
    "trainer.val_before_train": "evaluation.at_start",
    "batch_size": "algorithm.prompts_per_step",
    "data": "task",
    "dataset": "task",
    "engine": "backend/rollout",
    "epochs": "task.epochs",
    "gpus": "hardware",
    "learning_rate": "backend.trainer.optimizer.lr",
    "lr": "backend.trainer.optimizer.lr",
    "max_steps": "steps",
    "num_generations": "algorithm.group_size",
    "optimizer": "backend.trainer.optimizer",
    "reward": "task.reward",
    "rollout": "backend/rollout",
    "trainer": "backend/trainer",
    "wandb": "logger",
}
"""Their name -> our key or group."""


def hint(key: str, known: list[str]) -> str:
    """As `nearest`, for a key that nothing here is called; `known` are those of the chosen parts, and the groups."""
    if key not in OURS:
        return nearest(key, known)
    elsewhere = "" if OURS[key] in known else " Not every option of its group has it, and the one chosen does not."
    return f" Did you mean '{OURS[key]}'?{elsewhere}"
