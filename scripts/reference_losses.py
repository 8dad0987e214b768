"""Numbers of TRL and verl on random inputs, for tests/unit/algorithms/test_against_references.py.

    uv venv refs && source refs/bin/activate
    uv pip install torch==2.13.0 numpy transformers accelerate datasets tensordict hydra-core codetiming ray orjson
    uv pip install --no-deps trl==1.16.0 verl==0.9.1
    python scripts/reference_losses.py tests/fixtures/reference_losses.json

It calls their own functions (of TRL the trainer's loss method, on an object that has only the settings it reads) in
float64 and writes inputs, settings, losses and gradients with the versions. Nothing of this project is imported.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

NUM_PROMPTS, GROUP_SIZE, WIDTH, HORIZON = 3, 4, 7, 9
Case = dict[str, Any]


def made_inputs() -> dict[str, torch.Tensor]:
    """[B, T] and [B], B = prompts x group size, right-padded; ratios from 0.2 to 5, so that every clip bites."""
    torch.manual_seed(20261201)
    rows = NUM_PROMPTS * GROUP_SIZE
    lengths = torch.randint(1, WIDTH + 1, (rows,))
    mask = (torch.arange(WIDTH) < lengths[:, None]).double()
    old = -3 * torch.rand(rows, WIDTH, dtype=torch.float64) - 0.1
    rewards = torch.randint(0, 3, (rows,)).double() / 2
    rewards[:GROUP_SIZE] = 0.5
    return {
        "mask": mask,
        "old": old,
        "logprobs": old + 0.6 * torch.randn(rows, WIDTH, dtype=torch.float64),
        "rollout": old + 0.5 * torch.randn(rows, WIDTH, dtype=torch.float64),
        "ref": old + 0.7 * torch.randn(rows, WIDTH, dtype=torch.float64),
        "advantages": torch.randn(rows, dtype=torch.float64),
        "rewards": rewards,
        "groups": torch.arange(rows) // GROUP_SIZE,
    }


def with_gradient(inputs: dict[str, torch.Tensor], loss_of: Any) -> Case:
    logprobs = inputs["logprobs"].clone().requires_grad_()
    loss = loss_of(logprobs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return {"loss": loss.item(), "gradient": gradient.tolist()}


def verl_config(**settings: Any) -> Any:
    from verl.workers.config import ActorConfig

    return ActorConfig(strategy="fsdp", rollout_n=GROUP_SIZE, ppo_micro_batch_size_per_gpu=1, **settings)


def verl_losses(inputs: dict[str, torch.Tensor]) -> list[Case]:
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    mask, old = inputs["mask"], inputs["old"]
    advantages = inputs["advantages"][:, None] * mask

    def surrogate(name: str, aggregation: str, weights: torch.Tensor | None = None, **settings: Any) -> Case:
        config = verl_config(loss_agg_mode=aggregation, **settings)
        config.global_batch_info["loss_scale_factor"] = HORIZON
        loss = core_algos.get_policy_loss_fn(name)
        case = with_gradient(
            inputs,
            lambda logprobs: loss(
                old_log_prob=old,
                log_prob=logprobs,
                advantages=advantages,
                response_mask=mask,
                loss_agg_mode=aggregation,
                config=config,
                rollout_is_weights=weights,
            )[0],
        )
        return {"kind": name, "aggregation": aggregation, "settings": settings} | case

    clip: dict[str, Any] = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    modes = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    cases = [surrogate("vanilla", mode, **clip, clip_ratio_c=1.5) for mode in modes]
    cases.append(surrogate("vanilla", "token-mean", **clip, clip_ratio_c=10.0))
    cases.append(surrogate("gspo", "seq-mean-token-mean", clip_ratio=0.1, clip_ratio_low=0.1, clip_ratio_high=0.15))
    cases.append(surrogate("cispo", "token-mean", clip_ratio=0.2, clip_ratio_low=1.0, clip_ratio_high=1.0))
    for level, threshold in (("token", 1.5), ("sequence", 1.5), ("token", "0.7_1.4"), ("sequence", "0.5_2.0")):
        weights, _, _ = compute_rollout_correction_and_rejection_mask(
            old_log_prob=old,
            rollout_log_prob=inputs["rollout"],
            response_mask=mask,
            rollout_is=level,
            rollout_is_threshold=threshold,
        )
        assert weights is not None
        weights = weights.batch["rollout_is_weights"]
        case = surrogate("vanilla", "token-mean", weights, **clip, clip_ratio_c=10.0)
        cases.append(case | {"level": level, "threshold": threshold, "weights": weights.tolist()})
    _, kept, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=old,
        rollout_log_prob=inputs["rollout"],
        response_mask=mask,
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold="0.8_1.2",
    )
    cases.append({"kind": "geometric", "low": 0.8, "high": 1.2, "kept": kept.tolist()})
    for name in ("k1", "k2", "k3", "k1+", "k3+"):
        case = with_gradient(
            inputs, lambda logprobs, name=name: (core_algos.kl_penalty(logprobs, inputs["ref"], name) * mask).sum()
        )
        cases.append({"kind": "kl", "name": name} | case)
    return cases


def verl_advantages(inputs: dict[str, torch.Tensor]) -> list[Case]:
    from verl.trainer.ppo import core_algos

    mask = inputs["mask"]
    last = mask.sum(-1).long() - 1
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(last)), last] = inputs["rewards"]
    index = inputs["groups"].numpy()
    with_kl = core_algos.compute_rewards(rewards, inputs["rollout"], inputs["ref"], 0.1) * mask
    cases = []

    def add(name: str, values: torch.Tensor, **settings: Any) -> None:
        cases.append({"kind": "advantages", "name": name, "settings": settings, "values": (values * mask).tolist()})

    for scaled in (True, False):
        values = core_algos.compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=scaled)[0]
        add("grpo", values, scaled=scaled)
    for coef, of_tokens in ((0.0, rewards), (0.1, with_kl)):
        add("rloo", core_algos.compute_rloo_outcome_advantage(of_tokens, mask, index)[0], kl_coef=coef)
        add(
            "reinforce_pp",
            core_algos.compute_reinforce_plus_plus_outcome_advantage(of_tokens, mask, SimpleNamespace(gamma=0.9))[0],
            kl_coef=coef,
            gamma=0.9,
        )
    alone = torch.arange(len(last)).numpy()
    add("grpo_groups_of_one", core_algos.compute_grpo_outcome_advantage(rewards, mask, alone)[0])
    add("rloo_groups_of_one", core_algos.compute_rloo_outcome_advantage(rewards, mask, alone)[0])
    baseline = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, index)[0]
    add("reinforce_pp_baseline", baseline)
    return cases


class OneProcess:
    """As much of an accelerator as TRL's loss methods read."""

    num_processes = 1
    sync_gradients = True

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values.reshape(-1)

    gather_for_metrics = gather

    def reduce(self, values: torch.Tensor, reduction: str) -> torch.Tensor:
        return values


