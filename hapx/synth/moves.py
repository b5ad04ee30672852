"""What can be done at a step, priced at given ratios: choices of triples together with the conversions that they need.

In: a Problem, shares of every cut, and the masks (available placements) of the step's slots. Out: the *moves* that no other move covers: a covers b
when it leaves at least the same placements available and `effect.cheaper(a, b)`.

A use of a tensor takes a placement that is available (or free), or converts once from any such one; what it converts from and to is then
available too. The first use of a parameter also chooses how it is stored.

Invariant: for every way to do the step with a choice there is a move of that choice here that can stand for it in every program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import accumulate
from operator import and_, mul, or_, truediv
from typing import NamedTuple, Protocol, TypeVar

from hapx.cost.exposed import ALL, Exposed
from hapx.cost.terms import Shares
from hapx.synth.conversions import Converted, conversions
from hapx.synth.effect import Effect, Vector, cheaper, compose, nothing
from hapx.synth.problem import Choice, Problem, StepClass
from hapx.synth.tables import Conversion, Kept, StepTerms, TensorTable, bits
from hapx.theory.conversion import storages

MOST = 200  # ways that none covers, if bytes count as well, from which on there are too many to look at
# pairs of placements whose conversions are priced, from which on they are asked before what they cost at least: to know that takes preparation
PRICED = 200
MANY = 64  # ways to have some operands of a step, from which on those that others cover are left out before the next operand is looked at


class Crowded(Exception):
    """A step has too many ways to have its operands that differ in seconds or bytes."""


class Use(NamedTuple):
    """How an operand is made available in placement `target`: stored (first use of a parameter), converted; None: it is there, or free."""

    slot: int
    target: int
    kept: Kept | None
    conversion: Conversion | None


class Way(NamedTuple):
    """To have operands where they are wanted: masks afterwards, and how. `place`: what it makes available, of all slots."""

    effect: Effect
    place: int
    masks: tuple[int, ...]
    uses: tuple[Use, ...]


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

    @property
    def does(self) -> tuple[int, ...]:
        """Equal for moves of a step class that do the same, at whatever shares and prices: tables keep what a use is made of, so its identity stays
        its own."""
        return self.choice.index, *[id(part) for use in self.uses for part in (use.kept, use.conversion)]


Item = TypeVar("Item", Option, Way, Move)


class Least(Protocol):
    """What conversions cost at least, known before they are priced."""

    def in_order(self, table: TensorTable, sources: Sequence[int], target: int) -> Sequence[int]:
        """The sources from which a conversion may be cheapest first."""

    def covered(self, table: TensorTable, source: int, target: int, effect: Effect, ties: bool) -> bool:
        """Whether every conversion costs at least as much as an effect, whatever comes before and after; ties: as much will do, else more."""


class Moves:
    """Moves at given shares. memory: bytes are part of the comparison (only needed when a limit binds). capacity: instead of seconds, count the
    share of this capacity (bytes per kind) that is used, as if it were forward compute: the search then finds the program of least memory.
    prices: seconds that a byte costs in addition, per kind."""

    def __init__(self, problem: Problem, shares: Shares, memory: bool, capacity: Vector | None = None, prices: Vector | None = None):
        self.problem, self.memory, self.capacity, self.prices = problem, memory, capacity, prices
        self.conversions = conversions(problem, shares)
        self.values, self.grid, self.edges = self.conversions.values, self.conversions.grid, self.conversions.edges
        self.exposed = problem.exposed
        self.nothing = nothing(problem.terms.kinds)
        self._moves: dict[tuple[int, tuple[int, ...], int], tuple[Move, ...]] = {}
        self._options: dict[tuple[int, int, int, bool], tuple[Option, ...]] = {}
        self._sources: dict[tuple[int, int, int, bool], int] = {}
        self._between: dict[tuple[int, int, int], tuple[tuple[Effect, Conversion], ...]] = {}
        self._prices: dict[int, float] = {}  # of memory, by terms
        self._effects: dict[tuple[int, int], Effect] = {}
        self.least: Least | None = None  # set where there are many ways to convert

    def at(self, kind: StepClass, masks: tuple[int, ...], choice: int) -> tuple[Move, ...]:
        """The moves of one choice of a step whose slots have these masks, cheapest first; masks of what is used will do. Places are then what is used
        and what is made: what else is available stays so."""
        key = id(kind), masks, choice
        if key not in self._moves:
            self._moves[key] = undominated(self._of_choice(kind, masks, kind.choices[choice], self.effect(kind, choice)), self.memory)
        return self._moves[key]

    def used(self, kind: StepClass, masks: tuple[int, ...], choice: int) -> tuple[int, ...]:
        """Of masks, what the moves of a choice use: they are those of all masks of which that is used."""
        used = [0] * len(masks)
        needs = kind.choices[choice].needs
        slots = [slot for slot, _ in needs]
        for slot, target in needs:
            mask, once = masks[slot], slots.count(slot) == 1
            used[slot] = self._used(kind.slots[slot].table, mask, target, kind.slots[slot].live) if once and mask else mask
        return tuple(used)

    def _used(self, table: TensorTable, mask: int, target: int, tracked: bool) -> int:
        """What ways to have a tensor in `target` use of a mask: it itself, or the placements from which it is converted. Where there is no way, all
        of it: none would be a parameter that is not stored yet."""
        if mask >> target & 1:
            return table.closure(target)
        key = id(table), mask, target, tracked
        if key not in self._sources:
            sources = [o.conversion.source for o in self.options(table, mask, target, tracked) if o.conversion is not None]
            self._sources[key] = reduce(or_, map(table.closure, sources)) if sources else mask
        return self._sources[key]

    def again(self, kind: StepClass, move: Move) -> Move:
        """A move that was found at other shares or prices, with its effect at these."""
        effect = self.nothing
        for use in move.uses:
            effect = compose(effect, self._effect(use.kept.step)) if use.kept is not None else effect
            effect = compose(effect, self._effect(use.conversion.step, self.exposed)) if use.conversion is not None else effect
        last = self.effect(kind, move.choice.index)
        return move._replace(effect=compose(effect, last) if effect is not self.nothing else last)

    def effect(self, kind: StepClass, choice: int) -> Effect:
        """The effect of a choice, without conversions."""
        key = id(kind), choice
        if key not in self._effects:
            self._effects[key] = self._effect(kind.choices[choice].step)
        return self._effects[key]

    def _of_choice(self, kind: StepClass, masks: tuple[int, ...], choice: Choice, last: Effect) -> Iterator[Move]:
        made = 0
        for result, offset, given in zip(kind.results, kind.result_offsets, choice.gives, strict=True):
            if result.live:
                made |= result.table.closure(given) << offset
        for effect, _, after, uses in self._operands(kind, choice, masks):
            place = made
            for slot, offset, mask in zip(kind.slots, kind.slot_offsets, after, strict=True):
                if slot.live:
                    place |= mask << offset
            yield Move(compose(effect, last) if effect is not self.nothing else last, place, choice, uses)

    def _operands(self, kind: StepClass, choice: Choice, masks: tuple[int, ...]) -> list[Way]:
        """Ways to have every operand where the choice needs it. Of many, those that others cover are left out on the way: whatever follows, they are
        no better. Raises Crowded."""
        ways = [Way(self.nothing, 0, masks, ())]
        slots = [slot for slot, _ in choice.needs]
        offsets = list(accumulate((len(slot.table.placements) for slot in kind.slots), initial=0))
        for slot, target in choice.needs:
            table = kind.slots[slot].table
            tracked = kind.slots[slot].live or slots.count(slot) > 1
            ways = [
                Way(
                    compose(effect, option.effect) if option.effect is not self.nothing else effect,
                    place | option.place << offsets[slot],
                    after[:slot] + (option.place,) + after[slot + 1 :] if tracked else after,
                    (*uses, Use(slot, target, option.kept, option.conversion)),
                )
                for effect, place, after, uses in ways
                for option in self.options(table, after[slot], target, tracked)
            ]
            if len(ways) > MANY:
                ways = list(undominated(ways, self.memory))
                if self.memory and len(ways) > MOST:
                    raise Crowded
        return ways

    def options(self, table: TensorTable, mask: int, target: int, tracked: bool) -> tuple[Option, ...]:
        """Ways to have a tensor in `target`; mask 0: a parameter that is not stored yet. tracked: what is available afterwards counts."""
        key = id(table), mask, target, tracked
        if key not in self._options:
            found = self._stored(table, target, once=not tracked) if mask == 0 else self._converted(table, mask, target)
            self._options[key] = undominated(found if tracked else (o._replace(place=0) for o in found), self.memory)
        return self._options[key]

    def _converted(self, table: TensorTable, mask: int, target: int) -> Iterator[Option]:
        wanted = table.closure(target)
        if mask >> target & 1:
            yield Option(self.nothing, mask | wanted, None, None)
            return
        found: list[tuple[int, Effect]] = []
        sources: Sequence[int] = list(bits(mask))
        least = self.least if len(sources) > 1 and len(self._between) >= PRICED else None
        for source in least.in_order(table, sources, target) if least is not None else sources:
            if found and least is not None and self._covered(least, table, source, target, found):
                continue
            place = mask | table.closure(source) | wanted
            for effect, conversion in self._paths(table, source, target):
                found.append((source, effect))
                yield Option(effect, place, None, conversion)

    def _covered(self, least: Least, table: TensorTable, source: int, target: int, found: list[tuple[int, Effect]]) -> bool:
        """Whether one of the conversions that were found, with their sources, stands for all from another source. Of equal ones (see `undominated`)
        that with less memory would be kept, then the first one."""
        return any(least.covered(table, source, target, effect, before < source and not any(effect.memory)) for before, effect in found)

    def _paths(self, table: TensorTable, source: int, target: int) -> tuple[tuple[Effect, Conversion], ...]:
        """The paths between two placements that may be the best ones, at the prices of memory."""
        key = id(table), source, target
        if key not in self._between:
            asked = self.conversions.between if self.capacity is None else self.conversions.keeping
            known = asked(table, source, target)
            self._between[key] = tuple([(self._path(table, source, target, path), path.conversion) for path in known])
        return self._between[key]

    def _path(self, table: TensorTable, source: int, target: int, path: Converted) -> Effect:
        return self._counted(path.effect, path.held)

    def price(self, term: int) -> float:
        """What the memory of a term costs."""
        if self.prices is None:
            return 0.0
        if term not in self._prices:
            self._prices[term] = float(sum(map(mul, self.prices, self.values[term])))
        return self._prices[term]

    def _stored(self, table: TensorTable, target: int, once: bool) -> Iterator[Option]:
        """once: the parameter has no other use; the others are kept in any placement, since a later use may want it."""
        allowed = storages(tuple(table.placements[k.placement] for k in table.stored), table.placements[target]) if once else None
        for kept in table.stored:
            if allowed is not None and table.placements[kept.placement] not in allowed:
                continue
            base = self.of_kept(table, kept)
            for option in self._converted(table, table.closure(kept.placement), target):
                yield option._replace(effect=compose(base, option.effect), kept=kept)

    def of_kept(self, table: TensorTable, kept: Kept) -> Effect:
        """The effect of storing a parameter."""
        return self._effect(kept.step)

    def _effect(self, step: StepTerms, exposed: Exposed = ALL) -> Effect:
        return self._counted(self.values.effect(step, exposed), step.memory)

    def _counted(self, effect: Effect, memory: int) -> Effect:
        """memory: number of the term of its bytes."""
        if self.prices is not None:
            return effect._replace(const=effect.const + self.price(memory)) if memory >= 0 else effect
        if self.capacity is None:
            return effect
        return self.nothing._replace(forward=tuple(map(truediv, effect.memory, self.capacity)), memory=effect.memory)


def undominated(items: Iterable[Item], memory: bool) -> tuple[Item, ...]:
    """Those that no other one covers, the cheapest first; of those that cover each other, one. memory: bytes count, too."""
    found = list(items)
    if len(found) < 2:
        return tuple(found)
    always = reduce(and_, [item.place for item in found])
    kept: list[Item] = []
    having: dict[int, int] = {}  # by what is available, the items of `kept` with which it is: a bit for each
    for item in sorted(found, key=lambda x: (x.effect.weight, sum(x.effect.memory), -x.place.bit_count())):
        effect, own = item.effect, tuple(bits(item.place & ~always))
        leaving = (1 << len(kept)) - 1  # those that leave at least as much available
        for bit in own:
            leaving &= having.get(bit, 0)
            if not leaving:
                break
        if not (leaving and any(cheaper(kept[i].effect, effect, memory) for i in bits(leaving))):
            for bit in own:
                having[bit] = having.get(bit, 0) | 1 << len(kept)
            kept.append(item)
    return tuple(kept)
