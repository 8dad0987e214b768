from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rl.config.compose import compose_run_config
from rl.config.schema import ConfigError
from rl.config.tasks import DataConfig, EvalSamplingConfig, MathematicsConfig, Overlong, SamplingConfig, Scoring
from rl.tasks import published
from rl.tasks.mathematics import Mathematics
from rl.tasks.published import DATA_SETS
from tests.made_answers import answer

GSM8K = {
    "train": [
        {"question": "Tom has 3 apples and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
        {"question": "A house costs 80 thousand. Price?", "answer": "80 x 1,000\n#### 80,000"},
        {"question": "It is 3 degrees and falls by 5. Now?", "answer": "3 - 5\n#### -2"},
    ],
    "test": [{"question": "What is left of 10 after 1?", "answer": "#### 9"}],
}
MATH = {
    "train": [
        {"problem": "Half of $3$?", "solution": r"First \boxed{1}, no: $\boxed{\frac{3}{2}}$.", "level": "Level 1"},
        {"problem": "Primes from 24 to 28?", "solution": r"There are $\boxed{}$."},
    ],
    "test": [
        {"problem": "Half of 1?", "solution": r"It is $\boxed{\frac{1}{2}}$."},
        {"problem": "half of 3?", "solution": r"$\boxed{1.5}$"},
    ],
}


def dapo_row(problem: str, gold: str) -> dict[str, Any]:
    content = f"Solve it. The last line is Answer: $Answer.\n\n{problem}\n\nRemember the line."
    return {"prompt": [{"content": content, "role": "user"}], "reward_model": {"ground_truth": gold, "style": "rule"}}


DAPO = [dapo_row("One?", "1"), dapo_row("Two?", "2"), dapo_row("One?", "1"), dapo_row("Two?", "2")]


@pytest.fixture(autouse=True)
def _read_anew():
    published._problems.cache_clear()


def write(folder: Path, splits: dict[str, list[dict[str, Any]]]) -> DataConfig:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(str(folder))


def config_of(train: list[str], evaluate: list[str], data: dict[str, DataConfig], **values: Any) -> MathematicsConfig:
    sampling = {"sampling": SamplingConfig(max_new_tokens=9), "eval_sampling": EvalSamplingConfig(max_new_tokens=8)}
    config = MathematicsConfig(train=train, evaluate=evaluate, **(sampling | values))
    for name, where in data.items():
        setattr(config.data, name, where)
    return config


@pytest.fixture
def mixture(tmp_path: Path) -> MathematicsConfig:
    data = {"gsm8k": write(tmp_path / "gsm8k", GSM8K), "math": write(tmp_path / "math", MATH)}
    return config_of(["gsm8k", "math"], ["gsm8k", "math"], data)


def test_the_mixture_is_all_rows_in_order_and_each_test_set_is_a_set_of_its_own(mixture, renderer, capsys):
    assert Mathematics.check(mixture) == 5
    task = Mathematics(mixture, renderer=renderer, seed=0)
    assert [prompt.prompt_id for prompt in task.training] == [
        "gsm8k/train:0",
        "gsm8k/train:1",
        "gsm8k/train:2",
        "math/train:0",
        "math/train:1",
    ]
    assert [prompt.answer for prompt in task.training] == ["7", "80000", "-2", r"\frac{3}{2}", ""]
    sets = task.eval_sets()
    assert [(one.name, len(one.prompts)) for one in sets] == [("gsm8k", 1), ("math", 2)]
    assert all(one.accuracies == ("published", "equivalence") and one.votes for one in sets)
    assert capsys.readouterr().out.strip() == (
        "gsm8k+math: 5 training prompts; held-out problems: gsm8k 1, math 2; "
        "held-out problems also trained on: 1 (math/test:1 = math/train:0)"
    )


def test_problems_are_asked_word_for_word_as_in_the_published_runs(mixture, renderer):
    task = Mathematics(mixture, renderer=renderer, seed=0)
    text = [prompt.messages[0]["content"] for prompt in task.training]
    assert text[0] == (
        'Tom has 3 apples and buys 4. How many? Let\'s think step by step and output the final answer after "####".'
    )
    assert text[3] == r"Half of $3$? Let's think step by step and output the final answer within \boxed{}."
    assert renderer.tokenizer.decode(task.training[3].token_ids) == text[3]


def test_both_accuracies_are_parts_and_the_scoring_says_which_is_the_reward(mixture, renderer):
    texts = ["#### 7", "The answer is 7.", "#### 8"]

    def graded(scoring: Scoring):
        mixture.scoring = scoring
        task = Mathematics(mixture, renderer=renderer, seed=0)
        rollouts = [answer(text, index=index) for index, text in enumerate(texts)]
        try:
            return asyncio.run(task.grade(task.training[0], rollouts))
        finally:
            task._checker.close()

    strict, equal = graded(Scoring.published), graded(Scoring.equivalence)
    assert [reward.value for reward in strict] == [1.0, 0.0, 0.0]
    assert [reward.value for reward in equal] == [1.0, 1.0, 0.0]
    for rewards in (strict, equal):
        assert [reward.parts["published"] for reward in rewards] == [1.0, 0.0, 0.0]
        assert [reward.parts["equivalence"] for reward in rewards] == [1.0, 1.0, 0.0]
    assert [reward.answer for reward in strict] == ["7", None, "8"]


def test_the_row_whose_box_is_empty_is_graded_and_is_no_error(mixture, renderer):
    task = Mathematics(mixture, renderer=renderer, seed=0)
    rollouts = [answer(text) for text in (r"It is \boxed{}.", r"It is \boxed{7}.")]
    rewards = asyncio.run(task.grade(task.training[4], rollouts))
    task._checker.close()
    assert [(reward.value, reward.parts["equivalence"]) for reward in rewards] == [(1.0, 0.0), (0.0, 0.0)]


def dapo_config(tmp_path: Path, **values: Any) -> MathematicsConfig:
    import pyarrow
    import pyarrow.parquet

    for name, rows in (("dapo-math-17k", DAPO), ("aime-2024", [dapo_row("two?", "002")] * 32)):
        (tmp_path / name / "data").mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name / "data" / f"{name}.parquet")
    data = {
        "dapo_math": DataConfig(str(tmp_path / "dapo-math-17k")),
        "dapo_aime_2024": DataConfig(str(tmp_path / "aime-2024")),
    }
    return config_of(["dapo_math"], ["dapo_aime_2024"], data, **values)


