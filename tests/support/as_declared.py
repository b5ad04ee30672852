"""Runs the `main` of a script on processes that are taken for the devices of its cluster file, whatever this machine can do.

    torchrun --standalone --nproc-per-node=4 tests/support/as_declared.py examples/train_gpt.py "{}" [the script's arguments]

What the script calibrates are the numbers that its cluster file has, so that it plans for those devices and links; nothing else of it is changed, but
for its constants that are given by name, as JSON. Rank 0 says of each model that is started as a pipeline where its stages are.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from hapx import api
from hapx.cluster.spec import ClusterSpec
from hapx.plan import Plan
from hapx.profile import calibrate
from hapx.runtime.pipeline import Pipeline


def declared(cluster: ClusterSpec, **_: Any) -> ClusterSpec:
    return cluster


class Told(Pipeline):
    def __init__(self, plan: Plan, rank: int, *args: Any, **options: Any):
        super().__init__(plan, rank, *args, **options)
        if rank == 0:
            print(f"a pipeline of {len(plan.stages)} stages: {' '.join(str(s.devices) for s in plan.stages)}", flush=True)


if __name__ == "__main__":
    script, constants, *sys.argv[1:] = sys.argv[1:]
    calibrate.calibrate, api.Pipeline = declared, Told  # type: ignore[assignment, misc]
    sys.path[0] = str(Path(script).parent)  # as if the script had been started
    module = import_module(Path(script).stem)
    for name, value in json.loads(constants).items():
        assert hasattr(module, name), name
        setattr(module, name, value)
    module.main()
