"""Programs whose synchronisation hides behind backward.

The additive cost counts the sums of gradients in full, though they run beside backward, so a search by it avoids them at prices that overlap would
have spared. Let A be the seconds of a program without these sums, S those of the sums, and e the part of S that backward does not hide, which only
the simulator knows. For every e, a search that counts the part e of the sums (`Problem.exposed`) finds the program of least A + e S, a corner of the
lower convex hull of all (S, A). The planner has that of e = 1. Here comes that of e = 0, plain data parallelism most often, from both ends on the
corners at what their programs expose, until these are known (a fixed point: the program found leaves bare what was counted), and the one where both
ends take equally long. What all these expose may be much, or nothing: then come the corners between the fastest one so far and its neighbours. The
least A + e S is a concave function of e, so between two ends it lies above their chord and below the lines of all programs: where these are close,
nothing is searched for.

On two levels sums inside of machines have links of their own, and are hidden where those between machines are not. So last come the corner where all
sums between machines count and none inside, and, if its program is the fastest so far, that at what it exposes.

In: the alternation of a view that was searched, its best candidate, and one that gives candidates their simulated times. Out: further candidates,
which only the simulator can rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from hapx.alternation import Alternation
from hapx.cost.exposed import ALL, BETWEEN, NONE, Exposed
from hapx.ir import Kind
from hapx.lower import Candidate
from hapx.synth.search import EXACT

SEARCHES = (3, 6)  # at most; the latter in problems that are solved to the end (`EXACT`)
INSIDE = 2  # and on two levels, where sums inside of machines do not count
LESS = 1.25  # times what is known, up to which programs are searched for with a part of the sums: of theirs less may be exposed
WORTH = 1e-3  # relative gain below which nothing is searched for


class Line(NamedTuple):
    """A candidate's seconds over the part of its sums of gradients that counts: without them, and theirs."""

    candidate: Candidate
    apart: float
    sums: float

    def at(self, part: float) -> float:
        return self.apart + part * self.sums


def overlapped(alternation: Alternation, best: Candidate, timed: Callable[[Candidate], Candidate], known: float) -> list[Candidate]:
    """Candidates of a view from searches that count only a part of the sums of gradients. best: the view's cheapest by the additive cost. known:
    simulated seconds of the best of all views."""
    found: list[Candidate] = []
    counted = [ALL]  # parts of the sums that were searched with
    programs = {id(best.program)}
    ends = [line(best)]
    lines = [*ends]
    left = SEARCHES[len(alternation.problem.steps) <= EXACT]

    def searched(part: Exposed) -> Line | None:
        """The cheapest with this part of the sums, if it may be worth it and its program is new."""
        nonlocal left
        if not left or any(part.like(other) for other in counted):
            return None
        counted.append(part)
        left -= 1
        new = alternation.exposing(part, known * (1 - WORTH) * (LESS if any(part) else 1.0))
        if not new or id(new[0].program) in programs:
            return None
        programs.add(id(new[0].program))
        found.extend(new)
        made = line(min(new, key=lambda c: c.cost))
        lines.append(made)
        if part == NONE:
            ends.append(made)
        return made

    def promising(part: float) -> bool:
        """Whether a program may be cheaper with this part of the sums than those of both ends, which are the best ones there."""
        if len(ends) == 1 or max(end.candidate.gap for end in ends) > WORTH:
            return True
        last, first = ends
        chord = (1 - part) * first.at(0.0) + part * last.at(1.0)
        return min(own.at(part) for own in lines) - chord > WORTH * known

    def bare(own: Line) -> float:
        """The part of its sums that a program exposes."""
        return exposed(own, timed(own.candidate).time)

    def follow(part: float | None) -> None:
        """From one program to the next, as long as there is a new one."""
        while part is not None:
            at = searched(Exposed.alike(part)) if promising(part) else None
            part = bare(at) if at is not None else None

    if _all_sums(alternation) < known and searched(NONE) is None:
        return found  # nothing is faster even where all sums hide, or one program is the best for every part
    for end in ends:  # to which the search with none of them may add
        follow(bare(end))
    if len(ends) > 1:
        follow(crossing(*ends))
    while any(promising(part) and searched(Exposed.alike(part)) is not None for part in beside(lines, timed)):
        follow(bare(lines[-1]))
    if not all(links.cuts for links in alternation.costs.links):
        left, fastest = INSIDE, min(timed(own.candidate).time for own in lines)
        at = searched(BETWEEN)
        if at is not None and timed(at.candidate).time < fastest:
            searched(Exposed(bare(at), 0.0))
    return found


def beside(lines: Sequence[Line], timed: Callable[[Candidate], Candidate]) -> Iterator[float]:
    """The parts at which the fastest program and its neighbours, by their sums, take equally long."""
    fastest = min(lines, key=lambda own: timed(own.candidate).time)
    more, less = [own for own in lines if own.sums > fastest.sums], [own for own in lines if own.sums < fastest.sums]
    for other in (min(more, key=lambda own: own.sums, default=None), max(less, key=lambda own: own.sums, default=None)):
        part = crossing(fastest, other) if other is not None else None
        if part is not None:
            yield part


def line(candidate: Candidate) -> Line:
    """Of a candidate, at its lengths: its sums one after another."""
    costs, shares = candidate.costs, candidate.costs.lengths_to_shares(candidate.lengths)
    steps = Counter(map(costs.step, (i.triple for i in candidate.program.instructions)))
    sums = sum(times * step.synchronisation(shares) for step, times in steps.items())
    return Line(candidate, candidate.cost - sums, sums)


def exposed(of: Line, time: float) -> float:
    """The part of the sums of gradients that nothing hides, by the simulated time; 0 where there are none."""
    return min(1.0, max(0.0, (time - of.apart) / of.sums)) if of.sums else 0.0


def crossing(one: Line, other: Line) -> float | None:
    """The part at which two candidates take equally long, if there is one."""
    part = (one.apart - other.apart) / (other.sums - one.sums) if one.sums != other.sums else -1.0
    return part if 0.0 < part < 1.0 else None


def _all_sums(alternation: Alternation) -> float:
    """Seconds, at least, that the links take where every gradient is summed."""
    costs, sizes = alternation.costs, alternation.theory.mesh.sizes
    moved = sum(ref.bytes for ref in costs.graph.refs.values() if ref.kind is Kind.PARAMETER and ref.requires_grad) / prod(sizes[1:])
    term = costs.links[0].all_reduce(costs.view.constant(moved))
    return 0.0 if term is None else float(term.at({}).max()) - float(max(costs.links[0].messages(2 * costs.links[0].rounds).const))
