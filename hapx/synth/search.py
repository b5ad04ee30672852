"""Synthesis: the cheapest program of a theory at given ratios, by A* (HAP section 4.3).

In: a Problem, the share of every cut per device kind, memory limits. Out: a `Solution`: a Program whose cost

    t(Q, B) = sum over phases (comm_i(B) + max_j comp_ij(B)) + synchronisation

is least among all programs that fit, with the costs of its steps for the balancer.

Memory is first left out. If the program found then fits, it is the answer, because a relaxation's optimum that is feasible is optimal; otherwise
memory gets a price (`hapx.synth.limited`), and in small problems the search is then made with memory as part of the state, unless a step reads so
many parameters that their ways to be stored are too many to compare (`hapx.synth.moves.Crowded`).

A search that is not short makes its bound sharper on the way (`hapx.synth.potentials`), and those at other shares after it begin with that. In
larger problems beams come first, and are as good as the bound: where it leaves much to the first of them, it is made sharper before the others.

How exact: programs of up to `EXACT` steps are optimal, those of up to `NEARLY` within `ALMOST` and larger ones within `WITHIN` of the optimum,
proven by the bound, unless the search ends with its budget; then a wider beam follows, and where that leaves little in a problem of one axis and few
steps, the search once more from there. Where memory must be priced, the prices may leave a gap. `statistics.gap` says what was proven. Where only a
part of the sums of gradients counts (`hapx.overlap`), searches end early, as on two axes they would take longer than what they bring is worth.
They also end early at shares where the bound says that no program is as fast as one that is known at others, as soon as it says so, and where
little is asked of them (`Problem.within`); no wider beam follows then, nor in a larger problem where what was found is far from what is known. Where
prices of memory say that all that fits is far from what is known, there is no search with memory as part of the state. At shares that are only tried
(`Problem.rough`) they are as long as ever, but good enough earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from operator import attrgetter, le, mul

import numpy as np

from hapx.cluster.units import show
from hapx.cost.exposed import ALL
from hapx.cost.model import CostModel, StepCost
from hapx.cost.terms import Shares
from hapx.errors import InsufficientMemoryError, PlanError
from hapx.ir import Graph
from hapx.plan import ProgramKey
from hapx.restriction import AUTO, Restriction
from hapx.states import Placement
from hapx.synth.astar import TOLERANCE, Sharpen, Statistics, Width, beam, search
from hapx.synth.conversions import conversions
from hapx.synth.domain import State, Synthesis, moves_of
from hapx.synth.effect import Vector, compose
from hapx.synth.limited import fitting
from hapx.synth.moves import Crowded
from hapx.synth.problem import Problem, build
from hapx.synth.seeds import seeds
from hapx.synth.splices import Splices
from hapx.synth.tables import Values, numbered
from hapx.synth.writer import Solution, solution
from hapx.theory.triple import Theory

# what takes that many times what is known elsewhere is not balanced further (`hapx.turns`), nor searched with memory as part of the state
HOPELESS = 1.5
FARTHER = 1.1  # nor searched with wider beams, in a larger problem: what its ratios lead to from there, the next search sees
NARROW, WIDTH = Width(1), Width(4)  # of the beams that a search begins with
REMEMBERED = 2  # programs that the next search begins with
AT_PRICES = 24  # those that were found last where memory had a price, which other shares begin with
BUDGET = 6_000  # partial programs that one search keeps at most, once it has a program
SHORT = BUDGET // 6  # where little is to be expected
NEARBY = 0.05  # relative difference of shares at which wider beams hardly find anything else than before
AGAIN = 20_000  # the same once more, where beams found something better and left less than `NEAR`, on one axis and up to `NEARLY[1]` steps
LONG = 60_000  # the same for problems of up to EXACT steps in which memory binds, where a single one is searched
SHARPEN = 50  # partial programs after which the bound is made sharper, in problems of up to `EXACT` steps: about as long as that takes;
SHARP = 400  # in those of up to so many steps where the search would end with its budget and what it finds is wanted; then in every later search
LOOSE = 0.02  # what the bound may leave to the first program of a larger problem, or it is made sharper before other beams;
RAISED = 0.005  # part of that program's cost by which the bound must become sharper, or beams are not led by it alone
EXACT = 100  # steps up to which a problem is solved to the end
NEARLY = (400, 110)  # and up to which one is solved to a, on meshes of one axis and of several,
ALMOST = 1e-6  # relative distance from the optimum
NEAR = 0.01  # what may be left to the bound without another beam
# of those that follow where a search ends with its budget, if more than this is left; on meshes of one axis and of several,
WIDE = (((Width(16), 0.0), (Width(8, True), NEAR)), ((Width(4, True), 0.0), (Width(8, True), NEAR / 2), (Width(12), NEAR)))
SHARPENED = ((Width(8, True), NEAR / 2),)  # in larger problems whose bound was made sharper before,
WIDEST = ((Width(64), 0.0),)  # where memory binds in a problem of up to EXACT steps,
PARTLY = ((WIDTH, NEAR), (Width(12), NEAR))  # and where sums of gradients count in part
# where memory has prices in a larger one, on one axis and on several: what was found at other prices hardly leads anywhere else
PRICED = (NARROW, WIDTH), (NARROW, Width(4, True))
# partial programs after which the search of a problem of more than EXACT steps is asked whether its budget leads anywhere, and, after the first of
# these, a short one on several axes: where it did not come to its end, it never found anything
PACE = (300, BUDGET // 3)
WITHIN = 1e-3  # relative distance from the optimum that is proven for larger ones
WORTH = 0.25  # of the distance: what a beam may leave, which follows nothing that is not better by more
TOO_SLOW = 2.0  # times what would be possible with more memory, above which prices go no further in problems of up to
SURE = 50  # steps
WITHIN_LIMITS = 5e-3  # the distance at which prices of memory are good enough


def solve(problem: Problem, shares: Shares, limits: Vector | None, key: ProgramKey, prices: Vector | None = None) -> Solution:
    """The cheapest program at these shares. limits: bytes per kind (None: not limited). prices: of memory, to begin with, where limits bind.

    Raises InsufficientMemoryError when no program fits."""
    found, nearest = attempt(problem, shares, limits, key, prices, budget=LONG)
    if found is None:
        assert limits is not None
        raise too_small(problem, nearest[-1], limits)
    return found


def least(problem: Problem, shares: Shares) -> float:
    """Seconds that every program takes at these shares, at least. The next search there begins with what is found out here."""
    start = _domain(problem, shares).start()
    return start.estimate if start is not None else inf


def _domain(problem: Problem, shares: Shares) -> Synthesis:
    """Without limits; that of the last question, if it was asked at the same shares."""
    asked: Synthesis | None = problem.asked
    if asked is None or asked.moves.conversions is not conversions(problem, shares):
        asked = problem.asked = Synthesis(problem, shares, None)
    return asked


def attempt(
    problem: Problem, shares: Shares, limits: Vector | None, key: ProgramKey, prices: Vector | None = None, budget: int | None = BUDGET,
    above: float = inf, known: float = inf, possible: Callable[[], bool] = lambda: True,
) -> tuple[Solution | None, tuple[Solution, ...]]:  # fmt: skip
    """As `solve`, with what other ratios may make fit where memory binds: the cheapest program, and the one of least memory if nothing was found.
    budget: small problems where memory binds are searched to the end with it; None: only with prices of memory, and shortly. above: seconds; nothing
    at all where the bound says that every program takes more. known: seconds of a program at other shares; where the bound says that every program
    takes more than that, a good one will do: it is wanted for the ratios that it leads to. possible: is asked before a program is looked for that
    fits; none is where it says no, and the cheapest is all that there is."""
    statistics = Statistics()
    domain = _domain(problem, shares)
    problem.asked = None
    start = domain.start()
    if start is not None and start.estimate > above:
        return None, ()
    best = _search(domain, statistics, budget=BUDGET, known=known)
    if best is None:
        raise _stuck(problem)
    bound = best.estimate * (1 - statistics.gap)
    cheapest = solution(problem, best, best.estimate, key, statistics)
    if limits is None or all(map(le, best.memory, limits)):
        return cheapest, ()
    if not possible():
        return None, (cheapest,)
    found, least = _limited(domain, shares, limits, key, best, prices, statistics, budget, known)
    if found is not None:
        return found, (cheapest,)
    assert least is not None, "found by prices of memory"
    if least.cost > 1:
        return None, (cheapest, least)
    # whatever fits is slow
    statistics.add(least.statistics)
    fits = _timed(problem, shares, least, statistics)
    statistics.gap = max(0.0, 1 - bound / fits.cost)  # of what fits nothing is known but that it takes no less than without limits
    return fits, (cheapest,)


def alternatives(problem: Problem, shares: Shares, key: ProgramKey) -> Iterator[Solution]:
    """Programs that were found where memory has a price, here and at other shares, as they are here, the fastest first."""
    domain, statistics = _domain(problem, shares), Statistics()
    start = domain.start()
    assert start is not None, "without limits"
    for state in sorted(_at_prices(problem, domain), key=attrgetter("estimate")):
        statistics.gap = 1 - start.estimate / state.estimate if state.estimate > 0 else 0.0  # a stage of a pipeline may have nothing to do
        yield solution(problem, state, state.estimate, key, replace(statistics))


def _limited(
    domain: Synthesis, shares: Shares, limits: Vector, key: ProgramKey, cheapest: State, prices: Vector | None, statistics: Statistics,
    budget: int | None, known: float,
) -> tuple[Solution | None, Solution | None]:  # fmt: skip
    """The cheapest program that fits, None where none was found; and, where prices of memory led to none, the one of least memory. `cheapest` does
    not fit. domain: that of the search without limits. What prices led to at the same shares, when limits were others, is known."""
    problem, splices = domain.problem, Splices(domain, limits)
    small = budget is not None and len(problem.steps) <= EXACT
    asked: dict[Vector, tuple[State | None, float, Synthesis]] = conversions(problem, shares).priced.setdefault(small, {})
    programs = _at_prices(problem, domain)
    for program in programs:
        splices.know(program, domain)
    spliced = splices.add(cheapest, domain)
    programs += [spliced[0]] if spliced is not None else []

    def priced(at: Vector) -> tuple[State | None, float, tuple[State, float] | None]:
        if at not in asked:
            own, there = Statistics(), Synthesis(problem, shares, None, prices=at)
            begin = min(programs, key=lambda s: s.estimate + sum(map(mul, at, s.memory)), default=None)
            widths = () if small else PRICED[len(problem.theory.mesh.axes) > 1]
            state = _search(there, own, WITHIN, SHORT, wide=small, widths=widths, begin=() if begin is None else (begin,))
            asked[at] = state, own.gap, there
            if state is not None:
                _remember(problem, state)
            own.gap = 0.0
            statistics.add(own)
        state, gap, there = asked[at]
        return state, gap, splices.add(state, there) if state is not None else None

    # what is far slower than without limits, the search with memory as part of the state finds as well, if there are not too many steps
    above = TOO_SLOW * cheapest.estimate if small and len(problem.steps) <= SURE else HOPELESS * known
    found = fitting(priced, cheapest, limits, 0.0 if small else WITHIN_LIMITS, prices, tuple(asked), above, programs)
    best, cost, least = found.best, found.cost, None
    if best is None:
        least = least_memory(problem, shares, limits, key, SHORT if budget is None else BUDGET)
        if least.cost > 1:
            return None, least
    exact = None
    if small and (best is None or found.bound <= HOPELESS * known):
        with suppress(Crowded):
            exact = _with_memory(problem, shares, limits, found.prices, best, cost, statistics, budget, known)
    if exact is not None:
        best, cost = exact, exact.estimate
    elif best is not None:
        statistics.gap = max(statistics.gap, 1 - found.bound / cost)
    if best is None:
        return None, least
    _remember(problem, best)
    return solution(problem, best, cost, key, statistics, found.prices), least


def _at_prices(problem: Problem, domain: Synthesis) -> list[State]:
    """Programs that were found where memory has a price, in a domain without."""
    return [own for last in problem.at_prices.values() if (own := domain.follow(last)) is not None]


def _remember(problem: Problem, state: State) -> None:
    """Keeps a program that was found where memory has a price, for other shares."""
    key, known = tuple([move.does for move in moves_of(state)]), problem.at_prices
    known.pop(key, None)
    known[key] = state
    if len(known) > AT_PRICES:
        known.pop(next(iter(known)))


def _with_memory(
    problem: Problem, shares: Shares, limits: Vector, prices: Vector | None, best: State | None, cost: float, statistics: Statistics,
    budget: int | None, known: float,
) -> State | None:  # fmt: skip
    """The search with bytes as part of the state. best: what prices found, of that many seconds; None: the program of least memory begins. known: see
    `attempt`. Raises Crowded."""
    domain = Synthesis(problem, shares, limits, prices=prices)
    if best is not None:  # as an incumbent: with its seconds alone
        best = State(best.level, best.place, cost, best.forward, best.backward, best.memory, cost, cost, best.parent, best.move, best.rounds)
    else:
        best = domain.follow(problem.programs[0])
    own = Statistics()
    best = _counted(domain, own, search(domain, own, best, budget, watch=problem.watch, enough=(known, SHORT), sharpen=_sharpen(domain)))
    if best is not None and best.estimate * (1 - own.gap) <= known:
        best = _widened(domain, own, best, WIDEST, TOLERANCE)
    statistics.gap = 0.0  # that of the program without limits
    statistics.add(own)
    return best


def least_memory(problem: Problem, shares: Shares, limits: Vector, key: ProgramKey, budget: int = BUDGET) -> Solution:
    """The program whose fullest device kind is least full; its `cost` is that fraction of the limit, not seconds. budget: with less than the usual
    one the search is short."""
    statistics = Statistics()
    domain = Synthesis(problem, shares, None, capacity=limits)
    best = _search(domain, statistics, budget=budget, wide=budget >= BUDGET)
    statistics.gap = 0.0  # one of bytes, not of seconds
    if best is None:
        raise _stuck(problem)
    return solution(problem, best, best.estimate, key, statistics)


def synthesize(theory: Theory, costs: CostModel, shares: Shares, limits: Vector | None = None, given: Mapping[str, Placement] | None = None,
               restriction: Restriction = AUTO) -> Solution:  # fmt: skip
    """The cheapest program of a theory at given shares: builds the problem and solves it once."""
    return solve(build(theory, costs, restriction, given), shares, limits, program_key(theory))


def program_key(theory: Theory) -> ProgramKey:
    graph: Graph = theory.graph
    return ProgramKey(graph.mode, tuple(graph.refs[n].shape for n in graph.input_names))


def _search(
    domain: Synthesis, statistics: Statistics, tolerance: float | None = None, budget: int = BUDGET, wide: bool = True, widths: Sequence[Width] = (),
    known: float = inf, begin: Sequence[State] = (),
) -> State | None:  # fmt: skip
    """First good programs, so that most of what the search would generate is above the best of them: those that were found at other shares, or else
    those that people write by hand and what beams find. Where the best is not wanted exactly, the search hardly ever finds a better one, so it is
    short."""
    problem = domain.problem
    found = [state for last in (*problem.programs, *begin) if (state := domain.follow(last)) is not None]
    best = min(found, key=lambda s: s.estimate, default=None)
    within = _tolerance(problem) if tolerance is None else tolerance
    if best is None or problem.exposed != ALL:  # what was found where all counts is far from the best where a part does
        best = _incumbent(domain, statistics, within, best)
    else:
        best = _sharpened(domain, statistics, within, best)
    for width in widths:
        if not (domain.sharp and width == NARROW):
            best = beam(domain, width, statistics, best, WORTH * within)
    own = Statistics()
    several = len(problem.theory.mesh.axes) > 1
    short = problem.brief or problem.within > 0 or (problem.exposed != ALL and several)
    pace = PACE if len(problem.steps) > EXACT else PACE[:1] if problem.brief and several else ()
    sharpened = len(problem.steps) <= (EXACT if problem.within or problem.exposed != ALL else SHARP)
    sharpen = _sharpen(domain) if sharpened else None
    best = search(domain, own, best, min(budget, SHORT) if short else budget, within, problem.watch, pace, (known, SHORT), sharpen)
    before = best
    far = best is not None and (best.estimate * (1 - own.gap) > known or (len(problem.steps) > EXACT and best.estimate > FARTHER * known))
    if wide and not far and not problem.within and own.unproven and not _found_by_wider(domain, best):
        best = _widened(domain, own, best, SHARPENED if domain.sharp else WIDE[several] if problem.exposed == ALL else PARTLY, within)
        if best is not None:
            problem.widened[problem.exposed, domain.moves.capacity] = best, domain.moves.values.shares
    solvable = not far and not several and len(problem.steps) <= NEARLY[1] and tolerance is None and not short
    if best is not None and best is not before and solvable:
        best = _once_more(domain, own, best, within)
    statistics.add(own)
    if best is not None:
        problem.programs[:] = [best, *problem.programs[: REMEMBERED - 1]]
    return _counted(domain, statistics, best)


def _sharpen(domain: Synthesis) -> Sharpen[State]:
    """When the bound is made sharper: at once, where that takes a part of the time only."""
    return Sharpen(0 if domain.quickly_sharp else SHARPEN if len(domain.problem.steps) <= EXACT else inf, domain.sharpen)


def _incumbent(domain: Synthesis, statistics: Statistics, within: float, best: State | None) -> State | None:
    """A good program of beams: of a narrow one for every seed, and of a narrow and a wide one that may choose whatever they like. Where the best is
    not wanted exactly, these two come first, and the seeds only if it may be further off than that."""
    problem = domain.problem
    several = len(problem.theory.mesh.axes) > 1
    narrow, wide = [(seed, NARROW) for seed in seeds(problem)], [(None, WIDTH)] if problem.exposed == ALL else []
    start = domain.start()
    for only, width in [(None, NARROW), *(wide + narrow if problem.within else narrow + wide)]:
        if best is not None and width == NARROW and start is not None and start.estimate >= best.estimate * (1 - within):
            break
        domain.only = only
        best = beam(domain, width, statistics, best, WORTH * within)
        if best is not None and only is None and (width == WIDTH or problem.exposed != ALL or not several):
            best = _sharpened(domain, statistics, within, best)
    domain.only = None
    return best


def _sharpened(domain: Synthesis, statistics: Statistics, within: float, best: State) -> State | None:
    """Of a larger problem, what a narrow beam finds once more where the bound leaves much: with a sharper one it goes wrong less often than wide ones
    without. Where it did not become sharper once, that is not tried again."""
    problem, start, of_seconds = domain.problem, domain.start(), domain.moves.capacity is None
    if start is None or domain.depth <= EXACT or of_seconds in problem.blunt or start.estimate >= best.estimate * (1 - LOOSE):
        return best
    if domain.sharpen(best.estimate) is None:
        return best
    sharper = domain.start()
    assert sharper is not None, "as before"
    if not domain.sharp and sharper.estimate - start.estimate < RAISED * best.estimate:
        problem.blunt.add(of_seconds)
        return best
    domain.sharp = True
    return beam(domain, NARROW, statistics, best, WORTH * within)


def _counted(domain: Synthesis, statistics: Statistics, best: State | None) -> State | None:
    """`best`, once what the domain did not follow is counted."""
    statistics.bounded += domain.bounded
    statistics.dominated += domain.dominated
    statistics.generated += domain.dominated
    statistics.unfit += domain.unfit
    return best


def _widened(
    domain: Synthesis, statistics: Statistics, best: State | None, widths: Sequence[tuple[Width, float]], within: float
) -> State | None:  # fmt: skip
    """Where a search ended with its budget, wider beams try once more: a best-first search that ends early has hardly seen the last steps.
    statistics: of this search alone."""
    if best is None or not statistics.unproven:
        return best
    bound = best.estimate * (1 - statistics.gap)
    for width, near in widths:
        if bound < best.estimate * (1 - near):
            best = beam(domain, width, statistics, best, WORTH * within)
            assert best is not None
    statistics.gap = max(0.0, 1 - bound / best.estimate)
    return best


def _found_by_wider(domain: Synthesis, best: State | None) -> bool:
    """Whether wider beams found no better program of a larger problem where computing was shared out nearly as here: then they hardly do here."""
    problem = domain.problem
    known = problem.widened.get((problem.exposed, domain.moves.capacity))
    if known is None or best is None or len(problem.steps) <= EXACT:
        return False
    found, shares = known
    own = domain.moves.values.shares
    if not all(np.allclose(own[c], shares[c], rtol=NEARBY, atol=0) for c in own if c.row.kind == "compute"):
        return False
    again = domain.follow(found)
    return again is not None and best.estimate <= again.estimate * (1 + TOLERANCE)


def _once_more(domain: Synthesis, statistics: Statistics, best: State, within: float) -> State:
    """From what beams found the search again, where that left little: a good program to begin with keeps away most of what it kept before.
    statistics: of the search before."""
    if not within < statistics.gap < NEAR:
        return best
    bound, own = best.estimate * (1 - statistics.gap), Statistics()
    found = search(domain, own, best, AGAIN, within, domain.problem.watch)
    assert found is not None
    bound = max(bound, found.estimate * (1 - own.gap))
    statistics.add(own)
    statistics.gap = max(0.0, 1 - bound / found.estimate)
    return found


def _tolerance(problem: Problem) -> float:
    steps, nearly = len(problem.steps), NEARLY[len(problem.theory.mesh.axes) > 1]
    return max(problem.within, problem.rough, TOLERANCE if steps <= EXACT else ALMOST if steps <= nearly else WITHIN)


def _stuck(problem: Problem) -> PlanError:
    return PlanError(f"restriction {problem.restriction.name!r} allows no program", where="planner", hint="allow more splits, forms or storage")


def _timed(problem: Problem, shares: Shares, least: Solution, statistics: Statistics) -> Solution:
    """The program of least memory with its cost in seconds (the search for a faster one that fits ended with its budget)."""
    values = Values(problem.terms, shares)
    total = values.effect(numbered(problem.terms, StepCost(None, None, (), None)))
    for step in least.steps:
        total = compose(total, values.effect(numbered(problem.terms, step)))
    return replace(least, cost=total.seconds, statistics=statistics)


def too_small(problem: Problem, least: Solution, limits: Vector) -> InsufficientMemoryError:
    """The error: which devices lack how much, by the program of least memory."""
    kind = max(range(len(limits)), key=lambda j: least.memory[j] / limits[j])
    mesh, axis = problem.theory.mesh, problem.theory.mesh.uneven or 0
    devices = [d for d in mesh.devices if mesh.coordinates(d)[axis] in problem.costs.kinds[kind]]
    needs, has, lack = (show(float(n), "size") for n in (least.memory[kind], limits[kind], least.memory[kind] - limits[kind]))
    return InsufficientMemoryError(
        f"no program fits: the smallest needs {needs} there and {has} is free; {lack} lack",
        where=f"device{'s' if len(devices) > 1 else ''} {', '.join(map(str, devices))}",
        hint="use a smaller batch, more devices, an optimizer with less state, strategy='auto' with sharded storage, or rematerialisation",
    )
