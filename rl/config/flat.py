"""Settings by dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Absent:
    """Stands for the value of a key that is not there; null is a value."""

    def __str__(self) -> str:
        return "(absent)"


ABSENT = Absent()


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested mappings. Lists are values, and so is an empty mapping inside another."""
    if not isinstance(node, Mapping) or (not node and prefix):
        yield prefix, node
        return
    for name, value in node.items():
        yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))


def flat(node: Any) -> dict[str, Any]:
    return dict(leaves(node))


def differing(*settings: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Keys whose values are not equal in all `settings` -> the value in each; `ABSENT` where one lacks the key."""
    keys = dict.fromkeys(key for each in settings for key in each)
    values = {key: tuple(each.get(key, ABSENT) for each in settings) for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}
