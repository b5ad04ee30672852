"""Best-first search over partial solutions, with dominance and an admissible bound. Knows nothing of tensors.

In: a `Domain`. Out: a solution of least cost (within `TOLERANCE`, relative) and statistics.

Every partial solution (`Node`) has a `level` (how many decisions are made), a `place` (a set, coded as the bits of an int; a superset is at least
as good), an `estimate` (cost so far + a lower bound of the rest; exact for complete solutions) and what it has `spent`. Two rules prune:

- bound: estimate >= the best complete solution known (A*: Hart, Nilsson, Raphael 1968);
- dominance: another node of the same level whose place includes this one's and which `dominates` it, so that every completion of this one
  is a completion of the other at no more cost. Most nodes are dominated; where a domain can tell so before it makes them, it does.

Invariant: both rules keep at least one optimal solution, so the first complete node that leaves the queue is optimal.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from math import inf
from operator import itemgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

TOLERANCE = 1e-11
ROUNDING = 1e-12  # of an estimate: more than rounding does to what is spent
EVERY = 200  # expansions between two calls of whoever watches
PREPARED = 200  # nodes that a search keeps, from which on decisions are asked whether all that they make is dominated: to know that takes preparation

Watch = Callable[[int, float, float | None], None]  # expansions since the last call, least estimate that is open, best solution known


class Node(Protocol):
    level: int
    place: int
    estimate: float
    spent: float  # what dominates a node has not spent more, but for `ROUNDING` of its estimate
    dead: bool  # set by the search: dominated, or expanded already


N = TypeVar("N", bound=Node)


class Domain(Protocol[N]):
    """What is searched."""

    depth: int  # level of complete solutions
    sharp: bool  # estimates made in haste are nearly what they would be: better guesses than what is likely
    eager: bool  # an answer limits so much that beams look for one first

    def start(self) -> N | None: ...

    def successors(self, node: N, limit: float, most: int | None = None, front: Front[N] | None = None, hasty: bool = False) -> Iterable[N]:
        """The next partial solutions whose estimate is below `limit`; `most`: only those of the so many best decisions. front: of their level: those
        that something there dominates need not be made. hasty: estimates may be lower than `estimated` says, and then not below the limit."""

    def estimated(self, node: N) -> float:
        """The estimate of a node that was made in haste, or before the domain was made sharper."""

    def dominates(self, a: N, b: N) -> bool:
        """Whether a's cost makes b superfluous, given that a's place includes b's and that it has not spent more."""

    def likely(self, node: N) -> float:
        """What the best solution that it leads to may cost: a guess, where the estimate is a bound."""

    def kin(self, node: N) -> int:
        """Equal for nodes of one level that differ in little."""

    def again(self, node: N, limit: float) -> list[N] | None:
        """What repeats what was done where things stood as they do here, if they did: the next partial solution or, where a whole round was the same,
        one after all rounds that are left; None where there is no such place."""

    def leaps(self, node: N, limit: float) -> list[N]:
        """Of these only the latter: an answer is found sooner, so that less is above it."""

    def settled(self, level: int) -> bool:
        """Whether what is good and not done yet repeats itself at a level."""


class Sharpen(NamedTuple, Generic[N]):
    """How a search that does not end at once makes its estimates sharper, which takes a while. after: nodes that are expanded before, unless it would
    end with its budget. make: from then on nodes have other estimates; gives those of nodes that were made before, None where it can do nothing. It
    is told above what no solution is wanted."""

    after: float
    make: Callable[[float], Callable[[N], float] | None]


@dataclass(slots=True)
class Statistics:
    """expansions: nodes expanded; generated: nodes made, and decisions all of whose nodes were seen to be dominated before; kept: those that the
    frontier of a search took in; dominated, bounded: dropped by the two rules (bounded: also decisions that were not followed for it); unfit: dropped
    for a limit of the domain (memory); cut: dropped without proof, by the width of a beam, where a beam follows only what repeats itself, or with the
    budget; unproven: searches that ended with their budget; gap: by how much, relative, a solution may be above the best one, the largest of all."""

    expansions: int = 0
    generated: int = 0
    kept: int = 0
    dominated: int = 0
    bounded: int = 0
    unfit: int = 0
    cut: int = 0
    unproven: int = 0
    gap: float = 0.0

    def add(self, other: Statistics) -> None:
        gap = max(self.gap, other.gap)
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))
        self.gap = gap


