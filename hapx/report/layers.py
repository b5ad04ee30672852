"""What a plan does to each layer: where its weights and activations are, and what is communicated for it.

In: a plan. Out: one `Layer` per module of the model that computes something, in the order of the program; repeated modules that are treated
alike are one row ("blocks.0-11.qkv"). A communication belongs to the module that uses its result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from hapx.ir import Kind, OpCall, TensorRef
from hapx.plan import Axes, Communication, Plan, Program, Triple
from hapx.report.words import Vocabulary, collective_text, ranges_text, size_text
from hapx.states import Invariant, Partial, Placement, Property, Replicated, Sharded
from hapx.theory.factors import gathered
from hapx.transposes import backward_collective, forward_collective


@dataclass(frozen=True, slots=True)
class Layer:
    """One row: a module path and phrases."""

    module: str
    weights: tuple[str, ...]
    activations: tuple[str, ...]
    communication: tuple[str, ...]


def layers(plan: Plan) -> tuple[Layer, ...]:
    """The rows of a plan's first training program."""
    words, program = Vocabulary.of(plan), plan.stages[0].program
    storage = {name: s.copies[0].placement for name, s in plan.storage_of.items()}
    return collapse(_Collector(words, program, storage).rows())


@dataclass
class _Draft:
    """A row in the making. `weights`: phrase by parameter. `moved`: bytes forward and backward by what moves them."""

    weights: dict[str, str] = field(default_factory=dict)
    activations: dict[str, None] = field(default_factory=dict)
    moved: dict[tuple[str, str | None, str | None], list[int]] = field(default_factory=dict)
    inside: dict[str, None] = field(default_factory=dict)


class _Collector:
    def __init__(self, words: Vocabulary, program: Program, storage: Mapping[str, Placement]):
        self.words, self.graph, self.program, self.storage = words, words.graph, program, storage
        self.drafts: dict[str, _Draft] = {}

    def rows(self) -> list[Layer]:
        users = self._users()
        for instruction in self.program.instructions:
            triple = instruction.triple
            if triple.node is not None:
                self._call(triple, self.drafts.setdefault(self.graph.nodes[triple.node].module, _Draft()))
        for instruction in self.program.instructions:
            triple = instruction.triple
            if isinstance(triple.body, tuple):
                draft = self.drafts.setdefault(users.get(triple.post[0], self._made_in(triple.post[0].tensor)), _Draft())
                self._conversion(triple, triple.body, draft)
        return [
            Layer(module, _weights(d.weights), tuple(d.activations), (*_moved(d.moved), *d.inside))
            for module, d in self.drafts.items()
            if d.weights or d.activations or d.moved
        ]

    def _users(self) -> dict[Property, str]:
        """The module that first uses a property."""
        found: dict[Property, str] = {}
        for instruction in self.program.instructions:
            if instruction.triple.node is not None:
                for p in instruction.triple.pre:
                    found.setdefault(p, self.graph.nodes[instruction.triple.node].module)
        return found

    def _made_in(self, tensor: str) -> str:
        made = self.graph.producer.get(tensor)
        return self.graph.nodes[made].module if made is not None else ""

    def _call(self, triple: Triple, draft: _Draft) -> None:
        assert isinstance(triple.body, OpCall)
        for p in triple.pre:
            ref = self.graph.refs[p.tensor]
            if ref.kind is Kind.PARAMETER:
                draft.weights.setdefault(ref.name, self._weight(ref, p.placement))
        for p in triple.post:
            ref = self.graph.refs[p.tensor]
            if ref.size > 1 and ref.kind is Kind.VALUE and ref.requires_grad:
                draft.activations[self.words.placement(ref, p.placement)] = None
        axes = [v for _, v in triple.body.args if isinstance(v, Axes) and v.axes]
        if (factor := gathered(triple.body)) is not None:
            ends = next(p for p in triple.pre if p.tensor == factor), triple.post[0]
            size = sum(self.words.message_bytes(self.graph.refs[p.tensor], p.placement, axes[0].axes[0]) for p in ends)
            draft.moved.setdefault(("sufficient factors", None, "all_gather"), [0, 0])[1] += size
        elif axes:
            draft.inside[f"small sums inside {triple.body.target.removeprefix('hapx.').replace('_', ' ')}"] = None

    def _weight(self, ref: TensorRef, used: Placement) -> str:
        stored = self.storage[ref.name]
        if any(isinstance(s, Partial) for s in used.states) and not any(isinstance(s, Partial) for s in stored.states):
            return "whole, added on one device"
        text = self.words.placement(ref, used)
        if text == self.words.placement(ref, stored):
            return text
        return f"stored {self.words.shards(stored)}" + ("" if text == "whole" else f", used {text}")

    def _conversion(self, triple: Triple, path: tuple[Communication, ...], draft: _Draft) -> None:
        (source,) = triple.pre
        ref, at = self.graph.refs[source.tensor], source.placement
        for step in path:
            after = at.with_state(step.axis, step.target)
            forward = forward_collective(step.source, step.target)
            backward = backward_collective(step.source, step.target) if step.gradient else None
            if forward or backward:
                whole = after if isinstance(step.source, Sharded) else at
                size = self.words.message_bytes(ref, whole, step.axis)
                twice = step.free and forward == "all_gather" and backward is not None
                if twice:  # gathered again in backward
                    backward = f"all_gather + {backward}"
                sizes = draft.moved.setdefault((self._what(ref, step), forward, backward), [0, 0])
                sizes[0] += size if forward else 0
                sizes[1] += size * (1 + twice) if backward else 0
            at = after

    def _what(self, ref: TensorRef, step: Communication) -> str:
        over = f" over {self.words.mesh.axes[step.axis].name}" if len(self.words.mesh.axes) > 1 else ""
        if ref.kind is Kind.PARAMETER:
            synchronised = isinstance(step.source, Invariant) and isinstance(step.target, Replicated)
            return ("gradients" if synchronised else "weights") + over
        return ("loss" if ref.name == self.graph.loss else "activations") + over


