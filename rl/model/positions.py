"""How long a sequence a model takes, by its config.json, as transformers 5 reads that (modeling_rope_utils.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl.config.schema import ConfigError

POSITIONS_KEY = "max_position_embeddings"
ORIGINAL_KEY = "original_max_position_embeddings"
"""Positions before they were stretched."""
ROPE_KEYS = ("rope_scaling", "rope_parameters")
"""Where the kind of rotary positions stands, in older files and in newer ones. Of both the first counts."""
STRETCHED_FROM_ORIGINAL = ("yarn", "longrope", "su", "llama3")
"""Kinds whose frequencies depend on `ORIGINAL_KEY`, which is `POSITIONS_KEY` where no one says it."""


def max_positions(text: Mapping[str, Any]) -> int | None:
    """Of the text part of a config.json; None: it does not say.

    Raises ConfigError where it says something else than a number of positions.
    """
    written = text.get(POSITIONS_KEY)
    if written is None:
        return None
    if isinstance(written, bool) or not isinstance(written, int) or written < 1:
        raise ConfigError(
            f"{POSITIONS_KEY}={written!r:.60}, of config.json or model.hf_overrides, must be a whole number of tokens, "
            "at least 1."
        )
    return min((_reach(rope, written, _original(rope, text)) for rope in _rope_settings(text)), default=written)


def max_positions_of(text_config: Any) -> int | None:
    """Of the text part of a config that transformers has read; some classes have the number under another name."""
    return max_positions({**text_config.to_dict(), POSITIONS_KEY: getattr(text_config, POSITIONS_KEY, None)})


def check_stretch(original: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
    """Of whole config.json files, before and after overrides: raises ConfigError for another number of positions where
    the stretched ones would be stretched from that, unnoticed."""
    before, after = (values.get("text_config") or values for values in (original, changed))
    if before.get(POSITIONS_KEY) == after.get(POSITIONS_KEY):
        return
    for rope in _rope_settings(after):
        if _kind(rope) in STRETCHED_FROM_ORIGINAL and _original(rope, after) is None:
            where = next(key for key in ROPE_KEYS if after.get(key))
            raise ConfigError(
                f"model.hf_overrides: {POSITIONS_KEY}={after.get(POSITIONS_KEY)}: this model stretches its "
                f"{_kind(rope)} positions from as many as that key says, so it would change every one of them. Say the "
                f"number before beside it: {where}.{ORIGINAL_KEY}={before.get(POSITIONS_KEY)}."
            )


def _rope_settings(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Of each kind of rotary positions: one, or one for each type of layers."""
    found = next((text[key] for key in ROPE_KEYS if text.get(key)), None)
    if not isinstance(found, Mapping):
        return
    nested = [value for value in found.values() if isinstance(value, Mapping)]
    yield from nested or [found]


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _original(rope: Mapping[str, Any], text: Mapping[str, Any]) -> int | None:
    """Phi-3 writes it beside the rotary settings, and there it comes first. None: nobody says it."""
    return text.get(ORIGINAL_KEY) or rope.get(ORIGINAL_KEY)


def _reach(rope: Mapping[str, Any], written: int, original: int | None) -> int:
    """Positions up to which one kind is what it was trained for, and the same for each sequence of a batch.

    - yarn: the original ones times `factor`; `written` counts the stretched ones, and no engine takes more.
    - longrope: past the original ones all sequences of a batch get other frequencies. A trainer's batches are not the
      engine's, so the two would compute different log-probs.
    - dynamic: likewise past `written`.
    - linear: `written` counts the stretched ones in some files and the original ones in others, and engines differ,
      too: this is the most that anyone takes.
    - llama3, and plain ones: `written`. The factor of llama3 is one of frequencies, not of length.
    """
    before, factor = original or written, rope.get("factor")
    stretch = factor if isinstance(factor, int | float) and factor >= 1 else None
    match _kind(rope):
        case "yarn":
            return written if stretch is None else min(written, int(before * stretch))
        case "longrope" | "su":
            return min(written, before)
        case "linear":
            return int(written * (stretch or 1))
        case _:
            return written
