"""A persistent pool of gloo ranks: processes that run one job after another. What runs in them is `support.rank`.

In: a module-level function and arguments that can be pickled. Out: its result on every rank, in rank order. Inside the function
the default process group is initialised; `torch.distributed.get_rank()` says who it is.
Invariant: no call hangs. A rank that raises, dies or is too slow ends the job with `RankError`, which names the ranks and shows
their tracebacks; the pool is then started afresh for the next job, because its collectives may be out of step. Ranks end when
the process that started them ends, however it ends. On a GPU they run one job each: NCCL does not give back what groups of earlier jobs need, and
many ranks share the GPU's memory.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any

from support.devices import ON_GPU

GRACE = 5.0  # seconds the other ranks get to finish after one has failed
TIMEOUT = 60.0
TESTS = Path(__file__).resolve().parents[1]


class RankError(RuntimeError):
    """A job that did not finish on every rank. `failures`: traceback or reason by rank."""

    def __init__(self, failures: dict[int, str]):
        self.failures = failures
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))


class _Starter:
    """The process that starts ranks, all of this process."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        path = os.pathsep.join(p for p in sys.path if p)
        environment = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        command = [sys.executable, str(Path(__file__).with_name("rank.py")), str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
        theirs.close()
        atexit.register(self.stop)

    def ask(self, *what: Any, files: Sequence[int] = ()) -> int:
        """The answer to a message; see `support.rank`."""
        socket.send_fds(self.socket, [pickle.dumps(what)], files)
        answer = self.socket.recv(64)
        assert answer, "the process that starts ranks has ended; what it printed says why"
        found: int = pickle.loads(answer)
        return found

    def stop(self) -> None:
        self.socket.close()
        self.process.wait()


@cache
def _starter() -> _Starter:
    return _Starter()


class _Rank:
    """One rank and the pipe to it."""

    def __init__(self, rank: int, world_size: int, store: str):
        self.rank = rank
        self.connection, child = Pipe()
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in `stop`)
        self.process = _starter().ask("start", rank, world_size, store, files=[child.fileno(), self.log.fileno()])
        self.status: int | None = None
        child.close()

    def stop(self) -> None:
        if self.status is None:
            os.kill(self.process, signal.SIGKILL)
            self.ended()
        self.connection.close()
        self.log.close()

    def ended(self) -> int:
        """Its exit status (negative: the signal), once it has ended."""
        if self.status is None:
            self.status = _starter().ask("end", self.process, GRACE)
        return self.status

    def printed(self) -> str:
        """The end of it."""
        self.log.seek(0)
        return self.log.read()[-3000:]

    def last_words(self) -> str:
        """Why the process is gone: its exit status and the end of what it printed."""
        return f"the process ended with status {self.ended()}\n{self.printed()}"


class Pool:
    """`world_size` gloo ranks. Started at the first job, and again after a failure."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.ranks: list[_Rank] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hapx-pool-")
        store = str(Path(self._directory.name) / "store")
        self.ranks = [_Rank(r, self.world_size, store) for r in range(self.world_size)]

    def stop(self) -> None:
        for rank in self.ranks:
            rank.stop()
        self.ranks = []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """`function(*args)` on every rank; the results in rank order. Raises RankError."""
        if not self.ranks:
            self.start()
        job = pickle.dumps((_test_modules(), pickle.dumps((function, args))))  # plain pickle: tensors travel by value
        for rank in self.ranks:
            with contextlib.suppress(BrokenPipeError):  # a dead rank is reported by `_collect`
                rank.connection.send_bytes(job)
        results, failures = self._collect(time.monotonic() + timeout)
        if failures or ON_GPU:
            self.stop()
        if failures:
            raise RankError(failures)
        return [results[r] for r in range(self.world_size)]

    def _collect(self, deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {rank.connection: rank for rank in self.ranks}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                rank = waiting.pop(connection)  # type: ignore[arg-type]
                try:
                    kind, value = pickle.loads(rank.connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    kind, value = "failed", rank.last_words()
                (results if kind == "done" else failures)[rank.rank] = value
                if kind != "done":
                    deadline = min(deadline, time.monotonic() + GRACE)
        return results, failures | self._stuck(list(waiting.values()), "was waiting for the others" if failures else "did not finish in time")

    @staticmethod
    def _stuck(ranks: Sequence[_Rank], why: str) -> dict[int, str]:
        """What to say of ranks that are not done: where each of them is, which it prints when it is asked to."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process, signal.SIGUSR1)
        time.sleep(0.5 if ranks else 0.0)
        return {rank.rank: f"{why}\n{rank.printed()}" for rank in ranks}


_POOLS: dict[int, Pool] = {}


def pool(world_size: int) -> Pool:
    """The pool of that size of this process."""
    if world_size not in _POOLS:
        _starter()  # stopped after the pools: what is registered first ends last
        _POOLS[world_size] = Pool(world_size)
        atexit.register(_POOLS[world_size].stop)
    return _POOLS[world_size]


def _test_modules() -> dict[str, str]:
    """Test modules by the name under which they were imported: ranks load them from the same files."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).is_relative_to(TESTS):
            found[name] = file
    return found
