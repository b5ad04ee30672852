"""Recurrent networks: sequences of two steps, and single steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hapx.theory.samples.draw import Draw, Sample, sample, t


def recurrent() -> Iterator[Sample]:
    """Sequences, then steps. Two or three parameters at most: all combinations of the states of all operands are tried."""
    for name, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
        yield _sequence(name, gates)
        yield _sequence(name, gates, grad=False, batch_first=True, bidirectional=True)
    yield _sequence("lstm", 4, grad=False, projected=1)
    yield _sequence("gru", 3, grad=False, num_layers=2)
    for name, gates in (("lstm_cell", 4), ("gru_cell", 3), ("rnn_tanh_cell", 1), ("rnn_relu_cell", 1)):
        states: Any = [t(3, 2), t(3, 2)] if name == "lstm_cell" else t(3, 2)
        yield sample(name, input=t(3, 1), hx=states, w_ih=t(2 * gates, 1), w_hh=t(2 * gates, 2), b_ih=None, b_hh=None)


def _sequence(name: str, gates: int, *, grad: bool = True, projected: int = 0, **flags: Any) -> Sample:
    """Three sequences; the initial states need no gradient. `projected`: width to which hidden states are projected."""
    layers, directions, hidden = flags.get("num_layers", 1), 2 if flags.get("bidirectional") else 1, 2
    width = projected or hidden
    weights: list[Draw] = []
    for layer in range(layers):
        inputs = 1 if layer == 0 else directions * width
        one = [t(gates * hidden, inputs, grad=grad), t(gates * hidden, width, grad=grad), *[t(projected, hidden, grad=grad)] * (projected > 0)]
        weights += one * directions
    state = t(layers * directions, 3, width, grad=False)
    hx: Any = [state, t(layers * directions, 3, hidden, grad=False)] if name == "lstm" else state
    constants = {"has_biases": False, "num_layers": 1, "dropout": 0.0, "train": True, "bidirectional": False, "batch_first": False}
    shape = (3, 2, 1) if flags.get("batch_first") else (2, 3, 1)
    made = sample(f"{name}.input", input=t(*shape), hx=hx, params=weights, **(constants | flags))
    return replace(made, whole=frozenset(n for n, _ in made.draws if n != "input"))
