"""What a step does to the cost of a partial program, in a normal form that composes and compares.

A partial program has a cost and, for each direction (forward, backward), the pending compute p of the running phase, one number per device
kind. A direction of a step either adds to it (`pre` is None): p <- p + post, or cuts it: cost += max_j (p + pre)_j, p <- post. Everything that
is known not to depend on p (collectives, phases inside the step, synchronisation) is in `const`. So, over all phases i of a program,

    sum of all const and max = sum_i comm_i + max_j comp_ij          (HAP section 5, equation for t(Q, B) at fixed ratios B).

Invariant: effects compose associatively, and `excess(a, b) <= 0` means that replacing b by a never makes any program slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import add, le, sub
from typing import Literal, NamedTuple

import numpy as np

from hapx.cost.edges import Array, Numbers

Vector = tuple[float, ...]
INFINITY = float("inf")
ROUNDING = 1e-13  # of seconds that are compared


class Effect(NamedTuple):
    """`const` seconds; per direction `pre` (None: the phase is not cut) and `post`; `memory` bytes per kind that stay allocated."""

    const: float
    forward_pre: Vector | None
    forward: Vector
    backward_pre: Vector | None
    backward: Vector
    memory: Vector

    @property
    def weight(self) -> float:
        """A number to sort by: the seconds on an average kind."""
        n = len(self.forward)
        pending = sum(self.forward) + sum(self.backward) + sum(self.forward_pre or ()) + sum(self.backward_pre or ())
        return self.const + pending / n

    @property
    def seconds(self) -> float:
        """Of a whole program: every phase takes as long as its slowest kind."""
        phases = (self.forward_pre, self.forward, self.backward_pre, self.backward)
        return self.const + sum(max(own) for own in phases if own is not None)


_new = tuple.__new__  # an Effect without its constructor's checks of arguments: searches make very many


def nothing(kinds: int) -> Effect:
    zero = (0.0,) * kinds
    return Effect(0.0, None, zero, None, zero, zero)


def plus(a: Vector, b: Vector) -> Vector:
    return tuple(map(add, a, b))


def compose(a: Effect, b: Effect) -> Effect:
    """First a, then b."""
    a_const, a_forward_pre, a_forward, a_backward_pre, a_backward, a_memory = a
    b_const, b_forward_pre, b_forward, b_backward_pre, b_backward, b_memory = b
    forward_const, forward_pre, forward = _direction(a_forward_pre, a_forward, b_forward_pre, b_forward)
    backward_const, backward_pre, backward = _direction(a_backward_pre, a_backward, b_backward_pre, b_backward)
    const = a_const + b_const + forward_const + backward_const
    memory = tuple(map(add, a_memory, b_memory))
    return _new(Effect, (const, forward_pre, forward, backward_pre, backward, memory))


def after(cost: float, forward: Vector, backward: Vector, effect: Effect) -> tuple[float, Vector, Vector]:
    """Cost and pending compute of a partial program after an effect."""
    const, forward_pre, ahead, backward_pre, back, _ = effect
    cost += const
    if forward_pre is None:
        ahead = tuple(map(add, forward, ahead))
    else:
        cost += max(map(add, forward, forward_pre))
    if backward_pre is None:
        back = tuple(map(add, backward, back))
    else:
        cost += max(map(add, backward, backward_pre))
    return cost, ahead, back


def repeated(once: Effect, times: int) -> Effect:
    """An effect `times` (at least 1) after another, by squaring."""
    result: Effect | None = None
    for bit in bin(times)[2:]:
        result = compose(result, result) if result is not None else None
        if bit == "1":
            result = compose(result, once) if result is not None else once
    assert result is not None, "at least once"
    return result


def _direction(a_pre: Vector | None, a: Vector, b_pre: Vector | None, b: Vector) -> tuple[float, Vector | None, Vector]:
    if b_pre is None:
        return 0.0, a_pre, tuple(map(add, a, b))
    if a_pre is None:
        return 0.0, tuple(map(add, a, b_pre)), b
    return max(map(add, a, b_pre)), a_pre, b


def excess(a: Effect, b: Effect) -> float:
    """An upper bound, over all pending vectors and all continuations, of what a costs more than b."""
    const = a.const - b.const
    forward = _excess(a.forward_pre, a.forward, b.forward_pre, b.forward)
    return const + forward + _excess(a.backward_pre, a.backward, b.backward_pre, b.backward)


def _excess(a_pre: Vector | None, a: Vector, b_pre: Vector | None, b: Vector) -> float:
    if a_pre is None:
        # p + a against: max(p + b_pre) paid and b left; max(p + a - b) <= max(p + b_pre) + max(a - b - b_pre)
        worst: float = max(map(sub, a, b)) if b_pre is None else max(map(sub, map(sub, a, b), b_pre))
        return worst
    if b_pre is None:
        return INFINITY  # a pays max(p), b may hide it: it depends on p
    return float(max(map(sub, a_pre, b_pre)) + max(map(sub, a, b)))


def cheaper(a: Effect, b: Effect, memory: bool) -> bool:
    """Whether a can always stand for b (`memory`: bytes count too)."""
    return excess(a, b) <= ROUNDING * b.weight and (not memory or all(map(le, a.memory, b.memory)))


def at_most(const: float, forward: Vector, backward: Vector, most: Iterable[float]) -> bool:
    """Whether for every pair of kinds, one forward and one backward, `const` with what is pending there is no more than `most` says of the pair."""
    limits = iter(most)
    for ahead in forward:
        spent = const + ahead
        for back in backward:
            if spent + back > next(limits):
                return False
    return True


class Effects:
    """Effects as arrays, which follow a partial program all at once, or several of them each one of its own."""

    def __init__(self, effects: Sequence[Effect]):
        self.const = np.array([e.const for e in effects])
        self.forward = _Direction([e.forward_pre for e in effects], [e.forward for e in effects])
        self.backward = _Direction([e.backward_pre for e in effects], [e.backward for e in effects])

    def after(
        self, cost: float | Array, forward: Vector | Array, backward: Vector | Array, of: slice | Numbers = slice(None)
    ) -> tuple[Array, Array, Array]:
        """(effect,), (effect, kind), (effect, kind): cost and pending compute after each. of: the effects; of arrays of partial programs one each."""
        there, pending_forward = self.forward.after(forward, of)
        back, pending_backward = self.backward.after(backward, of)
        return cost + self.const[of] + there + back, pending_forward, pending_backward


class _Direction:
    def __init__(self, pre: Sequence[Vector | None], post: Sequence[Vector]):
        self.cuts = np.array([p is not None for p in pre])
        self.pre = np.array([p if p is not None else (0.0,) * len(q) for p, q in zip(pre, post, strict=True)])
        self.post = np.array(post)

    def after(self, pending: Vector | Array, of: slice | Numbers) -> tuple[Array, Array]:
        """What is paid, and what is pending then."""
        cuts = self.cuts[of]
        paid = np.where(cuts, (self.pre[of] + pending).max(axis=1), 0.0)
        return paid, self.post[of] + np.where(cuts[:, None], 0.0, pending)


Event = tuple[Literal["forward", "backward", "synchronise"], Vector, bool]


def effect(events: Iterable[Event], forward: Vector, backward: Vector, memory: Vector) -> Effect:
    """The effect of communications (direction, value per kind, cuts) in order, followed by compute. A collective that cuts takes the
    maximum over kinds; "synchronise" also does, but cuts nothing."""
    const, zero = 0.0, (0.0,) * len(forward)
    pre: dict[str, Vector | None] = {"forward": None, "backward": None}  # what runs before the first communication that cuts
    now = {"forward": zero, "backward": zero}
    for direction, value, cuts in events:
        if direction == "synchronise":
            const += max(value)
        elif not cuts:
            now[direction] = tuple(map(add, now[direction], value))
        else:
            const += max(value)
            if pre[direction] is None:
                pre[direction] = now[direction]
            else:
                const += max(now[direction])
            now[direction] = zero
    after = tuple(map(add, now["forward"], forward)), tuple(map(add, now["backward"], backward))
    return _new(Effect, (const, pre["forward"], after[0], pre["backward"], after[1], memory))
