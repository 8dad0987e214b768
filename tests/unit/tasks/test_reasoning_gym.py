from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rl.config.schema import ConfigError
from rl.config.tasks import EvalSamplingConfig, ReasoningGymConfig, SamplingConfig
from rl.tasks.reasoning_gym import ReasoningGym, evaluating_call
from tests.made_answers import answer


def config_of(generator: str = "chain_sum", **values: Any) -> ReasoningGymConfig:
    defaults: dict[str, Any] = {"train_size": 40, "eval_size": 10, "sampling": SamplingConfig(max_new_tokens=9)}
    defaults["eval_sampling"] = EvalSamplingConfig(max_new_tokens=9)
    return ReasoningGymConfig(generator=generator, **(defaults | values))


def test_a_missing_package_names_the_remedy(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[reasoning-gym\]'"):
        ReasoningGym.check(config_of())


@pytest.fixture(scope="module")
def gym() -> Any:
    return pytest.importorskip("reasoning_gym.factory")


@pytest.mark.usefixtures("gym")
def test_training_and_held_out_differ_by_seed_and_are_the_same_every_time(renderer):
    first, second = (ReasoningGym(config_of(), renderer=renderer, seed=seed) for seed in (0, 1))
    assert first.fingerprint() == second.fingerprint()
    assert first.fingerprint() != ReasoningGym(config_of(train_seed=7), renderer=renderer, seed=0).fingerprint()
    (held_out,) = first.eval_sets()
    assert (held_out.name, len(held_out.prompts), first.leaks) == ("chain_sum", 10, [])
    assert first.training[0].prompt_id == "chain_sum/train-1:0"
    assert held_out.prompts[0].prompt_id == "chain_sum/test-2:0"


@pytest.mark.usefixtures("gym")
def test_a_problem_of_both_seeds_is_held_out(renderer, capsys):
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = ReasoningGym(config_of(params=params, train_size=400, eval_size=60), renderer=renderer, seed=0)
    held_out = {prompt.messages[0]["content"] for prompt in task.eval_sets()[0].prompts}
    assert not held_out & {prompt.messages[0]["content"] for prompt in task.training}
    assert task.num_prompts < 400 and "generated training problems are left out" in capsys.readouterr().out


@pytest.mark.usefixtures("gym")
def test_the_score_is_of_what_stands_in_the_last_answer_tags(renderer):
    task = ReasoningGym(config_of(), renderer=renderer, seed=0)
    prompt = task.training[0]
    right = prompt.answer
    texts = [f"<answer>1</answer> no: <answer> {right} </answer>", right, f"<answer>{right}1</answer>"]
    rewards = asyncio.run(task.grade(prompt, [answer(text) for text in texts]))
    assert [reward.correct for reward in rewards] == [True, False, False]
    assert [reward.answer for reward in rewards] == [right, None, f"{right}1"]
    assert rewards[0].value == 1.0 and rewards[1].value == 0.0


def test_a_generator_whose_scorer_runs_answers_as_code_is_refused(gym):
    unsafe = {name for name, (dataset_class, _) in gym.DATASETS.items() if evaluating_call(dataset_class)}
    # By hand, from the source of reasoning-gym 0.1.25: scorers that hand the answer to eval or sympy's parse_expr.
    by_hand = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
    by_hand |= {"countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration"}
    assert by_hand <= unsafe
    assert len(gym.DATASETS) - len(unsafe) >= 80
    with pytest.raises(ConfigError, match=r"task\.generator=countdown is refused: .* calls parse_expr"):
        ReasoningGym.check(config_of("countdown"))


@pytest.mark.usefixtures("gym")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"generator": "chain_sums"}, r"none of the \d+ generators\. Near: chain_sum"),
        ({"generator": "composite"}, r"composite is refused"),
        ({"params": {"max_term": 3}}, r"task\.params\.max_term: chain_sum has no such setting\. It has .*max_terms"),
        ({"params": {"max_terms": 0}}, r"chain_sum refuses them"),
        ({"params": {"seed": 3}}, r"task\.params\.seed: chain_sum has no such setting"),
        ({"train_size": 0}, r"task\.train_size=0 is out of range"),
        ({"eval_size": -1}, r"task\.eval_size=-1 is out of range"),
        ({"eval_seed": 1}, r"both 1: they must differ"),
    ],
)
def test_wrong_settings_are_refused_before_a_model_loads(values, message):
    with pytest.raises(ConfigError, match=message):
        ReasoningGym.check(config_of(**values))


@pytest.mark.slow
def test_every_generator_that_is_not_refused_gives_its_own_answer_the_full_score(gym):
    wrong = []
    for name, (dataset_class, settings_class) in gym.DATASETS.items():
        if name == "composite" or evaluating_call(dataset_class):
            continue
        dataset = dataset_class(config=settings_class(size=2, seed=3))
        entry = dataset[0]
        if entry["answer"] is not None and dataset.score_answer(str(entry["answer"]), entry) < 1.0:
            wrong.append(name)
    assert wrong == []
