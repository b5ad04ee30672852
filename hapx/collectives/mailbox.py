"""Messages on their way between threads of one process, or from a device to itself.

Invariant: messages of a lane (source, target, channel) arrive in the order in which they were sent, at the receivers in the order in which those
asked, whoever waits first. A message is a copy: what was sent may change.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict

from torch import Tensor

from hapx.errors import LaunchError

Lane = tuple[int, int, int]


class Mailbox:
    """`timeout`: seconds to wait for a message of another device."""

    def __init__(self, timeout: float):
        self.timeout, self.broken = timeout, False
        self._changed = threading.Condition()
        self._messages: dict[tuple[Lane, int], Tensor] = {}
        self._sent: dict[Lane, int] = defaultdict(int)
        self._asked: dict[Lane, int] = defaultdict(int)

    def put(self, lane: Lane, message: Tensor) -> None:
        """Sends; never waits."""
        message = message.clone()
        with self._changed:
            self._messages[lane, self._sent[lane]] = message
            self._sent[lane] += 1
            self._changed.notify_all()

    def ask(self, lane: Lane) -> int:
        """The number of the next message that nobody has asked for."""
        with self._changed:
            self._asked[lane] += 1
            return self._asked[lane] - 1

    def take(self, lane: Lane, number: int) -> Tensor:
        """Waits for a message. Raises LaunchError when it does not come."""
        source, target, _ = lane
        seconds = 0.0 if source == target else None if math.isinf(self.timeout) else self.timeout  # nobody else sends from here to here
        with self._changed:
            self._changed.wait_for(lambda: self.broken or (lane, number) in self._messages, seconds)
            if (lane, number) in self._messages:
                return self._messages.pop((lane, number))
        if self.broken:
            reason = "another rank failed"
        elif source == target:
            reason = "it has not been sent"
        else:
            reason = f"it did not come within {self.timeout:g} s"
        raise LaunchError(f"a message from device {source} was given up: {reason}", where=f"rank {target}")

    def abort(self) -> None:
        """Releases all who wait."""
        with self._changed:
            self.broken = True
            self._changed.notify_all()
