from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rl.config.schema import ConfigError
from rl.config.tasks import AnswerRule, EvalSamplingConfig, JsonlConfig, Overlong, SamplingConfig
from rl.tasks.jsonl import Jsonl
from tests.made_answers import answer

ROWS = [{"prompt": "What is 7 + 5?", "answer": "12"}, {"prompt": "Capital of France?", "answer": " Paris "}]


def write(path: Path, rows=ROWS) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def config_of(path, **values) -> JsonlConfig:
    sampling = {"sampling": SamplingConfig(max_new_tokens=9), "eval_sampling": EvalSamplingConfig(max_new_tokens=9)}
    return JsonlConfig(path=str(path), **(sampling | values))


def test_rows_of_texts_and_of_messages(tmp_path, renderer):
    chat = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2"}], "answer": 4}
    task = Jsonl(config_of(write(tmp_path / "train.jsonl", [*ROWS, chat])), renderer=renderer, seed=0)
    assert [prompt.answer for prompt in task.training] == ["12", "Paris", "4"]
    assert [prompt.prompt_id for prompt in task.training] == ["train.jsonl:0", "train.jsonl:1", "train.jsonl:2"]
    assert task.training[0].messages == ({"role": "user", "content": "What is 7 + 5?"},)
    assert renderer.tokenizer.decode(task.training[2].token_ids) == "Be brief.2+2"
    assert task.eval_sets() == []


def test_own_column_names_and_an_evaluation_file(tmp_path, renderer):
    rows = [{"q": "1+1", "a": "2"}]
    config = config_of(
        write(tmp_path / "t.jsonl", rows),
        eval_path=write(tmp_path / "e.jsonl", rows),
        prompt_key="q",
        answer_key="a",
        eval_sampling=EvalSamplingConfig(temperature=0.6, max_new_tokens=5, samples_per_problem=4),
    )
    (eval_set,) = Jsonl(config, renderer=renderer, seed=0).eval_sets()
    assert (eval_set.prompts[0].prompt_id, eval_set.samples_per_problem) == ("e.jsonl:0", 4)
    assert (eval_set.sampling.temperature, eval_set.sampling.max_new_tokens) == (0.6, 5)


@pytest.mark.parametrize(
    ("rule", "right"),
    [
        (AnswerRule.equivalence, [True, True, True, False]),
        (AnswerRule.last_number, [True, True, True, False]),
        (AnswerRule.exact, [False, True, False, False]),
        (AnswerRule.gsm8k, [False, False, True, False]),
    ],
)
def test_the_rule_says_when_an_answer_is_right(tmp_path, renderer, rule, right):
    task = Jsonl(config_of(write(tmp_path / "train.jsonl"), rule=rule), renderer=renderer, seed=0)
    texts = ["The answer is 12.", " 12\n", "#### 12", "13"]
    rewards = asyncio.run(task.grade(task.training[0], [answer(text) for text in texts]))
    task._checker.close()
    assert [reward.correct for reward in rewards] == right == [reward.value == 1.0 for reward in rewards]


def test_an_answer_in_words_is_right_as_it_is(tmp_path, renderer):
    task = Jsonl(config_of(write(tmp_path / "train.jsonl")), renderer=renderer, seed=0)
    rewards = asyncio.run(task.grade(task.training[1], [answer(" Paris\n"), answer("Lyon")]))
    task._checker.close()
    assert [reward.value for reward in rewards] == [1.0, 0.0]


