"""The cheapest program that fits into memory, by pricing memory.

In: a problem whose cheapest program does not fit. Out: a program that fits, and a proof of how good it is. With prices l_k >= 0 (seconds per byte on
a device of kind k; Lagrangian multipliers), the cheapest program by t(Q) + l . memory(Q) is found by the same search as without limits, and

    min over Q that fit of t(Q)  >=  min over Q of ( t(Q) + l . memory(Q) ) - l . limits        for every l >= 0,

so every round gives a lower bound, and a candidate where its program fits. Prices rise where memory is exceeded and fall where it is not, each kind's
between the largest that was too low and the least that was enough. (Everett, *Generalized Lagrange multiplier method*, Operations Research 1963.)
What lies between programs that fit and programs that do not is put together from both (`hapx.synth.splices`).

Invariant: `bound` <= the cost of every program that fits; `best` fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from operator import le, mul

from hapx.synth.domain import State
from hapx.synth.effect import Vector

ROUNDS = 12
FACTOR = 4.0  # by which a price changes until it is bracketed
CLOSE = 1.1  # ratio of the ends of a bracket that is not halved further
NEGLIGIBLE = 1e-3  # of the time of a program, as the price of all the memory of a device
DOMINANT = 50.0  # times the seconds of a program, as the price of all the memory of a device: what is cheapest then takes about as little as there is

Search = Callable[[Vector], tuple[State | None, float, tuple[State, float] | None]]


@dataclass(frozen=True)
class Priced:
    """`best`: the cheapest state that fits, or None; `cost`: its seconds; `bound`: no state that fits takes less; `prices`: those of `best`."""

    best: State | None
    cost: float
    bound: float
    prices: Vector


def fitting(
    search: Search, cheapest: State, limits: Vector, tolerance: float, start: Vector | None = None, asked: Sequence[Vector] = (),
    above: float = inf,
) -> Priced:  # fmt: skip
    """search: prices -> (the best state at these prices, relative gap of its proof, a combination of it with others that fits, with its seconds, if
    that is the best so far). cheapest: the best one without limits, which does not fit. start: prices to begin with. asked: prices with
    which the search was made already, and takes no time. Ends without a state where all that fit would take more than `above` seconds, or
    where memory is too scarce to tell: at prices beside which time hardly counts."""
    low, high = [0.0] * len(limits), [inf] * len(limits)
    first = [cheapest.estimate / limit if used > limit else 0.0 for used, limit in zip(cheapest.memory, limits, strict=True)]
    prices = tuple(start) if start is not None and any(start) else tuple(first)
    found, dominant = Priced(None, inf, cheapest.estimate, prices), DOMINANT * cheapest.estimate

    def ask(prices: Vector) -> State:
        nonlocal found
        state, gap, spliced = search(prices)
        assert state is not None, "a program exists without limits"
        bound = max(found.bound, state.estimate * (1 - gap) - sum(map(mul, prices, limits)))
        cost = state.estimate - sum(map(mul, prices, state.memory))
        if all(map(le, state.memory, limits)) and cost < found.cost:
            found = Priced(state, cost, bound, prices)
        else:
            found = replace(found, bound=bound)
        if spliced is not None and spliced[1] < found.cost:
            found = Priced(*spliced, bound, prices)
        _narrow(prices, state.memory, limits, low, high)
        return state

    for at in asked:
        ask(at)
    for _ in range(ROUNDS):
        state = ask(prices)
        closed = all(h <= low[k] * CLOSE or h < NEGLIGIBLE * cheapest.estimate / limits[k] for k, h in enumerate(high) if h < inf or low[k])
        scarce = found.best is None and all(p * n >= dominant for p, used, n in zip(prices, state.memory, limits, strict=True) if used > n)
        if scarce or found.cost * (1 - tolerance) <= found.bound or found.bound > above or (found.best is not None and closed):
            break
        prices = tuple(_price(*of_kind, cheapest.estimate) for of_kind in zip(prices, state.memory, limits, low, high, strict=True))
    return found


def _narrow(prices: Vector, memory: Vector, limits: Vector, low: list[float], high: list[float]) -> None:
    """A price at which too much is used is too low, another one is enough. Where other kinds' prices have changed that, a bracket opens again."""
    for k, (price, used, limit) in enumerate(zip(prices, memory, limits, strict=True)):
        if used > limit:
            low[k] = max(low[k], price)
            high[k] = high[k] if high[k] > low[k] else inf
        elif price:
            high[k] = min(high[k], price)
            low[k] = low[k] if low[k] < high[k] else 0.0


def _price(price: float, used: float, limit: float, low: float, high: float, seconds: float) -> float:
    """The next price of a kind."""
    if low and high < inf:
        return sqrt(low * high)
    if used > limit:
        return price * FACTOR if price else seconds / limit
    return price / FACTOR
