"""The crossovers that `python -m benchmarks.communication` shows exist, and lie where the cost model's formulas say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import communication, crossover
from hapx.plan import Form
from hapx.planner import plan_graphs

MIB = 2**20


@pytest.mark.parametrize(("devices", "size"), [(4, 4 * MIB), (4, MIB // 4), (8, MIB), (3, 64 * MIB)])
def test_grouped_beats_padded_from_the_share_of_the_formula_on(devices: int, size: int) -> None:
    cluster = crossover.equal_devices(devices)
    found = crossover.skew_where_grouped_wins(cluster, size)
    assert found == pytest.approx(crossover.skew_by_formula(devices, size, cluster.inter.bandwidth, cluster.inter.latency), abs=2e-3)
    seconds = {form: [crossover.gather_seconds(cluster, size, found + d, form) for d in (-0.02, 0.02)] for form in (Form.PADDED, Form.GROUPED)}
    assert seconds[Form.PADDED][0] < seconds[Form.GROUPED][0]
    assert seconds[Form.PADDED][1] > seconds[Form.GROUPED][1]


def test_small_tensors_are_never_worth_a_message_per_device() -> None:
    assert crossover.skew_where_grouped_wins(crossover.equal_devices(4), 2**14) is None
    assert crossover.skew_by_formula(4, 2**14, 1.3e9, 5e-5) > 1


def test_uneven_shares_win_where_computing_takes_most_of_the_time() -> None:
    slow, quick = (crossover.at_bandwidth(g) for g in (5.0, 500.0))
    even, proportional, balanced = "tensor, even", "tensor, proportional", "tensor, balanced"
    assert slow.ratio < 1 < quick.ratio
    assert slow.seconds[even] < slow.seconds[proportional]
    assert quick.seconds[proportional] < quick.seconds[even]
    assert slow.fast == pytest.approx(0.25, abs=1e-3) and quick.fast > 0.27
    for r in (slow, quick):
        assert r.seconds[balanced] <= min(r.seconds[even], r.seconds[proportional]) * (1 + 1e-6)
        assert r.seconds["planner"] <= r.seconds[balanced] * (1 + 1e-6)


def test_data_parallelism_overtakes_tensor_parallelism() -> None:
    slow, quick = (crossover.at_bandwidth(g) for g in (5.0, 500.0))
    assert slow.seconds["tensor, balanced"] < slow.seconds["data, proportional"]
    assert quick.seconds["tensor, balanced"] > quick.seconds["data, proportional"]


def test_choices_follow_batch_and_skew() -> None:
    """Few rows: factors; many: the gradients of layers are summed, that of the table still not. Skewed: in groups."""
    few, many, skewed = crossover.choices(64, 10.4, 0.25), crossover.choices(4096, 10.4, 0.4), crossover.choices(64, 10.4, 0.7)
    assert set(few.values()) == {"factors, padded"}
    assert many == {"table": "factors, grouped", "first": "all-reduce", "second": "all-reduce"}
    assert set(skewed.values()) == {"factors, grouped"}


def test_tables_and_plots_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(communication, "BANDWIDTHS", (5.0, 500.0))
    for name, values in {"BATCHES": (64,), "SKEWS": (0.7,), "GIGABITS": (10.4,)}.items():
        monkeypatch.setattr(communication, name, values)
    communication.main(["--write", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "data, proportional beats tensor, balanced from 500 Gbit/s" in shown
    assert "factors, grouped" in shown and "34.4%" in shown
    assert {p.name for p in tmp_path.iterdir()} == {"crossover_forms.svg", "crossover_ratio.svg"}


@pytest.mark.parametrize("gigabits", [100.0, 1000.0])
def test_plain_data_parallelism_is_simulated_too(gigabits: float) -> None:
    """On very fast links it hides all synchronisation, which the additive cost cannot see."""
    auto, plain = (
        plan_graphs([crossover.perceptron(2048)], crossover.mixed_devices(gigabits), strategy=s, optimizer="sgd") for s in ("auto", "dp-proportional")
    )
    assert auto.iteration_time <= plain.iteration_time * (1 + 1e-9)
