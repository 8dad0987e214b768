from __future__ import annotations

from dataclasses import replace

import pytest

from rl.config.schema import ConfigError
from rl.config.tasks import ArithmeticConfig, EvalSamplingConfig, Notation, SamplingConfig
from rl.tasks.arithmetic import Arithmetic, Expression, split_problems
from rl.types import FinishReason
from tests.made_answers import answer


def config_of(**values) -> ArithmeticConfig:
    defaults = {
        "sampling": SamplingConfig(max_new_tokens=8),
        "eval_sampling": EvalSamplingConfig(max_new_tokens=8),
    }
    return ArithmeticConfig(**(defaults | values))


ONE_DIGIT = {"digits": 1, "held_out": 20, "validation": 10, "warm_start": 15}


def text_of(renderer, prompt) -> str:
    return renderer.tokenizer.decode(prompt.token_ids)


def written(renderer, a: int, operator: str, b: int, **values) -> tuple[str, str]:
    """Prompt and answer of one problem."""
    task = Arithmetic(config_of(held_out=0, validation=0, warm_start=0, **values), renderer=renderer, seed=0)
    (prompt,) = [p for p in task.training if p.prompt_id == f"arithmetic:{a}{operator}{b}"]
    return text_of(renderer, prompt), prompt.answer


@pytest.mark.parametrize(
    ("a", "b", "prompt", "expected"),
    [(12, 34, "12+34=", "640"), (7, 5, "07+05=", "210"), (99, 99, "99+99=", "891"), (0, 0, "00+00=", "000")],
)
def test_sums_are_padded_and_answered_least_significant_digit_first(renderer, a, b, prompt, expected):
    assert written(renderer, a, "+", b) == (prompt, expected)


def test_products_are_padded_to_the_longest_answer_of_all_operators(renderer):
    # 9 * 9 = 81 and 9 + 9 = 18: two digits. 3 * 2 = 6 is 06, and 60 reversed.
    assert written(renderer, 3, "*", 2, digits=1, operators=["+", "*"]) == ("3*2=", "60")
    assert written(renderer, 3, "+", 2, digits=1, operators=["+", "*"]) == ("3+2=", "50")
    assert written(renderer, 12, "*", 34, operators=["*"]) == ("12*34=", "8040")  # 0408


def test_the_question_notation_asks_in_words(renderer):
    question = "What is 7 + 5? Answer with the number only."
    assert written(renderer, 7, "+", 5, digits=1, notation=Notation.question) == (question, "12")


def test_the_reward_is_one_for_exactly_the_answer_and_its_end_of_text(renderer):
    task = Arithmetic(config_of(**ONE_DIGIT), renderer=renderer, seed=0)
    prompt = replace(task.training[0], answer="21")
    scores = [
        task.score(prompt, rollout).value
        for rollout in (
            answer("21"),
            answer("12"),
            answer("21 "),
            answer("210"),
            answer("2"),
            answer(""),
            answer("21", finish=FinishReason.LENGTH),
        )
    ]
    assert scores == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_the_question_notation_scores_the_last_number(renderer):
    task = Arithmetic(config_of(notation=Notation.question, **ONE_DIGIT), renderer=renderer, seed=0)
    prompt = replace(task.training[0], answer="12")
    assert task.score(prompt, answer("7 + 5 = 12.")).correct
    assert not task.score(prompt, answer("12, no, 13")).correct
    assert not task.score(prompt, answer("112")).correct


@pytest.mark.parametrize("operators", [["+"], ["+", "*"]])
@pytest.mark.parametrize("split_seed", [0, 1, 20261201])
def test_parts_have_their_sizes_and_share_no_unordered_pair(operators, split_seed):
    config = config_of(operators=operators, split_seed=split_seed)
    split = split_problems(config)
    parts = [split.held_out, split.validation, split.warm_start, split.training]
    assert [len(part) for part in parts] == [1000, 300, 2000, len(operators) * 10_000 - 3300]
    every = [problem for part in parts for problem in part]
    assert len(set(every)) == len(every) == len(operators) * 10_000
    pairs = [{problem.pair for problem in part} for part in parts]
    assert sum(len(part) for part in pairs) == len(set().union(*pairs)) == 5050  # 100 x 101 / 2


def test_a_pair_is_the_same_both_ways_round():
    assert Expression(7, "+", 5).pair == Expression(5, "*", 7).pair == (5, 7)


