"""Audit of the operator table: every rule is executed, and every combination of states that is true must follow from one.

In: the registry and its samples. Out: `AuditReport`.

- *unsound*: a triple that `derive` claims for a sample's one-node graph and that fails when it is executed, on 2 and 3 devices with
  uneven and zero lengths (operators with composites also on 2x2); memory that a kernel does not write holds NaN;
- *missing*: a combination of operand and output states that holds when the plain local body is executed, on all settings, and that
  follows from no claimed triple by free conversions.

The true rules that are counted are those combinations that follow from a claimed triple, and the missing ones.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product

import torch

from hapx.ir import CONTINUOUS, OpCall, TensorRef
from hapx.operators import find_overload
from hapx.plan import Triple
from hapx.states import INVARIANT, PARTIAL, REPLICATED, Cut, Partial, Placement, Sharded, State
from hapx.theory.conversion import free
from hapx.theory.derive import derive
from hapx.theory.grains import Grains, find_grains
from hapx.theory.probe import Run, Truth, communicates, deal, failure, in_placement, is_empty, run_all, truth
from hapx.theory.registry import REGISTRY, LocalCall, lookup
from hapx.theory.samples import SAMPLES, UNSAMPLED, Reason, Sample, samples_of
from hapx.theory.settings import Setting, grid, line

# entries without composites that are also executed on two axes: linear, reshapes and blocks nest in interesting ways
ALSO_ON_GRID = frozenset({"aten.mm.default", "aten.view.default", "aten.split.Tensor", "aten.add.Tensor"})
# kernels that say in torch's deterministic mode, at every call, that they have no deterministic form
OUTSPOKEN = frozenset({"aten.put.default", "aten.max_unpool2d.default", "aten.max_unpool3d.default"})


@dataclass(frozen=True, slots=True)
class Finding:
    """An unsound or missing rule. `rule`: its states, as text. `detail`: what failed, or why it is not claimed ("" if for no reason)."""

    sample: str
    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.sample}: {self.rule}{': ' + self.detail if self.detail else ''}"


@dataclass(frozen=True, slots=True)
class EntryReport:
    """One operator. `combinations`: of states that were tried; `claimed`: triples that were executed; `true`: combinations that hold."""

    target: str
    samples: int
    combinations: int
    claimed: int
    true: int
    unsound: tuple[Finding, ...]
    missing: tuple[Finding, ...]


@dataclass(frozen=True)
class AuditReport:
    """Sums over all operators, and one `EntryReport` each."""

    rows: tuple[EntryReport, ...]
    seconds: float

    @property
    def entries(self) -> int:
        return len(self.rows)

    @property
    def combinations(self) -> int:
        return sum(r.combinations for r in self.rows)

    @property
    def claimed(self) -> int:
        return sum(r.claimed for r in self.rows)

    @property
    def true(self) -> int:
        return sum(r.true for r in self.rows)

    @property
    def unsound(self) -> tuple[Finding, ...]:
        return tuple(f for r in self.rows for f in r.unsound)

    @property
    def missing(self) -> tuple[Finding, ...]:
        return tuple(f for r in self.rows for f in r.missing)

    @property
    def missing_share(self) -> float:
        """Missing rules as a share of the true ones."""
        return len(self.missing) / max(self.true, 1)

    def __str__(self) -> str:
        lines = [f"{'operator':44s} {'samples':>7s} {'tried':>7s} {'claimed':>7s} {'true':>7s} {'unsound':>7s} {'missing':>7s}"]
        for r in self.rows:
            lines.append(f"{r.target:44s} {r.samples:7d} {r.combinations:7d} {r.claimed:7d} {r.true:7d} {len(r.unsound):7d} {len(r.missing):7d}")
        lines += [f"unsound  {f}" for f in self.unsound]
        lines += [f"missing  {f}" for f in self.missing]
        share = f"{100 * self.missing_share:.2f} % of {self.true} true rules"
        lines.append(
            f"{self.entries} operators, {sum(r.samples for r in self.rows)} samples, {self.combinations} combinations tried, {self.claimed} triples "
            f"executed: {len(self.unsound)} unsound, {len(self.missing)} missing ({share}), {self.seconds:.1f} s"
        )
        return "\n".join(lines)


def audit(targets: Iterable[str] | None = None, quick: bool = False, missing: bool = True) -> AuditReport:
    """Audit operators ("aten.mm") or overloads ("aten.sum.dim_IntList"), all of the registry by default. `quick`: the first sample of
    each overload, on fewer settings. `missing`: whether unclaimed combinations are tried, too: most of the time goes there."""
    start = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # kernels warn of empty tensors, which are meant
            rows = tuple(_audit_target(t, quick, missing) for t in (overloads() if targets is None else targets) if samples_of(t))
    finally:
        torch.set_num_threads(threads)
    return AuditReport(rows, time.perf_counter() - start)


def overloads() -> tuple[str, ...]:
    """Every overload that the registry covers (out variants and the like are not captured)."""
    found: dict[str, None] = {}
    for target in REGISTRY:
        namespace, name, *overload = target.split(".")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        for o in overload or (packet.overloads() if packet is not None else ()):
            if overload or _is_functional(f"{namespace}.{name}.{o}"):
                found[f"{namespace}.{name}.{o}"] = None
    return tuple(found)


def _is_functional(target: str) -> bool:
    schema = find_overload(target)._schema
    arguments = schema.arguments
    named = any("Dimname" in str(a.type) for a in arguments)
    writes = any(a.is_out or (a.alias_info is not None and a.alias_info.is_write) for a in arguments)
    return not named and not writes and any("Tensor" in str(r.type) for r in schema.returns)


def coverage() -> tuple[str, ...]:
    """Overloads that have neither a sample nor a reason to have none."""
    sampled = {s.call.target for s in SAMPLES}
    return tuple(t for t in overloads() if t not in sampled and t not in UNSAMPLED)


def representatives() -> tuple[str, ...]:
    """One overload of each entry, the first that has a sample: what they claim comes from one place."""
    found: dict[int, str] = {}
    for sample in SAMPLES:
        found.setdefault(id(lookup(sample.call)), sample.call.target)
    return tuple(found.values())


@contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    """A kernel that returns what it finds in memory (some do without rows) is wrong every time, not by chance: torch fills new tensors so in its
    deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fills


