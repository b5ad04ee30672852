"""The errors a user can meet.

Every message says what is wrong and where, what would be allowed, and what to do next. Programmer mistakes are `assert`s.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from operator import attrgetter
from typing import TypeVar


class HapError(Exception):
    """Base of all hapx errors.

    Args:
        what: what is wrong, one sentence.
        where: file, key, module path or source line.
        allowed: what would have been accepted.
        hint: what to do next.
    """

    def __init__(self, what: str, *, where: str | None = None, allowed: str | None = None, hint: str | None = None):
        self.what, self.where, self.allowed, self.hint = what, where, allowed, hint
        message = f"{where}: {what}" if where else what
        if allowed:
            message += f"; allowed: {allowed}"
        if hint:
            message += f"; {hint}"
        super().__init__(message)


class ClusterSpecError(HapError):
    """A cluster file (or dict) that cannot be understood."""


class CaptureError(HapError):
    """A model that cannot be captured as a graph."""


# what to do about a random operator that is refused
RANDOM_HINT = "make it of torch.rand, torch.randn or torch.randint, or pass the random numbers as an input"


class UnsupportedOperatorError(HapError):
    """An operator without a rule that is random, in place or data-dependent."""


class PlanError(HapError):
    """A plan that is not sound, damaged, or made for another model or cluster."""


class InsufficientMemoryError(HapError):
    """No program of the search space fits into the devices' memory. needs: bytes by device, of the program of least memory where they do not fit;
    times: how many times as much as there is its fullest device needs."""

    def __init__(
        self, what: str, *, where: str | None = None, allowed: str | None = None, hint: str | None = None, needs: Mapping[int, float] | None = None,
        times: float = inf,
    ):  # fmt: skip
        super().__init__(what, where=where, allowed=allowed, hint=hint)
        self.needs, self.times = dict(needs or {}), times


Kept = TypeVar("Kept", bound=HapError)


def kept(error: Kept) -> Kept:
    """An error to look at later, without its traceback: that knows the frames of functions, one of which may know the error, and what knows each
    other is not freed while a plan is made. It is raised by `nearest`, for the same reason."""
    return error.with_traceback(None)


def nearest(errors: list[Kept]) -> HapError:
    """Of errors that were kept (at least one) that of what lacks least memory, else the first one, to be raised; none is kept any longer."""
    found: HapError = min((e for e in errors if isinstance(e, InsufficientMemoryError)), key=attrgetter("times"), default=errors[0])
    errors.clear()
    return found


class LaunchError(HapError):
    """The processes, devices or inputs at run time contradict the plan or each other."""
