"""Agreement to 1e-6 with numbers of TRL and verl (scripts/reference_losses.py wrote them), and where we differ."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl.algorithms.advantages import centered, group_scaled, leave_one_out
from rl.algorithms.cispo import CISPO
from rl.algorithms.correction import correction
from rl.algorithms.dapo import DAPO
from rl.algorithms.dr_grpo import DrGRPO
from rl.algorithms.grpo import GRPO
from rl.algorithms.gspo import GSPO
from rl.algorithms.losses import LossTokens, kl_estimate
from rl.algorithms.policy_gradient import PolicyGradient
from rl.algorithms.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from rl.algorithms.rloo import RLOO
from rl.config.algorithms import (
    Aggregation,
    CISPOConfig,
    CorrectionConfig,
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    KlEstimator,
    KlGradient,
    OldLogprobs,
    Outside,
    ReinforcePPBaselineConfig,
    ReinforcePPConfig,
    RLOOConfig,
    WeightLevel,
)
from rl.protocols import LossInputs
from tests.made_groups import made_group
from tests.made_losses import gradient, loss_inputs

SIZES = {"prompts_per_step": 3, "group_size": 4}
TOLERANCE = 1e-6


@cache
def fixture() -> dict[str, Any]:
    path = Path(__file__).parents[2] / "fixtures" / "reference_losses.json"
    return json.loads(path.read_text(encoding="utf-8"))


def rows(name: str) -> list[list[float]]:
    """[sequence][token] without the padding that the references need."""
    lengths = [int(sum(row)) for row in fixture()["inputs"]["mask"]]
    return ragged(fixture()["inputs"][name], lengths)


def ragged(padded: list[list[float]], lengths: list[int] | None = None) -> list[list[float]]:
    lengths = lengths or [int(sum(row)) for row in fixture()["inputs"]["mask"]]
    return [row[:n] for row, n in zip(padded, lengths, strict=True)]


def inputs_of(**changes: Any) -> LossInputs:
    """The references' inputs, packed behind two prompt tokens each instead of padded."""
    values: dict[str, Any] = {name: rows(name) for name in ("old", "rollout", "ref")}
    given = fixture()["inputs"]
    values |= {"advantages": given["advantages"], "groups": given["groups"], "prompt_tokens": 2}
    return loss_inputs(rows("logprobs"), **(values | changes))


def cases(of: str, kind: str) -> list[dict[str, Any]]:
    found = [case for case in fixture()[of] if case["kind"] == kind]
    assert found
    return found


def assert_agrees(algorithm: PolicyGradient, case: dict[str, Any], inputs: LossInputs | None = None) -> None:
    inputs = inputs or inputs_of()
    loss = algorithm.loss(inputs).loss
    assert loss.item() == pytest.approx(case["loss"], abs=TOLERANCE)
    expected = torch.tensor([x for row in ragged(case["gradient"]) for x in row], dtype=torch.float64)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(gradient(inputs, loss)[inputs.loss_mask], expected, atol=TOLERANCE, rtol=TOLERANCE)


def grpo(**settings: Any) -> GRPO:
    return GRPO(GRPOConfig(**SIZES, **settings))


def test_the_fixture_says_what_wrote_it():
    assert fixture()["versions"] == {"trl": "1.16.0", "verl": "0.9.1", "torch": "2.13.0+cpu"}


@pytest.mark.parametrize("index", range(4))
def test_clipped_losses_in_four_aggregations_agree_with_verl(index):
    case = cases("verl", "vanilla")[index]
    aggregation = Aggregation(case["aggregation"].replace("-", "_"))
    horizon = fixture()["horizon"] if aggregation is Aggregation.seq_mean_token_sum_norm else None
    assert_agrees(grpo(clip_high=0.28, dual_clip=1.5, aggregation=aggregation, horizon=horizon), case)


def test_dual_clip_changed_something():
    first, other = cases("verl", "vanilla")[0], cases("verl", "vanilla")[4]
    assert abs(first["loss"] - other["loss"]) > 1e-3
    assert_agrees(grpo(clip_high=0.28, dual_clip=10.0), other)


def test_gspo_agrees_with_verl():
    assert_agrees(GSPO(GSPOConfig(**SIZES, clip_low=0.1, clip_high=0.15)), cases("verl", "gspo")[0])


def test_cispo_agrees_with_verl_at_its_bounds():
    config = CISPOConfig(**SIZES, weight_low=0.0, weight_high=2.0)
    assert_agrees(CISPO(config), cases("verl", "cispo")[0])


