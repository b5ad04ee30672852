"""Processes against the cluster file; errors that reach every rank; ranks that die. And the pool that the tests themselves use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hapx.api import HAP
from hapx.cluster.spec import ClusterSpec
from hapx.errors import HapError, LaunchError, PlanError
from hapx.runtime.launch import Facts, check, join
from support.models import MLP
from support.plans import cluster, mlp_batch_split
from support.pool import RankError, pool

WIDTHS = (5, 8, 3)


def facts(hosts: Sequence[str], **changes: Any) -> list[Facts]:
    return [replace(Facts(i, host, "cpu", "cpu", 0, "2.13.0", "abc"), **changes) for i, host in enumerate(hosts)]


def test_ranks_that_fit_are_accepted() -> None:
    check(facts(["a", "a", "b"]), cluster([2, 1]), simulated=False)
    check(facts(["a", "a", "a"]), cluster([2, 1]), simulated=True)


@pytest.mark.parametrize(
    "hosts, machines, simulated, message",
    [
        (["a", "a"], [3], True, "2 processes for a cluster of 3 devices"),
        (["a", "b", "b"], [2, 1], True, "ranks 0, 1 are one machine in the cluster file but run on a, b"),
        (["a", "a", "a"], [2, 1], False, "rank 2 run on a, as do those of machine 'm0'"),
    ],
)
def test_ranks_that_contradict_the_cluster_are_refused(hosts: list[str], machines: list[int], simulated: bool, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        check(facts(hosts), cluster(machines), simulated)


def test_different_versions_and_files_are_named() -> None:
    two = facts(["a", "a"])
    with pytest.raises(LaunchError, match=r"different versions of torch: rank 1: 2\.11\.0; rank 0: 2\.13\.0"):
        check([two[0], replace(two[1], torch="2.11.0")], cluster([2]), True)
    with pytest.raises(LaunchError, match="different cluster files"):
        check([two[0], replace(two[1], cluster="def")], cluster([2]), True)


def catalogue(device: str) -> ClusterSpec:
    link = {"bandwidth": "1 GB/s", "latency": "1 us"}
    return ClusterSpec.load({"name": "x", "machines": [{"name": "m", "device": device, "devices": 1}], "network": {"inter": link, "intra": link}})


def test_wrong_gpu_is_refused() -> None:
    here = Facts(0, "a", "cuda:0", "Tesla V100-SXM2-16GB", 16 * 2**30, "2.13.0", "abc")
    check([here], catalogue("V100-SXM2-16GB"), False)
    with pytest.raises(LaunchError, match=r"the device has 8\.0 GiB"):
        check([replace(here, memory=8 * 2**30)], catalogue("V100-SXM2-16GB"), False)
    with pytest.raises(LaunchError, match="the device is a Tesla P100"):
        check([replace(here, name="Tesla P100-SXM2-16GB")], catalogue("V100-SXM2-16GB"), False)


def test_no_launcher_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(LaunchError, match=r"no process group and no launcher: RANK.*torchrun"):
        join(cluster([2]))


# ---- errors on some ranks reach all ---------------------------------------------------------------------------------------------


def caught(work: Any) -> str:
    """Type and text of the HapError that `work` raises."""
    try:
        work()
    except HapError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def errors_of_world() -> list[str]:
    world = join(cluster([2]))
    rank = dist.get_rank()

    def fail_on(which: int) -> Any:
        def work() -> str:
            if rank == which:
                raise PlanError("is broken", where="somewhere", hint="mend it")
            return "fine"

        return work

    def crash() -> str:
        raise ValueError("a bug")

    return [
        caught(lambda: world.from_first(fail_on(0), "planning")),
        caught(lambda: world.together(fail_on(1), "reading")),
        caught(lambda: world.agree("same")),
        caught(lambda: world.agree(f"shape {rank}")),
        caught(lambda: world.from_first(crash, "planning")) if rank else caught_value(lambda: world.from_first(crash, "planning")),
        world.from_first(lambda: f"from {rank}", "talking"),
    ]


def caught_value(work: Any) -> str:
    try:
        work()
    except ValueError as error:
        return f"own: {error}"
    return "no error"


@pytest.mark.gloo
def test_errors_reach_every_rank() -> None:
    first, second = pool(2).run(errors_of_world)
    for rank in (first, second):
        assert rank[0] == "PlanError: somewhere: is broken; mend it"
        assert rank[1] == "PlanError: somewhere: is broken; mend it"
        assert rank[2] == "no error"
        assert "different steps: rank 0: shape 0; rank 1: shape 1" in rank[3]
        assert rank[5] == "from 0"
    assert first[4] == "own: a bug"
    assert "planning failed on another rank" in second[4]
    assert "ValueError: a bug" in second[4]


def start_with(machines: list[int], plan: Any) -> str:
    return caught(lambda: HAP(MLP(WIDTHS), cluster(machines), plan=plan))


@pytest.mark.gloo
def test_bad_launches_are_refused_everywhere() -> None:
    plan = mlp_batch_split(WIDTHS, (6, 2))
    for text in pool(2).run(start_with, [3], plan):
        assert "LaunchError" in text
        assert "2 processes for a cluster of 3 devices" in text
    for text in pool(2).run(start_with, [2], "/nowhere/plan.json"):
        assert text.startswith("PlanError: /nowhere/plan.json")
    for text in pool(2).run(start_with, [1, 1], plan):
        assert "another cluster" in text


def dies_in_a_step() -> None:
    model = HAP(MLP(WIDTHS), cluster([2]), plan=mlp_batch_split(WIDTHS, (6, 2)))
    batch = MLP(WIDTHS).example(8)
    model(*batch).backward()
    if dist.get_rank() == 1:
        os._exit(3)
    model(*batch)


@pytest.mark.gloo
def test_a_rank_that_dies_ends_the_others_with_a_clear_error() -> None:
    with pytest.raises(RankError) as error:
        pool(2).run(dies_in_a_step)
    assert "status 3" in error.value.failures[1]
    assert "LaunchError: another rank has ended or does not answer" in error.value.failures[0]
    assert pool(2).run(dist.get_rank) == [0, 1]  # the pool is whole again


def raises_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("only here")
    dist.barrier()


@pytest.mark.gloo
def test_pool_shows_the_traceback_of_a_rank() -> None:
    with pytest.raises(RankError, match="KeyError: 'only here'") as error:
        pool(2).run(raises_on_one)
    assert "raises_on_one" in error.value.failures[1]
    assert pool(2).run(torch.get_num_threads) == [1, 1]


# ---- the end of the process -----------------------------------------------------------------------------------------------------------------------

TRAINS = """
import atexit, faulthandler, os, sys

