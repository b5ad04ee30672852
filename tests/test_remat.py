"""Rematerialisation as a choice of the plan: what it keeps, what it costs, when "auto" takes it, and how plans carry it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from math import inf
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hapx.cluster.spec import ClusterSpec
from hapx.cost.compute import work
from hapx.cost.memory import converted_again, forgotten, kept, kept_bytes
from hapx.cost.model import CostModel
from hapx.cost.remat import chosen_blocks, most_blocks, with_blocks, without_blocks
from hapx.errors import HapError, InsufficientMemoryError, PlanError
from hapx.graph.capture import capture
from hapx.graph.segments import graph_hash
from hapx.ir import Graph, OpCall, Region
from hapx.lower import Candidate, lower
from hapx.plan import Mesh, Plan
from hapx.planner import extend, key_of, plan_graphs, plan_module, plan_spmd, views
from hapx.processes import at_once
from hapx.recompute import WORTH, _Tried, fastest, roomy
from hapx.restriction import BASELINES, Restriction, with_remat
from hapx.setting import Counters, Setting
from hapx.synth.search import HOPELESS
from hapx.theory.discover import discover
from support.models import GPT

LAYERS = 4


def gpt() -> GPT:
    with torch.device("meta"):
        return GPT(13, 16, 4, LAYERS, 8, dtype=torch.float32)


@cache
def graph(batch: int = 16, training: bool = True) -> Graph:
    return capture(gpt(), GPT(13, 4, 1, 1, 8).example(batch), training=training)


def devices(memory: int | str, count: int = 2) -> ClusterSpec:
    return ClusterSpec.load(
        {
            "name": "small",
            "machines": [{"name": "m", "devices": ["d"] * count}],
            "device_types": {"d": {"flops": 1e9, "memory": memory, "memory_bandwidth": "1 GB/s"}},
            "network": {"inter": {"bandwidth": "1 GB/s", "latency": "1 us"}, "intra": {"bandwidth": "1 GB/s", "latency": "1 us"}},
        }
    )


DP = Restriction("dp", mesh="flat", split="batch", ratios="even", storage="as-used", sfb="never")


@cache
def plan(remat: str, memory: int | str = "1 GiB") -> Plan:
    return plan_graphs([graph()], devices(memory), strategy=replace(DP, remat=remat))  # type: ignore[arg-type]


# ---- the transformation ------------------------------------------------------------------------------------------------------


def test_every_repeated_block_becomes_a_region() -> None:
    blocks = with_blocks(graph())
    assert chosen_blocks(blocks) == LAYERS
    assert [r.stop - r.start for r in blocks.regions] == [blocks.regions[0].stop - blocks.regions[0].start] * LAYERS
    assert kept_bytes(blocks) < 0.5 * kept_bytes(graph())
    assert without_blocks(blocks) == graph()


def test_the_hash_is_that_of_the_computation() -> None:
    assert graph_hash(with_blocks(graph())) == graph().hash
    own = replace(graph(), regions=(Region("checkpoint", 3, 9),))
    assert graph_hash(own) != graph().hash  # a region of the model is part of it


def test_regions_of_the_model_stay() -> None:
    class Half(GPT):
        def logits(self, idx: Tensor) -> Tensor:
            x = self.tok(idx) + self.pos(torch.arange(idx.shape[1], device=idx.device))
            for i, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=False) if i < LAYERS // 2 else block(x)
            return self.head(self.norm(x))

    captured = capture(Half(13, 16, 4, LAYERS, 8), GPT(13, 4, 1, 1, 8).example(4))
    assert len(captured.regions) == LAYERS // 2
    assert with_blocks(captured).regions[: LAYERS // 2] == captured.regions
    assert set(kept(with_blocks(captured))) < set(kept(captured)) < set(kept(replace(captured, regions=())))


def test_a_model_without_repetition_is_left_alone() -> None:
    captured = capture(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (torch.ones(2, 4), torch.ones(2, 4)), loss_fn=nn.functional.mse_loss)
    assert with_blocks(captured) is captured
    assert plan_graphs([captured], devices("1 GiB"), strategy=Restriction(remat="blocks")).graphs != {}


# ---- memory and time ---------------------------------------------------------------------------------------------------------


def test_one_region_counts_as_if_it_were_none() -> None:
    """While it is computed again its tensors are there."""
    blocks = with_blocks(graph())
    first = blocks.regions[0]
    names = {o.name for n in blocks.nodes[first.start : first.stop] for o in n.outputs}
    assert kept(graph()) & names <= kept(blocks)
    assert not forgotten(blocks) & names
    assert len(forgotten(blocks)) == (LAYERS - 1) * len(names)


def test_inside_of_a_region_backward_computes_forward_again() -> None:
    blocks = with_blocks(graph())
    node = next(n for n in blocks.nodes[blocks.regions[1].start :] if n.call.op == "aten.linear")
    once, twice = work(graph(), node), work(blocks, node)
    assert twice.forward == once.forward
    assert twice.backward == once.forward + once.backward
    assert sum(b for _, b in twice.moved_back) == sum(b for _, b in once.moved) + sum(b for _, b in once.moved_back)
    outside = blocks.nodes[0]
    assert work(blocks, outside) == work(graph(), outside)


def test_what_only_regions_use_is_converted_again() -> None:
    blocks = with_blocks(graph())
    again = converted_again(blocks)
    assert "blocks.0.up.weight" in again
    assert "tok.weight" not in again
    assert converted_again(graph()) == frozenset()
    path = next(
        i.triple
        for i in plan_graphs([graph()], devices("1 GiB"), strategy="zero").stages[0].program.instructions
        if not isinstance(i.triple.body, OpCall) and i.triple.pre[0].tensor == "blocks.0.up.weight"
    )
    assert not isinstance(path.body, OpCall)
    costs = []
    for g in (graph(), blocks):
        theory = _theory(g)
        model = CostModel(theory, devices("1 GiB"), "fp32", "adamw", "train")
        costs.append(model.conversion(g.refs["blocks.0.up.weight"], path.body, path.post[0].placement))
    count = [[c.direction for c in cost.communication].count("backward") for cost in costs]
    forward = [c.direction for c in costs[0].communication].count("forward")
    assert forward >= 1
    assert count[1] == count[0] + (0 if any(c.free for c in path.body) else forward)
    assert [c.direction for c in costs[1].communication].count("forward") == forward


def _theory(g: Graph):  # type: ignore[no-untyped-def]
    from hapx.theory.derive import derive

    return derive(g, plan("none").stages[0].mesh)


def test_plans_with_blocks_need_less_memory_and_more_time() -> None:
    none, blocks = plan("none"), plan("blocks")
    assert blocks.memory[0] < none.memory[0]
    forward = sum(work(graph(), n).forward for n in graph().nodes[with_blocks(graph()).regions[0].start : with_blocks(graph()).regions[-1].stop])
    assert blocks.iteration_time - none.iteration_time > 0.9 * forward / 2 / 1e9  # two devices of 1 GFLOP/s
    assert blocks.restriction.remat == "blocks"
    blocks.verify()


def test_auto_computes_as_few_blocks_again_as_it_must() -> None:
    none, blocks = plan("none").memory[0] / 0.9, plan("blocks").memory[0] / 0.9
    plenty, short, none_at_all = round(1.05 * none), round((none + blocks) / 2), round(0.8 * blocks)
    found = [plan("auto", memory) for memory in (plenty, short, round(1.01 * blocks))]
    again = [chosen_blocks(p.graphs[p.first]) for p in found]
    assert again[0] == 0 < again[1] < again[2] == LAYERS - 1  # the last one is needed when it would be computed again
    assert found[0].iteration_time < found[1].iteration_time < found[2].iteration_time < plan("blocks").iteration_time
    for one in found:
        one.verify()
        assert max(one.memory) <= 0.9 * one.cluster.type_of(0).memory
    with pytest.raises(InsufficientMemoryError):
        plan("none", short)
    with pytest.raises(InsufficientMemoryError):
        plan("auto", none_at_all)


def test_blocks_are_the_first_ones_and_one_alone_saves_nothing() -> None:
    assert with_blocks(graph(), 1) is graph()
    some = with_blocks(graph(), LAYERS - 1)
    assert some.regions == with_blocks(graph()).regions[:-1]
    assert kept_bytes(with_blocks(graph())) < kept_bytes(some) < kept_bytes(graph())
    assert most_blocks(graph()) == LAYERS
    assert most_blocks(some) == 1  # what is chosen already is not chosen again


@cache
def on_links(bandwidth: str, remat: str, part: float = 0.0) -> Plan:
    """A GPT on two quick devices with a part of the memory that it would like; 0: with plenty."""
    data = devices("1 GiB").to_dict()
    data["machines"][0]["intra"] = {"bandwidth": bandwidth, "latency": "1 us"}
    data["device_types"]["d"] |= {"flops": 1e12, "memory_bandwidth": "1000 GB/s"}
    if part:
        data["device_types"]["d"]["memory"] = round(part * max(on_links(bandwidth, "none").memory) / 0.9)
    wide = capture(GPT(13, 32, 4, LAYERS, 16, dtype=torch.float32), GPT(13, 4, 1, 1, 16).example(16))
    return plan_graphs([wide], ClusterSpec.load(data), strategy=replace(BASELINES["auto"], mesh="flat", remat=remat))  # type: ignore[arg-type]


def test_where_memory_binds_blocks_are_computed_again_over_slow_links_and_parameters_are_sharded_over_fast_ones() -> None:
    slow, fast = on_links("300 MB/s", "auto", 0.7), on_links("10 GB/s", "auto", 0.9)
    assert 0 < chosen_blocks(slow.graphs[slow.first]) < LAYERS
    assert slow.iteration_time < 0.9 * on_links("300 MB/s", "blocks", 0.7).iteration_time
    assert chosen_blocks(fast.graphs[fast.first]) == 0
    assert fast.iteration_time == on_links("10 GB/s", "none", 0.9).iteration_time < 0.9 * on_links("10 GB/s", "blocks", 0.9).iteration_time
    assert fast.iteration_time > on_links("10 GB/s", "none").iteration_time  # it binds


@pytest.mark.parametrize("parts", [(0.0, 0.9, 0.7), pytest.param((0.7, 0.55), marks=pytest.mark.slow)])
def test_less_memory_makes_no_plan_faster(parts: tuple[float, ...]) -> None:
    times = [on_links("300 MB/s", "auto", part).iteration_time for part in parts]
    assert times == sorted(times)


def test_memory_is_a_limit_only_where_that_may_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """On mesh views on which there is something to gain, if memory were no matter, beside what blocks that are computed again bring."""
    data = devices("1 GiB", 4).to_dict()
    data["machines"] = [data["machines"][0] | {"name": name, "devices": ["d", "d"]} for name in ("m0", "m1")]
    data["network"]["inter"]["bandwidth"] = "100 MB/s"
    rule = replace(DP, mesh="auto", remat="auto")
    room = 0.9 * max(plan_graphs([graph()], ClusterSpec.load(data), strategy=replace(rule, remat="none")).memory)
    data["device_types"]["d"]["memory"] = round(room / 0.9)
    setting = Setting(discover(graph()), key_of(graph()), ClusterSpec.load(data), rule, "fp32", "adamw")
    meshes = views(setting.cluster, rule)
    roomy: list[dict[str, float]] = []
    of_blocks: list[float] = []
    limited: list[set[str]] = []

    def plan(own: Setting, counters: Counters, on: Sequence[Mesh] | None) -> list[Candidate]:
        if own.tight:
            limited.append({m.name for m in on or ()})
        before = len(counters.tried)
        found = plan_spmd(own, counters, on)
        roomy.append({view["view"]: view["time"] for view in counters.tried[before:]})
        if chosen_blocks(own.graph) and max(found[0].peak) <= room:
            of_blocks.append(found[0].time)
        return found

    at_once(fastest(setting, Counters(), meshes, plan))
    times, best = roomy[0], min(of_blocks)
    assert set(times) == {"flat", "2x2"}
    assert limited == [{name for name, time in times.items() if time < best * (1 - WORTH)}]

    limited.clear()
    monkeypatch.setattr("hapx.recompute.WORTH", 1 - sum(times.values()) / 2 / best)
    at_once(fastest(setting, Counters(), meshes, plan))
    assert limited == [{min(times, key=lambda name: times[name])}]

    limited.clear()
    monkeypatch.setattr("hapx.recompute.WORTH", 1.0)
    chosen, found = at_once(fastest(setting, Counters(), meshes, plan))
    assert limited == []
    assert found.time == best
    assert chosen_blocks(chosen.graph) > 0


@pytest.mark.parametrize(("part", "several"), [(0.2, False), (0.97, True)])
def test_where_all_blocks_do_not_suffice_other_numbers_are_tried_if_little_lacks(part: float, several: bool) -> None:
    """It is told how long it takes without blocks, and then how long with them, as if memory were no matter."""
    cluster, rule = devices(round(part * min(plan("blocks").memory) / 0.9)), replace(DP, remat="auto")
    setting = Setting(discover(graph()), key_of(graph()), cluster, rule, "fp32", "adamw")
    times, told, limited = dict[int, float](), list[float](), list[int]()

    def plan_one(own: Setting, counters: Counters, on: Sequence[Mesh] | None) -> list[Candidate]:
        if own.tight:
            limited.append(chosen_blocks(own.graph))
        found = plan_spmd(own, counters, on)
        times[chosen_blocks(own.graph)] = found[0].time
        return found

    with pytest.raises(InsufficientMemoryError):
        at_once(fastest(setting, Counters(), views(cluster, rule), plan_one), told.append)
    assert told == [times[0], min(t for n, t in times.items() if n)]
    assert told[0] < told[1]
    assert limited[0] == 0
    assert (len(limited) > 2) is several


@pytest.mark.parametrize("part", [0.97, 0.8, 0.6])
def test_how_many_blocks_suffice_is_told_by_the_program_without_any(part: float) -> None:
    """The fewest that suffice are planned, and no others."""
    deep = capture(GPT(13, 16, 4, 8, 8), GPT(13, 4, 1, 1, 8).example(16))
    rule = replace(DP, remat="none")
    peaks = [max(plan_graphs([with_blocks(deep, n)], devices("1 GiB"), strategy=rule).memory) for n in range(8)]
    cluster = devices(round(part * peaks[0] / 0.9))
    setting = Setting(discover(deep), key_of(deep), cluster, replace(DP, remat="auto"), "fp32", "adamw")
    planned: list[int] = []

    def plan_one(own: Setting, counters: Counters, on: Sequence[Mesh] | None) -> list[Candidate]:
        planned.extend([] if own.tight else [chosen_blocks(own.graph)])
        return plan_spmd(own, counters, on)

    chosen, found = at_once(fastest(setting, Counters(), views(cluster, setting.rule), plan_one))
    fewest = next(n for n, need in enumerate(peaks) if need <= part * peaks[0])
    assert 0 < fewest < 7
    assert found.fits
    assert chosen_blocks(chosen.graph) == fewest
    assert planned == [0, fewest]


@dataclass(frozen=True)
class Large(Candidate):
    """That does not fit."""

    fits = False  # type: ignore[assignment]


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_a_program_that_fits_with_blocks_is_kept_where_the_best_one_does_not(slower: float) -> None:
    """And no other number of blocks is tried if it is as good as that."""
    cluster = devices(round(0.8 * plan("none").memory[0] / 0.9))
    setting = Setting(discover(graph()), key_of(graph()), cluster, replace(DP, remat="auto"), "fp32", "adamw")
    planned: dict[int, Candidate] = {}

    def plan_one(own: Setting, counters: Counters, on: Sequence[Mesh] | None) -> list[Candidate]:
        if own.tight:
            raise InsufficientMemoryError("as a limit")
        best = plan_spmd(own, counters, on)[0]
        number = chosen_blocks(own.graph)
        if number and not any(planned):
            best = Large(**{f.name: getattr(best, f.name) for f in fields(Candidate)})
            best = replace(best, time=best.time / slower)
        planned[number] = best
        return [best]

    counters = Counters()
    chosen, found = at_once(fastest(setting, counters, views(cluster, setting.rule), plan_one))
    fewest = list(planned)[1]
    assert chosen_blocks(chosen.graph) == fewest
    assert found.fits
    assert found.program is planned[0].program
    assert found.time == pytest.approx(planned[fewest].time * slower, rel=1e-9)  # data parallelism is all that there is
    assert found.cost == pytest.approx(planned[fewest].cost, rel=1e-9)
    assert [view["time"] for view in counters.tried] == [found.time]
    assert (len(planned) > 2) is (slower > 1)
    lower(found, chosen.graph, chosen.key, cluster, chosen.rule, "fp32", "adamw", {}).verify()


def test_what_is_far_slower_than_what_was_found_is_not_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, cluster = discover(graph()), devices("1 GiB")
    setting = Setting(captured, key_of(captured), cluster, replace(BASELINES["auto"], mesh="flat"), "fp32", "adamw")
    improved: list[float] = []

    def overlapped(own: Setting, *_: object) -> list[Candidate]:
        improved.append(own.beside)
        return []

    monkeypatch.setattr("hapx.planner._overlapped", overlapped)
    best = plan_spmd(setting, Counters())[0]
    far, near = best.time / HOPELESS * 0.99, best.time / HOPELESS * 1.01
    assert [plan_spmd(replace(setting, beside=seconds), Counters())[0].program for seconds in (far, near)] == [best.program] * 2
    assert improved == [inf, near]


def test_where_all_blocks_but_the_last_one_do_not_suffice_all_are_planned() -> None:
    large = GPT(600, 4, 1, LAYERS, 8)  # a head that needs more than a block, for which also the last one gives way
    captured = discover(capture(large, large.example(16)))
    peaks = [max(plan_graphs([with_blocks(captured, n)], devices("1 GiB"), strategy=replace(DP, remat="none")).memory) for n in (LAYERS - 1, LAYERS)]
    assert peaks[1] < peaks[0]
    cluster, rule = devices(round(sum(peaks) / 2 / 0.9)), replace(DP, remat="auto")
    setting = Setting(captured, key_of(captured), cluster, rule, "fp32", "adamw")
    planned: list[int] = []

    def plan_one(own: Setting, counters: Counters, on: Sequence[Mesh] | None) -> list[Candidate]:
        planned.extend([] if own.tight else [chosen_blocks(own.graph)])
        return plan_spmd(own, counters, on)

    chosen, _ = at_once(fastest(setting, Counters(), views(cluster, rule), plan_one))
    assert chosen_blocks(chosen.graph) == LAYERS
    assert planned == [0, LAYERS]


@pytest.mark.parametrize("bandwidth", ["1 GB/s", "50 MB/s"])
def test_a_further_number_of_blocks_is_planned_from_what_was_best_with_the_one_before(bandwidth: str) -> None:
    """On its view and from its shares: what is found is as good as from everywhere."""
    deep = discover(capture(GPT(13, 16, 4, 8, 8), GPT(13, 4, 1, 1, 8).example(16)))
    document = devices("1 GiB", 4).to_dict()
    document["device_types"]["slow"] = document["device_types"]["d"] | {"flops": 3e8}
    document["machines"] = [{"name": "a", "devices": ["d", "d"]}, {"name": "b", "devices": ["slow", "slow"]}]
    document["network"]["inter"]["bandwidth"] = bandwidth
    cluster = ClusterSpec.load(document)
    setting = Setting(deep, key_of(deep), cluster, BASELINES["auto"], "fp32", "adamw")
    asked: list[tuple[int, bool, list[str]]] = []

    def plan_one(own: Setting, counters: Counters, on: Sequence[Mesh] | None) -> list[Candidate]:
        assert on is not None
        asked.append((chosen_blocks(own.graph), own.start is not None, [mesh.name for mesh in on]))
        return plan_spmd(own, counters, on)

    tried = _Tried(setting, views(cluster, setting.rule), plan_one)
    first, second = tried.unlimited(6), tried.unlimited(7)
    afresh = roomy(tried.setting_with(7), Counters(), tried.meshes, plan_spmd)
    assert asked == [(6, False, ["flat", "2x2"]), (7, True, [first.mesh.name])]
    assert second.time == pytest.approx(afresh.time, rel=2e-3)
    assert second.time > first.time
    assert [set(times) for _, times in tried.known.values()] == [{"flat", "2x2"}] * 2


def test_the_error_says_what_there_really_is() -> None:
    """However far from enough it is (a mistyped unit); and what is lacking where as many blocks as there are are computed again."""
    with pytest.raises(InsufficientMemoryError, match=r"KiB there .* and 270 B is free") as auto:
        plan("auto", 300)
    with pytest.raises(InsufficientMemoryError) as none:
        plan("none", 300)
    assert 0 < auto.value.needs[0] < 0.8 * none.value.needs[0]


def test_what_is_told_of_the_search_is_of_the_plan_that_was_chosen() -> None:
    for part in (0.9, 0.7):
        found = on_links("300 MB/s", "auto", part)
        assert [view["time"] for view in found.statistics["tried"]] == [found.iteration_time]
        assert found.statistics["views"] == ("flat",)


# ---- what users say ----------------------------------------------------------------------------------------------------------


def test_the_restriction_comes_first() -> None:
    choices = ("auto", "none", "blocks")
    said = {(rule, asked): with_remat(replace(DP, remat=rule), asked).remat for rule in choices for asked in choices}  # type: ignore[arg-type]
    assert said == {(rule, asked): rule if rule != "auto" else asked for rule, asked in said}
    assert all(r.remat == "auto" for r in BASELINES.values())
    chosen = plan_module(gpt(), devices("1 GiB"), GPT(13, 4, 1, 1, 8).example(16), strategy=DP, remat="blocks")
    assert chosen_blocks(chosen.graphs[chosen.first]) == LAYERS


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(HapError, match=r"remat='full'.*'auto', 'none', 'blocks'"):
        plan_module(gpt(), devices("1 GiB"), GPT(13, 4, 1, 1, 8).example(16), remat="full")


def test_the_plan_says_it() -> None:
    assert f"computed again in backward: {LAYERS} blocks\n" in str(plan("blocks"))
    assert "computed again" not in str(plan("none"))


def test_plans_keep_their_regions(tmp_path: Path) -> None:
    plan("blocks").save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    loaded.verify()
    assert loaded == plan("blocks")
    assert loaded.digest != plan("none").digest


def test_further_programs_follow_the_first() -> None:
    other, evaluation = graph(6), graph(4, training=False)
    longer = extend(extend(plan("blocks"), other, key_of(other)), evaluation, key_of(evaluation))
    assert [chosen_blocks(g) for g in longer.graphs.values()] == [LAYERS, LAYERS, 0]
    longer.verify()
    assert chosen_blocks(extend(plan("none"), other, key_of(other)).graphs[key_of(other)]) == 0


def test_a_further_program_may_need_blocks_where_the_first_did_not() -> None:
    first = plan("auto", round(1.05 * plan("none").memory[0] / 0.9))
    large = graph(32)
    longer = extend(first, large, key_of(large))
    assert [chosen_blocks(g) for g in longer.graphs.values()] == [0, LAYERS - 1]
    longer.verify()


def edited(regions: tuple[Region, ...]) -> Plan:
    p = plan("blocks")
    return replace(p, graphs={p.first: replace(p.graphs[p.first], regions=regions)})


@pytest.mark.parametrize("fault", ["one less", "overlap", "outside", "wider"])
def test_changed_regions_are_noticed(fault: str) -> None:
    own = plan("blocks").graphs[plan("blocks").first].regions
    first, second = own[0], own[1]
    regions = {
        "one less": own[1:],
        "overlap": (replace(first, stop=second.start + 1), *own[1:]),
        "outside": (*own[:-1], replace(own[-1], stop=10_000)),
        "wider": (replace(first, start=first.start - 1), *own[1:]),
    }[fault]
    with pytest.raises(PlanError):
        edited(regions).verify()
