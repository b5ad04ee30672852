"""What can be done at a step, priced at given ratios: choices of triples together with the conversions that they need.

In: a Problem, shares of every cut, and the masks (available placements) of the step's slots. Out: the *moves* that no other move covers: a covers b
when it leaves at least the same placements available and `effect.cheaper(a, b)`.

A use of a tensor takes a placement that is available (or free), or converts once from any such one; what it converts from and to is then
available too. The first use of a parameter also chooses how it is stored.

Invariant: for every way to do the step with a choice there is a move of that choice here that can stand for it in every program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import accumulate
from operator import and_, mul, truediv
from typing import NamedTuple, TypeVar

from hapx.cost.terms import Shares
from hapx.synth.effect import Effect, Event, Vector, cheaper, compose, nothing, plus
from hapx.synth.effect import effect as of_events
from hapx.synth.grid import Grid
from hapx.synth.problem import Choice, Problem, StepClass
from hapx.synth.tables import Conversion, Edge, Kept, Path, StepTerms, TensorTable, Values, bits
from hapx.theory.conversion import storages

Ran = tuple[list[Event], Vector, Vector]  # what a communication runs between devices, and seconds of copies forward and backward
MOST = 200  # ways that none covers, if bytes count as well, from which on there are too many to look at
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


class Moves:
    """Moves at given shares. memory: bytes are part of the comparison (only needed when a limit binds). capacity: instead of seconds, count the
    share of this capacity (bytes per kind) that is used, as if it were forward compute: the search then finds the program of least memory.
    prices: seconds that a byte costs in addition, per kind."""

    def __init__(self, problem: Problem, shares: Shares, memory: bool, capacity: Vector | None = None, prices: Vector | None = None):
        self.problem, self.memory, self.capacity, self.prices = problem, memory, capacity, prices
        self.values = Values(problem.terms, shares)
        problem.grid = problem.grid or Grid(problem)
        self.grid: Grid = problem.grid
        self.exposed = problem.exposed
        self.edges = self.grid.edges.at(shares, self.exposed)
        self.nothing = nothing(problem.terms.kinds)
        self._moves: dict[tuple[int, tuple[int, ...], int], tuple[Move, ...]] = {}
        self._options: dict[tuple[int, int, int, bool], tuple[Option, ...]] = {}
        self._edges: dict[int, Effect] = {}
        self._ran: dict[int, Ran] = {}
        self._between: dict[tuple[int, int, int], tuple[tuple[Effect, Conversion], ...]] = {}
        self._effects: dict[tuple[int, int], Effect] = {}

    def at(self, kind: StepClass, masks: tuple[int, ...], choice: int) -> tuple[Move, ...]:
        """The moves of one choice of a step whose slots have these masks, cheapest first."""
        key = id(kind), masks, choice
        if key not in self._moves:
            self._moves[key] = undominated(self._of_choice(kind, masks, kind.choices[choice], self.effect(kind, choice)), self.memory)
        return self._moves[key]

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
        for source in bits(mask):
            place = mask | table.closure(source) | wanted
            for effect, conversion in self._paths(table, source, target):
                yield Option(effect, place, None, conversion)

    def _paths(self, table: TensorTable, source: int, target: int) -> tuple[tuple[Effect, Conversion], ...]:
        """The paths between two placements that no other path covers. Paths that communicate and free alike keep the same bytes, so only
        the cheapest of those are priced in full."""
        key = id(table), source, target
        if key not in self._between:
            found: list[tuple[Effect, Conversion]] = []
            for holds, paths in table.paths(source, target):
                candidates = [(reduce(compose, [self.edge(table, e) for e in path]), path, conversion) for path, conversion in paths]
                for effect, path, conversion in _cheapest(candidates):
                    found.append((self._whole(table, source, target, path, effect, holds), conversion))
            self._between[key] = tuple(found)
        return self._between[key]

    def _whole(self, table: TensorTable, source: int, target: int, edges: Path, effect: Effect, holds: bool) -> Effect:
        """Of a path with what it keeps in memory; effect: of its edges, which of more than one is not quite that of all, as all copies come last."""
        if len(edges) > 1 and self.capacity is None:
            ran = [self._run(table, edge) for edge in edges]
            events = [event for own, _, _ in ran for event in own]
            effect = of_events(events, reduce(plus, [ahead for _, ahead, _ in ran]), reduce(plus, [back for _, _, back in ran]), self.values.zero)
        held = table.held(table.placements[target]) if holds else -1
        return self._counted(effect._replace(memory=self.values[held]))

    def edge(self, table: TensorTable, edge: Edge) -> Effect:
        """The effect of one communication, without what it keeps in memory."""
        key = id(edge)
        if key not in self._edges:
            self._edges[key] = of_events(*self._run(table, edge), self.values.zero) if self.capacity is None else self.nothing
        return self._edges[key]

    def _run(self, table: TensorTable, edge: Edge) -> Ran:
        key = id(edge)
        if key not in self._ran:
            self._ran[key] = self._communication(table, edge)
        return self._ran[key]

    def _communication(self, table: TensorTable, edge: Edge) -> Ran:
        number = self.grid.number.get((id(table), edge.source, edge.target))
        moved = self.edges.moved(number, edge.step.form, edge.step.free) if number is not None else None
        if moved is None:
            terms = table.terms_of(edge)
            return self.values.events(terms, self.exposed), self.values[terms.forward], self.values[terms.backward]
        seconds, forward, backward, sums, cuts, copied = moved
        events: list[Event] = [("forward", seconds, cuts)] * forward
        events += [("synchronise" if sums else "backward", seconds, cuts)] * backward
        return events, *copied

    def price(self, term: int) -> float:
        """What the memory of a term costs."""
        return float(sum(map(mul, self.prices, self.values[term]))) if self.prices is not None else 0.0

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

    def _effect(self, step: StepTerms, exposed: float = 1.0) -> Effect:
        return self._counted(self.values.effect(step, exposed))

    def _counted(self, effect: Effect) -> Effect:
        if self.prices is not None:
            return effect._replace(const=effect.const + sum(map(mul, self.prices, effect.memory)))
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


def _cheapest(candidates: list[tuple[Effect, Path, Conversion]]) -> Iterator[tuple[Effect, Path, Conversion]]:
    """The paths whose time no other one covers."""
    if len(candidates) == 1:
        yield candidates[0]
        return
    kept: list[Effect] = []
    for candidate in sorted(candidates, key=lambda c: c[0].weight):
        if not any(cheaper(other, candidate[0], False) for other in kept):
            kept.append(candidate[0])
            yield candidate
