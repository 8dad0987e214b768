"""A few rows of each data set in its published layout, made by code: for smoke runs, where there is no network.

The problems are sums, so that every rule has something to judge; they are none of the published ones.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from rl.tasks.rows import Row

NUM_TRAINING = 32
NUM_HELD_OUT = 4


def made_rows(name: str, *, is_held_out: bool) -> Iterator[Row]:
    """Rows of data set `name`; training and held-out rows share no problem."""
    first, count = (NUM_TRAINING, NUM_HELD_OUT) if is_held_out else (0, NUM_TRAINING)
    for number in range(first, first + count):
        yield _ROWS[name](number, number + 7)


def _gsm8k(a: int, b: int) -> Row:
    return {"question": f"Tom has {a} apples and buys {b}. How many has he?", "answer": f"{a} + {b}\n#### {a + b}"}


def _boxed(a: int, b: int) -> Row:
    solution = f"It is $\\boxed{{{a + b}}}$."
    return {"problem": f"What is ${a} + {b}$?", "solution": solution, "answer": str(a + b)}


def _amc(a: int, b: int) -> Row:
    return {"question": f"What is ${a} + {b}$?", "answer": float(a + b)}


def _dapo(a: int, b: int) -> Row:
    content = (
        "Solve it. The last line is of the form Answer: $Answer.\n\n"
        f"What is ${a} + {b}$?\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
    return {"prompt": [{"role": "user", "content": content}], "reward_model": {"ground_truth": str(a + b)}}


def _geometry3k(a: int, b: int) -> Row:
    """A rectangle of a x b, and its half perimeter."""
    return {"images": [{"bytes": _rectangle(a, b)}], "problem": f"<image>Find {a} + {b}.", "answer": str(a + b)}


def _rectangle(a: int, b: int) -> bytes:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (64, 96), "white")
    ImageDraw.Draw(image).rectangle((8, 8, 12 + a, 12 + b), outline="black")
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


_ROWS: dict[str, Any] = {
    "gsm8k": _gsm8k,
    "math": _boxed,
    "math_500": _boxed,
    "dapo_math": _dapo,
    "dapo_aime_2024": _dapo,
    "aime_2024": _boxed,
    "aime_2025": _boxed,
    "amc23": _amc,
    "geometry3k": _geometry3k,
}
