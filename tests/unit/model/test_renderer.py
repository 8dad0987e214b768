from __future__ import annotations

import os
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.config.schema import ConfigError
from rl.config.tasks import Overlong
from rl.model.renderer import Renderer
from tests.tiny_models import write_char_tokenizer

CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{% if not thinking | default(true) %}/no{% endif %}"
)


def folder_with(
    folder: Path, *, chat_template: str | None = CHAT, bos: str | None = "<s>", unknown: bool = False
) -> Path:
    """A character tokenizer that writes `bos` before any text, as Llama's does."""
    tokenizer = write_char_tokenizer(folder, string.ascii_letters + string.digits + " []/\n")
    if bos is not None:
        from tokenizers import processors

        tokenizer.add_special_tokens({"bos_token": bos})
        tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    if unknown:
        tokenizer.add_special_tokens({"unk_token": "<pad>"})
    tokenizer.chat_template = chat_template
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    return folder


def renderer_of(folder: Path, **options: Any) -> Renderer:
    defaults: dict[str, Any] = {"chat_template_kwargs": {}, "max_prompt_tokens": 100, "overlong": Overlong.error}
    return Renderer(folder, **(defaults | options))


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def text_of(renderer: Renderer, messages: list[dict[str, Any]]) -> str:
    (token_ids,) = renderer.render([messages], names=["p"])
    assert token_ids is not None and token_ids.dtype.name == "int32"
    return renderer.tokenizer.decode(token_ids)


def test_the_chat_template_writes_the_only_beginning_of_text(tmp_path):
    assert text_of(renderer_of(folder_with(tmp_path)), user("hi")) == "<s>[user]hi[assistant]"


def test_arguments_reach_the_chat_template(tmp_path):
    renderer = renderer_of(folder_with(tmp_path), chat_template_kwargs={"thinking": False})
    assert text_of(renderer, user("hi")) == "<s>[user]hi[assistant]/no"


def test_plain_joins_the_contents_and_begins_as_any_text_does(tmp_path):
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    with_bos = renderer_of(folder_with(tmp_path / "a", chat_template=None), chat_template="plain")
    without = renderer_of(folder_with(tmp_path / "b", chat_template=CHAT, bos=None), chat_template="plain")
    assert text_of(with_bos, messages) == "<s>a\nb"
    assert text_of(without, messages) == "a\nb"


def test_a_second_beginning_of_text_in_the_data_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"prompt row:7 begins with two '<s>'"):
        renderer_of(folder_with(tmp_path, chat_template="{{ bos_token }}{{ messages[0].content }}")).render(
            [user("<s>hi")], names=["row:7"]
        )


def test_a_tokenizer_without_a_chat_template_names_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"has no chat template\. Use model\.chat_template=plain"):
        renderer_of(folder_with(tmp_path, chat_template=None))


def test_an_over_long_prompt_is_an_error_by_default(tmp_path):
    folder = folder_with(tmp_path, chat_template=None, bos=None)
    renderer = renderer_of(folder, chat_template="plain", max_prompt_tokens=4)
    assert text_of(renderer, user("abcd")) == "abcd"
    with pytest.raises(ConfigError, match=r"prompt row:3 has 5 tokens, more than task\.max_prompt_tokens=4"):
        renderer.render([user("abcde")], names=["row:3"])


def test_over_long_prompts_are_dropped_or_cut_on_the_left_and_counted(tmp_path):
    folder = folder_with(tmp_path, chat_template=None, bos=None)
    options = {"chat_template": "plain", "max_prompt_tokens": 4}
    dropping = renderer_of(folder, overlong=Overlong.drop, **options)
    cutting = renderer_of(folder, overlong=Overlong.truncate_left, **options)
    dropped, kept = dropping.render([user("abcdef"), user("abcd")], names=["a", "b"])
    assert dropped is None and kept is not None
    assert [text_of(cutting, user(text)) for text in ("abcdef", "abcd", "uvwxyz")] == ["cdef", "abcd", "wxyz"]
    assert (dropping.num_dropped, dropping.num_truncated) == (1, 0)
    assert (cutting.num_dropped, cutting.num_truncated) == (0, 2)


def test_many_at_once_are_what_each_is_alone_and_the_filter_measures_what_is_rolled_out(tmp_path):
    """The template's argument adds three tokens to each prompt."""
    options: dict[str, Any] = {"chat_template_kwargs": {"thinking": False}}
    folder = folder_with(tmp_path)
    texts = ["a", "bc", "de", "f"]
    alone = [renderer_of(folder, **options).render([user(text)], names=["p"])[0] for text in texts]
    limit = max(len(ids) for ids in alone if ids is not None) - 1
    at_once = renderer_of(folder, **(options | {"max_prompt_tokens": limit, "overlong": Overlong.drop}))
    rendered = at_once.render([user(text) for text in texts], names=texts)
    assert [ids is None for ids in rendered] == [False, True, True, False] and at_once.num_dropped == 2
    for together, single in zip(rendered, alone, strict=True):
        assert together is None or np.array_equal(together, single)
    without = renderer_of(folder, max_prompt_tokens=limit, overlong=Overlong.drop)
    assert all(ids is not None for ids in without.render([user(text) for text in texts], names=texts))
    cut = renderer_of(folder, **(options | {"max_prompt_tokens": limit, "overlong": Overlong.truncate_left}))
    (ids,) = cut.render([user("bc")], names=["p"])
    assert alone[1] is not None and np.array_equal(ids, alone[1][1:])


def test_tokenizing_leaves_the_variable_of_parallelism_as_it_was(tmp_path, monkeypatch):
    renderer = renderer_of(folder_with(tmp_path))
    for value in ("false", None):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", value) if value else monkeypatch.delenv("TOKENIZERS_PARALLELISM")
        renderer.render([user("a")], names=["p"])
        assert os.environ.get("TOKENIZERS_PARALLELISM") == value


def test_a_character_that_the_tokenizer_does_not_know_is_refused(tmp_path):
    renderer = renderer_of(folder_with(tmp_path, chat_template=None, bos=None, unknown=True), chat_template="plain")
    with pytest.raises(ConfigError, match=r"prompt row:1 has a character that the tokenizer .* does not know"):
        renderer.render([user("5 \u20ac")], names=["row:1"])


def test_an_empty_prompt_is_refused(tmp_path):
    renderer = renderer_of(folder_with(tmp_path, chat_template=None, bos=None), chat_template="plain")
    with pytest.raises(ConfigError, match="prompt row:1 is empty"):
        renderer.render([user("")], names=["row:1"])
