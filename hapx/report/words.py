"""Plain words for placements, lengths, collectives and numbers.

In: what a plan holds. Out: short text such as "batch split 5:5:1:1", "heads split evenly", "whole", "partial sums". Invariant: ASCII only.
A dim is named after what it is in the model: the batch (from the graph), heads and vocabulary (cuts that attention and embeddings use),
else outputs and inputs of a weight, features or dim 2 of an activation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from hapx.ir import Graph, Kind, TensorRef
from hapx.layout import Lengths, local_shape
from hapx.plan import Mesh, Plan, Program
from hapx.states import REPLICATED, Cut, Invariant, Partial, Placement, Replicated, Sharded


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


def lengths_text(lengths: Sequence[int]) -> str:
    """Unequal lengths: "5:5:1:1"; long rows by runs, "21 x16 : 14 x48"."""
    if len(lengths) <= 8:
        return ":".join(map(str, lengths))
    runs = [(value, len(list(run))) for value, run in groupby(lengths)]
    if len(runs) > 6:
        return f"{min(lengths)} to {max(lengths)}"
    return " : ".join(f"{value} x{count}" for value, count in runs)


def ranges_text(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 4] -> "0-2,4"."""
    parts = []
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        members = [n for _, n in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(parts)


def collective_text(name: str) -> str:
    return name.replace("_", "-")


@dataclass(frozen=True)
class Vocabulary:
    """The words for one program: its graph, mesh and lengths."""

    graph: Graph
    mesh: Mesh
    lengths: Lengths
    _batch: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        batch = {o.name: d for n in self.graph.nodes for o, d in zip(n.outputs, n.batch_dims, strict=True) if d is not None}
        object.__setattr__(self, "_batch", batch)

    @classmethod
    def of(cls, plan: Plan) -> Vocabulary:
        """Of a plan's first training program."""
        stage = plan.stages[0]
        key = next(iter(stage.programs))
        return cls(plan.graphs[key], stage.mesh, stage.lengths[key])

    # ---- placements ------------------------------------------------------------------------------------------------

    def placement(self, ref: TensorRef, placement: Placement) -> str:
        """Where a tensor is: one phrase per axis that does something."""
        phrases = []
        for axis, state in enumerate(placement.states):
            if isinstance(state, Replicated | Invariant):
                continue
            over = f" over {self.mesh.axes[axis].name}" if len(self.mesh.axes) > 1 else ""
            if isinstance(state, Partial):
                phrases.append(f"partial sums{over}")
            else:
                phrases.append(f"{self.dim(ref, state)} split {self._how(state, axis)}{over}")
        return ", ".join(phrases) or "whole"

    def _how(self, state: Sharded, axis: int) -> str:
        lengths = self.lengths.get(state.cut)
        if lengths is None or len(set(lengths)) == 1:
            return "evenly"
        return lengths_text(lengths)

    def dim(self, ref: TensorRef, state: Sharded) -> str:
        """What the split dim is."""
        if self._batch.get(ref.name) == state.dim or (ref.kind is Kind.INPUT and state.dim == 0):
            return "batch"
        factor = (state.outer, state.cut.units, state.inner)
        if state.dim == len(ref.shape) - 1 or ref.kind in (Kind.PARAMETER, Kind.BUFFER) or self._heads_dim(ref, state.dim):
            if (ref.name, state.dim) in self._vocabulary_dims:
                return "vocabulary"
            if self._is_heads(factor) or self._heads_dim(ref, state.dim):
                return "heads"
        if ref.kind is Kind.PARAMETER and len(ref.shape) > 1:
            sides = ("output channels", "input channels") if len(ref.shape) > 2 else ("outputs", "inputs")
            return sides[state.dim] if state.dim < 2 else f"dim {state.dim}"
        return "features" if state.dim == len(ref.shape) - 1 else f"dim {state.dim}"

    @cached_property
    def _heads(self) -> Mapping[str, int]:
        """Tensors that attention reads or makes, with their dim of heads."""
        found: dict[str, int] = {}
        for node in self.graph.nodes:
            if "attention" in node.call.op:
                names = [r for r in node.call.refs() if len(self.graph.refs[r].shape) == 4]
                found |= dict.fromkeys((*names, *(o.name for o in node.outputs if len(o.shape) == 4)), 1)
        return found

    def _heads_dim(self, ref: TensorRef, dim: int) -> bool:
        return self._heads.get(ref.name) == dim

    def _is_heads(self, factor: tuple[int, int, int]) -> bool:
        """Whether a cut deals out units that are heads of attention, each `inner` columns wide."""
        sizes = {(self.graph.refs[n].shape[1], self.graph.refs[n].shape[3]) for n in self._heads}
        return any(factor[1] * factor[2] == heads * width and factor[2] % width == 0 for heads, width in sizes)

    @cached_property
    def _vocabulary_dims(self) -> frozenset[tuple[str, int]]:
        """Dims that run over the symbols of an embedding or the classes of a cross-entropy."""
        found = set()
        for node in self.graph.nodes:
            refs = [self.graph.refs[r] for r in node.call.refs()]
            if node.call.op == "aten.embedding":
                found.add((refs[0].name, 0))
            elif node.call.op == "aten.cross_entropy_loss":
                found.add((refs[0].name, 1 if len(refs[0].shape) > 1 else 0))
                found |= {(self.graph.refs[o].name, len(self.graph.refs[o].shape) - 1) for o in self._same_values(refs[0].name)}
        return frozenset(found)

    def _same_values(self, name: str) -> list[str]:
        """The tensors that `name` is a view of."""
        found = []
        while (made := self.graph.producer.get(name)) is not None and self.graph.nodes[made].call.op in VIEWS:
            name = self.graph.nodes[made].call.refs()[0]
            found.append(name)
        return found

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def message_bytes(self, ref: TensorRef, placement: Placement, axis: int) -> int:
        """Bytes of a tensor as it is whole along `axis`, on the first device: what a collective over the axis moves or fills."""
        size = 1
        first = (0,) * len(self.mesh.axes)
        for n in local_shape(ref.shape, placement.with_state(axis, REPLICATED), self.mesh.sizes, self.lengths, first):
            size *= n
        return size * (ref.bytes // max(ref.size, 1))


VIEWS = frozenset(f"aten.{name}" for name in ("view", "reshape", "flatten", "_unsafe_view", "contiguous", "alias", "to", "clone", "squeeze"))


def cut_of_batch(program: Program, words: Vocabulary) -> Cut | None:
    """The cut by which a program splits the batch over the uneven axis, if it does so."""
    uneven = program.mesh.uneven if program.mesh.uneven is not None else 0
    for instruction in program.instructions:
        for p in instruction.triple.post:
            state = p.placement.states[uneven]
            if isinstance(state, Sharded) and words.dim(words.graph.refs[p.tensor], state) == "batch":
                return state.cut
    return None
