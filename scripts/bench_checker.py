"""Measures the checker: responses scored per second, a few of them hanging, and what each of those costs.

    python scripts/bench_checker.py                    # 8,192 responses of 2,000 words and signs, 4 hanging, 2 workers
    python scripts/bench_checker.py --hanging 0 --workers 8

Prints one JSON object. Responses are made up: 512 problems with 16 answers each, of the kinds that MATH has, two thirds
of them right. The hanging ones state a power of powers, which sympy sets out to write down digit by digit.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter
from collections.abc import Sequence

from rl.config.tasks import CheckerConfig
from rl.tasks.rewards.checker import Checker
from rl.tasks.rewards.verdict import Case, Reason

GROUP_SIZE = 16
HANGING = r"9^{9^{9}} + 1"
SENTENCES = (
    "Let us write the condition as $x_{%d} = %d$ and look at both sides, step by step.",
    "Since $\\frac{%d}{%d}$ is positive, the second factor must be positive as well.",
    "We try the case $n = %d$ first; then the remainder is $%d$, which is not what we want.",
    "So the answer may be %d, but wait, we have to check the sum of the digits again: it is %d.",
)


def right_answer(rng: random.Random, kind: int) -> tuple[str, str, str]:
    """An answer, another way to write it, and a wrong one."""
    a, b, c = rng.randint(2, 60), rng.randint(2, 60), rng.choice((2, 3, 5, 7))
    return (
        (str(a * b), f"{a * b}.0", str(a * b + 1)),
        (f"\\frac{{{a}}}{{{b}}}", f"{a}/{b}", f"\\frac{{{a + 1}}}{{{b}}}"),
        (f"{a}\\sqrt{{{c}}}", f"\\sqrt{{{a * a * c}}}", f"{a}\\sqrt{{{c + 4}}}"),
        (f"x^2+{a}x+{b}", f"{b}+{a}x+x^2", f"x^2-{a}x+{b}"),
        (f"({a},{b})", f"\\left({a}, {b}\\right)", f"({b + 1},{a})"),
        (f"\\frac{{{a}\\pi}}{{{b}}}", f"\\frac{{{a}}}{{{b}}}\\pi", f"\\frac{{{b + 60}\\pi}}{{{a}}}"),
    )[kind]


def thoughts(rng: random.Random, num_tokens: int) -> str:
    """Prose of about `num_tokens` words and signs, which is about as many tokens."""
    parts: list[str] = []
    while num_tokens > 0:
        parts.append(rng.choice(SENTENCES) % (rng.randint(1, 99), rng.randint(1, 999)))
        num_tokens -= len(re.findall(r"\w+|[^\w\s]", parts[-1]))
    return " ".join(parts)


def made_up(rng: random.Random, *, num: int, num_tokens: int, num_hanging: int) -> list[Case]:
    proses = [thoughts(rng, num_tokens) for _ in range(64)]
    cases: list[Case] = []
    while len(cases) < num:
        answer, other_form, wrong = right_answer(rng, rng.choice((0, 0, 0, 0, 1, 1, 2, 3, 4, 5)))
        for _ in range(GROUP_SIZE):
            stated = rng.choice((answer, other_form, wrong))
            end = rng.choice((f"Therefore $\\boxed{{{stated}}}$.", f"\n\nThe answer is ${stated}$."))
            cases.append(Case(f"{rng.choice(proses)} {end}", answer))
    cases = cases[:num]
    for place in rng.sample(range(num), num_hanging):
        cases[place] = Case(f"{rng.choice(proses)} \\boxed{{{HANGING}}}", "10")
    return cases


def measure(cases: Sequence[Case], config: CheckerConfig) -> dict[str, float]:
    checker = Checker(config)
    started = time.perf_counter()
    checker.check(cases[:1])
    start_s = time.perf_counter() - started
    checker.counts = Counter()
    started = time.perf_counter()
    verdicts = checker.check(cases)
    seconds = time.perf_counter() - started
    checker.close()
    assert len(verdicts) == len(cases)
    return {
        "responses": len(cases),
        "seconds": round(seconds, 2),
        "start_s": round(start_s, 2),
        "responses_per_s": round(len(cases) / seconds, 1),
        **{reason.value: checker.counts[reason] for reason in Reason},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=2000, help="words and signs of each response")
    parser.add_argument("--hanging", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=CheckerConfig.timeout_s)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    cases = made_up(
        random.Random(options.seed),
        num=options.responses,
        num_tokens=options.tokens,
        num_hanging=options.hanging,
    )
    config = CheckerConfig(workers=options.workers, timeout_s=options.timeout_s)
    mean_characters = sum(len(case.response) for case in cases) / len(cases)
    print(json.dumps({**measure(cases, config), "hanging": options.hanging, "mean_characters": round(mean_characters)}))


if __name__ == "__main__":
    main()
