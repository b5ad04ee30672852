"""`examples/train_gpt.py`, as it is, where a slow link between two pairs of ranks makes pipelines the fastest plans."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from examples import train_gpt
from hapx.plan import Plan

ROOT = Path(__file__).parents[1]
SMALL = {"BATCH": 8, "CONTEXT": 16, "WIDTH": 48, "HEADS": 2, "LAYERS": 3}
STEPS = 4
SLOW_LINK = {
    "name": "two pairs",
    "machines": [{"name": "a", "device": "core", "devices": 2}, {"name": "b", "device": "core", "devices": 2}],
    "device_types": {"core": {"flops": "200 MFLOP/s", "memory": "2 GiB", "memory_bandwidth": "5 GB/s", "kernel_latency": "1 us"}},
    "network": {"inter": {"bandwidth": "2 Mbit/s", "latency": "1 us"}, "intra": {"bandwidth": "10 GB/s", "latency": "1 us"}},
}


class Single(nn.Module):
    """The model on one device, with what the script asks of a distributed one."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *batch: Tensor) -> Any:
        return self.inner(*batch)

    def clip_grad_norm_(self, largest: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.inner.parameters(), largest)


def single(text: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], float, dict[str, Tensor]]:
    """Losses, validation loss and weights of the same training on one device."""
    for name, value in SMALL.items():
        monkeypatch.setattr(train_gpt, name, value)
    torch.manual_seed(0)
    model: Any = Single(train_gpt.model_of(text))
    losses, _ = train_gpt.train(model, text, STEPS, torch.device("cpu"), rank=1)
    return losses, train_gpt.validate(model, text, torch.device("cpu")), model.inner.state_dict()


@pytest.mark.gloo
def test_the_script_trains_over_a_slow_link_with_pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(SLOW_LINK))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "tests/support/as_declared.py"]
    script = [
        "examples/train_gpt.py",
        json.dumps(SMALL),
        "--cluster",
        tmp_path / "cluster.yaml",
        "--steps",
        str(STEPS),
        "--timed",
        "1",
        "--out",
        tmp_path,
    ]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), LOGLEVEL="ERROR", TORCH_CPP_LOG_LEVEL="ERROR")
    ran = subprocess.run([*launcher, *script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    compared, trained = [line for line in ran.stdout.splitlines() if line.startswith("a pipeline of ")]
    assert "4 devices in 2 stages, strategy auto" in ran.stdout and "(0, 1) (2, 3)" in compared and "2 stages" in trained
    assert len(Plan.load(tmp_path / "plan-hapx.json").stages) == 2

    numbers = json.loads((tmp_path / "numbers.json").read_text())
    losses, validation, state = single(train_gpt.standard_library(), monkeypatch)
    assert numbers["losses"] == pytest.approx(losses, abs=1e-5)
    assert numbers["validation_loss"] == pytest.approx(validation, abs=1e-5)
    torch.testing.assert_close(torch.load(tmp_path / "model.pt"), state, rtol=1e-3, atol=1e-5)
