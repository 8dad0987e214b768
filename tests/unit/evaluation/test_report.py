from __future__ import annotations

import io
import json
import math
from dataclasses import replace

from rich.console import Console

from rl.evaluation.report import evaluation_rows, evaluation_table
from rl.types import EvalResult, Sampling

GREEDY = Sampling(temperature=0.0, max_new_tokens=1024, seed=1)
RESULT = EvalResult("gsm8k", "greedy", 0.75, 0.25, 1319, 1, GREEDY, 0, truncated_fraction=0.125, num_errors=2)


def shown(*results: EvalResult) -> list[str]:
    screen = io.StringIO()
    Console(file=screen, width=80).print(evaluation_table(results))
    return [line.rstrip() for line in screen.getvalue().splitlines()]


def test_the_table_says_how_each_set_was_sampled_and_fits_80_columns():
    warm = Sampling(temperature=0.6, max_new_tokens=64, seed=7, top_p=0.95)
    other = replace(RESULT, metric="equivalence/greedy", value=0.8)
    sampled = replace(RESULT, benchmark="aime", metric="pass@8", samples_per_problem=8, sampling=warm, num_problems=30)
    lines = shown(RESULT, other, sampled)
    assert lines[0] == "gsm8k: greedy, at most 1,024 new tokens"
    assert lines[1] == "aime: temperature 0.6, top_p 0.95, top_k -1, seed 7, at most 64 new tokens"
    rows = [line.split() for line in lines if "eval/" in line]
    assert rows == [
        ["eval/gsm8k/greedy", "0.7500", "0.2500", "1,319", "x", "1", "0.125", "2"],
        ["eval/gsm8k/equivalence/greedy", "0.8000", "0.2500", "1,319", "x", "1", "0.125", "2"],
        ["eval/aime/pass@8", "0.7500", "0.2500", "30", "x", "8", "0.125", "2"],
    ]


def test_an_unknown_error_is_null_in_the_file_and_said_in_the_table():
    single = replace(RESULT, stderr=math.nan, num_problems=1)
    (row,) = evaluation_rows([single])
    assert json.loads(json.dumps(row, allow_nan=False))["stderr"] is None
    assert (row["key"], row["sampling"]["max_new_tokens"]) == ("eval/gsm8k/greedy", 1024)
    assert any("unknown" in line for line in shown(single))
