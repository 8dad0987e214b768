"""Settings by dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested mappings. Lists are values, and so is an empty mapping inside another."""
    if not isinstance(node, Mapping) or (not node and prefix):
        yield prefix, node
        return
    for name, value in node.items():
        yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))


def flat(node: Any) -> dict[str, Any]:
    return dict(leaves(node))
