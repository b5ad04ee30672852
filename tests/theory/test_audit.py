"""The audit of the whole registry: no unsound rule, few missing ones, every overload covered.

What of it is run by default follows from two rules: every claimed triple of the first sample of every overload is executed, and all combinations of
states are tried for one overload of every entry. (Some ten seconds for 230 overloads; the whole audit, every sample on all meshes, is slow.)
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import hapx.theory.ops  # noqa: F401  (fills the registry)
from hapx.ir import OpCall
from hapx.states import INVARIANT, PARTIAL, REPLICATED, Placement
from hapx.theory.audit import AuditReport, _unsound, audit, coverage, overloads, representatives
from hapx.theory.derive import derive
from hapx.theory.ops import losses
from hapx.theory.probe import complete, deal, in_placement, truth
from hapx.theory.registry import REGISTRY, lookup
from hapx.theory.samples import SAMPLES, UNSAMPLED, Reason, Values, sample, t
from hapx.theory.settings import grid, line

REASONS = {r.value for r in Reason}


def test_every_overload_has_a_sample_or_a_reason() -> None:
    assert coverage() == ()
    assert set(UNSAMPLED) <= set(overloads()), "a reason for an overload that is not registered"
    assert all(UNSAMPLED.values())
    assert all(lookup(s.call) is not None for s in SAMPLES), "a sample without an entry"


def test_every_entry_names_an_operator_of_torch() -> None:
    for target in REGISTRY:
        namespace, name, *overload = target.split(".")
        packet = getattr(getattr(torch.ops, namespace), name)
        assert not overload or overload[0] in packet.overloads(), target


def check(report: AuditReport, share: float) -> None:
    print(report)
    assert report.unsound == (), "\n".join(map(str, report.unsound))
    assert report.missing_share <= share, str(report)
    assert {f.detail for f in report.missing} <= REASONS, "\n".join(str(f) for f in report.missing if f.detail not in REASONS)


@pytest.mark.slow
def test_quick_audit_of_everything() -> None:
    report = audit(quick=True)
    assert report.entries + len(UNSAMPLED) == len(overloads())
    assert report.true > 3000 and report.claimed > 2500
    check(report, 0.02)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_full_audit_of_everything() -> None:
    report = audit()
    assert report.true > 6000 and report.claimed > 8000
    check(report, 0.02)


def test_what_every_overload_claims_is_true() -> None:
    report = audit(quick=True, missing=False)
    assert report.entries + len(UNSAMPLED) == len(overloads())
    assert report.claimed > 5 * report.entries and report.combinations == report.true == 0
    check(report, 0.0)


def test_what_is_true_of_every_entry_is_claimed() -> None:
    report = audit(representatives(), quick=True)
    assert report.entries == len({id(lookup(s.call)) for s in SAMPLES}) >= 70
    assert report.true > 10 * report.entries
    check(report, 0.02)


def test_kernels_that_return_what_they_find_in_memory_are_found_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    margins = ["aten.multi_margin_loss.default", "aten.multilabel_margin_loss.default"]
    assert audit(margins, missing=False).unsound == ()
    monkeypatch.setattr(losses, "SUMMED_BY_ROWS", frozenset())
    for _ in range(3):
        found = audit(margins, missing=False).unsound
        assert len(found) == 6 and all("reduction=2" in f.sample and "not P" in f.detail for f in found)
    assert torch.are_deterministic_algorithms_enabled() == before


def test_bodies_call_no_composites_but_those_their_entries_name() -> None:
    seen: set[str] = set()
    for s in SAMPLES:
        entry = lookup(s.call)
        assert entry is not None
        if entry.body is None:
            continue
        for triple in derive(truth(s).graph, grid(2, 2).mesh).triples[0]:
            assert isinstance(triple.body, OpCall)
            if triple.body.target.startswith("hapx."):
                assert triple.body.target in entry.composites, s
                seen.add(triple.body.target)
    assert seen == {c for e in REGISTRY.values() for c in e.composites}


def test_the_report_prints_a_table() -> None:
    report = audit(["aten.neg", "aten.mm"], quick=True)
    lines = str(report).splitlines()
    assert lines[0].split() == ["operator", "samples", "tried", "claimed", "true", "unsound", "missing"]
    assert lines[1].startswith("aten.neg") and lines[2].startswith("aten.mm")
    assert "0 unsound, 0 missing" in lines[-1]


def test_samples_get_the_defaults_of_the_schema_in_its_order() -> None:
    call = complete(sample("conv2d", weight=t(8, 6, 3, 3), input=t(4, 6, 7, 5)).call)
    assert [k for k, _ in call.args] == ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]
    assert call["groups"] == 1 and call["bias"] is None and call["stride"] == (1, 1)


def test_dealt_tensors_are_in_their_placement_and_in_no_other() -> None:
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    setting = line(3, zero=1)
    rows = next(tr.pre[0].placement for tr in derive(truth(sample("neg", self=t(6, 4))).graph, setting.mesh).triples[0] if "S0" in str(tr.pre[0]))
    states = [Placement((REPLICATED,)), Placement((PARTIAL,)), rows]
    generator = torch.Generator().manual_seed(1)
    for dealt in states:
        local = deal(x, dealt, setting, generator)
        assert [in_placement(local, p, x, setting) for p in states] == [p == dealt for p in states]
    summands = deal(x, Placement((PARTIAL,)), setting, generator)
    assert all((s > 0).any() and (s < 0).any() for s in summands), "summands have both signs"
    assert in_placement(deal(x, Placement((INVARIANT,)), setting, generator), Placement((REPLICATED,)), x, setting)


def test_lengths_are_uneven_and_may_be_zero() -> None:
    cut = next(tr.work[0] for tr in derive(truth(sample("neg", self=t(6, 4))).graph, line(3).mesh).triples[0] if tr.work[0] and tr.work[0].units == 6)
    assert line(3).lengths[cut] == (1, 1, 4) and line(3, zero=1, first=2).lengths[cut] == (2, 0, 4) and line(2, zero=0).lengths[cut] == (0, 6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of kernels, as in the audit
def test_what_is_claimed_holds_for_complex_numbers_too() -> None:
    """Of every sample that also runs if all its ordinary operands are complex."""
    twins, executed = 0, 0
    for real in SAMPLES:
        ordinary = {n for n, d in real.draws if d.dtype == "float64" and d.values in (Values.NORMAL, Values.POSITIVE)}
        twin = replace(real, draws=tuple((n, replace(d, dtype="complex128") if n in ordinary else d) for n, d in real.draws))
        try:
            outputs = truth(twin).outputs
        except Exception:  # whatever a kernel says: it takes real numbers only
            continue
        if ordinary and all(bool(o.isfinite().all()) for o in outputs):
            number, unsound = _unsound(twin, quick=False)
            assert not unsound, "\n".join(map(str, unsound))
            twins, executed = twins + 1, executed + number
    print(f"{twins} samples, {executed} triples")
    assert twins > 350 and executed > 10_000