def _audit_target(target: str, quick: bool, search: bool) -> EntryReport:
    with uninitialised_memory_is_nan() if target not in OUTSPOKEN else nullcontext():
        return _audited(target, quick, search)


def _audited(target: str, quick: bool, search: bool) -> EntryReport:
    found = samples_of(target)
    if quick:
        found = tuple({s.call.target: s for s in reversed(found)}.values())
    unsound: list[Finding] = []
    missing: list[Finding] = []
    combinations = claimed = true = 0
    for sample in found:
        case = truth(sample)
        claims = derive(case.graph, _settings(quick)[0].mesh).triples[0]
        number, findings = _unsound(sample, quick)
        claimed += number
        unsound += findings
        if not search:
            continue
        tried, holding, findings = _missing(sample, claims)
        combinations += tried
        true += holding
        missing += findings
    return EntryReport(target, len(found), combinations, claimed, true, tuple(unsound), tuple(missing))


# --- unsound ---------------------------------------------------------------------------------------------------------------


def _settings(quick: bool) -> tuple[Setting, ...]:
    few = (line(2), line(3, zero=1, first=2))
    return few if quick else (*few, line(2, zero=0), line(3))


def _unsound(sample: Sample, quick: bool) -> tuple[int, list[Finding]]:
    """(number of triples executed, those that fail)."""
    entry = lookup(sample.call)
    settings = list(_settings(quick))
    if (entry is not None and entry.body is not None) or sample.call.target in ALSO_ON_GRID:
        settings.append(grid(2, 2))
    case, number, found = truth(sample), 0, {}
    for setting in settings:
        for triple in derive(case.graph, setting.mesh).triples[0]:
            number += 1
            wrong = triple_failure(triple, case, setting)
            if wrong is not None:
                text = _rule([p.placement for p in triple.pre], [p.placement for p in triple.post])
                found.setdefault(text, Finding(str(sample), text, f"{wrong} ({setting})"))
    return number, list(found.values())


def triple_failure(triple: Triple, case: Truth, setting: Setting) -> str | None:
    """What is wrong with a triple of a one-node graph."""
    assert isinstance(triple.body, OpCall)
    return failure(triple.body, case, [p.placement for p in triple.pre], [p.placement for p in triple.post], setting)


def _rule(pre: Sequence[Placement], post: Sequence[Placement]) -> str:
    return f"{' '.join(map(str, pre)) or '()'} -> {' '.join(map(str, post))}"


# --- missing ---------------------------------------------------------------------------------------------------------------


def _missing(sample: Sample, claims: Sequence[Triple]) -> tuple[int, int, list[Finding]]:
    """(combinations tried, combinations that hold, those that hold and are not claimed)."""
    case = truth(sample)
    mesh = _settings(True)[0].mesh
    grains = find_grains(case.graph)
    row = mesh.row(0)
    outputs = case.node.outputs
    options = [
        tuple(Placement((s,)) for s in _states(r, grains, lambda n: Cut(row, n)) if r.name not in sample.whole or not isinstance(s, Sharded))
        for r in (*case.refs, *outputs)
    ]
    follows = _closure(claims, case.refs, outputs)
    tried, holding, found = 0, 0, []
    for pre in product(*options[: len(case.refs)]):
        posts = list(product(*options[len(case.refs) :]))
        tried += len(posts)
        open_posts = [p for p in posts if not follows(pre, p)]
        holding += len(posts) - len(open_posts)
        for post in _holding(sample, pre, open_posts):
            holding += 1
            reason = _reason(sample, case, pre, post)
            found.append(Finding(str(sample), _rule(pre, post), reason.value if reason else ""))
    return tried, holding, found


