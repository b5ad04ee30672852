"""Tables behind the integer-coded problem: terms by number, and per kind of tensor its placements and conversions by number.

In: a cost model and the placements that the theory knows for a tensor. Out: numbers and bit sets, computed when first asked for and shared by all
tensors that are alike (shape, dtype, gradient, placements), so that twelve equal layers cost as much as one.

Invariant: bit q of `closure(p)` is set iff a tensor in placement p is in placement q without communication in either direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hapx.cost.model import CommunicationCost, CostModel, StepCost
from hapx.cost.terms import Shares, Term
from hapx.ir import Kind, TensorRef
from hapx.plan import Communication, Mesh
from hapx.restriction import Restriction
from hapx.states import Cut, Invariant, Placement, Replicated, Sharded
from hapx.synth.effect import Effect, Vector, effect
from hapx.theory.conversion import free, paths
from hapx.transposes import forward_collective


@dataclass(frozen=True, slots=True)
class StepTerms:
    """A StepCost whose terms are numbers of a `TermTable` (-1: nothing)."""

    forward: int
    backward: int
    communication: tuple[tuple[str, int, bool], ...]
    memory: int


class TermTable:
    """Terms by number, evaluated all at once: value = const + slopes x shares, then the maximum over the pieces of each term."""

    def __init__(self, kinds: int):
        self.kinds = kinds
        self.terms: list[Term] = []
        self._number: dict[int, int] = {}
        self._compiled: tuple[int, list[Cut], npt.NDArray[np.float64], npt.NDArray[np.float64], list[int]] | None = None

    def number(self, term: Term | None) -> int:
        if term is None:
            return -1
        if id(term) not in self._number:  # the table keeps every term alive, so ids are not reused
            self._number[id(term)] = len(self.terms)
            self.terms.append(term)
        return self._number[id(term)]

    def step(self, cost: StepCost) -> StepTerms:
        communication = tuple((c.direction, self.number(c.term), c.cuts) for c in cost.communication)
        return StepTerms(self.number(cost.forward), self.number(cost.backward), communication, self.number(cost.memory))

    def values(self, shares: Shares) -> list[Vector]:
        """The value per kind of every term known so far."""
        if not self.terms:
            return []
        if self._compiled is None or self._compiled[0] != len(self.terms):
            self._compiled = self._compile()
        _, cuts, const, slopes, starts = self._compiled
        value = const
        if cuts:
            value = const + np.einsum("pck,ck->pk", slopes, np.array([shares[c] for c in cuts], dtype=float), optimize=False)
        top = np.maximum.reduceat(value, starts, axis=0)
        return [tuple(row) for row in top.tolist()]

    def _compile(self) -> tuple[int, list[Cut], npt.NDArray[np.float64], npt.NDArray[np.float64], list[int]]:
        numbers: dict[Cut, int] = {}
        pieces = [piece for term in self.terms for piece in term.pieces]
        entries = [(p, numbers.setdefault(cut, len(numbers)), slope) for p, piece in enumerate(pieces) for cut, slope in piece.slopes]
        slopes = np.zeros((len(pieces), len(numbers), self.kinds))
        for p, c, slope in entries:
            slopes[p, c] += slope
        starts, at = [], 0
        for term in self.terms:
            starts.append(at)
            at += len(term.pieces)
        return len(self.terms), list(numbers), np.array([p.const for p in pieces], dtype=float), slopes, starts


class Values:
    """Terms at given shares, as tuples; terms that the table learns later are evaluated one by one."""

    def __init__(self, table: TermTable, shares: Shares):
        self.table, self.shares = table, shares
        self.zero: Vector = (0.0,) * table.kinds
        self._values = table.values(shares)

    def __getitem__(self, number: int) -> Vector:
        if number < 0:
            return self.zero
        while number >= len(self._values):
            term = self.table.terms[len(self._values)]
            self._values.append(tuple(term.at(self.shares).tolist()))
        return self._values[number]

    def effect(self, step: StepTerms) -> Effect:
        events = [(d, self[n], cuts) for d, n, cuts in step.communication]
        return effect(events, self[step.forward], self[step.backward], self[step.memory])  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Conversion:
    """A path between two placements (numbers) with what it costs."""

    source: int
    target: int
    path: tuple[Communication, ...]
    cost: StepCost
    step: StepTerms


@dataclass(frozen=True, slots=True)
class Kept:
    """A placement (number) in which a parameter or buffer may be stored: its bytes, and per iteration the seconds of its update."""

    placement: int
    memory: Term
    cost: StepCost
    step: StepTerms


class TensorTable:
    """Placements and conversions of all tensors like `ref`."""

    def __init__(self, ref: TensorRef, placements: Sequence[Placement], stored: Iterable[Placement], cost: CostModel, terms: TermTable, mesh: Mesh,
                 rule: Restriction, training: bool):  # fmt: skip
        self.ref, self.placements, self.cost, self.terms, self.mesh, self.rule, self.training = ref, tuple(placements), cost, terms, mesh, rule, training
        self.number = {p: i for i, p in enumerate(self.placements)}
        self.full = (1 << len(self.placements)) - 1
        self.parameter = ref.kind is Kind.PARAMETER
        self.stored: list[Kept] = []
        for p in stored:
            memory = cost.storage(ref, p)
            update = (CommunicationCost("synchronise", cost.update(ref, p), False),) if training and ref.requires_grad else ()
            self.stored.append(Kept(self.number[p], memory, StepCost(None, None, update, None), terms.step(StepCost(None, None, update, memory))))
        self._closure: dict[int, int] = {}
        self._conversions: dict[tuple[int, int], tuple[Conversion, ...]] = {}

    def closure(self, source: int) -> int:
        """The bit set of placements that are free from `source`, itself included."""
        if source not in self._closure:
            p = self.placements[source]
            self._closure[source] = sum(1 << i for i, q in enumerate(self.placements) if free(self.ref, p, q))
        return self._closure[source]

    def conversions(self, source: int, target: int) -> tuple[Conversion, ...]:
        """The paths from source to target that the restriction allows; empty if there is none."""
        key = source, target
        if key not in self._conversions:
            found = paths(self.ref, self.mesh, self.placements[source], self.placements[target], self.rule.forms)
            self._conversions[key] = tuple(self._conversion(source, target, path) for p in found for path in self._variants(p) if self._allowed(path))
        return self._conversions[key]

    def free_path(self, source: int, target: int) -> tuple[Communication, ...]:
        """The path of a free conversion; any of them, none communicates."""
        return paths(self.ref, self.mesh, self.placements[source], self.placements[target], self.rule.forms)[0]

    def _conversion(self, source: int, target: int, path: tuple[Communication, ...]) -> Conversion:
        cost = self.cost.conversion(self.ref, path, self.placements[target])
        return Conversion(source, target, path, cost, self.terms.step(cost))

    def _variants(self, path: tuple[Communication, ...]) -> tuple[tuple[Communication, ...], ...]:
        """A parameter gathered for use is kept for backward, or freed and gathered again."""
        gathers = self.parameter and any(forward_collective(c.source, c.target) == "all_gather" for c in path)
        if not gathers or not self.training:
            return (path,)
        freed = tuple(replace(c, free=forward_collective(c.source, c.target) == "all_gather") for c in path)
        if self.rule.storage == "sharded-keep":
            return (path,)
        return (freed,) if self.rule.storage == "sharded-free" else (path, freed)

    def _allowed(self, path: tuple[Communication, ...]) -> bool:
        """"as-used": a parameter is never gathered, and never stored whole for a use in shards; only gradients are synchronised."""
        if not self.parameter or self.rule.storage != "as-used":
            return True
        return all(isinstance(c.source, Invariant) and isinstance(c.target, Replicated) for c in path)


def shards(placement: Placement) -> int:
    """On how many axes a placement is Sharded."""
    return sum(isinstance(s, Sharded) for s in placement.states)
