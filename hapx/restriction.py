"""What the planner may choose from, as frozen data. `strategy=` takes a name from `BASELINES` or a `Restriction`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Literal, get_args

from hapx.errors import HapError

Remat = Literal["auto", "none", "blocks"]
REMAT: tuple[Remat, ...] = get_args(Remat)
MOST_SEGMENTS = 4


@dataclass(frozen=True, slots=True)
class Restriction:
    """A subspace of programs.

    Attributes:
        mesh: "auto" (every view), "flat", "two-level", or a view by name such as "2x4".
        ratios: "balanced" (the LP), "even", "speed" (proportional to device speed), or explicit shares of the uneven axis.
        storage: "auto"; "as-used": parameters are kept in the placement of their use, never gathered; "sharded": every parameter of at least one unit
            per device is stored in shards and gathered for use, "sharded-keep" / "sharded-free" force one form; "sharded-inside": in shards inside
            of each machine, whole on each machine (where a view has an axis of machines, else as "sharded").
        split: "auto"; "batch": only the batch is split; "model": the batch is not split (tensor parallelism).
        forms: collective forms allowed: "padded", "grouped", "point_to_point".
        sfb: "auto", "never", or "always" (wherever it is legal).
        remat: "none": activations are kept as the model says; "blocks": repeated blocks are computed again in backward; "auto": as many of them as
            the memory asks for, where it binds and nothing else that fits is faster.
        segments: parts of the model with ratios of their own, where that pays. "auto": the planner finds them, four at most; "none" or 1: the whole
            model has one compute row and one storage row; a number: at most so many; module paths: each is a part, what is under none of them belongs
            to the part before it. Only balanced ratios have segments.
        max_stages: of a pipeline; 1: one program on all devices. More are tried where the model's micro-batches can be captured and something is to
            be gained by them.
    """

    name: str = "auto"
    mesh: str = "auto"
    ratios: Literal["balanced", "even", "speed"] | tuple[float, ...] = "balanced"
    storage: Literal["auto", "as-used", "sharded", "sharded-inside", "sharded-keep", "sharded-free"] = "auto"
    split: Literal["auto", "batch", "model"] = "auto"
    forms: frozenset[str] = field(default_factory=lambda: frozenset({"padded", "grouped", "point_to_point"}))
    sfb: Literal["auto", "never", "always"] = "auto"
    remat: Remat = "auto"
    segments: Literal["auto", "none"] | int | tuple[str, ...] = "auto"
    max_stages: int = 1

    @property
    def most_segments(self) -> int:
        """How many segments a plan may have."""
        if self.ratios != "balanced" or self.segments == "none":
            return 1
        if isinstance(self.segments, tuple):
            return max(1, len(self.segments) + 1)
        return MOST_SEGMENTS if self.segments == "auto" else int(self.segments)


AUTO = Restriction(max_stages=64)
FORMS = ("padded", "grouped", "point_to_point")
CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "ratios": ("balanced", "even", "speed"),
        "storage": ("auto", "as-used", "sharded", "sharded-inside", "sharded-keep", "sharded-free"),
        "split": ("auto", "batch", "model"),
        "sfb": ("auto", "never", "always"),
        "remat": REMAT,
        "segments": ("auto", "none"),
    }
)
OTHERS = MappingProxyType({"ratios": "shares, one number per coordinate of the uneven axis", "segments": "a number from 1 on, paths of modules"})

BASELINES: Mapping[str, Restriction] = MappingProxyType(
    {
        r.name: r
        for r in (
            AUTO,
            Restriction("dp-even", mesh="flat", ratios="even", storage="as-used", split="batch", sfb="never", forms=frozenset({"padded"})),
            Restriction("dp-proportional", mesh="flat", ratios="speed", storage="as-used", split="batch", sfb="never", forms=frozenset({"padded"})),
            Restriction("zero", mesh="flat", ratios="even", storage="sharded", split="batch", sfb="never", forms=frozenset({"padded"})),
            Restriction("tensor-parallel", mesh="flat", split="model", storage="as-used", sfb="never"),
        )
    }
)


def restriction(strategy: str | Restriction) -> Restriction:
    """The restriction a user's `strategy=` means. Raises HapError for an unknown name, and for words that a restriction does not know."""
    if isinstance(strategy, Restriction):
        return _checked(strategy)
    if strategy not in BASELINES:
        near = get_close_matches(str(strategy), BASELINES, 1)
        hint = f"did you mean {near[0]}?" if near else None
        raise HapError(f"unknown strategy {strategy!r}", where="strategy", allowed=", ".join(BASELINES) + ", or a hapx.Restriction", hint=hint)
    return BASELINES[strategy]


def _checked(rule: Restriction) -> Restriction:
    """The restriction. Raises HapError for a value that means nothing: a misspelt word would restrict nothing."""
    for name, choices in CHOICES.items():
        value, others = getattr(rule, name), OTHERS.get(name)
        if value not in choices and not (others and _is_other(name, value)):
            allowed = ", ".join([*map(repr, choices), *([others] if others else [])])
            raise _unknown(name, value, allowed, get_close_matches(str(value), choices, 1))
    wrong = sorted(set(rule.forms) - set(FORMS))
    if wrong or not rule.forms:
        allowed = "one or more of " + ", ".join(map(repr, FORMS))
        raise _unknown("forms", wrong[0] if wrong else set(), allowed, get_close_matches(str(wrong[0]), FORMS, 1) if wrong else [])
    if not _is_number(rule.max_stages):
        raise _unknown("max_stages", rule.max_stages, "a number from 1 on", [])
    return rule


def _unknown(name: str, value: object, allowed: str, near: list[str]) -> HapError:
    return HapError(f"{name}={value!r}", where="restriction", allowed=allowed, hint=f"did you mean {near[0]!r}?" if near else None)


def _is_other(name: str, value: object) -> bool:
    """Whether a value is one of those that are no words; explicit shares are compared with the mesh later, paths with the model."""
    return isinstance(value, tuple) or (name == "segments" and _is_number(value))


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def with_remat(rule: Restriction, remat: str) -> Restriction:
    """The restriction under a user's `remat=`; what the restriction itself says comes first. Raises HapError for an unknown choice."""
    if remat not in REMAT:
        raise HapError(f"remat={remat!r}", where="plan", allowed=", ".join(map(repr, REMAT)))
    return replace(rule, remat=remat) if rule.remat == "auto" else rule