class Front(Generic[N]):
    """The nodes of one level that nothing dominates, by place, and there in the order of what they have spent: what has spent more is not asked. Most
    nodes are dominated, and most of them by what dominated the last one of their place: that is asked first. Places are numbered, and every bit
    knows the numbers of those that have it, as the bits of an int: so those that include a place, or that it includes, are found without a walk
    over all of them."""

    def __init__(self, domain: Domain[N]):
        self.domain = domain
        self.places: dict[int, int] = {}  # their numbers
        self._shelves: list[tuple[int, list[float], list[N]]] = []  # by number: the place, what was spent, and the nodes
        self._free: list[int] = []  # numbers that are not in use
        self._all = self._bits = 0  # the numbers that are, and the bits that places have had
        self._having: dict[int, int] = {}  # by bit, the numbers of the places that have it
        self._last: dict[int, N] = {}  # by place

    def admit(self, node: N) -> bool:
        """Adds a node and removes those that it dominates (marking them dead); False if it is dominated itself."""
        place, dominates, rounding = node.place, self.domain.dominates, ROUNDING * node.estimate
        least = node.spent - rounding
        if self.covers(place, node.spent + rounding, lambda other: dominates(other, node)):
            return False
        for other_place, spent, others in self._of(self._included(place)):
            if spent[-1] >= least:
                for i in range(len(others) - 1, bisect_left(spent, least) - 1, -1):
                    if dominates(node, others[i]):
                        others.pop(i).dead = True
                        del spent[i]
                if not others:
                    self._remove(other_place)
        _, spent, others = self._shelf(place)
        at = bisect_right(spent, node.spent)
        spent.insert(at, node.spent)
        others.insert(at, node)
        return True

    def covers(self, place: int, most: float, dominates: Callable[[N], bool]) -> bool:
        """Whether a node whose place includes this one, and that has spent at most so much, dominates something."""
        last = self._last.get(place)
        if last is not None and not last.dead and last.spent <= most and dominates(last):
            return True
        for _, spent, others in self._of(self._including(place)):
            if spent[0] <= most:
                for other in others if spent[-1] <= most else others[: bisect_right(spent, most)]:
                    if dominates(other):
                        self._last[place] = other
                        return True
        return False

    def nodes(self) -> list[N]:
        return [node for number in self.places.values() for node in self._shelves[number][2]]

    def _of(self, numbers: int) -> Iterator[tuple[int, list[float], list[N]]]:
        while numbers:
            low = numbers & -numbers
            yield self._shelves[low.bit_length() - 1]
            numbers ^= low

    def _including(self, place: int) -> int:
        """The numbers of the places that include a place."""
        found = self._all
        while place and found:
            bit = place & -place
            found &= self._having.get(bit, 0)
            place ^= bit
        return found

    def _included(self, place: int) -> int:
        """The numbers of the places that a place includes: those that have no other bit."""
        left, others = self._bits & ~place, 0
        while left:
            bit = left & -left
            others |= self._having[bit]
            left ^= bit
        return self._all & ~others

    def _shelf(self, place: int) -> tuple[int, list[float], list[N]]:
        """Of a place, an empty one if there was none."""
        number = self.places.get(place)
        if number is not None:
            return self._shelves[number]
        shelf: tuple[int, list[float], list[N]] = (place, [], [])
        if self._free:
            number = self._free.pop()
            self._shelves[number] = shelf
        else:
            number = len(self._shelves)
            self._shelves.append(shelf)
        self.places[place] = number
        self._bits |= place
        self._mark(place, 1 << number)
        return shelf

    def _remove(self, place: int) -> None:
        number = self.places.pop(place)
        self._free.append(number)
        self._mark(place, 1 << number)

    def _mark(self, place: int, own: int) -> None:
        """That a place is there, if it was not, or is not, if it was. own: the bit of its number."""
        self._all ^= own
        while place:
            bit = place & -place
            self._having[bit] = self._having.get(bit, 0) ^ own
            place ^= bit


@dataclass(frozen=True, slots=True)
class Width:
    """Of a beam: nodes of a level. apart: of those that are kin one first, so that all of them are not variants of one another."""

    nodes: int
    apart: bool = False