faulthandler.dump_traceback_later(200, exit=True)  # where it hangs, if it does

def names():
    threads = [open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")]
    sys.stdout.write(f"threads of gloo: {sum('gloo' in name for name in threads)}\\n")  # a line at once

atexit.register(names)  # the first to be registered is the last to run
import torch.distributed as dist
if "started" in sys.argv:
    dist.init_process_group("gloo")
import torch
import hapx

machine = {"name": "a", "device": "T4", "devices": 2, "intra": {"bandwidth": "10 GB/s", "latency": "5 us"}}
model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
model = hapx.HAP(model, {"machines": [machine]}, example_inputs=(x, x), loss_fn=torch.nn.functional.mse_loss)
model(x, x).backward()
names()
if "started" in sys.argv:
    dist.destroy_process_group()
"""


@pytest.mark.gloo
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc: threads have no names to count")
@pytest.mark.parametrize("how", ["started", "left to hapx"])
def test_no_thread_of_gloo_outlives_python(how: str, tmp_path: Path) -> None:
    """One that lets go of a tensor after the interpreter has ended ends the process with SIGABRT."""
    script = tmp_path / "trains.py"
    script.write_text(TRAINS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    counted = [int(line.split()[-1]) for line in ended.stdout.splitlines()]
    assert sorted(counted)[:2] == [0, 0] and min(sorted(counted)[2:]) > 0, ended.stdout
