"""geometry3k from a file in the published layout to graded answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rl.config.schema import ConfigError
from rl.config.tasks import MADE, DataConfig, EvalSamplingConfig, MathematicsConfig, Overlong, SamplingConfig, Scoring
from rl.loggers.names import unlisted
from rl.tasks import published
from rl.tasks.made import NUM_HELD_OUT, NUM_TRAINING
from rl.tasks.mathematics import Mathematics
from rl.tasks.published import DATA_SETS, THINK_AND_BOX
from tests.made_answers import answer
from tests.made_images import miniature, png, renderer_of


@pytest.fixture(autouse=True)
def _read_anew():
    published._problems.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return miniature(tmp_path_factory.mktemp("models"))


def row(problem: str, gold: str, *images: bytes) -> dict[str, Any]:
    return {"images": [{"bytes": image, "path": None} for image in images], "problem": problem, "answer": gold}


def config_of(path: Path | str, **values: Any) -> MathematicsConfig:
    config = MathematicsConfig(
        train=["geometry3k"],
        evaluate=["geometry3k"],
        sampling=SamplingConfig(max_new_tokens=9),
        eval_sampling=EvalSamplingConfig(max_new_tokens=8),
        **values,
    )
    config.data.geometry3k = DataConfig(str(path))
    return config


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Numbered parquet shards, as the hub has them. Two problems with one text and two pictures; one is tested on."""
    import pyarrow
    import pyarrow.parquet

    one, two = png(40, 50, seed=1), png(40, 50, seed=2)
    splits = {
        "train": [
            row("<image>Find x.", "5", one),
            row("<image>Find x.", r"2 \sqrt { 221 }", two),
            row("<image>Find x.", "5", one),
            row("From <image> and <image> find y.", "7", one, two),
        ],
        "test": [row("<image>Find x.", "5", one), row("<image>Find z.", "5", one)],
    }
    (tmp_path / "data").mkdir()
    for name, rows in splits.items():
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, tmp_path / "data" / f"{name}-00000-of-00001.parquet")
    return tmp_path


def test_rows_become_prompts_with_their_own_pictures_in_order(data, folder, capsys):
    config = config_of(data)
    assert Mathematics.check(config) == 4
    task = Mathematics(config, renderer=renderer_of(folder), seed=0)
    assert [prompt.prompt_id.rpartition(":")[2] for prompt in task.training] == ["0", "1", "0", "3"]
    first, second, _, both = task.training
    assert first.images != second.images
    assert both.images == first.images + second.images
    assert (first.answer, second.answer) == ("5", r"2 \sqrt { 221 }")
    assert first.messages == (
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": f"Find x. {THINK_AND_BOX}"}]},
    )
    assert [part.get("text", part["type"]) for part in both.messages[0]["content"]][:4] == [
        "From ",
        "image",
        " and ",
        "image",
    ]
    # The test's `Find x.` is the training row with its picture, and not the one with the other.
    assert (
        capsys.readouterr()
        .out.strip()
        .endswith("held-out problems also trained on: 1 (geometry3k/test:0 = geometry3k/train:0)")
    )


def test_another_picture_is_another_run(data, folder):
    prompts = [Mathematics(config_of(data), renderer=renderer_of(folder), seed=0) for _ in range(2)]
    assert prompts[0].fingerprint() == prompts[1].fingerprint()
    prompts[1].training[0] = prompts[1].training[1]
    assert prompts[0].fingerprint() != prompts[1].fingerprint()


def test_accuracy_form_and_equivalence_are_parts_of_the_published_reward(data, folder):
    texts = [r"<think>a</think> \boxed{5}", r"\boxed{5}", r"<think>a</think> \boxed{6}", "so x is 5.", "?"]

    def graded(scoring: Scoring):
        task = Mathematics(config_of(data, scoring=scoring), renderer=renderer_of(folder), seed=0)
        try:
            rollouts = [answer(text, index=index) for index, text in enumerate(texts)]
            return asyncio.run(task.grade(task.training[0], rollouts))
        finally:
            task._checker.close()

    rewards = graded(Scoring.published)
    assert [reward.value for reward in rewards] == pytest.approx([1.0, 0.9, 0.1, 0.0, 0.0])
    assert [reward.parts["accuracy"] for reward in rewards] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert [reward.parts["format"] for reward in rewards] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert [reward.parts["equivalence"] for reward in rewards] == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert [reward.value for reward in graded(Scoring.equivalence)] == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert unlisted([f"reward/part/{name}" for name in rewards[0].parts]) == []


def test_over_long_prompts_are_dropped_with_their_pictures_and_the_order_stays(data, folder):
    task = Mathematics(config_of(data), renderer=renderer_of(folder), seed=0)
    longest = max(len(prompt.token_ids) for prompt in task.training)
    dropping = {"max_prompt_tokens": longest - 1, "overlong": Overlong.drop}
    shorter = Mathematics(config_of(data, **dropping), renderer=renderer_of(folder, **dropping), seed=0)
    assert [prompt.prompt_id for prompt in shorter.training] == [prompt.prompt_id for prompt in task.training[:3]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (row("Find x.", "5", b"png"), r"<image> 0 time\(s\), and there are 1 image\(s\)"),
        (row("<image><image>", "5", b"png"), r"<image> 2 time\(s\), and there are 1 image\(s\)"),
        ({"images": ["a.png"], "problem": "<image>", "answer": "5"}, r"must be the bytes of its file \(got str\)"),
    ],
)
def test_a_row_whose_pictures_are_not_there_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        DATA_SETS["geometry3k"].read(wrong)


def test_a_decoded_picture_is_a_file_again():
    import io

    from PIL import Image

    decoded = Image.open(io.BytesIO(png(4, 5, seed=0)))
    reading = DATA_SETS["geometry3k"].read({"images": [decoded], "problem": "<image>Find x.", "answer": "5"})
    again = Image.open(io.BytesIO(reading.images[0]))
    assert list(again.getdata()) == list(decoded.getdata())


@pytest.mark.parametrize("name", DATA_SETS)
def test_made_rows_are_in_the_published_layout(name):
    data_set = DATA_SETS[name]
    for split, count in ((data_set.train_split, NUM_TRAINING), (data_set.test_split, NUM_HELD_OUT)):
        if split is not None and (split != data_set.test_split or count == NUM_HELD_OUT):
            assert len(published.read_problems(data_set, DataConfig(MADE), split)) == count


def test_a_model_without_eyes_is_refused_before_anything_is_sampled(data, make_renderer):
    with pytest.raises(ConfigError, match="geometry3k/train:0"):
        Mathematics(config_of(data), renderer=make_renderer(chat_template="plain"), seed=0)
