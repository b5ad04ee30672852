"""What a call of the distributed model returns: the container that the module returns, around this rank's tensors.

In: the graph's description of the container and the tensors by place. Out: the container. Classes are those that the process has already: the module
was imported with them. Where one is not there, or cannot be made from its items, `Results` stands for it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from hapx.ir import Container, Ref, Value


class Results(dict[str, Any]):
    """Results of a model by name, also as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def rebuild(container: Value, tensors: Mapping[str, Any]) -> Any:
    """`container` with the tensors in their places ("": the loss)."""
    if isinstance(container, Ref):
        return tensors[container.name]
    if not isinstance(container, Container):
        return container
    items = {key: rebuild(item, tensors) for key, item in container.items}
    if container.type in ("tuple", "list"):
        return (tuple if container.type == "tuple" else list)(items.values())
    if container.type == "dict":
        return items
    kind = _class(container.type)
    try:
        if is_dataclass(kind) or hasattr(kind, "_fields"):
            return kind(**items)
        if isinstance(kind, type) and issubclass(kind, dict):
            return kind(items)
    except (TypeError, ValueError):  # fields that were left out have no default
        pass
    return Results(items)


def _class(name: str) -> Any:
    """The class that "module:name" names, None if this process does not have it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None
