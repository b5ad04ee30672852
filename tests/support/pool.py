"""A persistent pool of gloo ranks: processes that import torch once and run one job after another.

In: a module-level function and arguments that can be pickled. Out: its result on every rank, in rank order. Inside the function
the default process group is initialised; `torch.distributed.get_rank()` says who it is.
Invariant: no call hangs. A rank that raises, dies or is too slow ends the job with `RankError`, which names the ranks and shows
their tracebacks; the pool is then started afresh for the next job, because its collectives may be out of step. Ranks end when
the process that started them ends, however it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import io
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import ModuleType
from typing import Any

GRACE = 5.0  # seconds the other ranks get to finish after one has failed
TIMEOUT = 60.0
COLLECTIVE_TIMEOUT = 30.0
TESTS = Path(__file__).resolve().parents[1]


class RankError(RuntimeError):
    """A job that did not finish on every rank. `failures`: traceback or reason by rank."""

    def __init__(self, failures: dict[int, str]):
        self.failures = failures
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))


class _Rank:
    """One child process and the pipe to it."""

    def __init__(self, rank: int, world_size: int, store: str):
        self.rank = rank
        self.connection, child = Pipe()
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in `stop`)
        command = [sys.executable, str(Path(__file__).resolve()), str(child.fileno()), str(rank), str(world_size), store, str(os.getpid())]
        path = os.pathsep.join(p for p in sys.path if p)
        environment = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        self.process = subprocess.Popen(
            command, pass_fds=[child.fileno()], env=environment, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL
        )
        child.close()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()
        self.log.close()

    def last_words(self) -> str:
        """Why the process is gone: its exit status and the end of what it printed."""
        status = self.process.wait(timeout=GRACE)
        self.log.seek(0)
        return f"the process ended with status {status}\n{self.log.read()[-2000:]}"


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
        if failures:
            self.stop()
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
        for rank in waiting.values():
            failures[rank.rank] = "did not finish in time" if not failures else "was waiting for the ranks above or below"
        return results, failures


_POOLS: dict[int, Pool] = {}


def pool(world_size: int) -> Pool:
    """The pool of that size of this process."""
    if world_size not in _POOLS:
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


class _Loader(pickle.Unpickler):
    """Finds functions and classes of test modules in their files, whatever the import mode of the test runner."""

    def __init__(self, data: bytes, files: dict[str, str]):
        super().__init__(io.BytesIO(data))
        self.files = files

    def find_class(self, module: str, name: str) -> Any:
        if module in self.files and module not in sys.modules:
            load_module(module, self.files[module])
        return super().find_class(module, name)


def load_module(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _die_with(parent: int) -> None:
    """Ends this process when its parent is gone, also while it waits inside a collective."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def serve(connection: Connection, rank: int, world_size: int, store: str, parent: int) -> None:
    """The life of a rank: join the process group, then run jobs until the pipe closes."""
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=timeout)
    while True:
        try:
            files, job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            function, args = _Loader(job, files).load()
            answer = pickle.dumps(("done", function(*args)))
        except BaseException:
            answer = pickle.dumps(("failed", traceback.format_exc()))
        connection.send_bytes(answer)


if __name__ == "__main__":
    _fd, _rank, _world_size, _store, _parent = sys.argv[1:]
    serve(Connection(int(_fd)), int(_rank), int(_world_size), _store, int(_parent))
