"""Jobs in copies of the process: the same results as without, whatever becomes of the copies."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Generator

import pytest

from hapx import processes
from hapx.processes import at_the_same_time, beside, beside_telling
from hapx.progress import Progress, Teller
from hapx.synth.astar import Statistics

FORKED: list[int] = []  # copies that a test has made


@pytest.fixture(autouse=True)
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with three cores, and as if what runs the tests had no thread of its own."""
    fork = os.fork

    def recorded() -> int:
        process = fork()
        FORKED.append(process)
        return process

    FORKED.clear()
    monkeypatch.setattr(os, "fork", recorded)
    monkeypatch.setattr(processes, "_cores", lambda: 3)
    monkeypatch.setattr(processes, "_alone", lambda: True)


def children() -> list[int]:
    """Copies that nobody has waited for."""
    return [process for process in FORKED if os.path.exists(f"/proc/{process}")]


def of_process(seconds: float = 0.05) -> tuple[int, float]:
    time.sleep(seconds)
    return os.getpid(), seconds


def test_copies_tell_nothing() -> None:
    seen: list[Progress] = []

    def told() -> int:
        Teller(seen.append, Statistics(), "flat", 1, 1, 1.0)("searching")
        return len(seen)

    with beside(told) as later:
        assert later.elsewhere and later.result() == 0  # not even in the copy itself
    assert told() == 1


def test_shared_objects_come_back_as_themselves() -> None:
    shared, other = [1, 2], [3]

    def job() -> tuple[list[int], list[int], int]:
        time.sleep(0.1)
        return shared, other, os.getpid()

    found = at_the_same_time([job] * 3, [shared])
    assert len({process for *_, process in found}) > 1
    assert all(a is shared and b == other for a, b, _ in found)
    assert any(b is not other for _, b, _ in found)


def test_a_patient_copy_lets_others_go_first() -> None:
    here = os.nice(0)
    with beside(lambda: os.nice(0), patient=True) as later:
        assert later.elsewhere and later.result() > here
    with beside(lambda: os.nice(0)) as later:
        assert later.result() == here


def test_results_are_in_the_order_of_the_jobs() -> None:
    found = at_the_same_time([lambda s=s: of_process(s) for s in (0.3, 0.05, 0.05, 0.05, 0.05, 0.2)])  # type: ignore[misc]
    assert [s for _, s in found] == [0.3, 0.05, 0.05, 0.05, 0.05, 0.2]
    assert len({process for process, _ in found}) == 3
    assert not children()
    assert at_the_same_time([]) == []


def test_one_job_and_other_threads_need_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.getpid()
    assert at_the_same_time([of_process]) == [(here, 0.05)]
    monkeypatch.undo()
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert [process for process, _ in at_the_same_time([of_process] * 3)] == [here] * 3
    finally:
        done.set()
        thread.join()


def test_an_error_is_raised_here() -> None:
    def fails() -> int:
        time.sleep(0.05)
        raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing"):
        at_the_same_time([fails, fails, fails])
    with pytest.raises(KeyError, match="no such thing"):
        at_the_same_time([lambda: 1, lambda: 2, lambda: 3, fails])
    assert not children()


@pytest.mark.parametrize("end", [lambda: os._exit(3), lambda: os.kill(os.getpid(), signal.SIGKILL)])
def test_a_copy_that_ends_early_is_made_up_for(end: Callable[[], None]) -> None:
    here = os.getpid()

    def job() -> int:
        time.sleep(0.05)
        if os.getpid() != here:
            end()
        return os.getpid()

    assert at_the_same_time([job] * 5) == [here] * 5
    assert not children()


def test_what_cannot_be_sent_is_done_here() -> None:
    def job() -> Callable[[], int]:
        time.sleep(0.05)
        return lambda: 7

    assert [found() for found in at_the_same_time([job] * 4)] == [7] * 4


def test_no_more_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", refused)
    here, open_before = os.getpid(), len(os.listdir("/proc/self/fd"))
    assert [process for process, _ in at_the_same_time([of_process] * 4)] == [here] * 4
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_nothing_is_left_where_this_process_is_interrupted() -> None:
    here = os.getpid()

    def job() -> None:
        if os.getpid() == here:
            raise KeyboardInterrupt
        time.sleep(60)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        at_the_same_time([job] * 3)
    assert not children() and time.monotonic() - began < 30


