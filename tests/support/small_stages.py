"""Small plans of several stages, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from hapx.plan import Plan
from support.clusters import THREE, TWO, TWO_MACHINES
from support.models import GPT, MLP
from support.staged import staged_plan

GPT_2: Callable[[], Any] = partial(GPT, 13, 8, 2, 2, 4)
DEEP: Callable[[], Any] = partial(MLP, (6, 8, 8, 8, 3))


@cache
def gpt() -> Plan:
    """Two stages of one device each, a tied head."""
    return staged_plan(GPT_2(), GPT_2().example(8), TWO, ((0,), (1,)), 4)


@cache
def deep_gpt() -> Plan:
    """Two stages of two devices each, two blocks per stage."""
    model = GPT(13, 8, 2, 4, 4)
    return staged_plan(model, model.example(8), TWO_MACHINES, ((0, 1), (2, 3)), 4)


@cache
def mlp() -> Plan:
    """Two stages, one of two devices."""
    return staged_plan(DEEP(), DEEP().example(8), THREE, ((0, 1), (2,)), 2)


@cache
def idle() -> Plan:
    """Two stages, and a device without any."""
    return staged_plan(DEEP(), DEEP().example(8), THREE, ((0,), (2,)), 2)


@cache
def interleaved() -> Plan:
    """Two stages on each of two devices."""
    return staged_plan(DEEP(), DEEP().example(8), TWO, ((0,), (1,), (0,), (1,)), 4, "interleaved")


@cache
def accumulating() -> Plan:
    """One stage on all devices."""
    return staged_plan(DEEP(), DEEP().example(8), TWO, ((0, 1),), 4)
