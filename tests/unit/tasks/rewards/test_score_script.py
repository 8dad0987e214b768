"""`scripts/score.py`: a line out for each line in, whatever the line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[4] / "scripts" / "score.py"

LINES: list[tuple[bytes, tuple[float, bool, str | None, str]]] = [
    (rb'{"response": "so \\boxed{\\frac{1}{2}}", "answer": "0.5"}', (1.0, True, r"\frac{1}{2}", "ok")),
    (rb'{"response": "\\boxed{0.33}", "answer": "1/3"}', (0.0, False, "0.33", "wrong")),
    (rb'{"response": "I do not know.", "answer": "5"}', (0.0, False, None, "no_answer")),
    (rb'{"response": "\\boxed{9^{9^{9}}}", "answer": "5"}', (0.0, False, None, "timeout")),
    (rb'{"response": "#### 72", "answer": 72, "mode": "equivalence"}', (1.0, True, "72", "ok")),
    (rb'{"response": "#### 72", "answer": "72", "mode": "published", "source": "gsm8k"}', (1.0, True, "72", "ok")),
    (
        rb'{"response": "#### 72", "answer": "72", "mode": "published", "source": "math"}',
        (0.0, False, None, "no_answer"),
    ),
    (rb'{"response": "\\boxed{72}", "answer": "72", "mode": "published"}', (1.0, True, "72", "ok")),
    (
        rb'{"response": "Answer: 7", "answer": "8", "mode": "published", "source": "math_dapo"}',
        (-1.0, False, "7", "wrong"),
    ),
    (b"not json", (0.0, False, None, "error")),
    (b"", (0.0, False, None, "error")),
    (b"\xff\xfe\x00", (0.0, False, None, "error")),
    (b"[1, 2]", (0.0, False, None, "error")),
    (b"[" * 100_000, (0.0, False, None, "error")),
    (b'{"response": 5, "answer": "5"}', (0.0, False, None, "error")),
    (b'{"response": "5"}', (0.0, False, None, "error")),
    (b'{"response": "5", "answer": ""}', (0.0, False, None, "error")),
    (b'{"response": "5", "answer": true}', (0.0, False, None, "error")),
    (b'{"response": "5", "answer": "5", "mode": "strict"}', (0.0, False, None, "error")),
    (b'{"response": "5", "answer": "5", "mode": "published", "source": "mine"}', (0.0, False, None, "error")),
    (rb'{"response": "The answer is \ud800.", "answer": "5"}', (0.0, False, "\ud800", "wrong")),
    (b'{"response": "The answer is 5.", "answer": "5", "more": null}', (1.0, True, "5", "ok")),
]


@pytest.mark.slow
def test_every_line_gets_its_score_in_order():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--task", "gsm8k_math"],
        input=b"\n".join(line for line, _ in LINES),
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    scores = [json.loads(line) for line in done.stdout.splitlines()]
    assert [tuple(score) for score in scores] == [("score", "correct", "extracted", "reason")] * len(LINES)
    assert [tuple(score.values()) for score in scores] == [expected for _, expected in LINES]
    assert b"line 18: 'answer' must be a text or a number, and not empty" in done.stderr


def test_an_unknown_task_is_refused_with_the_names_of_those_there_are():
    command = [sys.executable, str(SCRIPT), "--task", "gsm8k_maths"]
    done = subprocess.run(command, input=b"", capture_output=True, text=False, timeout=60, check=False)
    assert done.returncode == 2
    assert b"gsm8k_math" in done.stderr
