"""Messages to token ids: rendered and tokenized once, for engine, trainer and evaluator alike."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rl.config.schema import ConfigError
from rl.config.tasks import Overlong
from rl.model.vision import ImageReader
from rl.types import IntArray, RenderedWithImages

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
)
"""model.chat_template=plain: contents of the messages, a line break between them."""


class Renderer:
    """`protocols.PromptRenderer` over the tokenizer of a model folder.

    A chat template writes its own beginning of text, so the text is tokenized without special tokens. The plain
    template writes none: there the prompt begins as the tokenizer begins any text.
    """

    def __init__(
        self,
        folder: Path,
        *,
        chat_template_kwargs: Mapping[str, Any],
        max_prompt_tokens: int,
        overlong: Overlong,
        chat_template: str | None = None,
    ) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._folder = folder
        self._kwargs = dict(chat_template_kwargs)
        self._max_prompt_tokens = max_prompt_tokens
        self._overlong = overlong
        self._prefix: list[int] = []
        self._template: str | None = None
        if chat_template == "plain":
            self._template = PLAIN_TEMPLATE
            begin = self.tokenizer("").input_ids[:1]
            self._prefix = begin if begin == [self.tokenizer.bos_token_id] else []
        elif self.tokenizer.chat_template is None:
            raise ConfigError(
                f"the tokenizer of {folder} has no chat template. Use model.chat_template=plain, which joins the "
                "contents of the messages."
            )
        self.num_truncated = 0
        self.num_dropped = 0

    def render(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], *, names: Sequence[str]
    ) -> list[IntArray | None]:
        """[L_p] of each prompt's messages; None where it is over-long and such prompts are dropped.

        `names` say which prompts they are, for errors. Many at once are several times faster than one by one.
        """
        texts = self._texts(conversations)
        with _all_cores():
            encoded = self._token_ids(texts)
        return [
            self._within_limit(self._checked(self._prefix + token_ids, text, name=name), name=name)
            for token_ids, text, name in zip(encoded, texts, names, strict=True)
        ]

    def render_with_images(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[bytes], *, name: str
    ) -> RenderedWithImages | None:
        """Text and images in one go: the placeholders are in the text before it is tokenized, once.

        A prompt with images is never truncated: what is left of an image means nothing.
        """
        if self._template is not None:
            raise ConfigError(
                f"prompt {name} has images, and model.chat_template=plain knows none. Use the model's own: "
                "model.chat_template=null."
            )
        (text,) = self._texts([messages])
        text, grids = self._image_reader.expand(text, images, name=name)
        (encoded,) = self._token_ids([text])
        token_ids = self._checked(encoded, text, name=name)
        if len(token_ids) > self._max_prompt_tokens and self._overlong is Overlong.truncate_left:
            raise ConfigError(
                f"prompt {name} has {len(token_ids)} tokens, more than task.max_prompt_tokens="
                f"{self._max_prompt_tokens}, and its images cannot be cut. Set task.overlong to drop or error."
            )
        kept = self._within_limit(token_ids, name=name)
        if kept is None:
            return None
        reader = self._image_reader
        return RenderedWithImages(kept, reader.position_ids(kept, grids), reader.inputs(images))

    @functools.cached_property
    def _image_reader(self) -> ImageReader:
        """Loaded with the first image."""
        return ImageReader(self._folder, self.tokenizer)

    def _texts(self, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
        return self.tokenizer.apply_chat_template(
            [list(messages) for messages in conversations],
            tokenize=False,
            add_generation_prompt=True,
            chat_template=self._template,
            **self._kwargs,
        )

    def _token_ids(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False).input_ids

    def _within_limit(self, token_ids: list[int], *, name: str) -> IntArray | None:
        limit = self._max_prompt_tokens
        if len(token_ids) > limit:
            if self._overlong is Overlong.error:
                raise ConfigError(
                    f"prompt {name} has {len(token_ids)} tokens, more than task.max_prompt_tokens={limit}. "
                    "Raise it, or set task.overlong to drop or truncate_left."
                )
            if self._overlong is Overlong.drop:
                self.num_dropped += 1
                return None
            self.num_truncated += 1
            token_ids = token_ids[-limit:]
        return np.array(token_ids, dtype=np.int32)

    def _checked(self, token_ids: list[int], text: str, *, name: str) -> list[int]:
        if not token_ids:
            raise ConfigError(f"prompt {name} is empty after the chat template.")
        bos, unknown = self.tokenizer.bos_token_id, self.tokenizer.unk_token_id
        if bos is not None and token_ids[:2] == [bos, bos]:
            raise ConfigError(
                f"prompt {name} begins with two {self.tokenizer.bos_token!r}: the chat template writes one, and so "
                "does the message. Remove it from the data."
            )
        if unknown is not None and unknown in token_ids and self.tokenizer.unk_token not in text:
            raise ConfigError(
                f"prompt {name} has a character that the tokenizer of {self._folder} does not know: {text[:200]!r}. "
                "Use a model whose tokenizer covers the task's text."
            )
        return token_ids


@contextmanager
def _all_cores() -> Iterator[None]:
    """Lets the tokenizer use every core: it reads the variable at each call. Elsewhere a run keeps it off, because a
    process that has used those threads warns whenever another is forked from it."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
