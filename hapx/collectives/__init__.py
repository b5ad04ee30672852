"""Communication between devices: communicators, differentiable conversions between states, composite operators."""

from hapx.collectives.communicator import Communicator, Handle, ProcessGroupCommunicator, create_groups
from hapx.collectives.composites import COMPOSITES
from hapx.collectives.conversion import Conversion
from hapx.collectives.freed import free_after_forward, freeing
from hapx.collectives.rng import Rng
from hapx.collectives.threads import ThreadCommunicator, alone, run_threads

__all__ = [
    "COMPOSITES", "Communicator", "Conversion", "Handle", "ProcessGroupCommunicator", "Rng", "ThreadCommunicator", "alone", "create_groups",
    "free_after_forward", "freeing", "run_threads",
]  # fmt: skip
