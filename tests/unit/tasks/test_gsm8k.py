from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl.config.schema import ConfigError
from rl.config.tasks import EvalSamplingConfig, GSM8KConfig, SamplingConfig
from rl.tasks.gsm8k import GSM8K
from rl.types import FinishReason
from tests.made_answers import answer

TRAIN = [
    {"question": "Tom has 3 apples and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "A house costs 80 thousand. Price?", "answer": "80 x 1,000\n#### 80,000"},
    {"question": "It is 3 degrees and falls by 5. Now?", "answer": "3 - 5\n#### -2"},
]
TEST = [{"question": "What is left of 10 after 1?", "answer": "#### 9"}]


def write(folder: Path, train=TRAIN, test=TEST) -> str:
    for name, rows in (("train", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def config_of(path: str, **values) -> GSM8KConfig:
    sampling = {"sampling": SamplingConfig(max_new_tokens=9), "eval_sampling": EvalSamplingConfig(max_new_tokens=9)}
    return GSM8KConfig(path=path, **sampling, **values)


def test_rows_become_prompts_with_the_instruction_and_the_number(tmp_path, renderer):
    task = GSM8K(config_of(write(tmp_path)), renderer=renderer, seed=0)
    assert [prompt.answer for prompt in task.training] == ["7", "80000", "-2"]
    assert [prompt.prompt_id for prompt in task.training] == ["gsm8k/train:0", "gsm8k/train:1", "gsm8k/train:2"]
    (message,) = task.training[0].messages
    assert message == {
        "role": "user",
        "content": "Tom has 3 apples and buys 4. How many? "
        "Think it through step by step, and end with the final answer after ####.",
    }
    (eval_set,) = task.eval_sets()
    assert (eval_set.name, eval_set.prompts[0].prompt_id) == ("gsm8k", "gsm8k/test:0")
    assert task.demonstrations() == task.validation_demonstrations() == []


def test_parquet_shards_of_the_hub_are_read_in_order(tmp_path, renderer):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "main").mkdir()
    for number, rows in enumerate([TRAIN[:2], TRAIN[2:]]):
        shard = tmp_path / "main" / f"train-0000{number}-of-00002.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), shard)
    test = tmp_path / "main" / "test-00000-of-00001.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TEST), test)
    config = config_of(str(tmp_path))
    assert GSM8K.check(config) == 3
    assert [p.answer for p in GSM8K(config, renderer=renderer, seed=0).training] == ["7", "80000", "-2"]


def test_the_reward_is_the_strict_score_and_the_last_number_is_a_part(tmp_path, renderer):
    task = GSM8K(config_of(write(tmp_path)), renderer=renderer, seed=0)
    house = task.training[1]
    strict, lenient, wrong = (task.score(house, answer(text)) for text in ("#### 80,000", "80000", "#### 8"))
    assert (strict.value, strict.correct, strict.parts) == (1.0, True, {"strict": 1.0, "last_number": 1.0})
    assert (lenient.value, lenient.correct, lenient.parts) == (0.0, False, {"strict": 0.0, "last_number": 1.0})
    assert (wrong.value, wrong.parts) == (0.0, {"strict": 0.0, "last_number": 0.0})
    cut = task.score(house, answer("#### 80,000", finish=FinishReason.LENGTH))
    assert cut.parts["last_number"] == 0.0


def test_sizes_and_overlap_are_printed(tmp_path, renderer, capsys):
    GSM8K(config_of(write(tmp_path, test=[*TEST, TRAIN[0]])), renderer=renderer, seed=0)
    expected = "gsm8k: 3 training and 2 held-out prompts; held-out prompts also trained on: 1"
    assert capsys.readouterr().out.strip() == expected


def test_check_counts_the_training_rows_and_reads_no_hub(tmp_path):
    assert GSM8K.check(config_of(write(tmp_path))) == 3
    assert GSM8K.check(config_of("openai/gsm8k")) is None


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([TRAIN[0], {"question": "q"}], r"train\.jsonl, row 2: column 'answer' is missing\. The row has: question"),
        ([TRAIN[0], {"question": None, "answer": "#### 1"}], r"row 2: column 'question' is null"),
        ([{"question": "q", "answer": "seven"}], r"row 1: .*ends with '#### <number>' \(got 'seven'\)"),
        ([{"question": 3, "answer": "#### 1"}], r"row 1: 'question' must be a text"),
        ([], r"train\.jsonl holds no rows"),
    ],
)
def test_a_bad_row_is_named_by_number_before_a_model_loads(tmp_path, train, message):
    config = config_of(write(tmp_path, train=train))
    with pytest.raises(ConfigError, match=message):
        GSM8K.check(config)


def test_a_folder_without_splits_and_a_missing_folder_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"the folder has no train\.jsonl"):
        GSM8K.check(config_of(str(tmp_path)))
    with pytest.raises(ConfigError, match=r"there is no such folder"):
        GSM8K.check(config_of(str(tmp_path / "missing")))


def test_an_unreachable_hub_names_the_remedy(renderer, monkeypatch):
    import datasets

    def load_dataset(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"task\.path=openai/gsm8k .*HF_HUB_OFFLINE=1 is set.*local folder"):
        GSM8K(config_of("openai/gsm8k"), renderer=renderer, seed=0)
