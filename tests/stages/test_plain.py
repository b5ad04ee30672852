"""Pipelines as people make them: a stage per machine."""

from __future__ import annotations

from hapx.cluster.spec import ClusterSpec, Link
from hapx.stages.costs import ONE_F_ONE_B, Answer, Prices
from hapx.stages.plain import plain_pipelines
from hapx.stages.submeshes import Shape
from support.clusters import slow_devices

CLUSTER = slow_devices(["fast", "fast"], ["slow", "slow"])


def prices(cluster: ClusterSpec, most: int) -> Prices:
    def ask(start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
        return (Answer((stop - start) / sum(cluster.device_types[t].speed("fp32") for t in shape.types), 0.0, most),)

    def crossing(_boundary: int, _front: Shape, _back: Shape, link: Link) -> float:
        assert link == cluster.inter
        return 0.0

    return Prices(4, ask, lambda *run: ask(*run)[0], crossing)


def test_layers_in_equal_numbers_and_in_proportion_to_speed() -> None:
    found = list(plain_pipelines([1.0] * 10, CLUSTER, prices(CLUSTER, 8), ONE_F_ONE_B, "fp32"))
    assert [[(s.start, s.stop, s.devices) for s in p.stages] for p in found] == [
        [(0, 5, (0, 1)), (5, 10, (2, 3))],
        [(0, 8, (0, 1)), (8, 10, (2, 3))],
    ]
    assert [[s.in_flight for s in p.stages] for p in found] == [[2, 1], [2, 1]]
    assert found[1].time < found[0].time


def test_layers_at_the_ends_that_are_no_work_are_in_a_stage_too() -> None:
    for pipeline in plain_pipelines([0.0, 1.0, 2.0, 1.0, 0.0, 0.0], CLUSTER, prices(CLUSTER, 8), ONE_F_ONE_B, "fp32"):
        assert (pipeline.stages[0].start, pipeline.stages[-1].stop) == (0, 6)


def test_what_does_not_fit_is_left_out() -> None:
    assert not list(plain_pipelines([1.0] * 10, CLUSTER, prices(CLUSTER, 1), ONE_F_ONE_B, "fp32"))


def test_a_single_machine_has_a_stage_per_device() -> None:
    one = slow_devices(["fast", "fast", "slow", "slow"])

    def ask(start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
        return (Answer(float(stop - start), 0.0, 8),)

    found = list(plain_pipelines([1.0] * 8, one, Prices(4, ask, lambda *run: ask(*run)[0], lambda *_: 0.0), ONE_F_ONE_B, "fp32"))
    assert [len(p.stages) for p in found] == [4, 4, 2, 2]
    assert [s.devices for s in found[-1].stages] == [(0, 1), (2, 3)]
