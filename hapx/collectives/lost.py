"""One error for a rank that is gone.

In: any of the many errors with which the backends say that a peer has closed its connection, or has not answered in time. Out: a `LaunchError`
that says so, with the backend's own error as its cause. Also where autograd runs the collective, in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hapx.errors import LaunchError


@contextmanager
def lost_rank() -> Iterator[None]:
    """Around collectives (also as a decorator, `@lost_rank()`); a lack of memory stays what it is."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise LaunchError("another rank has ended or does not answer", hint="its own error, printed by that process, says why") from error
