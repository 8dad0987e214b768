"""Seconds to render, tokenize and filter many prompts, as a run does it at its start.

python scripts/bench_prompts.py MODEL_FOLDER GSM8K_FOLDER [NUM_PROMPTS]
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from itertools import cycle, islice
from pathlib import Path

from rl.config.tasks import DataConfig, EvalSamplingConfig, MathematicsConfig, Overlong, SamplingConfig
from rl.model.renderer import Renderer
from rl.tasks.base import ProblemTask
from rl.tasks.mathematics import training_problems

MAX_PROMPT_TOKENS = 256
"""Below the longest, so that the filter has something to drop."""


def main(model_folder: str, data_folder: str, num_prompts: int = 100_000) -> None:
    config = MathematicsConfig(
        train=["gsm8k"],
        evaluate=[],
        max_prompt_tokens=MAX_PROMPT_TOKENS,
        overlong=Overlong.drop,
        sampling=SamplingConfig(max_new_tokens=1),
        eval_sampling=EvalSamplingConfig(max_new_tokens=1),
    )
    config.data.gsm8k = DataConfig(data_folder)
    rows = islice(cycle(training_problems(config)), num_prompts)
    problems = [dataclasses.replace(problem) for problem in rows]  # objects of their own: none is rendered only once
    renderer = Renderer(
        Path(model_folder), chat_template_kwargs={}, max_prompt_tokens=MAX_PROMPT_TOKENS, overlong=Overlong.drop
    )
    began, cpu = time.perf_counter(), time.process_time()
    task = ProblemTask(config, renderer=renderer, seed=0, training=problems, held_out={})
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    num_tokens = sum(len(prompt.token_ids) for prompt in task.training)
    print(
        f"{num_prompts:,} prompts rendered, tokenized and filtered in {seconds:.1f} s ({cpu_s:.1f} s of CPU on "
        f"{len(os.sched_getaffinity(0))} cores): {task.num_prompts:,} kept, {num_tokens:,} tokens"
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
