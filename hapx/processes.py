"""What planning asks of the process that it runs in: no collections of garbage, and copies of the process for work that can be done at the same time.

In: jobs, functions without arguments whose results can be pickled. Out: their results, as if they had been called one after the other. A copy is made
by fork, so a job needs no preparation and sees everything; what it changes, nobody else sees. Objects that are `shared` come back in results as
themselves, without being pickled. Without a second core, or where there are other threads (a fork copies the calling one alone, and what others had
locked stays locked), the jobs are simply called.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Generic, TypeVar

T = TypeVar("T")
N = TypeVar("N")

MOST = 8  # processes at a time: there are seldom more jobs, and each takes memory
NUMBER = 4  # bytes of a job's number; so few are read from a pipe at once or not at all
PATIENCE = 4  # by how much a copy's priority is lowered that may wait: a third of what others get, not so little that it starves where cores are busy

_copied = False  # of this process


@contextmanager
def without_collections() -> Iterator[None]:
    """Inside, no cycles are collected. Planning makes none, but many objects: the collector would look at all of them again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            if not gc.get_freeze_count():  # what there is now is old: the next collection need not look at it
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@without_collections()
def at_the_same_time(jobs: Sequence[Callable[[], T]], shared: Sequence[object] = ()) -> list[T]:
    """The results of all jobs. Raises what the first of them raises that fails. A job whose process comes to nothing is done again in this one."""
    copies = min(_cores(), len(jobs), MOST) - 1
    if copies < 1 or not _alone():
        return [job() for job in jobs]
    started: list[_Copy[T]] = []
    try:
        with _numbers(len(jobs)) as numbers:
            for _ in range(copies):
                with suppress(OSError):  # no more processes: the others do it
                    started.append(_Copy.start(jobs, numbers, shared))
            done = _taken(jobs, numbers)
        for copy in started:
            done |= copy.results()
    finally:
        for copy in started:
            copy.end()
    return [done[i] if i in done else job() for i, job in enumerate(jobs)]


@contextmanager
def beside(job: Callable[[], T], patient: bool = False) -> Iterator[Later[T]]:
    """Inside, a job is done in a copy while this process does something else. Without a copy it is done when its result is asked for. patient: where
    cores are few, others go first."""
    copy: _Copy[T] | None = None
    if _cores() > 1 and _alone():
        with _numbers(1) as numbers, suppress(OSError):
            copy = _Copy.start([job], numbers, patience=PATIENCE if patient else 0)
    try:
        yield Later(job, copy)
    finally:
        if copy is not None:
            copy.end()


def at_once(steps: Generator[N, None, T], hear: Callable[[N], None] = lambda _: None) -> T:
    """The result of a job that yields what it has to say on the way. hear: is told that."""
    while True:
        try:
            note = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        hear(note)


@contextmanager
def beside_telling(job: Callable[[], Generator[N, None, T]], patient: bool = False) -> Iterator[Telling[T, N]]:
    """As `beside`, with a job that may say something long before it has its result, and more later: it yields that."""
    here = os.getpid()
    heard, said = os.pipe()

    def aloud() -> T:
        if os.getpid() == here:  # the copy came to nothing
            return at_once(job())
        with os.fdopen(said, "wb") as file:

            def say(note: N) -> None:
                pickle.dump(note, file, pickle.HIGHEST_PROTOCOL)
                file.flush()

            return at_once(job(), say)

    with os.fdopen(heard, "rb") as file:
        try:
            with beside(aloud, patient) as later:
                os.close(said)
                said = -1
                yield Telling(job, later, file)
        finally:
            if said >= 0:
                os.close(said)


class Telling(Generic[T, N]):
    """What a job of `beside_telling` says, and its result. file: what its copy says; elsewhere: there is one."""

    def __init__(self, job: Callable[[], Generator[N, None, T]], later: Later[T] | None = None, file: IO[bytes] | None = None):
        self._steps, self._file = job(), file
        self._later = later if later is not None and later.elsewhere else None
        self.elsewhere = self._later is not None
        self._done: list[T] = []
        self._failed: Exception | None = None

    def ready(self) -> bool:
        """Whether the result is there."""
        return bool(self._done) or (self._later is not None and self._later.ready())

    def note(self) -> N | None:
        """What the job says next, None if it says nothing more; waits for it. Without a copy the job goes on up to there."""
        if self._later is not None and self._file is not None:
            with suppress(EOFError, pickle.UnpicklingError):
                said: N = pickle.load(self._file)
                return said
            return None
        if self._done:
            return None
        try:
            return next(self._steps)
        except StopIteration as end:
            self._done.append(end.value)
        except Exception as error:
            self._failed = error
            raise
        return None

    def result(self) -> T:
        """Waits for it; to be asked for once."""
        if self._failed is not None:
            raise self._failed
        if self._done:
            return self._done[0]
        return self._later.result() if self._later is not None else at_once(self._steps)


