"""What a setting is, from the text that stands under it in its class."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import types
import typing
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rl.config.given import hints_of, parts_of
from rl.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Setting:
    key: str
    value: Any
    """In the config that it was described of."""
    kind: str
    """What it may be: `float or null`, `one of warn, stop`."""
    text: str
    """One or more sentences."""
    choices: dict[str, str]
    """Of an enum: name -> what it means, empty where the name says it."""


def describe(config: RunConfig, key: str) -> list[Setting]:
    """The setting `key`, or all settings below it, in the order of their classes. Empty: there is none of that name."""
    node: Any = config
    *parents, name = key.split(".")
    for parent in parents:
        node = getattr(node, parent, None)
    if not dataclasses.is_dataclass(node) or name not in {field.name for field in dataclasses.fields(node)}:
        return []
    return _below(node, name, key)


def _below(node: Any, name: str, key: str) -> list[Setting]:
    value = getattr(node, name)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.name != "_target_"]
        return [setting for child in names for setting in _below(value, child, f"{key}.{child}")]
    annotation = hints_of(type(node))[name]
    parts = parts_of(annotation)
    enum = next((part for part in parts if isinstance(part, type) and issubclass(part, Enum)), None)
    texts = (_texts(owner).get(name) for owner in type(node).__mro__ if dataclasses.is_dataclass(owner))
    of_enum = enum.__doc__ if enum is not None else None  # its own: getdoc() would give that of Enum
    text = next((text for text in texts if text), None) or of_enum or ""
    choices = {} if enum is None else {name: _texts(enum).get(name, "") for name in enum.__members__}
    kind = f"one of {', '.join(choices)}" if choices else " or ".join(_name(part) for part in parts)
    is_nullable = types.NoneType in typing.get_args(annotation)
    return [Setting(key, value, kind + " or null" * is_nullable, " ".join(text.split()), choices)]


def _name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) and not typing.get_args(annotation) else str(annotation)


@functools.cache
def _texts(owner: type) -> dict[str, str]:
    """Name in the body of a class -> the text under it, one line."""
    (tree,) = ast.parse(inspect.getsource(owner)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for statement, below in zip(tree.body, tree.body[1:], strict=False):
        target = statement.target if isinstance(statement, ast.AnnAssign) else None
        if isinstance(statement, ast.Assign):
            (target,) = statement.targets
        if isinstance(target, ast.Name) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[target.id] = " ".join(str(below.value.value).split())
    return found
