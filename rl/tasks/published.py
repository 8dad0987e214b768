r"""Data sets as they are published, and how the published runs asked their problems and scored the answers.

The layouts, checked against local copies row by row: see each `example`. geometry3k's was not: it is that of its data
card (images, problem, answer). The instructions are those of verl's examples/data_preprocess (gsm8k.py,
math_dataset.py, geo3k.py; 7b19203c52), word for word, because the start of a curve depends on them; DAPO's rows bring
their own (arXiv:2503.14476). AIME and AMC are asked as MATH is.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rl.config.schema import ConfigError
from rl.config.tasks import MADE, DataConfig
from rl.tasks.base import Problem, user_message
from rl.tasks.made import made_rows
from rl.tasks.rewards.published import last_boxed
from rl.tasks.rewards.rules import SOURCE_RULES
from rl.tasks.rows import Row, as_example, require_columns, split_rows

HASHES = 'Let\'s think step by step and output the final answer after "####".'
BOXED = r"Let's think step by step and output the final answer within \boxed{}."

THINK_AND_BOX = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    "The reasoning process MUST BE enclosed within <think> </think> tags. "
    "The final answer MUST BE put in \\boxed{}."
)
IMAGE_MARK = "<image>"
"""In the text of a problem, where an image stands."""

_GOLD = re.compile(r"####\s*(-?[0-9.,]+)\s*$")
_DAPO_PROBLEM = re.compile(r"\A[^\n]*\n\n(.*)\n\n[^\n]*\Z", re.DOTALL)
"""Between the instruction before it and the reminder after it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one row says."""

    messages: tuple[dict[str, Any], ...]
    text: str
    """The bare problem."""
    answer: str
    """The final answer, as the scoring rule of the data set compares it."""
    images: tuple[bytes, ...] = ()
    """See `Prompt.images`."""


@dataclass(frozen=True, slots=True)
class DataSet:
    name: str
    example: Row
    """A right row; its keys are the columns that every row must have."""
    read: Callable[[Row], Reading]
    """Raises ValueError, TypeError or LookupError where a row is not like that."""
    train_split: str | None = None
    test_split: str | None = None
    config_name: str | None = None
    """Of the hub."""
    file: str | None = None
    """Name of the published file, where it is not that of the split."""
    train_rows: int | None = None
    """As published. None: not known exactly, or none."""

    @property
    def has_images(self) -> bool:
        return "images" in self.example

    @property
    def rule(self) -> str:
        """Published scoring rule, a name in `rl.tasks.rewards.rules.RULES`."""
        return SOURCE_RULES[self.name]


def _gsm8k(row: Row) -> Reading:
    match = _GOLD.search(row["answer"])
    if match is None:
        raise ValueError(f"'answer' must end with '#### <number>' (got {row['answer'][-60:]!r})")
    return Reading(user_message(f"{row['question']} {HASHES}"), row["question"], match[1].replace(",", ""))


def _math(row: Row) -> Reading:
    answer = last_boxed(row["solution"])
    if answer is None:
        raise ValueError(f"'solution' must hold the answer in a \\boxed{{}} (got {row['solution'][-60:]!r})")
    return _boxed(row["problem"], answer)  # one training row's box is empty; the published runs have it, too


def _problem_and_answer(row: Row) -> Reading:
    return _boxed(row["problem"], row["answer"])


def _aime(row: Row) -> Reading:
    return _boxed(row["problem"], str(int(row["answer"])))  # some are written 033


def _amc(row: Row) -> Reading:
    answer = float(row["answer"])
    return _boxed(row["question"], str(int(answer)) if answer.is_integer() else str(answer))


def _boxed(problem: str, answer: str) -> Reading:
    return Reading(user_message(f"{problem} {BOXED}"), problem, answer)


def _dapo(row: Row) -> Reading:
    messages = tuple({"role": message["role"], "content": message["content"]} for message in row["prompt"])
    content = messages[-1]["content"]
    match = _DAPO_PROBLEM.match(content)
    return Reading(messages, match[1] if match else content, str(row["reward_model"]["ground_truth"]))


def _geometry3k(row: Row) -> Reading:
    images = tuple(_image_file(image) for image in row["images"])
    num_marks = row["problem"].count(IMAGE_MARK)
    if num_marks != len(images):
        raise ValueError(f"'problem' has {IMAGE_MARK} {num_marks} time(s), and there are {len(images)} image(s)")
    texts = re.split(f"({IMAGE_MARK})", f"{row['problem']} {THINK_AND_BOX}")
    parts = [{"type": "image"} if text == IMAGE_MARK else {"type": "text", "text": text} for text in texts if text]
    # Hundreds of problems are `Find x.`: what tells them apart is the picture.
    pictures = "".join(hashlib.blake2b(image, digest_size=16).hexdigest() for image in images)
    return Reading(({"role": "user", "content": parts},), f"{row['problem']} {pictures}", row["answer"], images)


def _image_file(image: Any) -> bytes:
    """As parquet holds it, `{"bytes": ..., "path": ...}`, or as `datasets` decodes it."""
    if isinstance(image, Mapping):
        image = image["bytes"]
    elif hasattr(image, "save"):
        file = io.BytesIO()
        image.save(file, format="PNG")
        image = file.getvalue()
    if not isinstance(image, bytes):
        raise ValueError(f"an image must be the bytes of its file (got {type(image).__name__})")
    return image


_DAPO_EXAMPLE = {
    "prompt": [{"role": "user", "content": "Solve ... Answer: $Answer ...\n\nWhat is 7 + 5?\n\nRemember ..."}],
    "reward_model": {"ground_truth": "12", "style": "rule-lighteval/MATH_v2"},
}
_AIME_EXAMPLE = {"problem": "What is 7 + 5?", "answer": "012"}

DATA_SETS = {
    data_set.name: data_set
    for data_set in (
        DataSet(
            "gsm8k",
            example={"question": "Tom has 3 apples and buys 4. How many has he?", "answer": "3 + 4 = 7\n#### 7"},
            read=_gsm8k,
            train_split="train",
            test_split="test",
            config_name="main",
            train_rows=7473,
        ),
        DataSet(
            "math",
            example={"problem": "What is $7 + 5$?", "solution": "It is $\\boxed{12}$."},
            read=_math,
            train_split="train",
            test_split="test",
            train_rows=7500,
        ),
        DataSet(
            "math_500",
            example={"problem": "What is $7 + 5$?", "answer": "12"},
            read=_problem_and_answer,
            test_split="test",
        ),
        DataSet(
            "dapo_math",
            example=_DAPO_EXAMPLE,
            read=_dapo,
            train_split="train",
            file="dapo-math-17k.parquet",
        ),
        DataSet(
            "dapo_aime_2024",
            example=_DAPO_EXAMPLE,
            read=_dapo,
            test_split="train",
            file="aime-2024.parquet",
        ),
        DataSet("aime_2024", example=_AIME_EXAMPLE, read=_aime, test_split="train"),
        DataSet("aime_2025", example=_AIME_EXAMPLE, read=_aime, test_split="test"),
        DataSet("amc23", example={"question": "What is 7 + 5?", "answer": 12.0}, read=_amc, test_split="test"),
        DataSet(
            "geometry3k",
            example={"images": [{"bytes": b"..."}], "problem": "<image>Find x.", "answer": "12"},
            read=_geometry3k,
            train_split="train",
            test_split="test",
            train_rows=2101,
        ),
    )
}


def read_problems(data_set: DataSet, data: DataConfig, split: str) -> tuple[Problem, ...]:
    """One for each row, in order; rows that repeat messages and answer are the same object.

    Raises ConfigError naming the first row that is not in the published layout.
    """
    return _problems(data_set.name, split, data.path, data.revision)


@lru_cache(maxsize=32)  # the check before a run and the run itself read the same rows
def _problems(name: str, split: str, path: str, revision: str | None) -> tuple[Problem, ...]:
    data_set, key = DATA_SETS[name], f"task.data.{name}.path"
    if path == MADE:
        rows = made_rows(name, is_held_out=split == data_set.test_split)
    else:
        rows = split_rows(path, split, key=key, file=data_set.file, config_name=data_set.config_name, revision=revision)
    return tuple(_interned(data_set, rows, split, source=f"{key}={path} ({split})"))


def _interned(data_set: DataSet, rows: Iterator[Row], split: str, *, source: str) -> Iterator[Problem]:
    """DAPO-Math-17k has 1.8 million rows of some 17 thousand problems: each problem is kept once."""
    known: dict[tuple[str, ...], Problem] = {}
    for number, row in enumerate(rows, 1):
        require_columns(row, number, data_set.example, source=source)
        try:
            reading = data_set.read(row)
            # With images the contents are lists of parts, and the text tells problems apart.
            contents = [reading.text] if reading.images else [message["content"] for message in reading.messages]
            key = (reading.answer, *contents)
            if not all(isinstance(part, str) for part in key) or not all(key[1:]):
                raise ValueError(f"problem and answer must be texts, and the problem not empty (got {key!r:.200})")
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{source}, row {number}: {error}. A row looks like {as_example(data_set.example)}"
            ) from error
        if key not in known:
            prompt_id = f"{data_set.name}/{split}:{number - 1}"
            known[key] = Problem(
                prompt_id,
                reading.messages,
                reading.answer,
                source=data_set.name,
                text=reading.text,
                images=reading.images,
            )
        yield known[key]
