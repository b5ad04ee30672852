"""Warnings that show the line of the user's which led to them, wherever in hapx they arise."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path

# between the user's line and what warns: hapx itself, and what calls it there
_BETWEEN = (str(Path(__file__).parent) + os.sep, contextlib.__file__, os.path.join("torch", "nn", "modules"))


class HapWarning(UserWarning):
    """Base of all warnings of hapx."""


def warn(message: str, category: type[HapWarning] = HapWarning) -> None:
    """As `warnings.warn`, of the nearest line that is not hapx's own."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in _BETWEEN):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
