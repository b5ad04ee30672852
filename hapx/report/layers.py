"""What a plan does to each layer: where its weights and activations are, and what is communicated for it.

In: a plan. Out: one `Layer` per module of the model that computes something, in the order of the program; repeated modules that are treated
alike are one row ("blocks.0-11.qkv"; see `hapx.report.folding`). A communication belongs to the module that uses its result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hapx.ir import Kind, OpCall, TensorRef
from hapx.plan import Axes, Communication, Plan, Program, Triple
from hapx.report.folding import fold
from hapx.report.pricing import modules_of
from hapx.report.words import Vocabulary, collective_text, size_text
from hapx.states import Invariant, Partial, Placement, Replicated, Sharded
from hapx.theory.factors import gathered
from hapx.transposes import backward_collective, forward_collective


@dataclass(frozen=True, slots=True)
class Layer:
    """One row: a module path and phrases. `modules`: those that the row stands for."""

    module: str
    weights: tuple[str, ...]
    activations: tuple[str, ...]
    communication: tuple[str, ...]
    modules: tuple[str, ...] = field(default=(), compare=False)


def layers(plan: Plan) -> tuple[Layer, ...]:
    """The rows of a plan's first training program."""
    words, program = Vocabulary.of(plan), plan.stages[0].program
    storage = {name: s.copies[0].placement for name, s in plan.storage_of.items()}
    return collapse(_Collector(words, program, storage).rows())


def collapse(rows: Sequence[Layer]) -> tuple[Layer, ...]:
    """Rows that differ in one number of their path only are one row, with a range of numbers in its place."""
    folded = fold([(r.module, (r.weights, r.activations, r.communication)) for r in rows])
    return tuple(replace(rows[members[0]], module=path, modules=tuple(rows[m].module for m in members)) for path, members in folded)


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
        modules = modules_of(self.program, self.graph)
        for instruction in self.program.instructions:
            triple = instruction.triple
            if triple.node is not None:
                self._call(triple, self.drafts.setdefault(self.graph.nodes[triple.node].module, _Draft()))
        for instruction, module in zip(self.program.instructions, modules, strict=True):
            triple = instruction.triple
            if isinstance(triple.body, tuple):
                self._conversion(triple, triple.body, self.drafts.setdefault(module, _Draft()))
        return [
            Layer(module, _weights(d.weights), tuple(d.activations), (*_moved(d.moved), *d.inside))
            for module, d in self.drafts.items()
            if d.weights or d.activations or d.moved
        ]

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
                if forward == "all_to_all":  # what a device has before; other collectives: as it is whole along the axis
                    size = self.words.held_bytes(ref, at)
                else:
                    size = self.words.message_bytes(ref, after if isinstance(step.source, Sharded) else at, step.axis)
                twice = step.free and forward == "all_gather" and backward is not None
                if twice:  # gathered again in backward
                    backward = f"all_gather + {backward}"
                sizes = draft.moved.setdefault((self._what(ref, step), forward, backward), [0, 0])
                sizes[0] += size if forward else 0
                sizes[1] += size * (1 + twice) if backward else 0
            at = after

    def _what(self, ref: TensorRef, step: Communication) -> str:
        over = self.words.over(step.axis)
        if ref.kind is Kind.PARAMETER:
            synchronised = isinstance(step.source, Invariant) and isinstance(step.target, Replicated)
            return ("gradients" if synchronised else "weights") + over
        return ("loss" if self.words.is_loss(ref.name) else "activations") + over


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
