"""hapx: training for GPUs that differ.

Public names are imported when they are first used, so that `import hapx` (and the command line) does not load torch. Two of them,
`hapx.plan` and `hapx.simulate`, are functions although submodules have these names: importing a submodule binds it to the attribute
of the package, so the class of this module answers for those attributes itself.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"


def _started() -> bool:
    """Whether CUDA runs in this process already."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


# CUDA reads it when it starts. Every communicator has a stream, and streams that share a queue of the device wait for each other.
if not _started():
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as many as there may be

# public name -> module that defines it
_HOMES = MappingProxyType(
    {
        "HAP": "hapx.api",
        "plan": "hapx.planning",
        "GradScaler": "hapx.runtime.scaler",
        "Plan": "hapx.plan",
        "ClusterSpec": "hapx.cluster.spec",
        "Restriction": "hapx.restriction",
        "simulate": "hapx.simulate",
        "mark_layer_boundary": "hapx.graph.capture_boundaries",
        **dict.fromkeys(
            ("CaptureError", "ClusterSpecError", "HapError", "InsufficientMemoryError", "LaunchError", "PlanError", "UnsupportedOperatorError"),
            "hapx.errors",
        ),
    }
)

__all__ = [
    "HAP", "GradScaler", "CaptureError", "ClusterSpec", "ClusterSpecError", "HapError", "InsufficientMemoryError", "LaunchError", "Plan", "PlanError",
    "Restriction", "UnsupportedOperatorError", "__version__", "mark_layer_boundary", "plan", "simulate",
]  # fmt: skip

if TYPE_CHECKING:
    from hapx.api import HAP
    from hapx.cluster.spec import ClusterSpec
    from hapx.errors import CaptureError, ClusterSpecError, HapError, InsufficientMemoryError, LaunchError, PlanError, UnsupportedOperatorError
    from hapx.graph.capture_boundaries import mark_layer_boundary
    from hapx.plan import Plan
    from hapx.planning import plan
    from hapx.restriction import Restriction
    from hapx.runtime.scaler import GradScaler
    from hapx.simulate import simulate


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hapx' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def _function(name: str) -> property:
    """An attribute that stays the public function when the import system binds the submodule of the same name."""
    return property(lambda package: getattr(import_module(_HOMES[name]), name), lambda package, submodule: None)


class _Package(ModuleType):
    plan = _function("plan")
    simulate = _function("simulate")


sys.modules[__name__].__class__ = _Package
