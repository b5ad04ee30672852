"""`plan`: a Plan from a module and a cluster. What only a run needs is not loaded for it.

A copy of the process begins to capture micro-batches before the planner's modules are loaded, which takes as long as a capture.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hapx.cluster.spec import ClusterSpec
from hapx.graph.capture_inputs import caller_autocast
from hapx.graph.captures import Captures
from hapx.restriction import Restriction, restriction
from hapx.stages.numbers import may_have_stages, numbers_of_micro_batches

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hapx.plan import Plan
    from hapx.progress import Watcher

Cluster = str | os.PathLike[str] | Mapping[str, Any] | ClusterSpec


def plan(
    module: nn.Module, cluster: Cluster, example_inputs: Any, *,
    loss_fn: Callable[..., Tensor] | None = None, strategy: str | Restriction = "auto", optimizer: str = "adamw",
    precision: str | None = None, remat: str = "auto", micro_batches: int | str = "auto", progress: Watcher | None = None,
) -> Plan:  # fmt: skip
    """The fastest distributed training program found for `module` on `cluster`. Needs no process group and no real weights (`meta`
    works); the module is not changed. Under `torch.autocast` it is the program for calls under that autocast. `remat`: "blocks" computes
    repeated blocks again in backward, "auto" as many of them as the memory asks for, where that is faster than other ways to fit. `micro_batches`:
    of a pipeline; with "auto" there is none where operators mix the samples of a batch, since these would see one micro-batch at a time. `progress`
    is called with a `hapx.progress.Progress` now and then. Raises CaptureError, ClusterSpecError, InsufficientMemoryError and other HapErrors."""
    spec, rule = ClusterSpec.load(cluster), restriction(strategy)
    pipelined = micro_batches == "auto" and may_have_stages(rule, spec)
    captures = Captures(module, example_inputs, loss_fn)
    with captures.ahead(lambda batch: numbers_of_micro_batches(batch, spec) if pipelined else ()):
        from hapx.planner import plan_module  # loaded meanwhile

        return plan_module(
            module, spec, example_inputs,
            loss_fn=loss_fn, strategy=rule, optimizer=optimizer, precision=precision, remat=remat, micro_batches=micro_batches,
            autocast=caller_autocast(), progress=progress, captures=captures,
        )  # fmt: skip
