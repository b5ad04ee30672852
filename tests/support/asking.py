"""Askers of a small GPT on two unlike machines with a slow link between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from hapx.planner import key_of
from hapx.restriction import AUTO
from hapx.setting import Setting
from hapx.stage_prices import Asker
from hapx.stages.clustering import find_layers
from support.clusters import slow_devices
from support.models import GPT
from support.staged import micro_graph

SLOW = slow_devices(["fast", "fast"], ["slow", "slow"], inter="2 Mbit/s", speed=1e8)
MODEL: Callable[..., Any] = partial(GPT, vocab=13, width=32, heads=4, layers=3, context=16)


def asker(number: int) -> Asker:
    model = MODEL()
    graph, whole = micro_graph(model, model.example(16), number)
    rule = replace(AUTO, segments="none", max_stages=1, remat="none")
    return Asker(Setting(graph, key_of(whole), SLOW, rule, "fp32", "adamw", repeats=number), find_layers(graph))