def _states(ref: TensorRef, grains: Grains, cut: Callable[[int], Cut]) -> Iterator[State]:
    """States that a tensor may be in along one axis."""
    yield REPLICATED
    if ref.requires_grad:
        yield INVARIANT
    if ref.dtype != "bool":
        yield PARTIAL
    for site, units in grains.sites_of.get(ref.name, ()):
        if units > 1:
            yield Sharded(site.dim, site.outer, ref.shape[site.dim] // (site.outer * units), cut(units))


Placements = tuple[Placement, ...]


def _closure(claims: Sequence[Triple], refs: Sequence[TensorRef], outputs: Sequence[TensorRef]) -> Callable[[Placements, Placements], bool]:
    """Whether a combination follows from a claimed triple by free conversions before and after it."""
    rules = [(tuple(p.placement for p in t.pre), tuple(p.placement for p in t.post)) for t in claims]

    def follows(pre: tuple[Placement, ...], post: tuple[Placement, ...]) -> bool:
        return any(
            all(free(r, a, b) for r, a, b in zip(refs, pre, needed, strict=True))
            and all(free(r, a, b) for r, a, b in zip(outputs, made, post, strict=True))
            for needed, made in rules
        )

    return follows


def _holding(sample: Sample, pre: tuple[Placement, ...], posts: Sequence[tuple[Placement, ...]]) -> Iterator[tuple[Placement, ...]]:
    """Of the `posts`, those that are true with the plain local body: tried forward first, then with gradients on other settings."""
    case = truth(sample)
    settings = (line(2), line(3, zero=1, first=2), line(3))
    forward = _Forward(case, pre, settings[0])
    for post in posts:
        body = plain_body(case, pre, post)
        if body is None or communicates(body) or not forward.holds(body, post):
            continue
        if all(failure(body, c, pre, post, s, seed) is None for seed, s in enumerate(settings) for c in (case, truth(sample, 1))):
            yield post


def plain_body(case: Truth, pre: tuple[Placement, ...], post: tuple[Placement, ...]) -> OpCall | None:
    """The local call without any variant."""
    entry = lookup(case.node.call)
    if entry is None or entry.body is None:
        return case.node.call
    return entry.body(LocalCall(case.node, 0, case.refs, pre, post, ("",)))


class _Forward:
    """The outputs of the plain body, run once for every placement of the operands."""

    def __init__(self, case: Truth, pre: tuple[Placement, ...], setting: Setting):
        self.case, self.pre, self.setting = case, pre, setting
        self.runs: dict[tuple[OpCall, tuple[bool, ...]], list[Run] | None] = {}

    def holds(self, body: OpCall, post: tuple[Placement, ...]) -> bool:
        empty = tuple(is_empty(self.case, post, self.setting, at) for at in self.setting.devices)
        if any(empty):
            return failure(body, self.case, self.pre, post, self.setting) is None
        key = (body, empty)
        if key not in self.runs:
            self.runs[key] = self._run(body, post)
        runs = self.runs[key]
        return runs is not None and all(
            in_placement([r.outputs[i] for r in runs], p, self.case.outputs[i], self.setting, self.case.tolerance) for i, p in enumerate(post)
        )

    def _run(self, body: OpCall, post: tuple[Placement, ...]) -> list[Run] | None:
        generator = torch.Generator().manual_seed(0)
        operands = [deal(x, p, self.setting, generator) for x, p in zip(self.case.operands, self.pre, strict=True)]
        try:
            return run_all(body, self.case, operands, [None] * len(post), post, self.setting)
        except Exception:  # the body does not run on such operands
            return None


def _reason(sample: Sample, case: Truth, pre: Sequence[Placement], post: Sequence[Placement]) -> Reason | None:
    for ref, placement in zip((*case.refs, *case.node.outputs), (*pre, *post), strict=True):
        if ref.dtype not in CONTINUOUS and any(isinstance(s, Partial) for s in placement.states):
            return Reason.INTEGER_PARTIAL
    return sample.excuse


__all__ = [
    "AuditReport",
    "EntryReport",
    "Finding",
    "audit",
    "coverage",
    "overloads",
    "representatives",
    "triple_failure",
    "uninitialised_memory_is_nan",
]