def test_a_job_beside() -> None:
    here = os.getpid()
    with beside(lambda: of_process(0.3)) as later:
        assert later.elsewhere and not later.ready()
        process, seconds = later.result()
    assert process != here and seconds == 0.3
    assert not children()


def test_a_job_beside_that_nobody_waits_for() -> None:
    began = time.monotonic()
    with pytest.raises(KeyError), beside(lambda: time.sleep(60)):
        raise KeyError
    assert not children() and time.monotonic() - began < 30


def test_a_job_beside_of_a_process_with_many_files() -> None:
    """More than `select` could look at."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1200:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1200, hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1050)]
    try:
        with beside(lambda: of_process(0.3)) as later:
            assert later.elsewhere and not later.ready()
            assert later.result()[1] == 0.3
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("cores", [1, 3])
def test_a_job_beside_that_fails_is_done_here(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_cores", lambda: cores)
    here = os.getpid()

    def job() -> int:
        if os.getpid() != here:
            os._exit(1)
        return 7

    with beside(job) as later:
        assert later.elsewhere == (cores > 1)
        assert later.result() == 7
        assert later.ready()

    def fails() -> int:
        raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing"), beside(fails) as later:
        later.result()
    assert not children() and len(FORKED) == (2 if cores > 1 else 0)


@pytest.mark.parametrize("cores", [1, 3])
def test_a_job_says_something_before_it_is_done(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """Without a copy it is done up to there, and goes on when more is wanted."""
    monkeypatch.setattr(processes, "_cores", lambda: cores)
    begun: list[int] = []  # jobs that began in this process

    def job() -> Generator[str, None, int]:
        begun.append(7)
        yield "half"
        return 7

    with beside_telling(job) as telling:
        assert telling.note() == "half" and telling.result() == 7
    with beside_telling(job) as telling:
        assert telling.result() == 7  # nobody has to listen

    def says_nothing() -> Generator[str, None, int]:
        yield from ()
        return 8

    with beside_telling(says_nothing) as telling:
        assert telling.note() is None and telling.result() == 8

    def says_more() -> Generator[str, None, int]:
        begun.append(9)
        yield "half"
        yield "nearly"
        return 9

    with beside_telling(says_more) as telling:
        assert [telling.note() for _ in range(4)] == ["half", "nearly", None, None] and telling.result() == 9
    with beside_telling(says_more) as telling:
        assert telling.note() == "half" and telling.result() == 9  # nor to everything
    assert not children() and len(FORKED) == (5 if cores > 1 else 0)
    assert begun == ([] if cores > 1 else [7, 7, 9, 9])


@pytest.mark.parametrize("cores", [1, 3])
def test_a_job_that_says_something_and_fails_has_no_result(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(processes, "_cores", lambda: cores)

    def job() -> Generator[str, None, int]:
        yield "half"
        raise KeyError("no such thing")

    with beside_telling(job) as telling:
        assert telling.note() == "half"
        if not telling.elsewhere:
            with pytest.raises(KeyError, match="no such thing"):
                telling.note()
        with pytest.raises(KeyError, match="no such thing"):
            telling.result()


def test_a_job_whose_copy_ends_early_says_nothing() -> None:
    here = os.getpid()

    def job() -> Generator[str, None, int]:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        yield from ()
        return os.getpid()

    with beside_telling(job) as telling:
        assert telling.note() is None and telling.result() == here


def test_what_was_said_is_enough() -> None:
    """A job whose result nobody wants ends with the block."""

    def job() -> Generator[str, None, int]:
        yield "enough"
        time.sleep(60)
        return 0

    began = time.monotonic()
    with beside_telling(job) as telling:
        assert telling.note() == "enough" and not telling.ready()
    assert time.monotonic() - began < 30 and not children()


def test_a_copy_that_takes_too_long_is_given_up() -> None:
    here = os.getpid()

    def job() -> int:
        if os.getpid() != here:
            time.sleep(60)
        return os.getpid()

    began = time.monotonic()
    with beside(job) as later:
        assert later.elsewhere and not later.ready(0.1)
        assert later.result(0.1) == here
    assert time.monotonic() - began < 30
    with beside(lambda: of_process(0.05)[0]) as later:
        assert later.result(60.0) != here
    assert not children()