def test_dapo_keeps_its_repeated_rows_renders_each_once_and_evaluates_each_problem_once(tmp_path, renderer, capsys):
    config = dapo_config(tmp_path)
    assert Mathematics.check(config) == 4
    task = Mathematics(config, renderer=renderer, seed=0)
    assert [prompt.prompt_id for prompt in task.training] == [f"dapo_math/train:{row}" for row in (0, 1, 0, 1)]
    assert task.training[0] is task.training[2]
    assert task.training[0].messages == ({"role": "user", "content": DAPO[0]["prompt"][0]["content"]},)
    (aime,) = task.eval_sets()
    assert (aime.name, len(aime.prompts), aime.prompts[0].answer) == ("dapo_aime_2024", 1, "002")
    assert capsys.readouterr().out.strip() == (
        "dapo_math: 4 training prompts (2 distinct); held-out problems: dapo_aime_2024 1; "
        "held-out problems also trained on: 1 (dapo_aime_2024/train:0 = dapo_math/train:1)"
    )


def test_deduplication_is_asked_for_and_keeps_the_first_rows_in_order(tmp_path, renderer):
    config = dapo_config(tmp_path, deduplicate=True)
    assert Mathematics.check(config) == 2
    task = Mathematics(config, renderer=renderer, seed=0)
    assert [prompt.prompt_id for prompt in task.training] == ["dapo_math/train:0", "dapo_math/train:1"]
    assert task.fingerprint() != Mathematics(dapo_config(tmp_path), renderer=renderer, seed=0).fingerprint()


