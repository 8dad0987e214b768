"""A model's tokenizer and chat template without transformers, whose import takes torch with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from rl.config.schema import ConfigError


class LightTokenizer:
    """Renders and tokenizes as `rl.model.renderer.Renderer` does, which a run uses; a test compares the two."""

    def __init__(
        self, tokenizer: Tokenizer, template: str, *, special_tokens: Mapping[str, str], is_plain: bool
    ) -> None:
        """`special_tokens`: what templates know by name, such as bos_token. `is_plain`: the template writes none."""
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens)
        self._template = _environment().from_string(template)
        self._prefix: list[int] = []
        if is_plain:
            begin = tokenizer.encode("").ids[:1]
            bos = tokenizer.token_to_id(special_tokens.get("bos_token", ""))
            self._prefix = begin if bos is not None and begin == [bos] else []

    def render(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        """The text of a prompt. Raises ConfigError where the template refuses."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
                **kwargs,
            )
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template does not take the task's messages: {error}") from error

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._prefix + one.ids for one in encoded]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids)[len(self._prefix) :], skip_special_tokens=False)


def read_light_tokenizer(folder: Path, *, plain_template: str | None) -> LightTokenizer | None:
    """Of a folder in Hugging Face layout. None: it has no tokenizer.json. `plain_template` replaces the model's own."""
    file, settings_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not file.is_file():
        return None
    settings = json.loads(settings_file.read_text(encoding="utf-8")) if settings_file.is_file() else {}
    special = {name: _content(value) for name, value in settings.items() if name.endswith("_token") and value}
    template = plain_template or _own_template(folder, settings)
    return LightTokenizer(
        Tokenizer.from_file(str(file)), template, special_tokens=special, is_plain=plain_template is not None
    )


def _own_template(folder: Path, settings: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings["chat_template"]  # that there is one, the model's own check has seen
    if isinstance(template, str):
        return template
    named = {entry["name"]: entry["template"] for entry in template}
    return named["default"]


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, Mapping) else str(token)


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers makes it: the same text comes out of the same template."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