class Later(Generic[T]):
    """The result of a job of `beside`. elsewhere: a copy does it."""

    def __init__(self, job: Callable[[], T], copy: _Copy[T] | None):
        self.elsewhere = copy is not None
        self._job, self._copy = job, copy

    def ready(self, seconds: float = 0.0) -> bool:
        """Whether the copy has something to say, if only that it has failed; waits for it at most so many seconds."""
        if self._copy is None:
            return True
        watched = select.poll()  # whatever the number of the file is: `select.select` takes none above 1023
        watched.register(self._copy.output, select.POLLIN)
        return bool(watched.poll(seconds * 1e3))

    def result(self, seconds: float | None = None) -> T:
        """Waits for it, at most so many seconds; to be asked for once. A job whose copy comes to nothing, or to nothing in time, is done here."""
        with without_collections():
            found = self._copy.results() if self._copy is not None and (seconds is None or self.ready(seconds)) else {}
        return found[0] if 0 in found else self._job()


@dataclass(frozen=True)
class _Copy(Generic[T]):
    """A copy of this process, and where its results come out."""

    process: int
    output: int
    shared: Sequence[object]

    @staticmethod
    def start(jobs: Sequence[Callable[[], T]], numbers: int, shared: Sequence[object] = (), patience: int = 0) -> _Copy[T]:
        output, into = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads that libraries have: none of them takes part in planning
            try:
                process = os.fork()
            except OSError:
                os.close(output)
                os.close(into)
                raise
        if process:
            os.close(into)
            return _Copy(process, output, shared)
        global _copied
        _copied = True
        try:  # this is the copy; whoever started it hears of nothing but results
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            warnings.simplefilter("ignore")
            os.nice(patience)
            with os.fdopen(into, "wb") as file:
                _Sender(file, shared).dump(_taken(jobs, numbers))
        finally:
            os._exit(0)

    def results(self) -> dict[int, T]:
        """By the number of the job, once all are there; none if it failed."""
        with suppress(EOFError, pickle.UnpicklingError), os.fdopen(os.dup(self.output), "rb") as file:
            found: dict[int, T] = _Receiver(file, self.shared).load()
            return found
        return {}

    def end(self) -> None:
        """Nothing of it is left."""
        os.close(self.output)
        with suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.process, 0)


class _Sender(pickle.Pickler):
    """Pickles shared objects by their numbers: in a copy they are where they were."""

    def __init__(self, file: IO[bytes], shared: Sequence[object]):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._numbers = {id(known): number for number, known in enumerate(shared)}

    def persistent_id(self, obj: object) -> int | None:
        return self._numbers.get(id(obj))


class _Receiver(pickle.Unpickler):
    def __init__(self, file: IO[bytes], shared: Sequence[object]):
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, pid: int) -> object:
        return self._shared[pid]


@contextmanager
def _numbers(count: int) -> Iterator[int]:
    """The numbers of so many jobs, to be read one by one: whoever has time takes the next."""
    numbers, given = os.pipe()
    try:
        with os.fdopen(given, "wb") as file:
            file.write(b"".join(i.to_bytes(NUMBER, "little") for i in range(count)))
        yield numbers
    finally:
        os.close(numbers)


def _taken(jobs: Sequence[Callable[[], T]], numbers: int) -> dict[int, T]:
    """Does jobs as long as there are any that nobody has taken."""
    done: dict[int, T] = {}
    while number := os.read(numbers, NUMBER):
        at = int.from_bytes(number, "little")
        done[at] = jobs[at]()
    return done


def is_copy() -> bool:
    """Whether this process is a copy, whose only voice is the results of its jobs."""
    return _copied


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "fork") and hasattr(os, "sched_getaffinity") else 1


def _alone() -> bool:
    """Whether there is no other thread."""
    return threading.active_count() == 1