def test_one_changed_row_changes_the_fingerprint(mixture, tmp_path, renderer):
    before = Mathematics(mixture, renderer=renderer, seed=0).fingerprint()
    assert before == Mathematics(mixture, renderer=renderer, seed=1).fingerprint()
    changed = [*GSM8K["train"][:2], {**GSM8K["train"][2], "answer": "#### -3"}]
    write(tmp_path / "gsm8k", {"train": changed})
    published._problems.cache_clear()
    assert Mathematics(mixture, renderer=renderer, seed=0).fingerprint() != before


def test_evaluation_uses_its_own_sampling_and_limits_are_of_the_first_rows(mixture, renderer):
    mixture.eval_sampling = EvalSamplingConfig(max_new_tokens=64, temperature=1.0, top_p=0.7, samples_per_problem=32)
    mixture.train_limit, mixture.eval_limit = 4, 1
    assert Mathematics.check(mixture) == 4
    task = Mathematics(mixture, renderer=renderer, seed=0)
    assert [prompt.prompt_id for prompt in task.training][-1] == "math/train:0"
    assert task.num_prompts == 4
    for one in task.eval_sets():
        assert (len(one.prompts), one.samples_per_problem) == (1, 32)
        assert (one.sampling.max_new_tokens, one.sampling.temperature, one.sampling.top_p) == (64, 1.0, 0.7)
    assert len({one.sampling.seed for one in task.eval_sets()}) == 2


def test_over_long_prompts_are_dropped_in_order_and_counted_by_the_renderer_that_trains(mixture, make_renderer, capsys):
    config = mixture
    task = Mathematics(config, renderer=make_renderer(max_prompt_tokens=102, overlong=Overlong.drop), seed=0)
    lengths = [len(prompt.token_ids) for prompt in task.training]
    assert max(lengths) <= 102
    assert [prompt.prompt_id for prompt in task.training] == ["gsm8k/train:1", "math/train:0", "math/train:1"]
    assert "of 5 training prompts 2 dropped and 0 truncated" in capsys.readouterr().out


def test_a_task_without_training_rows_is_for_evaluation(tmp_path, renderer):
    rows = [{"problem": "One hundred?", "answer": "0100", "id": "0"}]
    config = config_of([], ["aime_2025"], {"aime_2025": write(tmp_path, {"test": rows})})
    assert Mathematics.check(config) == 0
    task = Mathematics(config, renderer=renderer, seed=0)
    assert (task.num_prompts, task.name, task.eval_sets()[0].prompts[0].answer) == (0, "aime_2025", "100")


@pytest.mark.parametrize(
    ("name", "row", "gold"),
    [
        ("math_500", {"problem": "p", "answer": r"\frac12"}, r"\frac12"),
        ("aime_2024", {"problem": "p", "answer": "033"}, "33"),
        ("aime_2025", {"problem": "p", "answer": "70"}, "70"),
        ("amc23", {"question": "p", "answer": 27.0}, "27"),
        ("amc23", {"question": "p", "answer": 2.5}, "2.5"),
    ],
)
def test_the_gold_answer_of_each_layout(name, row, gold):
    assert DATA_SETS[name].read(row).answer == gold


@pytest.mark.parametrize("name", DATA_SETS)
def test_every_example_is_a_right_row_of_its_data_set(name):
    reading = DATA_SETS[name].read(DATA_SETS[name].example)
    assert int(reading.answer) in (7, 12)
    assert "##" not in reading.text and "boxed" not in reading.text and "Answer" not in reading.text


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            [GSM8K["train"][0], {"question": "q"}],
            r"\(train\), row 2: column 'answer' is missing\. The row has: question",
        ),
        ([GSM8K["train"][0], {"question": None, "answer": "#### 1"}], r"row 2: column 'question' is null"),
        ([{"question": "q", "answer": "seven"}], r"row 1: .*must end with '#### <number>' \(got 'seven'\)"),
        ([{"question": "q", "answer": 7}], r"row 1: .*A row looks like"),
        ([], r"train\.jsonl holds no rows"),
    ],
)
def test_a_bad_row_is_named_by_number_before_a_model_loads(tmp_path, train, message):
    config = config_of(["gsm8k"], [], {"gsm8k": write(tmp_path, {"train": train})})
    with pytest.raises(ConfigError, match=message):
        Mathematics.check(config)