def beam(domain: Domain[N], width: Width, statistics: Statistics, incumbent: N | None = None, tolerance: float = TOLERANCE) -> N | None:
    """A good solution: level by level, the nodes that are best by their estimate and by what they are likely to cost, in turns; where decisions
    repeat themselves, the same ones again. The incumbent where nothing is better by more than the tolerance (relative)."""
    start = domain.start()
    return _followed(domain, width, statistics, [start], incumbent, 1 - tolerance) if start is not None else incumbent


def _followed(domain: Domain[N], width: Width, statistics: Statistics, nodes: list[N], best: N | None, within: float) -> N | None:
    """From nodes of one level. Where the domain is eager, what leaps over others is followed to its end at once, as it limits everything else, unless
    its bound is above that of one that was: then it waits at its level, as all others do. Once something has leapt, only what also does is followed
    further where the domain is settled: of many rounds all but the first few are alike."""
    least, waiting, hasty = inf, dict[int, list[N]](), width.nodes == 1 or domain.sharp
    while nodes and nodes[0].level < domain.depth:
        limit = best.estimate * within if best is not None else inf
        leapt: dict[int, list[N]] = {}
        settled = least < inf and domain.settled(nodes[0].level)
        for node in nodes:
            statistics.expansions += 1
            repeated = domain.leaps(node, limit) if settled else domain.again(node, limit)
            statistics.cut += settled and not repeated
            for successor in domain.successors(node, limit, width.nodes + 2, hasty=hasty) if repeated is None else repeated:
                statistics.generated += 1
                ahead = waiting if successor.level == node.level + 1 else leapt
                ahead.setdefault(successor.level, []).append(successor)
        for level, found in leapt.items():
            lowest = min(n.estimate for n in found)
            first, least = domain.eager and lowest < least, min(least, lowest)
            if first:
                best = _followed(domain, width, statistics, found, best, within)
            else:
                waiting.setdefault(level, []).extend(found)
        limit = best.estimate * within if best is not None else inf
        nodes = []
        while waiting and not nodes:
            nodes = [n for n in waiting.pop(min(waiting)) if n.estimate < limit]
            nodes = _first(domain, nodes, limit, statistics) if width.nodes == 1 else _best(domain, nodes, width, statistics)
    return min(nodes, key=lambda n: n.estimate, default=best)


def _first(domain: Domain[N], nodes: list[N], limit: float, statistics: Statistics) -> list[N]:
    """The node of one level with the least estimate, if it is below the limit, of nodes that were made in haste: those that may have a lower one are
    asked for it."""
    least, first = limit, list[N]()
    for node in sorted(nodes, key=lambda n: n.estimate):
        if node.estimate >= least:
            break
        node.estimate = domain.estimated(node)
        if node.estimate < least:
            least, first = node.estimate, [node]
    above = sum(node.estimate >= limit for node in nodes)
    statistics.bounded += above
    statistics.cut += len(nodes) - above - len(first)
    return first


def _best(domain: Domain[N], nodes: list[N], width: Width, statistics: Statistics) -> list[N]:
    """The best nodes of one level that none of them dominates. What dominates a node is no worse, so those behind the last one kept need not be
    compared."""
    return undominated(domain, _ranked(domain, nodes, width), len(nodes), width.nodes, statistics)


def undominated(domain: Domain[N], ranked: Iterable[N], count: int, most: int, statistics: Statistics) -> list[N]:
    """The first ones that none before them dominates, at most so many. count: of all that are ranked."""
    front = Front(domain)
    kept = 0
    for place, node in enumerate(ranked):
        if kept == most:
            statistics.cut += count - place
            break
        admitted = front.admit(node)
        kept += admitted
        statistics.dominated += not admitted
    return front.nodes()


