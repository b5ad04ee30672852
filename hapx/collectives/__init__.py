"""Communication between devices: communicators, differentiable conversions between states, composite operators."""

from hapx.collectives.communicator import Communicator, Handle, ProcessGroupCommunicator, create_groups
from hapx.collectives.composites import COMPOSITES
from hapx.collectives.conversion import Conversion
from hapx.collectives.freed import free_after_forward, freeing
from hapx.collectives.messages import Messenger, ProcessGroupMessenger, ThreadMessenger, create_messenger
from hapx.collectives.rng import Rng
from hapx.collectives.threads import ThreadCommunicator, alone, run_threads

__all__ = [
    "COMPOSITES", "Communicator", "Conversion", "Handle", "Messenger", "ProcessGroupCommunicator", "ProcessGroupMessenger", "Rng",
    "ThreadCommunicator", "ThreadMessenger", "alone", "create_groups", "create_messenger", "free_after_forward", "freeing", "run_threads",
]  # fmt: skip
