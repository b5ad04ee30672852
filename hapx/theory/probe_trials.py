"""Trials of one call: small calls like a node's, run on one device, in which its rules are tried.

In: a node and its operands. Out: `Trials`, or `Unprobed`, which says why nothing can be tried. A trial has the node's constants, float64 for
its floating dtypes, equal sizes where sizes are equal and multiples where they are multiples, in one of several shapes, with numbers of one
of several ranges. Invariant: the values of the operands matter in every trial but the last ones, in which the real sizes and dtypes are
tried: all of them where the tensors are small, else each in turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

from torch import Tensor

from hapx.errors import UnsupportedOperatorError
from hapx.ir import COMPLEX, CONTINUOUS, Node, OpCall, TensorRef
from hapx.rules import Rule, Site, Slot
from hapx.states import Cut, Placement, Sharded, State
from hapx.theory.probe import Truth, failure, is_continuous, run_alone, same
from hapx.theory.samples.draw import Draw, Sample, Values
from hapx.theory.settings import Setting, line

ENOUGH = 3  # trials with different draws in which a rule must have held
LARGE = 1_000_000  # elements of all tensors of a trial, at most
ASTRONOMIC = 1e12  # numbers that stand for infinity
RATIO = 8  # larger multiples among sizes are not kept
SHAPES = ((4, 6, 10, 14), (5, 7, 9, 11), (6, 4, 10, 14), (9, 8, 5, 7))  # small sizes, for the node's different sizes in ascending order
SETTINGS = (line(2), line(3, zero=1, first=2), line(3), line(2, zero=0))

NO_GRADIENT = re.compile("no autograd formula was registered|derivative for .* is not implemented")

Sizes = Mapping[int, int]  # real size -> size in a trial
Options = Mapping[str, object]  # fields of a Draw


class Unprobed(Exception):
    """Why no rule of an operator can be found by execution."""


@dataclass(frozen=True)
class Trial:
    """A call on one device, and the meshes on which rules are tried. `settings` of the last trials, of real sizes, are fewer."""

    truth: Truth
    settings: tuple[Setting, ...]

    def placements(self, rule: Rule, setting: Setting) -> tuple[Placement, ...] | None:
        """Per operand and output; None where the rule's cut has a single unit."""
        refs = (*self.truth.refs, *self.truth.node.outputs)
        slots = (*rule.operands, *rule.outputs)
        units = gcd(*(r.shape[s.dim] // s.outer for r, s in zip(refs, slots, strict=True) if isinstance(s, Site)))
        if units == 1:
            return None
        row = setting.mesh.row(0)
        return tuple(Placement((state(s, r, Cut(row, units)),)) for r, s in zip(refs, slots, strict=True))

    def failure(self, rule: Rule, setting: Setting, seed: int) -> str | None:
        """What is wrong with a rule here; None if nothing is, "" if nothing can be said."""
        placements = self.placements(rule, setting)
        if placements is None:
            return ""
        count = len(self.truth.refs)
        return failure(self.truth.node.call, self.truth, placements[:count], placements[count:], setting, seed)


def state(slot: Slot, ref: TensorRef, cut: Cut) -> State:
    return Sharded(slot.dim, slot.outer, ref.shape[slot.dim] // (slot.outer * cut.units), cut) if isinstance(slot, Site) else slot


class Trials:
    """All trials of a node. `real`: those of real sizes, in which a rule is confirmed."""

    def __init__(self, node: Node, operands: tuple[TensorRef, ...]):
        if not operands:
            raise Unprobed("it has no tensor to split")
        self.node, self.operands = node, operands
        self.call, self.refs = node.call, {r.name: r for r in operands}
        self.sizes = sorted({n for r in operands for n in r.shape if n > 1})
        self.differentiable = True
        self.error, self.ran = "", False
        self.small = self._small()
        self.real = self._real()

    def _small(self) -> list[Trial]:
        """Trials in several shapes; in the real one, if the call cannot have others."""
        found = [t for number, small in enumerate(SHAPES) for t in self._draws(_shrunk(self.sizes, small), number)]
        if not found and self._elements({}) <= LARGE:
            found = self._draws({}, 0)
        if not self.ran:
            raise Unprobed(f"it does not run on other sizes, and the real ones are too large to try it; {self.error}")
        if len(found) < ENOUGH:
            raise Unprobed("its values do not depend on those of its operands, or are not finite")
        return found

    def _draws(self, sizes: Sizes, number: int) -> list[Trial]:
        """Trials of one shape, with numbers of several ranges; those that speak."""
        first = self._truth(sizes, {}, 0)
        if first is None:
            return []
        self._check_alike(first, self._truth(sizes, {}, 0))
        self.ran = True
        found: list[Trial] = []
        for seed, options in enumerate(self._ranges()):
            truth, other = (self._truth(sizes, options, 20 * number + 2 * seed + k) for k in (0, 1))
            if truth is not None and other is not None and not _equal(truth.outputs, other.outputs) and _is_telling(truth, options):
                shift = (number + seed) % len(SETTINGS)
                found.append(Trial(truth, (SETTINGS + SETTINGS)[shift : shift + 2]))
        return found

    def _ranges(self) -> list[Options]:
        """Ranges of numbers: normal, beyond thresholds, positive, and with infinities."""
        far = 10.0 * max([1000.0, *map(abs, _numbers(self.call))])
        found: list[Options] = [{}, {"scale": 30.0}, {"scale": far}, {"values": Values.POSITIVE}, {"values": Values.POSITIVE, "scale": 30.0}]
        if sum(r.dtype in CONTINUOUS for r in self.refs.values()) == 1:  # products of infinities with summands are not linear
            # forward only: kernels disagree about gradients where there is no number
            found.append({"values": Values.SPECIAL, "grad": False})
        return found

    def _real(self) -> list[Trial]:
        """Trials with the real sizes: of everything, or of one after another."""
        if self._elements({}) <= LARGE:
            wanted: list[Sizes] = [{}]
        else:
            small = _shrunk(self.sizes, SHAPES[0])
            wanted = [self._fitting({**small, size: size}, size) for size in self.sizes]
        found = []
        for sizes in wanted:
            truth = self._truth(sizes, {}, 7, exact=True)
            if truth is None:
                raise Unprobed(f"its sizes cannot be changed one at a time, and the real ones are too large to try it; {self.error}")
            found.append(Trial(truth, (SETTINGS[1],)))
        return found

    def _fitting(self, sizes: Sizes, size: int) -> Sizes:
        """The sizes, with that of `size` halved until the tensors are small enough."""
        while self._elements(sizes) > LARGE and sizes[size] > 1:
            sizes = {**sizes, size: sizes[size] // 2}
        return sizes

    def _elements(self, sizes: Sizes) -> int:
        return sum(prod(sizes.get(n, n) for n in r.shape) for r in (*self.refs.values(), *self.node.outputs))

    def _truth(self, sizes: Sizes, options: Options, seed: int, exact: bool = False) -> Truth | None:
        """The call at some sizes on one device; None where it does not run. `exact`: in the node's own dtypes (single instead of half)."""
        if self._elements(sizes) > LARGE:
            self.error = "too large"
            return None
        draws = tuple((name, self._draw(ref, sizes, options, exact)) for name, ref in self.refs.items())
        try:
            truth = self._run(draws, seed)
            assert [o.dim() for o in truth.outputs] == [len(r.shape) for r in self.node.outputs], "it gives other tensors"
            return truth
        except Exception as error:  # whatever a kernel says
            self.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return None

    def _run(self, draws: tuple[tuple[str, Draw], ...], seed: int) -> Truth:
        if self.differentiable and any(d.requires_grad for _, d in draws):
            try:
                return _measured(run_alone(Sample(self.call, draws), seed))
            except RuntimeError as error:
                if not NO_GRADIENT.search(str(error)):
                    raise
                self.differentiable = False  # no gradient flows through it, so none needs a rule
        still = tuple((name, replace(d, grad=False)) for name, d in draws)
        return _measured(run_alone(Sample(self.call, still), seed))

    def _draw(self, ref: TensorRef, sizes: Sizes, options: Options, exact: bool) -> Draw:
        shape = tuple(sizes.get(n, n) for n in ref.shape)
        if ref.dtype == "bool":
            return Draw(shape, "bool", Values.BOOL)
        if ref.dtype not in CONTINUOUS:
            limit = min((sizes.get(n, n) for n in self.sizes), default=2)  # they may be indices into any dim
            return Draw(shape, ref.dtype, Values.IDS, limit)
        narrow, wide = ("complex64", "complex128") if ref.dtype in COMPLEX else ("float32", "float64")
        dtype = narrow if exact and ref.dtype != wide else wide
        return Draw(shape, dtype, **{"grad": ref.requires_grad, **options})  # type: ignore[arg-type]

    def _check_alike(self, first: Truth, second: Truth | None) -> None:
        """Refuse an operator that is random or changes its operands. (Torch's generator goes on between the two runs.)"""
        where = f"{self.node.module or 'model'} ({self.node.source})"
        if second is None or not _equal(first.outputs, second.outputs):
            raise UnsupportedOperatorError(
                f"{self.node.call.target} gives other values each time: it is random, and has no rule", where=where,
                hint="replace it by a deterministic operator; torch's dropout is supported",
            )  # fmt: skip
        if not _equal(first.operands, first.changed):
            raise UnsupportedOperatorError(
                f"{self.node.call.target} changes its operands without saying so", where=where,
                hint="make a new tensor, or name the operand in mutates_args",
            )  # fmt: skip

    def failure(self, rule: Rule) -> str | None:
        """What is wrong with a rule, None if nothing is."""
        spoken = 0
        for seed, trial in enumerate((*self.small, *self.real)):
            for setting in trial.settings:
                wrong = trial.failure(rule, setting, seed)
                if wrong:
                    return f"{wrong} ({setting})"
            spoken += wrong is None
        return None if spoken >= ENOUGH else "tried too seldom"


# ---- helpers ---------------------------------------------------------------------------------------------------------------


def _shrunk(sizes: Sequence[int], small: Sequence[int]) -> dict[int, int]:
    """Small sizes for the real ones: a multiple of a smaller one stays that multiple of it, all others differ."""
    found: dict[int, int] = {}
    fresh = iter((*small, *range(max(small) + 2, max(small) + 2 + 2 * len(sizes), 2)))
    for size in sizes:
        base = next((b for b in reversed(found) if size % b == 0 and size // b <= RATIO), None)
        found[size] = found[base] * (size // base) if base is not None else next(n for n in fresh if n not in found.values())
    return found


def _numbers(call: OpCall) -> list[float]:
    """Numbers among the constants of a call, not too large: thresholds may lie there."""

    def inside(value: object) -> Iterator[float]:
        if isinstance(value, tuple):
            for v in value:
                yield from inside(v)
        elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e6:
            yield float(value)

    return [n for _, v in call.args for n in inside(v)]


def _equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(map(same, a, b))


def _measured(truth: Truth) -> Truth:
    """The truth with the magnitude of its numbers: sums of large ones have large errors."""
    tensors = (*truth.operands, *truth.outputs, *truth.gradients)
    ordinary = (x[x.abs() < ASTRONOMIC].abs() for x in tensors if x is not None and is_continuous(x))
    return replace(truth, magnitude=max([1.0, *(float(x.max()) for x in ordinary if x.numel())]))


def _is_telling(truth: Truth, options: Options) -> bool:
    """Whether most numbers of all outputs are finite, as others are equal too easily; or it is meant so."""
    finite = all(float(o.isfinite().double().mean()) > 0.5 for o in truth.outputs if is_continuous(o) and o.numel())
    return finite or options.get("values") is Values.SPECIAL
