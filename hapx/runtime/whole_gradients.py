"""What needs whole parameters or gradients, and would silently compute something else from pieces of them, is refused.

In: calls of `torch.nn.utils.clip_grad_norm_` and `get_total_norm`, steps of optimizers, and DistributedDataParallel, on parameters of which a rank
has a piece (or of which other stages of a pipeline have the rest). Out: a HapError that names what to call instead. Elementwise optimizers, and
parameters that are whole on every rank, are left alone. PyTorch has no hook for the norm: its function is replaced by one that looks first, for
whoever imported it under any name looks it up there. So is the making of a DistributedDataParallel, which gives all ranks the first one's pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, wraps
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import utils
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hapx.errors import HapError
from hapx.runtime.parameters import ParameterStore
from hapx.states import Sharded

# of what PyTorch and common packages have, by the names of classes; they take norms, factors or line searches of whole tensors
NOT_ELEMENTWISE = ("adafactor", "dadapt", "lamb", "lars", "lbfgs", "muon", "novograd", "prodigy", "shampoo", "soap")

_stores: list[ref[ParameterStore]] = []


def watch(store: ParameterStore) -> None:
    """From now on, what needs whole gradients of this store's parameters is refused where they are not whole."""
    if not any(_partial(store, name) for name, _ in store.module.named_parameters()):
        return
    _install()
    _stores[:] = [*(known for known in _stores if known() is not None), ref(store)]


@cache
def _install() -> None:
    """Once."""
    usual = clip_grad._get_total_norm

    @wraps(usual)
    def total_norm(tensors: Any, *arguments: Any, **options: Any) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if why := _in_pieces(tensors):
            raise HapError(
                f"torch.nn.utils sees only this rank's part of the gradients ({why})",
                where="clip_grad_norm_", hint="call model.clip_grad_norm_(max_norm) on all ranks: it counts every element of the model once",
            )  # fmt: skip
        return usual(tensors, *arguments, **options)

    clip_grad._get_total_norm = total_norm
    if utils.get_total_norm is usual:
        utils.get_total_norm = total_norm
    register_optimizer_step_pre_hook(_before_step)
    make = DistributedDataParallel.__init__

    @wraps(make)
    def wrap(self: DistributedDataParallel, module: nn.Module, *arguments: Any, **options: Any) -> None:
        if why := _in_pieces(module.parameters()):
            raise HapError(
                f"a part of the model is distributed already ({why})", where="DistributedDataParallel",
                hint="use the hapx.HAP as it is: it sums its gradients over ranks itself; wrap other modules on their own",
            )  # fmt: skip
        make(self, module, *arguments, **options)

    DistributedDataParallel.__init__ = wrap


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Called by every optimizer before its step."""
    if not any(name in type(optimizer).__name__.lower() for name in NOT_ELEMENTWISE):
        return
    if why := _in_pieces(p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        raise HapError(
            f"{type(optimizer).__name__} needs whole tensors, but this rank has a part of them ({why})",
            where="optimizer.step", allowed="optimizers that compute element by element (SGD, Adam, AdamW, Adagrad, RMSprop, ...)",
            hint='or plan with strategy="dp-proportional", which keeps all parameters whole',
        )  # fmt: skip


def _in_pieces(tensors: Iterable[Tensor]) -> str | None:
    """Where this rank has a part only of these parameters or gradients, why: by the first such parameter."""
    partial = {
        id(tensor): name
        for known in _stores
        if (store := known()) is not None
        for name, parameter in store.module.named_parameters()
        if _partial(store, name)
        for tensor in (parameter, parameter.grad)
        if tensor is not None
    }
    found = next((partial[id(t)] for t in tensors if id(t) in partial), None)
    return f"{found} is stored in pieces or other ranks have other parameters" if found is not None else None


def _partial(store: ParameterStore, name: str) -> bool:
    """Whether this rank has a part of what all ranks have of a gradient, or of all gradients."""
    home = store.home(name)
    return len(store.plan.stages) > 1 or (home is not None and any(isinstance(s, Sharded) for s in store.placement(name, home.stage).states))
