"""`hapx.HAP` with a plan of several stages on processes: training, results, evaluation, short batches; ranks that die; values from `meta`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hapx
from hapx import api
from hapx.collectives.communicator import ProcessGroupCommunicator
from hapx.errors import HapError
from hapx.plan import Plan
from hapx.profile.memory import allocation_peak
from hapx.runtime import materialise
from hapx.runtime.pipeline import Pipeline
from support.clusters import TWO_MACHINES
from support.models import MLP
from support.pool import RankError, pool
from support.random_stages import Job, random_stages
from support.staged import pipeline_on, staged_plan

pytestmark = pytest.mark.gloo
WIDTHS = (6, 8, 8, 3)
HALVES = ((0, 1), (2, 3))


class Scores(MLP):
    """Returns its scores beside the loss."""

    def forward(self, x: Tensor, targets: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        made = self.features(x)
        return {"loss": F.mse_loss(made, targets), "scores": made.softmax(-1)}


def batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    return Scores(WIDTHS).example(size, step)


@cache
def plan() -> Plan:
    return staged_plan(Scores(WIDTHS), batch(0), TWO_MACHINES, HALVES, 4, cuts=[3], optimizer="adamw")


@contextmanager
def unverified() -> Iterator[None]:
    """Plans of several stages are put together by hand here."""
    verify = api.verify
    api.verify = lambda found: None  # type: ignore[assignment]
    try:
        yield
    finally:
        api.verify = verify


def caught(work: Callable[[], Any]) -> str:
    try:
        work()
    except HapError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def trained(found: Plan) -> dict[str, Any]:
    with unverified():
        hap = hapx.HAP(Scores(WIDTHS), TWO_MACHINES, batch(0), plan=found, gather_outputs=True)
        optimizer = torch.optim.AdamW(hap.parameters(), lr=0.01, weight_decay=0.1)
        scaler = hapx.GradScaler(hap, init_scale=2.0**6)
        told: dict[str, Any] = {"losses": [], "scores": [], "norms": []}
        for step, size in enumerate((8, 6, 8)):  # the second batch is short
            optimizer.zero_grad()
            outputs = hap(*batch(step, size))
            scaler.scale(outputs["loss"]).backward()
            scaler.unscale_(optimizer)
            told["norms"].append(float(hap.clip_grad_norm_(0.1)))
            scaler.step(optimizer)
            scaler.update()
            told["losses"].append(float(outputs["loss"].detach()))
            told["scores"].append(outputs["scores"].detach())
        told["refused"] = caught(lambda: outputs["scores"].sum().backward())
        hap.eval()
        with torch.no_grad():
            told["evaluated"] = hap(*batch(7))["scores"]
        told["state"], told["gradients"] = hap.full_state_dict(), hap.full_gradients()
        told["micro"] = [len(s.micro_batches) for s in hap.plan.schedules.values()]
        told["code"], told["sizes"], told["everyone"] = hap.code, hap.batch_sizes, (hap.everyone.rank, hap.everyone.size)
        return told


def test_a_model_of_several_stages_is_used_like_the_module() -> None:
    module = Scores(WIDTHS)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)
    losses, scores, norms = [], [], []
    for step, size in enumerate((8, 6, 8)):
        optimizer.zero_grad()
        outputs = module(*batch(step, size))
        outputs["loss"].backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.1)))
        optimizer.step()
        losses.append(float(outputs["loss"].detach()))
        scores.append(outputs["scores"].detach())
    evaluated = module.eval()(*batch(7))["scores"].detach()
    for rank, told in enumerate(pool(4).run(trained, plan())):
        assert told["losses"] == pytest.approx(losses, rel=1e-10) and told["norms"] == pytest.approx(norms, rel=1e-9)
        torch.testing.assert_close(told["scores"], scores)
        assert told["refused"].startswith("LaunchError: backward: a result other than the loss has no gradient; allowed: gradients of the loss")
        torch.testing.assert_close(told["evaluated"], evaluated)
        torch.testing.assert_close(told["state"], dict(module.state_dict()))
        torch.testing.assert_close(told["gradients"], {n: p.grad for n, p in module.named_parameters()})
        assert told["micro"] == [4, 3, 4]
        assert told["code"].startswith(f"# stage {rank // 2} of 2") and sum(told["sizes"]) == 8 and told["everyone"] == (rank, 4)


def averaging(model: nn.Module) -> tuple[list[float], AveragedModel]:
    """Losses in training, the one of the average in evaluation, and the average."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*batch(step))["loss"]
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        losses.append(float(loss.detach()))
    average.eval()
    with torch.no_grad():
        return [*losses, float(average(*batch(7))["loss"])], average


def averaging_on_ranks(found: Plan) -> tuple[list[float], dict[str, Tensor]]:
    with unverified():
        losses, average = averaging(hapx.HAP(Scores(WIDTHS), TWO_MACHINES, batch(0), plan=found))
        return losses, average.module.full_state_dict()


