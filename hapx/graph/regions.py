"""Contexts of a model's forward as runs of nodes: checkpoints, autocast, no_grad.

In: one `Mark` per node, written while the model was traced. Out: `Region`s, sorted, and where the model marked boundaries of layers.
Invariant: the regions of one kind do not overlap, and every node with a mark of that kind lies in exactly one of them. Nested
checkpoints count as the outermost one.

An executor needs checkpoint regions to save memory. The others are for information: what a no_grad context uses is already detached, and
what autocast casts is cast by nodes or by `Node.casts`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hapx.ir import Region, TorchConst, Value


@dataclass(frozen=True, slots=True)
class Mark:
    """Where and in which contexts an operator was called. `checkpoint`: number of the outermost checkpoint call around it;
    `grad`: whether gradients were recorded; `autocast`: dtype of the enabled autocast, if any; `layer`: how many boundaries of layers the model
    had marked before."""

    file: str = ""
    line: int = 0
    code: str = ""
    checkpoint: int | None = None
    grad: bool = True
    autocast: str | None = None
    layer: int = 0

    @property
    def where(self) -> str:
        """file:line: code, with the whole path (for error messages)."""
        return f"{self.file}:{self.line}: {self.code}" if self.file else ""

    @property
    def source(self) -> str:
        """file:line: code, with the file's name only: the same on every machine."""
        return f"{self.file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{self.line}: {self.code}" if self.file else ""


def find_regions(marks: Sequence[Mark]) -> tuple[Region, ...]:
    """All regions of the nodes that have these marks, by start, outer before inner."""
    checkpoints = [Region("checkpoint", a, b) for _, a, b in _runs([m.checkpoint for m in marks])]
    no_grad = [Region("no_grad", a, b) for _, a, b in _runs([None if m.grad else True for m in marks])]
    autocast = [Region("autocast", a, b, _autocast_options(str(dtype))) for dtype, a, b in _runs([m.autocast for m in marks])]
    return tuple(sorted(checkpoints + no_grad + autocast, key=lambda r: (r.start, -r.stop, r.kind)))


def find_boundaries(marks: Sequence[Mark]) -> tuple[int, ...]:
    """Indices of the nodes, but the first, before which the model marked a boundary. A node that no call of the model made is in the layer of
    the node before."""
    numbers = list(accumulate((m.layer for m in marks), max))
    return tuple(i for i in range(1, len(numbers)) if numbers[i] > numbers[i - 1])


def _autocast_options(dtype: str) -> tuple[tuple[str, Value], ...]:
    return (("dtype", TorchConst("dtype", dtype)),)


def _runs(keys: Sequence[Hashable | None]) -> list[tuple[Hashable, int, int]]:
    """Maximal runs [start, stop) of equal keys that are not None."""
    runs: list[tuple[Hashable, int, int]] = []
    for i, key in enumerate(keys):
        if key is None:
            continue
        if runs and runs[-1][0] == key and runs[-1][2] == i:
            runs[-1] = (key, runs[-1][1], i + 1)
        else:
            runs.append((key, i, i + 1))
    return runs
