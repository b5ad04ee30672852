"""Writes into views as new values: `y[:, 0] = 3` makes a new `y`.

In: which value is a view of which, and the value that was written. Out: what must be computed so that all names of the memory mean what they
mean in the module: values under the written view get it scattered in (`scatter_into`), other views that are read later are made again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from hapx.graph.normalize_args import base_of, name_of
from hapx.graph.normalize_flatten import Slot, slots_in

# same elements in the same order (a cast that shares memory changes nothing)
_RESHAPES = frozenset({"aten.view", "aten.reshape", "aten.unsqueeze", "aten.squeeze", "aten.flatten", "aten.unflatten", "aten.to"})
_SYMMETRIC = frozenset({"aten.transpose.int", "aten.swapaxes.default", "aten.t.default"})


@dataclass(frozen=True)
class View:
    """A value that is `op(source, **rest)`, on the memory of `source`."""

    source: str
    op: torch._ops.OpOverload
    rest: Mapping[str, Any]

    @property
    def repeatable(self) -> bool:
        return not any(slots_in(tuple(self.rest.values())))


def scatter_into(view: View, base: Slot, value: Slot) -> tuple[torch._ops.OpOverload, dict[str, Any]] | None:
    """The call that makes `base` with `value` in the place of the view; None for views that have none."""
    aten, name = torch.ops.aten, name_of(view.op)
    assert base.fake is not None
    whole = value.fake is not None and value.fake.shape == base.fake.shape and view.rest.get("step") == 1
    if name == "aten.slice.Tensor" and not whole:
        return aten.slice_scatter.default, {"self": base, "src": value, **view.rest}
    if name == "aten.select.int":
        return aten.select_scatter.default, {"self": base, "src": value, **view.rest}
    if base_of(view.op) in _RESHAPES or name == "aten.slice.Tensor":
        return aten.reshape.default, {"self": value, "shape": list(base.fake.shape)}
    if name in _SYMMETRIC:
        return view.op, {"self": value, **view.rest}
    if name == "aten.permute.default":
        rank = len(view.rest["dims"])
        places = [d % rank for d in view.rest["dims"]]
        return view.op, {"self": value, "dims": [places.index(d) for d in range(rank)]}
    return None


@dataclass(frozen=True)
class Step:
    """`name` gets a new value: `written`, a view of it, is scattered in, or (None) it is made again from its source."""

    name: str
    written: str | None


class Views:
    """The views among the values of one memory, by name."""

    def __init__(self) -> None:
        self._of: dict[str, View] = {}

    def note(self, name: str, view: View) -> None:
        self._of[name] = view

    def __getitem__(self, name: str) -> View:
        return self._of[name]

    def path(self, name: str) -> list[str]:
        """The value, what it is a view of, and so on."""
        found = [name]
        while found[-1] in self._of:
            found.append(self._of[found[-1]].source)
        return found

    def steps(self, written: str, wanted: Iterable[str]) -> list[Step] | None:
        """What follows from a new value of `written`, so that those of `wanted` have new values too. None where that cannot be done."""
        wanted = list(wanted)
        if not wanted:
            return []
        path = self.path(written)
        found = [Step(base, view) for view, base in pairwise(path)]
        known = set(path)
        for name in wanted:
            missing = [n for n in self.path(name) if n not in known]
            if any(n not in self._of for n in missing):
                return None  # another value on the same memory
            found += [Step(n, None) for n in reversed(missing)]
            known |= set(missing)
        usable = all(self._of[s.name].repeatable if s.written is None else self._of[s.written].repeatable for s in found)
        return found if usable else None

    def rename(self, names: Mapping[str, str]) -> None:
        """The new values (by the old ones) are views as the old ones were; what made them does not matter."""
        for new in names.values():
            self._of.pop(new, None)
        for old, new in names.items():
            if old in self._of:
                view = self._of[old]
                self._of[new] = replace(view, source=names.get(view.source, view.source))
