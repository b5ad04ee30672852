"""Python identifiers for tensors and submodules of a local program."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable


def identifier(name: str) -> str:
    """`name` as a Python identifier: "layers.0.weight" -> "layers_0_weight"."""
    text = re.sub(r"\W", "_", name)
    if not text or text[0].isdigit() or keyword.iskeyword(text):
        text = f"_{text}"
    return text


class Names:
    """Names that are given out once."""

    def __init__(self, taken: Iterable[str] = ()):
        self.taken = set(taken)

    def fresh(self, name: str) -> str:
        """`name`, or `name_2`, `name_3`, ..."""
        result, number = name, 1
        while result in self.taken:
            number += 1
            result = f"{name}_{number}"
        self.taken.add(result)
        return result
