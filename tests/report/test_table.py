"""What people see of a plan: snapshots of whole tables, from plans written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hapx.plan import Plan
from hapx.report.compare import compare_table
from hapx.report.layers import Layer, collapse, layers
from hapx.report.split import TimeSplit, split_of
from hapx.report.table import batch_sizes, plan_table
from hapx.report.words import devices_text, lengths_text, ranges_text, shares_text, size_text, time_text
from hapx.restriction import BASELINES
from hapx.timeline import Event, Timeline
from support.plans import flat, mlp_batch_split, mlp_tensor_parallel, place, sharded

MODULES = ("blocks.0", "", "blocks.1", "")


def readable(plan: Plan, memory: Sequence[int] | None = None) -> Plan:
    """The plan with module paths, as captured graphs have them, and predictions that are easy to read."""
    graph = plan.graphs[plan.first]
    nodes = tuple(replace(n, module=m) for n, m in zip(graph.nodes, MODULES, strict=True))
    return replace(plan, graphs={plan.first: replace(graph, nodes=nodes)}, memory=tuple(memory or [0] * len(plan.memory)), iteration_time=1.0)


def test_data_parallel_with_an_even_split_for_comparison() -> None:
    plan = readable(mlp_batch_split((64, 256, 10), (4, 2, 1, 1)), [2**30, 2**29, 2**28, 2**28])
    even = replace(readable(mlp_batch_split((64, 256, 10), (2, 2, 2, 2))), restriction=BASELINES["dp-even"], iteration_time=2.0)
    head, *rest = plan_table(plan, even).split("\n\n")
    assert head == "plan for by-hand: 4 devices, strategy auto, float64, adamw"
    assert rest[0] == (
        "device  machine  type         share   batch  memory\n"
        "-----------------------------------------------------------------------\n"
        "0       m0       thing       50.0 %       4  1 GiB of 4 GiB (25%)\n"
        "1       m0       thing       25.0 %       2  512 MiB of 4 GiB (12%)\n"
        "2-3     m0       thing  12.5 % each  1 each  256 MiB of 4 GiB (6%) each"
    )
    assert rest[1] == (
        "layer     weights  activations          communication, forward / backward\n"
        "--------------------------------------------------------------------------\n"
        "blocks.0  whole    batch split 4:2:1:1  gradients: - / all-reduce 130 KiB\n"
        "(model)   -        batch split 4:2:1:1  loss: all-reduce 8 B / -\n"
        "blocks.1  whole    batch split 4:2:1:1  gradients: - / all-reduce 20.1 KiB"
    )
    times = rest[2].splitlines()
    assert times[0].startswith("predicted iteration: ")
    assert " = compute " in times[0]
    assert "sync" in times[0]
    assert times[1].startswith("            dp-even: ")
    assert times[2] == "this plan is 2.00x as fast as dp-even"


def test_one_line_per_group_of_many_devices() -> None:
    """64 devices that take 3, 2 or 1 samples in no order: no row is broken."""
    lengths = tuple(3 - (d * d % 7 > 2) - (d % 8 > 4) for d in range(64))
    _, table, *_ = plan_table(readable(mlp_batch_split((sum(lengths), 256, 10), lengths))).split("\n\n")
    rows = table.splitlines()[2:]
    assert [row.split("  ")[0] for row in rows] == ["0-1,3-4,8,10-11 and 22 more", "2,6-7,9,12-16,19 and 18 more", "5,23,30,37,47,54,61"]
    assert all("each" in row and len(row) <= 120 for row in rows)


def test_tensor_parallel() -> None:
    plan = replace(readable(mlp_tensor_parallel((64, 256, 10), (128, 64, 32, 32), 8)), shares=(0.25,) * 4)
    _, devices, table, _ = plan_table(plan).split("\n\n")
    assert devices.splitlines()[2].split() == ["0-3", "m0", "thing", "25.0", "%", "each", "all", "0", "B", "of", "4", "GiB", "(0%)", "each"]
    assert table == (
        "layer     weights                            activations                  communication, forward / backward\n"
        "-----------------------------------------------------------------------------------------------------------\n"
        "blocks.0  outputs split 128:64:32:32         features split 128:64:32:32  -\n"
        "(model)   -                                  features split 128:64:32:32  activations: all-reduce 640 B / -\n"
        "blocks.1  weight: inputs split 128:64:32:32  partial sums                 -\n"
        "          bias: whole, added on one device"
    )


@pytest.mark.parametrize("free", [False, True])
def test_stored_in_shards(free: bool) -> None:
    stored = {"layers.0.weight": place(sharded(flat(2), 0, 256))}
    plan = readable(mlp_batch_split((64, 256, 10), (6, 2), stored=stored, free=free))
    first, *_ = layers(plan)
    assert first.weights == ("weight: stored 192:64", "bias: whole")
    weights = "all-gather 128 KiB / all-gather + reduce-scatter 256 KiB" if free else "all-gather / reduce-scatter 128 KiB"
    assert first.communication == (f"weights: {weights}", "gradients: - / all-reduce 2 KiB")


def test_the_text_is_ascii_and_not_wider_than_120_columns() -> None:
    for plan in (mlp_batch_split((64, 256, 10), (4, 2, 1, 1)), mlp_tensor_parallel((64, 256, 10), (128, 64, 32, 32), 8)):
        text = plan_table(readable(plan))
        assert text.isascii()
        assert max(map(len, text.splitlines())) <= 120
        assert str(readable(plan)) == text


def test_batch_sizes() -> None:
    assert batch_sizes(readable(mlp_batch_split((4, 6, 2), (5, 0, 3)))) == (5, 0, 3)
    assert batch_sizes(readable(mlp_tensor_parallel((4, 6, 2), (4, 2), 8))) is None


def test_compare() -> None:
    fast, slow = (replace(readable(mlp_batch_split((64, 256, 10), n)), iteration_time=t) for n, t in (((4, 2, 1, 1), 0.5), ((2, 2, 2, 2), 2.0)))
    lines = compare_table({"a.json": fast, "b.json": replace(slow, restriction=BASELINES["dp-even"])}).splitlines()
    assert lines[0].split() == ["plan", "strategy", "mesh", "iteration", "compute", "comm.", "sync", "speedup", "memory", "shares"]
    assert lines[2].split()[:5] == ["a.json", "auto", "flat", "500", "ms"]
    assert "4.00x" in lines[2]
    assert "12.5 % to 50.0 %" in lines[2]
    assert "1.00x" in lines[3]
    assert "25.0 % each" in lines[3]
    assert "note: these plans" not in lines[-1]


def test_compare_says_when_plans_are_of_different_models() -> None:
    text = compare_table({"a": readable(mlp_batch_split((4, 6, 2), (1, 1))), "b": readable(mlp_tensor_parallel((4, 6, 2), (4, 2), 8))})
    assert "note: these plans are not of one model on one cluster" in text


def row(module: str, phrase: str = "whole") -> Layer:
    return Layer(module, (phrase,), (), ())


def test_repeated_modules_are_one_row() -> None:
    rows = [row("tokens"), *(row(f"blocks.{i}.{part}", part) for i in range(12) for part in ("up", "down")), row("norm")]
    assert [r.module for r in collapse(rows)] == ["tokens", "blocks.0-11.up", "blocks.0-11.down", "norm"]


def test_only_equal_rows_are_joined() -> None:
    rows = [row(f"blocks.{i}", "split" if i == 2 else "whole") for i in range(5)]
    assert [r.module for r in collapse(rows)] == ["blocks.0-1,3-4", "blocks.2"]
    assert [r.module for r in collapse([row(f"a.{i}.b.{j}") for i in range(2) for j in range(3)])] == ["a.0-1.b.0-2"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (size_text(0), "0 B"), (size_text(1023), "1023 B"), (size_text(3 * 2**19), "1.5 MiB"), (size_text(2**30 * 312), "312 GiB"),
        (time_text(0.0), "0"), (time_text(0.0931), "93.1 ms"), (time_text(1.5), "1.5 s"), (time_text(999.9e-6), "1000 us"), (time_text(5e-9), "5 ns"),
        (lengths_text((5, 5, 1, 1)), "5:5:1:1"), (lengths_text((21,) * 16 + (14,) * 48), "21 x16 : 14 x48"),
        (lengths_text(tuple(range(20))), "0 to 19"), (ranges_text([3, 0, 1, 2, 7]), "0-3,7"), (ranges_text([]), ""),
        (ranges_text([1, 3, 5, 7]), "1,3..7"), (ranges_text([1, 3, 5]), "1,3,5"), (ranges_text([0, 1, 8, 9, 16, 17]), "0-1,8-9..16-17"),
        (ranges_text([0, 1, 8, 9, 16, 17, 18]), "0-1,8-9,16-18"),
        (ranges_text([8 * m + d for m in range(8) for d in (0, 1, 2, 5)]), "0-2,5,8-10,13..56-58,61"),
        (devices_text(range(64)), "0-63"), (devices_text([0, 1, 2, 4, 7, 9, 10, 13, 17, 19, 20, 21, 25, 30, 44]), "0-2,4,7,9-10,13,17 and 6 more"),
    ],
)  # fmt: skip
def test_words(text: str, expected: str) -> None:
    assert text == expected


def test_where_the_time_goes() -> None:
    """Two devices; on the busier one: compute 0-2, a collective 2-3, compute 3-5, gradients 4-7 of which 5-7 are not hidden, update 8-9."""
    events = (
        Event("forward", "compute", (0.0, 0.0), (2.0, 1.0)), Event("gather", "communication", (2.0, 2.0), (3.0, 3.0)),
        Event("backward", "compute", (3.0, 3.0), (5.0, 4.0)), Event("synchronise bucket 0", "communication", (4.0, 4.0), (7.0, 7.0)),
        Event("update", "compute", (8.0, 8.0), (9.0, 8.5)),
    )  # fmt: skip
    split = split_of(Timeline(((0, 0), (1, 1)), events, 9.0))
    assert split == TimeSplit(9.0, 2.0, 2.0, 1.0, 1.0, 0.0, synchronisation=2.0, waiting=1.0, hidden=1.0)
    assert (split.compute, split.communication) == (5.0, 1.0)
    assert str(split) == "9 s = compute 5 s + communication 1 s + sync 2 s (+1 s hidden) + waiting 1 s"


def test_shares_of_all_devices() -> None:
    assert [shares_text(s) for s in ((1.0,), (0.25,) * 4, (0.1, 0.9))] == ["100.0 %", "25.0 % each", "10.0 % to 90.0 %"]
