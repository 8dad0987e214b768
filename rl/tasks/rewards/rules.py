"""Names of the rules, and which one published runs score a data source with. `judge.py` has the rules themselves."""

from __future__ import annotations

EQUIVALENCE = "equivalence"
PUBLISHED_RULES = ("gsm8k", "math", "dapo", "geometry3k")
RULES = (EQUIVALENCE, *PUBLISHED_RULES)

SOURCE_RULES = {
    **dict.fromkeys(("gsm8k", "openai/gsm8k"), "gsm8k"),
    **dict.fromkeys(
        (
            *("math", "DigitalLearningGmbH/MATH-lighteval", "lighteval/MATH", "EleutherAI/hendrycks_math"),
            *("math_500", "HuggingFaceH4/MATH-500", "aime_2024", "aime_2025", "amc23"),
        ),
        "math",
    ),
    **dict.fromkeys(
        ("dapo_math", "math_dapo", "BytedTsinghua-SIA/DAPO-Math-17k", "dapo_aime_2024", "BytedTsinghua-SIA/AIME-2024"),
        "dapo",
    ),
    **dict.fromkeys(("geometry3k", "hiyouga/geometry3k"), "geometry3k"),
}
"""Data source, by the name of ours or its hub id -> its published rule. AIME and AMC are asked as MATH is."""

TASK_SOURCES = {
    "gsm8k": ("gsm8k",),
    "math": ("math",),
    "gsm8k_math": ("gsm8k", "math"),
    "dapo_math": ("dapo_math",),
    "aime_2024": ("aime_2024",),
    "aime_2025": ("aime_2025",),
    "amc23": ("amc23",),
    "geometry3k": ("geometry3k",),
}
"""Task -> its sources. Tasks of other names have no published rule."""


def published_rules(task: str, source: str | None) -> tuple[str, ...]:
    """The published rule of a row; without its source, those of all sources of the task. Raises ValueError."""
    if source is not None:
        if source not in SOURCE_RULES:
            raise ValueError(f"source '{source}' has no published rule; one of {', '.join(SOURCE_RULES)} has")
        return (SOURCE_RULES[source],)
    if task not in TASK_SOURCES:
        raise ValueError(f"task '{task}' has no published rule; {', '.join(TASK_SOURCES)} have")
    return tuple(dict.fromkeys(SOURCE_RULES[name] for name in TASK_SOURCES[task]))
