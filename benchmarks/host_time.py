"""What hapx costs the host in a step of training, beside plain PyTorch: a model so small that kernels take next to nothing.

    python -m benchmarks.host_time          prints the table (one rank on the CPU; a quarter of a minute)

A GPT of 12 layers, width 32, on 8 tokens: what is left is Python, PyTorch's dispatcher and autograd. On GPUs that is what decides wherever kernels
are shorter than it takes to launch them. Plain and hapx take turns; the numbers are medians of steps with AdamW (foreach), the last column the ratio.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import hapx
from benchmarks.one_gpu import cluster_of
from benchmarks.workloads import example_module, random_tokens

STEPS, WARM, ROUNDS = 40, 10, 3


def _model() -> nn.Module:
    made: nn.Module = example_module("gpt").GPT(100, width=32, heads=4, layers=12, context=8)
    return made


def timed(loss_of: Callable[[], Tensor], parameters: Sequence[nn.Parameter]) -> tuple[float, float, float]:
    """Milliseconds of forward, backward and the whole step."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
    steps = []
    for _ in range(WARM + STEPS):
        optimizer.zero_grad()
        times = [time.perf_counter()]
        loss = loss_of()
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        times.append(time.perf_counter())
        steps.append((times[1] - times[0], times[2] - times[1], times[3] - times[0]))
    forward, backward, whole = (1e3 * median(column) for column in zip(*steps[WARM:], strict=True))
    return forward, backward, whole


def both(context: Callable[[], AbstractContextManager[object]]) -> list[tuple[float, float, float]]:
    """Plain and hapx: of each the round whose step was the shortest."""
    batch = random_tokens(1, 8, 100)
    plain = _model()
    with warnings.catch_warnings(), context():
        warnings.simplefilter("ignore")
        ours = hapx.HAP(_model(), cluster_of("CPU-core"), example_inputs=batch)

    def of(model: nn.Module) -> Callable[[], Tensor]:
        def loss() -> Tensor:
            with context():
                return model(*batch)  # type: ignore[no-any-return]

        return loss

    rounds = [[timed(of(m), list(m.parameters())) for m in (plain, ours)] for _ in range(ROUNDS)]
    return [min(own, key=lambda times: times[2]) for own in zip(*rounds, strict=True)]


def main() -> None:
    torch.set_num_threads(1)
    table = Table("dtype", "model", "forward ms", "backward ms", "step ms", "hapx / plain")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder, "store")), 1), rank=0, world_size=1)
        for dtype, context in (("fp32", nullcontext), ("bf16", lambda: torch.autocast("cpu", torch.bfloat16))):
            found = both(context)
            for name, times in zip(("plain", "hapx"), found, strict=True):
                table.add_row(dtype, name, *(f"{t:.2f}" for t in times), f"{found[1][2] / found[0][2]:.2f}" if name == "hapx" else "")
        dist.destroy_process_group()
    Console(width=100).print(table)
    print("made by: python -m benchmarks.host_time")


if __name__ == "__main__":
    main()
