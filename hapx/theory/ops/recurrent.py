"""Recurrent networks: whole sequences in one call, and single steps. Sequences are independent, so the batch is split.

Sequences that are packed (`aten.lstm.data` and the like) mix time and batch in one dim whose meaning is data: they have no entry.
"""

from __future__ import annotations

from collections.abc import Iterable

from hapx.errors import UnsupportedOperatorError
from hapx.theory.registry import Context, OpEntry, Rule, op, register, signature_rules

SEQUENCES = "aten.lstm.input aten.gru.input aten.rnn_tanh.input aten.rnn_relu.input"


def sequence_rules(context: Context) -> Iterable[Rule]:
    """Sequences of the batch; time, states and parameters are whole."""
    if context.call["train"] and context.call["dropout"]:
        raise UnsupportedOperatorError(
            f"{context.call.target} draws dropout masks between its layers, which differ between devices",
            where=f"{context.node.module or 'model'} ({context.node.source})",
            hint="use one recurrent module per layer, with nn.Dropout between them",
        )
    result = "b T O" if context.call["batch_first"] else "T b O"
    states = ", ".join("L b H" for _ in context.node.outputs[1:])
    source = result.replace("O", "I")
    return signature_rules(f"input: {source}, hx: L b H -> {result}, {states}")(context)


register(OpEntry(tuple(SEQUENCES.split()), sequence_rules, signature="sequences of the batch; time, states and parameters are whole"))

# one step; the kernels check that hidden units and gates are all there
op("aten.lstm_cell", "input: b I, hx: b H -> b H, b H")
op("aten.gru_cell aten.rnn_tanh_cell aten.rnn_relu_cell", "input: b I, hx: b H -> b H")