@pytest.mark.parametrize(
    ("train", "evaluate", "message"),
    [
        (["gsm8kk"], [], r"task\.train=\['gsm8kk'\]: 'gsm8kk' must be one of gsm8k, math, .*Did you mean 'gsm8k'\?"),
        (["gsm8k", "gsm8k"], [], r"'gsm8k' must be one of .* stand there once"),
        (["amc23"], [], r"amc23 has held-out problems only"),
        ([], ["dapo_math"], r"dapo_math has training rows only"),
        ([], [], r"task\.train and task\.evaluate are both empty"),
    ],
)
def test_a_wrong_name_of_a_data_set_lists_the_right_ones(train, evaluate, message):
    with pytest.raises(ConfigError, match=message):
        Mathematics.check(config_of(train, evaluate, {}))


def test_a_folder_that_is_not_there_and_one_without_the_split_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"task\.data\.gsm8k\.path=.*there is no such folder"):
        Mathematics.check(config_of(["gsm8k"], [], {"gsm8k": DataConfig(str(tmp_path / "missing"))}))
    with pytest.raises(ConfigError, match=r"has no train\.jsonl, train\.parquet, dapo-math-17k\.parquet or train-\*"):
        Mathematics.check(config_of(["dapo_math"], [], {"dapo_math": DataConfig(str(tmp_path))}))


def test_numbered_shards_of_the_hub_are_read_in_order(tmp_path, renderer):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "main").mkdir()
    for number, rows in enumerate([GSM8K["train"][:2], GSM8K["train"][2:]]):
        shard = tmp_path / "main" / f"train-0000{number}-of-00002.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), shard)
    config = config_of(["gsm8k"], [], {"gsm8k": DataConfig(str(tmp_path))})
    assert [p.answer for p in Mathematics(config, renderer=renderer, seed=0).training] == ["7", "80000", "-2"]


def test_a_hub_id_is_asked_for_with_its_config_split_and_revision(renderer, monkeypatch):
    import datasets

    asked = []

    def load_dataset(*words, **options):
        asked.append((*words, options))
        return datasets.Dataset.from_list(GSM8K[options["split"]])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = config_of(["gsm8k"], ["gsm8k"], {"gsm8k": DataConfig("openai/gsm8k", revision="abc")})
    assert Mathematics.check(config) is None and asked == []
    assert Mathematics.hub_data(config) == {"gsm8k": DataConfig("openai/gsm8k", revision="abc")}
    assert Mathematics(config, renderer=renderer, seed=0).num_prompts == 3
    assert asked == [
        ("openai/gsm8k", "main", {"split": "train", "revision": "abc"}),
        ("openai/gsm8k", "main", {"split": "test", "revision": "abc"}),
    ]


def test_an_unreachable_hub_names_the_remedy(renderer, monkeypatch):
    import datasets

    def load_dataset(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"task\.data\.gsm8k\.path=openai/gsm8k .*HF_HUB_OFFLINE=1 is set.*local"):
        Mathematics(config_of(["gsm8k"], [], {}), renderer=renderer, seed=0)


@pytest.mark.parametrize("option", ["gsm8k", "math", "gsm8k_math", "dapo_math", "aime_2024", "aime_2025", "amc23"])
def test_every_option_names_data_sets_that_exist(option):
    assert Mathematics.check(compose_run_config([f"task={option}"]).task) in (None, 0)  # type: ignore[arg-type]


def test_the_published_settings_of_the_two_runs_on_text():
    mixture = compose_run_config(["task=gsm8k_math"]).task
    assert (mixture.max_prompt_tokens, mixture.sampling.max_new_tokens, mixture.epochs) == (1024, 2048, 15)
    assert (mixture.overlong, mixture.eval_sampling.temperature) == (Overlong.drop, 0.0)
    dapo = compose_run_config(["task=dapo_math"]).task
    assert (dapo.max_prompt_tokens, dapo.sampling.max_new_tokens, dapo.overlong) == (
        2048,
        28672,
        Overlong.truncate_left,
    )
    evaluation = dapo.eval_sampling
    assert (evaluation.temperature, evaluation.top_p, evaluation.samples_per_problem) == (1.0, 0.7, 32)