def _weights(phrases: Mapping[str, str]) -> tuple[str, ...]:
    """One phrase if all parameters of the module share it, else one each with the last part of its name."""
    if len(set(phrases.values())) <= 1:
        return tuple(dict.fromkeys(phrases.values()))
    return tuple(f"{name.rsplit('.', 1)[-1]}: {text}" for name, text in phrases.items())


def _moved(moved: Mapping[tuple[str, str | None, str | None], list[int]]) -> Iterable[str]:
    """What is moved forward / backward."""
    for (what, forward, backward), (there, back) in moved.items():
        if forward and backward and there == back:
            yield f"{what}: {collective_text(forward)} / {collective_text(backward)} {size_text(there)}"
        else:
            parts = [f"{collective_text(name)} {size_text(size)}" if name else "-" for name, size in ((forward, there), (backward, back))]
            yield f"{what}: {' / '.join(parts)}"


# ---- repeated modules ------------------------------------------------------------------------------------------------


def collapse(rows: Iterable[Layer]) -> tuple[Layer, ...]:
    """Rows that differ in one number of their path only are one row, with a range of numbers in its place."""
    rows = list(rows)
    for depth in range(max((r.module.count(".") + 1 for r in rows), default=0)):
        rows = _collapse_at(rows, depth)
    return tuple(rows)


def _collapse_at(rows: list[Layer], depth: int) -> list[Layer]:
    groups: dict[tuple[object, ...], list[Layer]] = {}
    for row in rows:
        parts = row.module.split(".")
        numbered = depth < len(parts) and parts[depth].isdigit()
        path = (*parts[:depth], None, *parts[depth + 1 :]) if numbered else tuple(parts)
        groups.setdefault((path, replace(row, module="")), []).append(row)
    merged = []
    for members in groups.values():
        parts = members[0].module.split(".")
        if len(members) > 1:
            parts[depth] = ranges_text(int(m.module.split(".")[depth]) for m in members)
        merged.append(replace(members[0], module=".".join(parts)))
    return merged
