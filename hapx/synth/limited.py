"""The cheapest program that fits into memory, by pricing memory.

In: a problem whose cheapest program does not fit. Out: a program that fits, and a proof of how good it is. With prices l_k >= 0 (seconds per byte on
a device of kind k; Lagrangian multipliers), the cheapest program by t(Q) + l . memory(Q) is found by the same search as without limits, and

    min over Q that fit of t(Q)  >=  min over Q of ( t(Q) + l . memory(Q) ) - l . limits        for every l >= 0,

so every round gives a lower bound, and a candidate where its program fits. (Everett, *Generalized Lagrange multiplier method*, Operations Research
1963.) As a function of prices the right side is the least of planes, one for every program. The next prices are those at which the planes that are
known are highest, until the search finds none below them there (Kelley, *The cutting-plane method for solving convex programs*, J. SIAM 1960). Then
no prices prove more. Of the programs whose planes meet there one fits, if one kind of devices is short of memory; otherwise prices rise from there
until one does, and what lies between is halved.

Programs that were found at other shares begin with their planes: they often are as good here, and prices are right from the first round on.
What lies between programs that fit and programs that do not is put together from both (`hapx.synth.splices`).

Invariant: `bound` <= the cost of every program that fits; `best` fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from operator import le, mul

import numpy as np
from scipy.optimize import linprog

from hapx.cost.edges import Array, Mask
from hapx.synth.domain import State
from hapx.synth.effect import Vector

ROUNDS = 12
FACTOR = 8.0  # times the highest prices so far, up to which the next ones go while nothing fits
RISE = 2.0  # by which prices rise from the best ones on until something fits
CLOSE = 1.1  # ratio of prices at which something fits to those at which nothing does that is not halved further
DOMINANT = 50.0  # times the seconds of a program, as the price of all the memory of a device: what is cheapest then takes about as little as there is
ALIKE = 1e-6  # of the seconds of the cheapest program: what planes may differ by and be the same

Search = Callable[[Vector], tuple[State | None, float, tuple[State, float] | None]]


@dataclass(frozen=True)
class Priced:
    """`best`: the cheapest state that fits, or None; `cost`: its seconds; `bound`: no state that fits takes less; `prices`: those that show it."""

    best: State | None
    cost: float
    bound: float
    prices: Vector


class Planes:
    """What programs take, less the price of the memory that they leave free. Inside, seconds are in times of those of the cheapest program, and
    prices are those of all the memory that there is."""

    def __init__(self, cheapest: State, limits: Vector):
        self.seconds, self.limits = cheapest.estimate or 1.0, np.array(limits)  # a stage of a pipeline may have nothing to do
        self.asked: list[Vector] = []  # prices
        self._planes: list[tuple[float, ...]] = []  # seconds, then what lacks per kind
        self.add(cheapest.estimate, cheapest.memory)

    def add(self, seconds: float, memory: Vector) -> None:
        self._planes.append((seconds / self.seconds, *(np.array(memory) / self.limits - 1).tolist()))

    def lowest(self, prices: Vector) -> float:
        """The lowest plane at these prices."""
        return float(self._at(prices).min())

    def fits(self, prices: Vector) -> bool:
        """Whether a program that fits is on it."""
        own = self._at(prices)
        return bool((self._fitting & (own <= own.min() + ALIKE)).any())

    def highest(self) -> Vector:
        """Prices at which the lowest plane is highest, not too far from those that were asked while nothing fits."""
        planes, kinds, top = np.array(self._planes), len(self.limits), DOMINANT
        if not self._fitting.any():
            before = max((float((np.array(own) * self.limits).max()) / self.seconds for own in self.asked), default=0.0)
            top = min(max(FACTOR * before, 1.0), DOMINANT)
        rows = np.hstack([np.ones((len(planes), 1)), -planes[:, 1:]])
        found = linprog([-1.0, *[0.0] * kinds], rows, planes[:, 0], bounds=[(None, None), *[(0.0, top)] * kinds], method="highs")
        return tuple((found.x[1:] * self.seconds / self.limits).tolist())

    def highest_asked(self) -> Vector:
        """Of the prices that were asked, those at which the lowest plane is highest."""
        return max(self.asked, key=self.lowest)

    def _at(self, prices: Vector) -> Array:
        planes = np.array(self._planes)
        return np.asarray(planes[:, 0] + planes[:, 1:] @ (np.array(prices) * self.limits / self.seconds))

    @property
    def _fitting(self) -> Mask:
        return np.asarray((np.array(self._planes)[:, 1:] <= 0).all(axis=1))


def fitting(
    search: Search, cheapest: State, limits: Vector, tolerance: float, start: Vector | None = None, asked: Sequence[Vector] = (),
    above: float = inf, known: Sequence[State] = (),
) -> Priced:  # fmt: skip
    """search: prices -> (the best state at these prices, relative gap of its proof, a combination of it with others that fits, with its seconds, if
    that is the best so far). cheapest: the best one without limits, which does not fit. start: prices to begin with, where nothing says more. asked:
    prices with which the search was made already, and takes no time. known: states without prices. Ends without a state where all that fit would take
    more than `above` seconds, or where memory is too scarce to tell: at prices beside which time hardly counts."""
    planes = Planes(cheapest, limits)
    seconds = planes.seconds
    found, dominant = Priced(None, inf, cheapest.estimate, (0.0,) * len(limits)), DOMINANT * seconds * (1 - ALIKE)

    def take(state: State, cost: float) -> None:
        nonlocal found
        if cost < found.cost and all(map(le, state.memory, limits)):
            found = replace(found, best=state, cost=cost)

    def ask(prices: Vector) -> State:
        nonlocal found
        state, gap, spliced = search(prices)
        assert state is not None, "a program exists without limits"
        bound = state.estimate * (1 - gap) - sum(map(mul, prices, limits))
        found = replace(found, bound=bound, prices=prices) if bound > found.bound else found
        cost = state.estimate - sum(map(mul, prices, state.memory))
        take(state, cost)
        if spliced is not None:
            take(*spliced)
        planes.asked.append(prices)
        planes.add(cost, state.memory)
        return state

    for state in known:
        take(state, state.estimate)
        planes.add(state.estimate, state.memory)
    for at in asked:
        ask(at)
    if asked or found.best is not None:
        prices = planes.highest()
    elif start is not None and any(start):
        prices = start
    else:
        prices = tuple([seconds / limit if used > limit else 0.0 for used, limit in zip(cheapest.memory, limits, strict=True)])
    low: Vector | None = None  # prices at which nothing fits, once they only rise
    high: Vector | None = None  # and above them, at which something does
    for _ in range(ROUNDS):
        state = ask(prices)
        lacks = [used - limit for used, limit in zip(state.memory, limits, strict=True)]
        scarce = found.best is None and all(p * n >= dominant for p, own, n in zip(prices, lacks, limits, strict=True) if own > 0)
        if scarce or found.cost * (1 - tolerance) <= found.bound or found.bound > above:
            break
        if low is None:
            prices, best = planes.highest(), planes.highest_asked()
            if planes.lowest(prices) > planes.lowest(best) + ALIKE:
                continue
            if planes.fits(best):
                break
            prices = low = best
        elif max(lacks) > 0:
            low = prices
        else:
            high = prices
        if high is None:
            prices = tuple([(p * RISE or seconds / n) if own > 0 else p for p, own, n in zip(prices, lacks, limits, strict=True)])
        elif all(own <= CLOSE * below for own, below in zip(high, low, strict=True)):
            break
        else:
            prices = tuple([sqrt(own * below) or own for own, below in zip(high, low, strict=True)])
    return found
