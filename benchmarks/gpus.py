"""Several ranks on one GPU, where there are more ranks than GPUs: what they compute and need is theirs, how long it takes is not.

NCCL refuses two ranks of one machine on one GPU. Each rank is told that it is a machine of its own; they then talk over sockets.
"""

from __future__ import annotations

import os

import torch


def take_gpu(rank: int, size: int) -> torch.device:
    """The GPU of a rank; call it in the rank's process, before it joins the others."""
    count = torch.cuda.device_count()
    if count < size:
        os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    return device