def _ranked(domain: Domain[N], nodes: list[N], width: Width) -> list[N]:
    """The best ones first. Estimates of many nodes are equal, and of those with the same bound most lead nowhere; what is likely misleads elsewhere:
    so by turns what is first in either order (as Helmert 2006, *The Fast Downward planning system*, section 5, expands nodes)."""
    ranked = sorted(nodes, key=lambda n: n.estimate)
    if len(nodes) <= width.nodes:
        return ranked
    if not domain.sharp:
        in_turns = chain.from_iterable(zip(sorted(nodes, key=domain.likely), ranked, strict=True))
        ranked = list({id(n): n for n in in_turns}.values())
    if not width.apart:
        return ranked
    seen: Counter[int] = Counter()
    rounds = []
    for node in ranked:
        kin = domain.kin(node)
        rounds.append(seen[kin])
        seen[kin] += 1
    return [node for _, node in sorted(zip(rounds, ranked, strict=True), key=itemgetter(0))]


def search(
    domain: Domain[N], statistics: Statistics, incumbent: N | None = None, budget: int | None = None, tolerance: float = TOLERANCE,
    watch: Watch | None = None, pace: Sequence[int] = (), enough: tuple[float, int] = (inf, 0), sharpen: Sharpen[N] | None = None,
) -> N | None:  # fmt: skip
    """A solution that is optimal within `tolerance` (relative), or `incumbent` where nothing is better; None if there is no solution at all.

    budget: nodes to keep at most (four times as many while there is no solution); when it is spent, the best solution so far is returned
    and `statistics.unproven` says so, `statistics.gap` how far from the best it may be. pace: numbers of nodes at which a search
    ends whose least estimate has risen so little since the last of them that at this pace it would not come half of the way to a proof with its
    budget. enough: an estimate, and a number of nodes: it also ends where it keeps so many of them, has a solution, and all solutions are above the
    estimate. sharpen: see `Sharpen`."""
    best = incumbent
    limit = best.estimate * (1 - tolerance) if best is not None else inf
    least = limit  # below the estimates of everything that was not followed further
    fronts: list[Front[N]] = [Front(domain) for _ in range(domain.depth + 1)]
    start = domain.start()
    if start is None:
        return best
    queue: list[tuple[float, int, int, N]] = [(start.estimate, 0, 0, start)]
    count = generated = expanded = 0
    asked, then, since, begun, slow = 0, start.estimate, 0, 0, False
    while queue:
        estimate, _, _, node = heapq.heappop(queue)
        if estimate >= limit:
            statistics.bounded += len(queue) + 1
            break
        if node.dead:
            continue
        if node.level == domain.depth:
            best = node
            break
        if budget is not None and best is not None and asked < len(pace) and count - begun >= pace[asked]:
            slow = (estimate - then) * budget < (limit - then) * (count - since) / 2
            asked, then, since = asked + 1, estimate, count
        far = best is not None and estimate > enough[0] and count > enough[1]
        spent = budget is not None and (slow or count > (budget if best is not None else 4 * budget))
        if sharpen is not None and not far and (spent or expanded >= sharpen.after):
            sharper, sharpen = sharpen.make(limit), None
            if sharper is not None:
                opened = [(estimate, -node.level, 0, node), *queue]
                queue = [(now, level, number, n) for _, level, number, n in opened if not n.dead and (now := sharper(n)) < limit]
                statistics.bounded += len(opened) - len(queue)
                heapq.heapify(queue)
                asked, then, since, begun, slow = 0, queue[0][0] if queue else limit, count, count, False
                continue
        expanded += 1
        if far or spent:
            statistics.unproven += 1
            statistics.cut += len(queue) + 1
            least = estimate
            break
        statistics.expansions += 1
        if watch is not None and statistics.expansions % EVERY == 0:
            watch(EVERY, estimate, best.estimate if best is not None else None)
        front = fronts[node.level + 1] if count >= PREPARED else None
        for successor in chain(domain.successors(node, limit, front=front), domain.leaps(node, limit)):
            generated += 1
            if not fronts[successor.level].admit(successor):
                statistics.dominated += 1
            else:
                count += 1
                # of equal estimates the deeper one first: it is nearer to an answer
                heapq.heappush(queue, (successor.estimate, -successor.level, count, successor))
                if successor.level == domain.depth:
                    best, limit = successor, min(limit, successor.estimate * (1 - tolerance))
                    least = min(least, limit)
    statistics.generated += generated
    statistics.kept += count
    if best is not None and best.estimate > 0:  # a stage of a pipeline may have nothing to do
        statistics.gap = max(statistics.gap, 1 - min(least, best.estimate) / best.estimate)
    return best