def test_held_out_rows_are_evaluated_by_source_and_may_share_numbers_and_texts(tmp_path, renderer):
    rows = [{**ROWS[0], "source": "a/b"}, {**ROWS[0], "source": "c"}, {**ROWS[1], "source": "a/b"}]
    path = write(tmp_path / "rows.jsonl", rows)
    task = Jsonl(config_of(path, eval_path=path, source_key="source"), renderer=renderer, seed=0)
    sets = {one.name: [prompt.prompt_id for prompt in one.prompts] for one in task.eval_sets()}
    assert sets == {"a_b": ["rows.jsonl:0", "rows.jsonl:2"], "c": ["rows.jsonl:1"]}
    assert len(task.leaks) == 3
    bad = write(tmp_path / "bad.jsonl", [rows[0], ROWS[0]])
    with pytest.raises(ConfigError, match=r"row 2: column 'source' is missing"):
        Jsonl.check(config_of(bad, source_key="source"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROWS[0], {"prompt": "q"}], r"row 2: column 'answer' is missing\. The row has: prompt\. A row looks like \{"),
        ([{"prompt": "q", "answer": None}], r"row 1: column 'answer' is null"),
        ([{"prompt": 3, "answer": "1"}], r"row 1: 'prompt' must be a text or a list of messages"),
        ([{"prompt": " ", "answer": "1"}], r"row 1: 'prompt' .* not empty"),
        ([{"prompt": [{"role": "user"}], "answer": "1"}], r"row 1: 'prompt' must be"),
        ([{"prompt": "q", "answer": ["1"]}], r"row 1: 'answer' must be a text or a number.*got \['1'\]"),
        ([{"prompt": "q", "answer": True}], r"row 1: 'answer' must be"),
        ([{"prompt": "q", "answer": "  "}], r"row 1: 'answer' must be .* not empty"),
        ([ROWS[0], "{not json"], r"line 2: not valid JSON"),
        ([ROWS[0], "[1, 2]"], r"line 2: a list, not a JSON object"),
        ([], r"train\.jsonl holds no rows"),
        (["", ""], r"train\.jsonl holds no rows"),
    ],
)
def test_a_bad_file_is_refused_by_row_before_a_model_loads(tmp_path, rows, message):
    with pytest.raises(ConfigError, match=r"task\.path=.*" + message):
        Jsonl.check(config_of(write(tmp_path / "train.jsonl", rows)))


def test_a_missing_file_names_the_setting(tmp_path):
    with pytest.raises(ConfigError, match=r"task\.path=.*none\.jsonl: there is no such file"):
        Jsonl.check(config_of(tmp_path / "none.jsonl"))
    config = config_of(write(tmp_path / "t.jsonl"), eval_path=str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=r"task\.eval_path=.*none\.jsonl: there is no such file"):
        Jsonl.check(config)


def test_a_byte_order_mark_blank_lines_and_the_home_folder_are_fine(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode() + b"\n\n")
    assert Jsonl.check(config_of("~/t.jsonl")) == 1


def test_invalid_utf8_names_its_line(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(json.dumps(ROWS[0]).encode() + b"\n\xff\xfe\n")
    with pytest.raises(ConfigError, match="line 2: not valid JSON"):
        Jsonl.check(config_of(tmp_path / "t.jsonl"))


def test_over_long_prompts_are_counted_and_printed(tmp_path, make_renderer, capsys):
    path = write(tmp_path / "train.jsonl", [{"prompt": "short", "answer": "1"}, {"prompt": "x" * 30, "answer": "1"}])
    config = config_of(path, max_prompt_tokens=10, overlong=Overlong.drop)
    task = Jsonl(config, renderer=make_renderer(max_prompt_tokens=10, overlong=Overlong.drop), seed=0)
    assert task.num_prompts == 1
    assert "of 2 training prompts 1 dropped and 0 truncated" in capsys.readouterr().out


def test_dropping_every_prompt_is_refused(tmp_path, make_renderer):
    path = write(tmp_path / "train.jsonl")
    config = config_of(path, max_prompt_tokens=3, overlong=Overlong.drop)
    with pytest.raises(ConfigError, match=r"no training prompt is left.*max_prompt_tokens=3"):
        Jsonl(config, renderer=make_renderer(max_prompt_tokens=3, overlong=Overlong.drop), seed=0)


def test_the_fingerprint_changes_with_rows_answers_and_rendering(tmp_path, make_renderer):
    def fingerprint(rows, **options) -> str:
        config = config_of(write(tmp_path / "train.jsonl", rows))
        return Jsonl(config, renderer=make_renderer(**options), seed=0).fingerprint()

    other_answer = [ROWS[0] | {"answer": "13"}, ROWS[1]]
    prints = [fingerprint(ROWS), fingerprint(ROWS[:1]), fingerprint(ROWS[::-1]), fingerprint(other_answer)]
    prints.append(fingerprint(ROWS, max_prompt_tokens=5, overlong=Overlong.truncate_left))
    assert len(set(prints)) == 5
    assert fingerprint(ROWS) == prints[0]