def test_the_average_of_a_pipelines_weights_is_a_pipeline() -> None:
    losses, average = averaging(Scores(WIDTHS))
    for told, state in pool(4).run(averaging_on_ranks, plan()):
        assert told == pytest.approx(losses, rel=1e-10)
        torch.testing.assert_close(state, dict(average.module.state_dict()))


def refused(found: Plan) -> list[str]:
    with unverified():
        local = caught(lambda: hapx.HAP(Scores(WIDTHS), TWO_MACHINES, plan=found, inputs="local"))
        hap = hapx.HAP(Scores(WIDTHS), TWO_MACHINES, plan=found)
        return [local, caught(lambda: hap(*batch(0, 8 if dist.get_rank() else 4)))]


def test_local_shares_and_unlike_batches_are_refused_by_all_ranks() -> None:
    for local, unlike in pool(4).run(refused, plan()):
        assert 'LaunchError: HAP(..., inputs="local"): a pipeline of 2 stages takes whole batches; allowed: inputs="global"' in local
        assert "LaunchError: the ranks are about to run different steps: rank 0: train x torch.float64[4, 6]" in unlike


# ---- faults ------------------------------------------------------------------------------------------------------------------


def stops(found: Plan, which: int, folder: Path) -> None:
    """One rank is killed in the third micro-batch of the second step; every rank writes down when it ended, and why."""
    calls = 0

    def note(why: str) -> None:
        (folder / f"rank-{dist.get_rank()}").write_text(f"{time.monotonic()} {why}")  # a clock that all processes share

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 7:
            note("killed")
            os.kill(os.getpid(), signal.SIGKILL)

    pipeline = pipeline_on(found, MLP(WIDTHS), None)
    if dist.get_rank() == which:
        pipeline.programs(found.first)[0].module.register_forward_pre_hook(hook)
    graph = found.graphs[found.first]
    try:
        for _ in range(3):
            pipeline.run(found.first, dict(zip(graph.given, MLP(WIDTHS).example(8), strict=True)))[graph.loss].backward()
    except HapError as error:
        note(str(error))
        os._exit(1)  # as an error that nobody catches ends a process: the pool's would go on


@pytest.mark.parametrize("which", [0, 3])
def test_a_rank_that_is_killed_ends_the_others_with_a_clear_error(which: int, tmp_path: Path) -> None:
    work = Job(partial(MLP, WIDTHS), lambda step: MLP(WIDTHS).example(8, step), 4)
    found = random_stages(work, ((0, 1), (2,), (3,)), "1f1b", 1, cuts=[2, 4])
    with pytest.raises(RankError) as error:
        pool(4).run(stops, found, which, tmp_path)
    assert "status -9" in error.value.failures[which]
    assert all("status 1" in error.value.failures[rank] for rank in set(range(4)) - {which})
    ended = {rank: (tmp_path / f"rank-{rank}").read_text().split(" ", 1) for rank in range(4)}
    assert ended[which][1] == "killed"
    for rank in set(range(4)) - {which}:
        when, why = ended[rank]
        assert why == "another rank has ended or does not answer; its own error, printed by that process, says why"
        assert float(when) - float(ended[which][0]) < 30


# ---- values from `meta` ------------------------------------------------------------------------------------------------------

LAYERS, WIDTH = 8, 256


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.mean()


def deep() -> Deep:
    with torch.device("meta"):
        return Deep()


def started(found: Plan) -> tuple[int, int, int, float]:
    """Bytes at the peak of starting, kept afterwards, the largest submodule's; the sum of all values."""
    module, made = deep(), list[Pipeline]()
    materialise.CHUNK = 64 * WIDTH
    peak = allocation_peak(lambda: made.append(pipeline_on(found, module, None)), [], torch.device("cpu"), lambda: module.parameters())
    own = sum(p.numel() * p.element_size() for p in module.parameters())
    checksum = sum(float(t.double().sum()) for t in made[0].store.full_state_dict().values())
    return peak.during, own, sum(p.numel() * p.element_size() for p in nn.Linear(WIDTH, WIDTH).parameters()), checksum


def test_a_meta_model_starts_stage_by_stage_in_bounded_memory() -> None:
    work = Job(deep, lambda step: (torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)),), 2)
    whole = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
    found = random_stages(work, ((0,), (1,), (2, 3)), "1f1b", 0, cuts=[4, 8])
    results = pool(4).run(started, found)
    for rank, (peak, own, submodule, checksum) in enumerate(results):
        assert own <= whole // 2 and peak >= own
        more = submodule if rank == 0 else 0
        assert peak <= own + more + 8 * 64 * WIDTH, f"rank {rank}: {peak} bytes at the peak, {own} kept, {submodule} of a submodule"
        assert checksum == results[0][3] != 0


def state_of_group() -> tuple[int, int]:
    everyone = ProcessGroupCommunicator()
    return everyone.rank, everyone.size


def test_the_pool_is_whole_afterwards() -> None:
    assert pool(4).run(state_of_group) == [(r, 4) for r in range(4)]