@pytest.mark.parametrize("index", [5, 6, 7, 8])
def test_importance_weights_of_three_policies_agree_with_verl(index):
    case = cases("verl", "vanilla")[index]
    masked = isinstance(case["threshold"], str)
    low, high = map(float, case["threshold"].split("_")) if masked else (0.0, case["threshold"])
    config = CorrectionConfig(WeightLevel(case["level"]), Outside.mask if masked else Outside.truncate, low, high)
    tokens = LossTokens.of(inputs_of())
    weights = correction(config, tokens.old_logprobs - tokens.rollout_logprobs, tokens).weights
    expected = torch.tensor([x for row in ragged(case["weights"]) for x in row], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert weights.std() > 0.1
    assert_agrees(grpo(clip_high=0.28, dual_clip=10.0, correction=config), case)


def test_geometric_rejection_keeps_what_verl_keeps_and_the_denominator_that_verl_shrinks():
    case = cases("verl", "geometric")[0]
    config = CorrectionConfig(WeightLevel.none, geometric_low=case["low"], geometric_high=case["high"])
    inputs = inputs_of()
    tokens = LossTokens.of(inputs)
    weights = correction(config, tokens.old_logprobs - tokens.rollout_logprobs, tokens).weights
    assert weights.tolist() == [x for row in ragged(case["kept"]) for x in row]
    assert 0 < weights.sum() < len(weights)
    ours = grpo(correction=config).loss(inputs).loss
    by_kept = (grpo().surrogate(tokens).losses * weights).sum() / weights.sum()
    assert ours.item() == pytest.approx(by_kept.item() * weights.mean().item())


@pytest.mark.parametrize("index", range(5))
def test_kl_estimates_and_their_gradients_agree_with_verl(index):
    case = cases("verl", "kl")[index]
    kind = KlGradient.unbiased if case["name"].endswith("+") else KlGradient.estimator
    inputs = inputs_of()
    tokens = LossTokens.of(inputs)
    assert tokens.ref_logprobs is not None
    kl = kl_estimate(tokens.logprobs, tokens.ref_logprobs, KlEstimator(case["name"].strip("+")), kind).sum()
    assert kl.item() == pytest.approx(case["loss"], abs=TOLERANCE)
    expected = torch.tensor([x for row in ragged(case["gradient"]) for x in row], dtype=torch.float64)
    torch.testing.assert_close(gradient(inputs, kl)[inputs.loss_mask], expected, atol=TOLERANCE, rtol=TOLERANCE)


def advantage_case(name: str, **settings: Any) -> np.ndarray:
    """[sequence][token]"""
    found = [c for c in cases("verl", "advantages") if c["name"] == name and c["settings"] == settings]
    assert len(found) == 1
    return np.concatenate([np.array(row) for row in ragged(found[0]["values"])])


def graded_groups() -> list:
    """The references' rewards and log-probs as rollout groups."""
    given, lengths = fixture()["inputs"], [len(row) for row in rows("old")]
    made = []
    for group_id in range(SIZES["prompts_per_step"]):
        places = [i for i, group in enumerate(given["groups"]) if group == group_id]
        group = made_group(
            [given["rewards"][i] for i in places], response_tokens=[lengths[i] for i in places], group_id=group_id
        )
        for rollout, place in zip(group.rollouts, places, strict=True):
            for name, target in (("rollout", "rollout_logprobs"), ("ref", "ref_logprobs")):
                values = np.zeros(len(rollout.token_ids))
                values[rollout.loss_mask] = rows(name)[place]
                setattr(rollout, target, values)
        made.append(group)
    return made


def token_advantages(algorithm: PolicyGradient) -> np.ndarray:
    groups = graded_groups()
    algorithm.assign_advantages(groups)
    return np.concatenate(
        [
            np.full(r.num_response_tokens, r.advantage)
            if r.token_advantages is None
            else r.token_advantages[r.loss_mask]
            for group in groups
            for r in group.rollouts
        ]
    )


def spread(of_sequence: list[np.ndarray]) -> np.ndarray:
    values = np.concatenate(of_sequence)
    return np.repeat(values, [len(row) for row in rows("old")])


def rewards() -> list[np.ndarray]:
    return list(np.array(fixture()["inputs"]["rewards"]).reshape(-1, SIZES["group_size"]))


def test_group_advantages_agree_with_verl():
    scaled, plain = (advantage_case("grpo", scaled=scaled) for scaled in (True, False))
    np.testing.assert_allclose(spread([group_scaled(r) for r in rewards()]), scaled, atol=TOLERANCE)
    np.testing.assert_allclose(spread([centered(r) for r in rewards()]), plain, atol=TOLERANCE)
    np.testing.assert_allclose(
        spread([leave_one_out(r) for r in rewards()]), advantage_case("rloo", kl_coef=0.0), atol=TOLERANCE
    )


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_advantages_with_kl_in_the_reward_agree_with_verl(kl_coef):
    rloo = RLOO(RLOOConfig(**SIZES, kl_coef=kl_coef))
    np.testing.assert_allclose(token_advantages(rloo), advantage_case("rloo", kl_coef=kl_coef), atol=TOLERANCE)
    pp = ReinforcePP(ReinforcePPConfig(**SIZES, kl_coef=kl_coef, gamma=0.9))
    expected = advantage_case("reinforce_pp", kl_coef=kl_coef, gamma=0.9)
    np.testing.assert_allclose(token_advantages(pp), expected, atol=TOLERANCE)


def test_the_baseline_form_of_reinforce_pp_agrees_with_verl():
    algorithm = ReinforcePPBaseline(ReinforcePPBaselineConfig(**SIZES))
    np.testing.assert_allclose(token_advantages(algorithm), advantage_case("reinforce_pp_baseline"), atol=TOLERANCE)


def trl_case(**settings: Any) -> dict[str, Any]:
    found = [case for case in cases("trl", "trl") if case["settings"] == settings]
    assert len(found) == 1
    return found[0]


def test_grpo_of_the_paper_agrees_with_trl():
    paper = {"clip_high": 0.28, "aggregation": Aggregation.seq_mean_token_mean}
    assert_agrees(grpo(**paper), trl_case(loss_type="grpo"))
    assert_agrees(grpo(**paper, kl_coef=0.04), trl_case(loss_type="grpo", beta=0.04))


def test_dapo_agrees_with_trl():
    assert_agrees(DAPO(DAPOConfig(**SIZES, response_limit=9)), trl_case(loss_type="dapo"))


def test_dr_grpo_agrees_with_trl():
    config = DrGRPOConfig(**SIZES, clip_high=0.28, horizon=fixture()["horizon"])
    assert_agrees(DrGRPO(config), trl_case(loss_type="dr_grpo"))


def test_gspo_agrees_with_trl():
    case = trl_case(loss_type="grpo", importance_sampling_level="sequence", epsilon_low=0.1, epsilon_high=0.15)
    assert_agrees(GSPO(GSPOConfig(**SIZES, clip_low=0.1, clip_high=0.15)), case)


def test_cispo_agrees_with_trl_whose_upper_bound_is_the_weight_itself():
    case = trl_case(loss_type="cispo", epsilon_high=2.0)
    assert_agrees(CISPO(CISPOConfig(**SIZES, weight_high=2.0, old_logprobs=OldLogprobs.trainer)), case)


def test_rloo_has_the_gradient_of_trl_where_the_policy_is_the_old_one():
    """TRL's loss there is minus the mean advantage, ours holds log-probs; only the gradients are the same."""
    case = cases("trl", "trl_rloo_on_policy")[0]
    inputs = inputs_of()
    ours = gradient(inputs, RLOO(RLOOConfig(**SIZES)).loss(inputs).loss)[inputs.loss_mask]
    expected = torch.tensor([x for row in ragged(case["gradient"]) for x in row], dtype=torch.float64)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_group_of_one_has_no_advantage_where_verl_gives_it_its_reward():
    for name in ("grpo_groups_of_one", "rloo_groups_of_one"):
        np.testing.assert_allclose(advantage_case(name), spread(rewards()), atol=TOLERANCE)
    assert group_scaled(np.array([0.7])).tolist() == leave_one_out(np.array([0.7])).tolist() == [0.0]


def test_overlong_shaping_agrees_with_trl():
    (case,) = cases("trl", "overlong")
    dapo = DAPO(DAPOConfig(**SIZES, response_limit=case["limit"], overlong_buffer=case["buffer"]))
    answers = made_group([0.0] * len(case["rewards"]), response_tokens=range(1, len(case["rewards"]) + 1))
    assert [dapo.shape_reward(rollout) for rollout in answers.rollouts] == pytest.approx(case["rewards"], abs=TOLERANCE)
    assert len({reward for reward in case["rewards"] if -1 < reward < 0}) == 5
