"""Plain words for placements, lengths, collectives and numbers.

In: what a plan holds. Out: short text such as "batch split 5:5:1:1", "heads split evenly", "whole", "partial sums". Invariant: ASCII only.
A dim is named after the class of dims that it goes together with (`hapx.theory.grains`): batch, heads, vocabulary, sequence, channels, height where
inputs, attention, embeddings and convolutions say so; else outputs and inputs of a weight, features or "dim 1" of an activation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod

from hapx.ir import CONVOLUTIONS, Graph, Kind, TensorRef
from hapx.layout import Lengths, local_shape
from hapx.plan import Mesh, Plan
from hapx.states import REPLICATED, Invariant, Partial, Placement, Replicated, Sharded
from hapx.theory.grains import Grains, find_grains
from hapx.theory.registry import Site

FEW_LETTERS = 32  # of a column that lists devices

# dims of an image behind its channels, by their number
IMAGE: Mapping[int, tuple[str, ...]] = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}


def size_text(number: float) -> str:
    """Bytes: "312 MiB"."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= factor:
            return f"{_short(number / factor)} {unit}"
    return f"{number:.0f} B"


def time_text(seconds: float) -> str:
    """Seconds: "93.1 ms"."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor:
            return f"{_short(seconds / factor)} {unit}"
    return "0" if seconds <= 0 else f"{seconds * 1e9:.0f} ns"


def _short(number: float) -> str:
    """Three digits, never an exponent."""
    return f"{number:.0f}" if number >= 99.95 else f"{number:.3g}"


def share_text(share: float) -> str:
    return f"{share * 100:.1f} %"


def shares_text(shares: Sequence[float]) -> str:
    """Shares of all devices: one where they are equal, else from the smallest to the largest."""
    low, high = min(shares), max(shares)
    if len(shares) == 1:
        return share_text(low)
    return f"{share_text(low)} each" if high - low < 5e-4 else f"{share_text(low)} to {share_text(high)}"


def lengths_text(lengths: Sequence[int]) -> str:
    """Unequal lengths: "5:5:1:1"; long rows by runs, "21 x16 : 14 x48"."""
    plain = ":".join(map(str, lengths))
    runs = [(value, len(list(run))) for value, run in groupby(lengths)]
    short = " : ".join(f"{value} x{count}" if count > 1 else str(value) for value, count in runs)
    if len(lengths) <= 8:
        return min(plain, short, key=len)
    return short if len(runs) <= 6 else f"{min(lengths)} to {max(lengths)}"


def ranges_text(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 4] -> "0-2,4"; what repeats itself, [1, 3, 5, 7] -> "1,3..7", [0, 1, 8, 9, 16, 17] -> "0-1,8-9..16-17"."""
    runs = []
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        members = [n for _, n in run]
        runs.append((members[0], members[-1]))
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    for many in range(1, len(runs) // 3 + 1):  # runs of one round; there are at least three rounds, of single numbers four
        steps = {(b[0] - a[0], b[1] - a[1]) for a, b in zip(runs, runs[many:], strict=False)}
        if (
            len(runs) % many == 0
            and len(steps) == 1
            and len({s for step in steps for s in step}) == 1
            and len(parts) > (3 if parts[0].isdigit() else 2)
        ):
            return f"{','.join(parts[: 2 * many])}..{','.join(parts[-many:])}"
    return ",".join(parts)


def devices_text(numbers: Collection[int]) -> str:
    """Devices in a column of a table: their ranges, or the first of them and how many there are more."""
    text = ranges_text(numbers)
    if len(text) <= FEW_LETTERS or ".." in text:
        return text
    shown = text[: text.rindex(",", 0, FEW_LETTERS - len(" and 99 more"))]
    return f"{shown} and {len(numbers) - _count(shown)} more"


def _count(ranges: str) -> int:
    """How many numbers "0-2,4" names."""
    ends = (part.split("-") for part in ranges.split(","))
    return sum(int(own[-1]) - int(own[0]) + 1 for own in ends)


def collective_text(name: str) -> str:
    return name.replace("_", "-")


@dataclass(frozen=True)
class Vocabulary:
    """The words for one program: its graph, mesh and lengths."""

    graph: Graph
    mesh: Mesh
    lengths: Lengths

    @classmethod
    def of(cls, plan: Plan, number: int = 0) -> Vocabulary:
        """Of a stage of a plan's first program."""
        stage = plan.stages[number]
        return cls(plan.part(plan.first, number), stage.mesh, stage.lengths[plan.first])

    # ---- placements ------------------------------------------------------------------------------------------------

    def placement(self, ref: TensorRef, placement: Placement) -> str:
        """Where a tensor is: one phrase per axis that does something, joined where axes split the same dim."""
        phrases: list[str] = []
        splits: dict[str, int] = {}
        for axis, state in enumerate(placement.states):
            if isinstance(state, Replicated | Invariant):
                continue
            if isinstance(state, Partial):
                phrases.append(f"partial sums{self.over(axis)}")
                continue
            what, how = self.dim(ref, state), f"{self._how(state)}{self.over(axis)}"
            if what in splits:
                phrases[splits[what]] += f" and {how}"
            else:
                splits[what] = len(phrases)
                phrases.append(f"{what} split {how}")
        return ", ".join(phrases) or "whole"

    def over(self, axis: int) -> str:
        """Along which axis, where there are several."""
        return f" over {self.mesh.axes[axis].name}" if len(self.mesh.axes) > 1 else ""

    def shards(self, placement: Placement) -> str:
        """How a stored parameter is split, without the dim: nobody computes with the shards."""
        cuts = [(a, s) for a, s in enumerate(placement.states) if isinstance(s, Sharded)]
        return ", ".join(f"{self._how(s)}{self.over(a)}".replace("evenly", "split evenly") for a, s in cuts) or "whole"

    def _how(self, state: Sharded) -> str:
        lengths = self.lengths.get(state.cut)
        if lengths is None or len(set(lengths)) == 1:
            return "evenly"
        return lengths_text(lengths)

    def dim(self, ref: TensorRef, state: Sharded) -> str:
        """What the split dim is."""
        name = self._names.get(self._grains.classes.get((ref.name, Site(state.dim, state.outer)), -1))
        if name is not None and not (name == "channels" and ref.kind is Kind.PARAMETER):
            return name
        if ref.kind is Kind.PARAMETER:
            sides = ("output channels", "input channels") if len(ref.shape) > 2 else ("outputs", "inputs")
            if any("conv_transpose" in self.graph.nodes[i].call.op for i in self.graph.consumers[ref.name]):
                sides = (sides[1], sides[0])
            return sides[state.dim] if state.dim < 2 else f"dim {state.dim}"
        return "features" if state.dim == len(ref.shape) - 1 else f"dim {state.dim}"

    @cached_property
    def _grains(self) -> Grains:
        return find_grains(self.graph)

    @cached_property
    def _names(self) -> Mapping[int, str]:
        """Names of classes of dims, those that go together without communication; where several fit, the first."""
        refs, classes = self.graph.refs, self._grains.classes
        found = [("batch", name, 0) for name in self.graph.input_names if refs[name].shape[:1] == (self.graph.batch,)]
        for node in self.graph.nodes:
            operands = [refs[r] for r in node.call.refs()]
            if "attention" in node.call.op:
                found += [
                    (what, r.name, dim) for r in (*operands[:3], *node.outputs) if len(r.shape) == 4 for what, dim in (("heads", 1), ("sequence", 2))
                ]
            elif node.call.op in CONVOLUTIONS:
                image = ("channels", *IMAGE[len(operands[1].shape) - 2])
                found += [(what, r.name, len(r.shape) - len(image) + i) for r in (operands[0], *node.outputs) for i, what in enumerate(image)]
            elif node.call.op == "aten.embedding":
                found.append(("vocabulary", operands[0].name, 0))
            elif node.call.op == "aten.cross_entropy_loss":
                found.append(("vocabulary", operands[0].name, 1 if len(operands[0].shape) > 1 else 0))
        order = ("batch", "heads", "vocabulary", "sequence", "channels", *IMAGE[3], *IMAGE[1])
        names: dict[int, str] = {}
        for what, name, dim in sorted(found, key=lambda f: order.index(f[0])):
            if (name, Site(dim)) in classes:
                names.setdefault(classes[name, Site(dim)], what)
        return names

    def is_loss(self, name: str) -> bool:
        """Whether a tensor is the loss; a stage of several may have none."""
        return any(o.role == "loss" and o.tensor == name for o in self.graph.outputs)

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def message_bytes(self, ref: TensorRef, placement: Placement, axis: int) -> int:
        """Bytes of a tensor as it is whole along `axis`, on the first device: what a collective over the axis moves or fills."""
        return self.held_bytes(ref, placement.with_state(axis, REPLICATED))

    def held_bytes(self, ref: TensorRef, placement: Placement) -> int:
        """Bytes of a tensor in `placement` on the first device."""
        first = (0,) * len(self.mesh.axes)
        return prod(local_shape(ref.shape, placement, self.mesh.sizes, self.lengths, first)) * (ref.bytes // max(ref.size, 1))
