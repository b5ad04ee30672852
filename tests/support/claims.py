"""What the theory claims about one call, as text, for tests that name rules."""

from __future__ import annotations

from hapx.plan import Triple
from hapx.theory.derive import derive
from hapx.theory.probe import truth
from hapx.theory.samples import Sample
from hapx.theory.settings import line


def text(triple: Triple) -> str:
    """ "S0[4] R -> S0[4]"."""
    pre, post = (" ".join(str(p.placement) for p in ps) for ps in (triple.pre, triple.post))
    return f"{pre} -> {post}"


def claims(sample: Sample) -> set[str]:
    """The rules of a sample's node on one axis."""
    case = truth(sample)
    return {text(t) for t in derive(case.graph, line(2).mesh).triples[0]}


def bodies(sample: Sample) -> dict[str, str]:
    """The target of the local call of every rule."""
    case = truth(sample)
    return {text(t): t.body.target for t in derive(case.graph, line(2).mesh).triples[0]}  # type: ignore[union-attr]