def trl_losses(inputs: dict[str, torch.Tensor]) -> list[Case]:
    from trl import GRPOTrainer, RLOOTrainer

    mask = inputs["mask"]
    ids = torch.ones_like(mask, dtype=torch.long)

    def run(trainer: type, old: torch.Tensor, logprobs: torch.Tensor, **settings: Any) -> torch.Tensor:
        defaults = {
            "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
            "aux_loss_enabled": False,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "importance_sampling_level": "token",
            "beta": 0.0,
            "epsilon_low": 0.2,
            "epsilon_high": 0.28,
            "use_vllm": False,
            "max_completion_length": HORIZON,
            "current_gradient_accumulation_steps": 1,
            "_entropy_bonus_enabled": False,
            "model": SimpleNamespace(training=True),
            "accelerator": OneProcess(),
            "_metrics": {"train": defaultdict(list)},
            "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        }
        return trainer._compute_loss(
            SimpleNamespace(**(defaults | settings)),
            None,
            {
                "prompt_ids": ids[:, :1],
                "prompt_mask": ids[:, :1],
                "completion_ids": ids,
                "completion_mask": mask,
                "advantages": inputs["advantages"],
                "old_per_token_logps": old,
                "old_logps": (old * mask).sum(-1),
                "ref_per_token_logps": inputs["ref"],
                "num_items_in_batch": mask.sum(),
            },
        )

    cases = []
    for settings in (
        {"loss_type": "grpo"},
        {"loss_type": "dapo"},
        {"loss_type": "dr_grpo"},
        {"loss_type": "grpo", "beta": 0.04},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15},
        {"loss_type": "cispo", "epsilon_high": 2.0},
    ):
        case = with_gradient(
            inputs, lambda logprobs, settings=settings: run(GRPOTrainer, inputs["old"], logprobs, **settings)
        )
        cases.append({"kind": "trl", "settings": settings} | case)
    on_policy = with_gradient(inputs, lambda logprobs: run(RLOOTrainer, logprobs.detach(), logprobs))
    cases.append({"kind": "trl_rloo_on_policy"} | on_policy)
    return cases


def trl_overlong() -> Case:
    from trl.rewards import get_soft_overlong_punishment

    lengths = list(range(1, 25))
    penalty = get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=6)
    return {"kind": "overlong", "limit": 20, "buffer": 6, "rewards": penalty([[0] * length for length in lengths])}


def main(path: str) -> None:
    inputs = made_inputs()
    fixture = {
        "versions": {name: version(name) for name in ("trl", "verl", "torch")},
        "horizon": HORIZON,
        "inputs": {name: values.tolist() for name, values in inputs.items()},
        "verl": verl_losses(inputs) + verl_advantages(inputs),
        "trl": [*trl_losses(inputs), trl_overlong()],
    }
    Path(path).write_text(json.dumps(fixture) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
