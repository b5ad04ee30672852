"""The page of operators in the documentation, generated from the registry: `python -m hapx.report.operators > docs/operators.md`.

In: the registry and the samples of the audit. Out: markdown. An overload counts only if a rule of it that splits or sums something is executed by
the audit, or if its entry says in one line why there is none.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import groupby

import hapx.theory.ops  # noqa: F401  (fills the registry)
from hapx.ir import OpCall
from hapx.states import Invariant, Replicated
from hapx.theory.audit import overloads
from hapx.theory.grains import find_grains
from hapx.theory.probe import truth
from hapx.theory.registry import REGISTRY, OpEntry, lookup
from hapx.theory.samples import SAMPLES, UNSAMPLED
from hapx.theory.table import operators_table

HEAD = """# Operators

Generated from the registry (`hapx/theory/ops`) by `python -m hapx.report.operators > docs/operators.md`; a test compares the two.

{audited} overloads of {entries} entries are audited: {split} with at least one rule that splits a dim or passes a sum, executed on uneven and empty
shares, and {reasons} with the reason why there is none.{rest} Operators that only have another name are renamed at capture
(`hapx/graph/normalize_names.py`), views of many kinds and embedding bags are written as what they are made of (`normalize_aliases.py`,
`normalize_bags.py`), random operators as `rand`, `randn` and `randint` and what is computed from them (`normalize_random.py`), `istft` as inverse
transforms that are added up (`normalize_spectra.py`). An operator without an entry runs whole on every device, with a warning; one that is random,
writes in place or has a shape that depends on values is refused.

*May be split*: lowercase indices and `*` (any leading dims) may be split, UPPERCASE ones are whole. *Sums over*: splitting leaves Partial.
*Linear in*: groups of operands through which Partial passes. *Composites*: local programs of several operators or with communication.
*Overloads*: the audited ones.

"""


def audited() -> Mapping[str, bool]:
    """Every overload that the audit executes -> whether one of its rules does more than repeat the work on every device."""
    found: dict[str, bool] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what kernels say of tiny samples
        for target, samples in groupby(sorted(SAMPLES, key=lambda s: s.call.target), key=lambda s: s.call.target):
            rules = [rule for s in samples for rule in find_grains(truth(s).graph).rules[0]]
            found[target] = any(not isinstance(s, Replicated | Invariant) for rule in rules for s in (*rule.operands, *rule.outputs))
    return found


def page() -> str:
    """The whole page."""
    seen = audited()
    entry_of = {target: _entry(target) for target in overloads()}
    counted = [t for t, e in entry_of.items() if t in seen and (seen[t] or e.reason)]
    reasons = [t for t in counted if not seen[t]]
    others = [t for t in entry_of if t not in counted]
    numbers = {id(e): sum(entry_of[t] is e for t in counted) for e in REGISTRY.values()}
    named = ", ".join(f"`{t.removeprefix('aten.')}` ({UNSAMPLED.get(t, 'only whole')})" for t in sorted(others))
    rest = f" Not counted: {named}." if others else ""
    text = HEAD.format(audited=len(counted), entries=len(numbers), split=len(counted) - len(reasons), reasons=len(reasons), rest=rest)
    return text + operators_table(REGISTRY, numbers)


def _entry(target: str) -> OpEntry:
    entry = lookup(OpCall(target, ()))
    assert entry is not None, target
    return entry


if __name__ == "__main__":
    print(page(), end="")