def test_the_split_depends_on_its_own_seed_and_not_on_the_seed_of_the_run(renderer):
    tasks = [Arithmetic(config_of(**ONE_DIGIT), renderer=renderer, seed=seed) for seed in (0, 1)]
    other = Arithmetic(config_of(**ONE_DIGIT, split_seed=1), renderer=renderer, seed=0)

    def held_out(task: Arithmetic) -> list[str]:
        return [prompt.prompt_id for prompt in task.eval_sets()[0].prompts]

    assert held_out(tasks[0]) == held_out(tasks[1]) != held_out(other)
    assert tasks[0].fingerprint() == tasks[1].fingerprint() != other.fingerprint()


def test_demonstrations_are_right_and_disjoint_from_everything_evaluated(renderer):
    task = Arithmetic(config_of(**ONE_DIGIT), renderer=renderer, seed=0)
    shown, validation = task.demonstrations(), task.validation_demonstrations()
    assert (len(shown), len(validation), task.num_prompts) == (15, 10, 55)
    for prompt, response in shown + validation:
        a, b = text_of(renderer, prompt).rstrip("=").split("+")
        assert int(response[::-1]) == int(a) + int(b)
        assert task.score(prompt, answer(response)).correct
    parts = [{prompt.prompt_id for prompt, _ in shown}, {prompt.prompt_id for prompt, _ in validation}]
    parts += [{p.prompt_id for p in task.eval_sets()[0].prompts}, {p.prompt_id for p in task.training}]
    assert len(set().union(*parts)) == sum(len(part) for part in parts) == 100


def test_the_overlap_is_printed_and_is_zero(renderer, capsys):
    Arithmetic(config_of(**ONE_DIGIT), renderer=renderer, seed=0)
    assert capsys.readouterr().out == (
        "arithmetic: 20 held-out problems, 10 validation, 15 warm start, 55 training; overlap with held-out: "
        "validation 0, warm start 0, training 0\n"
    )


def test_the_printed_overlap_counts_problems_of_shared_pairs(renderer, capsys):
    task = Arithmetic(config_of(**ONE_DIGIT), renderer=renderer, seed=0)
    split = split_problems(config_of(**ONE_DIGIT))
    capsys.readouterr()
    turned = [Expression(e.b, e.operator, e.a) for e in split.held_out[:3]]
    task.print_split(replace(split, warm_start=split.warm_start + turned))
    assert "validation 0, warm start 3, training 0" in capsys.readouterr().out


def test_check_counts_training_problems_without_making_them():
    assert Arithmetic.check(config_of()) == 10_000 - 3_300
    assert Arithmetic.check(config_of(digits=1, operators=["+", "*"], held_out=60, validation=0, warm_start=0)) == 140
    assert Arithmetic.check(config_of(digits=3)) == 1_000_000 - 3_300


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"digits": 0}, r"task\.digits=0 .* 1 to 3"),
        ({"digits": 4}, r"task\.digits=4 .* 1 to 3"),
        ({"operators": []}, r"task\.operators=\[\]"),
        ({"operators": ["-"]}, r"task\.operators=\['-'\]"),
        ({"operators": ["+", "+"]}, r"each once"),
        ({"held_out": -1}, r"task\.held_out=-1"),
        ({"validation": -1}, r"task\.validation=-1"),
        ({"warm_start": -1}, r"task\.warm_start=-1"),
        ({"held_out": 8000}, r"leave -300 of the 10000 problems"),
        ({"held_out": 7700}, r"leave 0 of the 10000 problems"),
        ({"sampling": SamplingConfig(max_new_tokens=3)}, r"task\.sampling\.max_new_tokens=3 .* Use at least 4"),
        ({"eval_sampling": EvalSamplingConfig(max_new_tokens=3)}, r"task\.eval_sampling\.max_new_tokens=3"),
    ],
)
def test_settings_that_cannot_work_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        Arithmetic.check(config_of(**values))


def test_sizes_that_no_whole_pairs_fill_are_refused():
    # Two operators: a pair brings 2 or 4 problems, so a part of 3 cannot be filled.
    with pytest.raises(ConfigError, match=r"task\.held_out=3: only 2 problems"):
        split_problems(config_of(digits=1, operators=["+", "*"], held_out=3, validation=0, warm_start=0))
