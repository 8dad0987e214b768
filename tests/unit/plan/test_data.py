"""plan.data: rows, template, over-long prompts and the reward, as the run will have them, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl.config.compose import compose_run_config
from rl.config.schema import ConfigError, RunConfig
from rl.config.tasks import Overlong
from rl.model.light_tokenizer import LightTokenizer, read_light_tokenizer
from rl.model.renderer import PLAIN_TEMPLATE, Renderer
from rl.plan.data import data_lines
from rl.plan.report import print_plan
from tests.command import environment

ROWS = [{"prompt": f"what is {n} + {n}?", "answer": str(2 * n)} for n in range(1, 6)]
SMALL = ["task=jsonl", "algorithm.prompts_per_step=2", "algorithm.group_size=2"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def lines_of(rows: Path, model: Path, *words: str) -> list[str]:
    settings = [f"task.path={rows}", "model=hf", f"model.path={model}", "task.sampling.max_new_tokens=8"]
    return data_lines(compose_run_config([*SMALL, *settings, "task.eval_sampling.max_new_tokens=8", *words]))


def test_it_says_what_the_prompts_are_and_that_the_reward_knows_right_from_wrong(rows, tiny_qwen3):
    lines = lines_of(rows, tiny_qwen3)
    assert "prompts: 5, of 14 tokens on average and 14 at most" in lines  # one token a character
    assert "over-long: none has more than task.max_prompt_tokens=1,024" in lines
    assert "template: rendered, tokenized and decoded again, all come back the same" in lines
    assert "reward of the task: 3 of 3 problems tell their right answer from a wrong one" in lines


@pytest.mark.parametrize(
    ("overlong", "effect"), [("error", "the run would refuse them"), ("drop", "dropped"), ("truncate_left", "cut")]
)
def test_over_long_prompts_are_counted_and_what_becomes_of_them_is_said(rows, tiny_qwen3, overlong, effect):
    rows.write_text(rows.read_text() + json.dumps({"prompt": "what is 100 + 100?", "answer": "200"}) + "\n")
    lines = lines_of(rows, tiny_qwen3, "task.max_prompt_tokens=15", f"task.overlong={overlong}")
    (line,) = [line for line in lines if line.startswith("over-long")]
    assert line.startswith("over-long: 1 have more than task.max_prompt_tokens=15 and are " + effect)
    assert line.endswith("first rows.jsonl:5")


def test_a_character_that_the_tokenizer_does_not_know_does_not_come_back(rows, tiny_qwen3):
    rows.write_text(rows.read_text() + json.dumps({"prompt": "what is é?", "answer": "200"}) + "\n")
    assert "template: rendered, tokenized and decoded again, 1 come back changed" in lines_of(rows, tiny_qwen3)


def test_a_rule_that_no_phrasing_satisfies_is_named(rows, tiny_qwen3):
    rows.write_text(json.dumps({"prompt": "a", "answer": "two words"}) + "\n")
    lines = lines_of(rows, tiny_qwen3, "task.rule=last_number")
    assert "reward of the task: 0 of 1 problems" in lines[-1]
    assert "rows.jsonl:0: no phrasing of its answer 'two words' scores right" in lines[-1]


def test_prompts_with_images_are_counted_by_their_text():
    words = ["experiment=qwen3_5_35b_a3b_grpo_colocated", "task.data.geometry3k.path=made"]
    lines = data_lines(compose_run_config([*words, "model=tiny"]))
    assert any(line.startswith("images: ") and "whose tokens are not counted here" in line for line in lines)
    assert any(line.startswith("reward of geometry3k: 3 of 3 problems tell") for line in lines)


@pytest.mark.parametrize("template", [None, "plain"])
def test_it_renders_and_tokenizes_as_the_run_does(tiny_qwen3, template):
    renderer = Renderer(
        tiny_qwen3,
        chat_template_kwargs={},
        max_prompt_tokens=100,
        overlong=Overlong.error,
        chat_template=template,
    )
    conversations = [
        [{"role": "user", "content": "what is 2 + 2?"}],
        [{"role": "system", "content": "be short."}, {"role": "user", "content": "why?"}],
    ]
    light = read_light_tokenizer(tiny_qwen3, plain_template=PLAIN_TEMPLATE if template else None)
    assert light is not None
    texts = [light.render(messages) for messages in conversations]
    expected = renderer.render(conversations, names=["a", "b"])
    assert light.encode(texts) == [ids.tolist() for ids in expected if ids is not None]


def test_a_template_comes_out_as_in_transformers():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    template = (
        "{%- for m in messages %}\n  {%- if m.role == 'end' %}{% break %}{% endif %}\n<{{ m.content | tojson }}>"
        "{%- endfor %}\n  {% if thinking %}\n!{% endif %}\n{{ bos_token }}"
    )
    backend = Tokenizer(models.WordLevel({"a": 0, "B": 1}, unk_token="a"))
    messages = [{"role": "user", "content": "<é>"}, {"role": "end", "content": "x"}]
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="B")
    fast.chat_template = template
    light = LightTokenizer(backend, template, special_tokens={"bos_token": "B"}, is_plain=False)
    for thinking in (True, False):
        expected = fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, thinking=thinking)
        assert light.render(messages, thinking=thinking) == expected


def test_a_template_that_refuses_names_itself():
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    light = LightTokenizer(backend, "{{ raise_exception('no system message') }}", special_tokens={}, is_plain=False)
    with pytest.raises(ConfigError, match="chat template does not take the task's messages: no system message"):
        light.render([{"role": "user", "content": "x"}])


PROGRAM = """
import sys
from rl.__main__ import main
code = main(sys.argv[1:])
print(code, *[name for name in ("torch", "transformers", "ray") if name in sys.modules])
"""


def test_by_the_command_it_imports_no_torch(tmp_path):
    words = ["experiment=quickstart", "mode=plan", "plan.data=true"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0"
    assert "prompts: 10,000, of 6 tokens on average and 6 at most" in done.stdout


def test_data_that_cannot_be_read_takes_nothing_else_from_the_plan(monkeypatch, capsys):
    def offline(config: RunConfig) -> list[str]:
        raise ConfigError("task.data.gsm8k.path=openai/gsm8k is no folder here")

    monkeypatch.setattr("rl.plan.data.data_lines", offline)
    assert print_plan(compose_run_config(["experiment=qwen3_8b_grpo", "plan.data=true", "mode=plan"])) == 2
    page = capsys.readouterr().out
    assert "\nmemory\n" in page and "\nverdict: cannot run as it is: see data\nmemory: fits (margin " in page
    assert "\ndata\n  cannot be read: task.data.gsm8k.path=openai/gsm8k is no folder here\n" in page


def test_it_belongs_to_a_plan():
    from rl.config.check import check_plan

    with pytest.raises(ConfigError, match=r"plan\.data=true is for mode=plan \(got mode=train\)"):
        check_plan(compose_run_config(["experiment=quickstart", "plan.data=true"]))
