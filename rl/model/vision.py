"""Images of a prompt: their placeholders, pixels and rotary positions, as the processors of the Qwen-VL families do it.

Only the image processor of the model's folder is loaded, not its whole processor: that one needs torchvision for
videos. What the whole one would make of the same text is the same; a test compares the two.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl.config.schema import ConfigError
from rl.types import IntArray

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Model types whose images become `pixel_values` and `image_grid_thw`, with one placeholder for each merged patch."""

PREPROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
INPUT_NAMES = ("pixel_values", "image_grid_thw")
KEPT_PROMPTS = 64
"""Prompts whose pixels a process keeps: those of a group are read once for each of its answers."""


class ImageReader:
    """What a model's folder says about images."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        """Raises ConfigError for a model that takes none, or of a family that is not known here."""
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if values["model_type"] not in FAMILIES:
            raise ConfigError(
                f"the task's prompts have images, and the model of {folder} is a {values['model_type']}. Images work "
                f"with {', '.join(FAMILIES)}. Use such a model, or a task of text."
            )
        if not any((folder / name).is_file() for name in PREPROCESSOR_FILES):
            raise ConfigError(
                f"the task's prompts have images, and {folder} has no {' or '.join(PREPROCESSOR_FILES)} that says how "
                "the model sees them. Use a complete folder of the model."
            )
        self._folder = folder
        self._token_id: int = values["image_token_id"]
        self.placeholder: str = tokenizer.convert_ids_to_tokens(self._token_id)
        self._merge_size: int = _image_processor(folder).merge_size

    def expand(self, text: str, images: Sequence[bytes], *, name: str) -> tuple[str, NDArray[np.int64]]:
        """The text with as many placeholders for each image as it has merged patches, and the grids [images, 3].

        A grid is (frames, rows, columns) of patches. Raises ConfigError unless text and images fit together.
        """
        parts = text.split(self.placeholder)
        if len(parts) - 1 != len(images):
            raise ConfigError(
                f"prompt {name} has {len(images)} image(s), and {len(parts) - 1} time(s) {self.placeholder} after the "
                "chat template. Use a model whose chat template knows images, and keep the placeholder out of the data."
            )
        grids = _make_inputs(self._folder, tuple(images), name=name)["image_grid_thw"]
        counts = grids.prod(axis=1) // self._merge_size**2
        pieces = [self.placeholder * count + part for count, part in zip(counts.tolist(), parts[1:], strict=True)]
        return parts[0] + "".join(pieces), grids

    def position_ids(self, token_ids: Sequence[int] | IntArray, grids: NDArray[np.int64]) -> IntArray:
        return image_positions(token_ids, grids, placeholder_id=self._token_id, merge_size=self._merge_size)

    def inputs(self, images: Sequence[bytes]) -> PixelInputs:
        return PixelInputs(self._folder, tuple(images))


def image_positions(
    token_ids: Sequence[int] | IntArray, grids: NDArray[np.int64], *, placeholder_id: int, merge_size: int
) -> IntArray:
    """[3, L] multimodal rotary positions: frame, row and column within an image, and text counts on in all three.

    `grids` is [images, 3], see `ImageReader.expand`. What follows an image begins after the larger of its sides, in
    merged patches.
    """
    ids = np.asarray(token_ids)
    positions = np.empty((3, len(ids)), dtype=np.int32)
    place = position = 0
    for frames, height, width in grids.tolist():
        start = place + int((ids[place:] == placeholder_id).argmax())
        num_text = start - place
        positions[:, place:start] = np.arange(position, position + num_text)
        position += num_text
        rows, columns = height // merge_size, width // merge_size
        place = start + frames * rows * columns
        assert (ids[start:place] == placeholder_id).all(), "placeholders and grid of an image differ"
        positions[:, start:place] = position + np.indices((frames, rows, columns)).reshape(3, -1)
        position += max(rows, columns)
    positions[:, place:] = np.arange(position, position + len(ids) - place)
    return positions


@dataclass(frozen=True)
class PixelInputs(Mapping[str, NDArray[Any]]):
    """The model's inputs for some images, made where they are read; what is stored and sent is the files."""

    folder: Path
    """Of the model."""
    images: tuple[bytes, ...]

    def __getitem__(self, name: str) -> NDArray[Any]:
        return _kept_inputs(self.folder, self.images)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(INPUT_NAMES)

    def __len__(self) -> int:
        return len(INPUT_NAMES)


@lru_cache(maxsize=KEPT_PROMPTS)
def _kept_inputs(folder: Path, images: tuple[bytes, ...]) -> dict[str, NDArray[Any]]:
    return _make_inputs(folder, images, name="with these images")


def _make_inputs(folder: Path, images: tuple[bytes, ...], *, name: str) -> dict[str, NDArray[Any]]:
    from PIL import Image, UnidentifiedImageError

    try:
        pictures = [Image.open(io.BytesIO(image)).convert("RGB") for image in images]
    except (UnidentifiedImageError, OSError) as error:
        raise ConfigError(f"an image of prompt {name} cannot be read ({error}). Give PNG or JPEG files.") from error
    made = _image_processor(folder)(images=pictures, return_tensors="np")
    return {key: np.asarray(made[key]) for key in INPUT_NAMES}


@lru_cache(maxsize=4)
def _image_processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder)
