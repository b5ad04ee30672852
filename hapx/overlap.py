"""Programs whose synchronisation hides behind backward.

The additive cost counts the sums of gradients in full, though they run beside backward, so a search by it avoids them at prices that overlap would
have spared. Let A be the seconds of a program without these sums, S those of the sums, and e the part of S that backward does not hide, which only
the simulator knows. For every e, a search that counts the part e of the sums (`Problem.exposed`) finds the program of least A + e S, a corner of the
lower convex hull of all (S, A). The planner has that of e = 1. Here comes that of e = 0, plain data parallelism most often, and from both ends on the
corners at what their programs expose, until these are known (a fixed point: the program found leaves bare what was counted). The least A + e S is a
concave function of e, so between two ends it lies above their chord and below their lines: where these are close, nothing is searched for.

In: the alternation of a view that was searched, its best candidate, and one that gives candidates their simulated times. Out: further candidates,
which only the simulator can rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import prod

from hapx.alternation import Alternation
from hapx.ir import Kind
from hapx.lower import Candidate

SEARCHES = 3  # at most
WORTH = 1e-3  # relative gain below which nothing is searched for
ALIKE = 0.05  # parts of the sums that differ by less are searched with once


def overlapped(alternation: Alternation, best: Candidate, timed: Callable[[Candidate], Candidate], known: float) -> list[Candidate]:
    """Candidates of a view from searches that count only a part of the sums of gradients. best: the view's cheapest by the additive cost. known:
    simulated seconds of the best of all views."""
    found: list[Candidate] = []
    counted = [1.0]  # parts of the sums that were searched with
    programs = {id(best.program)}

    def searched(part: float) -> Candidate | None:
        """The cheapest with this part of the sums, if it may be worth it and its program is new."""
        if len(counted) > SEARCHES or any(abs(part - e) <= ALIKE for e in counted):
            return None
        counted.append(part)
        new = alternation.exposing(part, known * (1 - WORTH))
        if new is None or id(new.program) in programs:
            return None
        programs.add(id(new.program))
        found.append(new)
        return new

    ends = [best]

    def promising(part: float) -> bool:
        """Whether a program may be cheaper with this part of the sums than those of both ends, which are the best ones there."""
        if len(ends) == 1 or max(end.gap for end in ends) > WORTH:
            return True
        (one, more), (other, less) = ((c.cost - synchronisation(c), synchronisation(c)) for c in (ends[1], best))
        return min(one + part * more, other + part * less) - ((1 - part) * one + part * best.cost) > WORTH * known

    if _all_sums(alternation) < known:
        hidden = searched(0.0)
        if hidden is None:  # nothing is faster even where all sums hide, or one program is the best for every part
            return found
        ends.append(hidden)
    for end in ends:
        at: Candidate | None = end
        while at is not None:
            part = exposed(timed(at))
            at = searched(part) if promising(part) else None
    return found


def exposed(candidate: Candidate) -> float:
    """The part of the sums of gradients that nothing hides, by a candidate's simulated time; 0 where there are none."""
    sums = synchronisation(candidate)
    return min(1.0, max(0.0, 1 - (candidate.cost - candidate.time) / sums)) if sums else 0.0


def synchronisation(candidate: Candidate) -> float:
    """Seconds of the sums of gradients, one after another, at the candidate's lengths."""
    costs, shares = candidate.costs, candidate.costs.lengths_to_shares(candidate.lengths)
    steps = [costs.step(i.triple) for i in candidate.program.instructions]
    distinct = {id(step): step for step in steps}
    total = 0.0
    for number, times in Counter(map(id, steps)).items():
        total += times * sum(float(c.term.at(shares).max()) for c in distinct[number].communication if c.direction == "synchronise")
    return total


def _all_sums(alternation: Alternation) -> float:
    """Seconds, at least, that the links take where every gradient is summed."""
    costs, sizes = alternation.costs, alternation.theory.mesh.sizes
    moved = sum(ref.bytes for ref in costs.graph.refs.values() if ref.kind is Kind.PARAMETER and ref.requires_grad) / prod(sizes[1:])
    term = costs.links[0].all_reduce(costs.view.constant(moved))
    return 0.0 if term is None else float(term.at({}).max()) - float(max(costs.links[0].messages(2 * costs.links[0].rounds).const))
