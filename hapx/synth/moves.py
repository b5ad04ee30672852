"""What can be done at a step, priced at given ratios: choices of triples together with the conversions that they need.

In: a Problem, shares of every cut, and the masks (available placements) of the step's slots. Out: the *moves* that no other move covers: a covers b
when it leaves at least the same placements available and `effect.cheaper(a, b)`.

A use of a tensor takes a placement that is available (or free), or converts once from any available one; what it converts from and to is then
available too. The first use of a parameter also chooses how it is stored.

Invariant: for every way to do the step there is a move here that can stand for it in every program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import truediv
from typing import NamedTuple, TypeVar

from hapx.cost.terms import Shares
from hapx.synth.effect import Effect, Vector, cheaper, compose, nothing
from hapx.synth.problem import Choice, Problem, StepClass
from hapx.synth.tables import Conversion, Kept, StepTerms, TensorTable, Values


class Use(NamedTuple):
    """How an operand is made available in placement `target`: stored (first use of a parameter), converted; None: it is there, or free."""

    slot: int
    target: int
    kept: Kept | None
    conversion: Conversion | None


class Option(NamedTuple):
    effect: Effect
    place: int
    kept: Kept | None
    conversion: Conversion | None


class Move(NamedTuple):
    """`place`: masks of live slots and results, laid out as the StepClass says."""

    effect: Effect
    place: int
    choice: Choice
    uses: tuple[Use, ...]


Item = TypeVar("Item", Option, Move)


class Moves:
    """Moves at given shares. memory: bytes are part of the comparison (only needed when a limit binds). capacity: instead of seconds, count the
    share of this capacity (bytes per kind) that is used, as if it were forward compute: the search then finds the program of least memory."""

    def __init__(self, problem: Problem, shares: Shares, memory: bool, capacity: Vector | None = None):
        self.problem, self.memory, self.capacity = problem, memory, capacity
        self.values = Values(problem.terms, shares)
        self.nothing = nothing(problem.terms.kinds)
        self._moves: dict[tuple[int, tuple[int, ...]], tuple[Move, ...]] = {}
        self._options: dict[tuple[int, int, int, bool], tuple[Option, ...]] = {}
        self._effects: dict[int, tuple[Effect, ...]] = {}

    def at(self, kind: StepClass, masks: tuple[int, ...]) -> tuple[Move, ...]:
        """The moves of a step whose slots have these masks, cheapest first."""
        key = id(kind), masks
        if key not in self._moves:
            self._moves[key] = self._undominated(self._all(kind, masks))
        return self._moves[key]

    def _all(self, kind: StepClass, masks: tuple[int, ...]) -> Iterator[Move]:
        if id(kind) not in self._effects:
            self._effects[id(kind)] = tuple(self._effect(c.step) for c in kind.choices)
        for choice, last in zip(kind.choices, self._effects[id(kind)], strict=True):
            made = 0
            for result, offset, given in zip(kind.results, kind.result_offsets, choice.gives, strict=True):
                if result.live:
                    made |= result.table.closure(given) << offset
            for effect, after, uses in self._operands(kind, choice, masks):
                place = made
                for slot, offset, mask in zip(kind.slots, kind.slot_offsets, after, strict=True):
                    if slot.live:
                        place |= mask << offset
                yield Move(compose(effect, last) if effect is not self.nothing else last, place, choice, uses)

    def _operands(self, kind: StepClass, choice: Choice, masks: tuple[int, ...]) -> list[tuple[Effect, tuple[int, ...], tuple[Use, ...]]]:
        """All ways to have every operand where the choice needs it: (effect, masks afterwards, uses)."""
        ways: list[tuple[Effect, tuple[int, ...], tuple[Use, ...]]] = [(self.nothing, masks, ())]
        slots = [slot for slot, _ in choice.needs]
        for slot, target in choice.needs:
            table = kind.slots[slot].table
            tracked = kind.slots[slot].live or slots.count(slot) > 1
            ways = [
                (
                    compose(effect, option.effect) if option.effect is not self.nothing else effect,
                    after[:slot] + (option.place,) + after[slot + 1 :] if tracked else after,
                    (*uses, Use(slot, target, option.kept, option.conversion)),
                )
                for effect, after, uses in ways
                for option in self.options(table, after[slot], target, tracked)
            ]
        return ways

    def options(self, table: TensorTable, mask: int, target: int, tracked: bool) -> tuple[Option, ...]:
        """Ways to have a tensor in `target`; mask 0: a parameter that is not stored yet. tracked: what is available afterwards counts."""
        key = id(table), mask, target, tracked
        if key not in self._options:
            found = self._stored(table, target) if mask == 0 else self._converted(table, mask, target)
            self._options[key] = self._undominated(found if tracked else (o._replace(place=0) for o in found))
        return self._options[key]

    def _converted(self, table: TensorTable, mask: int, target: int) -> Iterator[Option]:
        wanted = table.closure(target)
        if mask >> target & 1:
            yield Option(self.nothing, mask | wanted, None, None)
            return
        for source in bits(mask):
            for conversion in table.conversions(source, target):
                place = mask | table.closure(source) | wanted
                yield Option(self._effect(conversion.step), place, None, conversion)

    def _stored(self, table: TensorTable, target: int) -> Iterator[Option]:
        for kept in table.stored:
            base = self._effect(kept.step)
            for option in self._converted(table, table.closure(kept.placement), target):
                yield option._replace(effect=compose(base, option.effect), kept=kept)

    def _effect(self, step: StepTerms) -> Effect:
        return self._counted(self.values.effect(step))

    def _counted(self, effect: Effect) -> Effect:
        if self.capacity is None:
            return effect
        return self.nothing._replace(forward=tuple(map(truediv, effect.memory, self.capacity)), memory=effect.memory)

    def _undominated(self, items: Iterable[Item]) -> tuple[Item, ...]:
        kept: list[Item] = []
        for item in sorted(items, key=lambda x: (x.effect.weight, sum(x.effect.memory), -x.place.bit_count())):
            effect, place = item.effect, item.place
            if not any(other.place & place == place and cheaper(other.effect, effect, self.memory) for other in kept):
                kept.append(item)
        return tuple(kept)


def bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
