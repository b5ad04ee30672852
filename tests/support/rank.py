"""What runs in the processes of `support.pool`: one that starts ranks, and the ranks.

Importing torch and hapx takes seconds. So one process (the *starter*) does it once and then forks a rank whenever it is asked to, which takes
milliseconds. It never has a second thread, so that a fork is whole. It ends when the process that started it closes its socket, however it ends;
ranks end when the starter does.

Messages to the starter are pickled: ("start", rank, world size, store), with the rank's end of its pipe and the file that it prints to; answered by
its process id. ("end", process id, seconds): answered by its exit status once it has ended (negative: the signal), killed if that takes longer.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import io
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

COLLECTIVE_TIMEOUT = 30.0
MESSAGE = 4096  # bytes at most


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
    import torch.distributed as dist

    from benchmarks.gpus import take_gpu
    from support.devices import BACKEND, ON_GPU

    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT)
    if ON_GPU:
        take_gpu(rank, world_size)
    dist.init_process_group(BACKEND, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=timeout)
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


# ---- the starter ---------------------------------------------------------------------------------------------------------------------------


def start_ranks(asked: socket.socket) -> None:
    """Answers until the socket is closed."""
    import hypothesis  # noqa: F401 (what ranks will need)
    import pytest  # noqa: F401
    import torch
    import torch.export._trace  # what the first capture imports

    import hapx.api  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # collections in the ranks leave the shared pages as they are
    while True:
        message, files, _, _ = socket.recv_fds(asked, MESSAGE, 2)
        if not message:
            return
        kind, *what = pickle.loads(message)
        if kind == "start":
            process = _fork(asked, files, *what)
            for file in files:
                os.close(file)
            asked.send(pickle.dumps(process))
        else:
            asked.send(pickle.dumps(_status(*what)))


def _status(process: int, patience: float) -> int:
    last = time.monotonic() + patience
    while not (ended := os.waitpid(process, os.WNOHANG))[0]:
        if time.monotonic() > last:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(ended[1])


def _fork(asked: socket.socket, files: list[int], rank: int, world_size: int, store: str) -> int:
    parent = os.getpid()
    if process := os.fork():
        return process
    status = 1
    try:
        asked.close()
        connection, log = files
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        faulthandler.register(signal.SIGUSR1, file=2)  # prints where it is
        serve(Connection(connection), rank, world_size, store, parent)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one has it too, and then closes the socket
    start_ranks(socket.socket(fileno=int(sys.argv[1])))
