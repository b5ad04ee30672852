"""`mark_layer_boundary`: how a model says where its layers begin.

In: a call in a model's forward. Out: while the model is captured, a boundary between the operators before and after the call, in
`Graph.boundaries`. Anywhere else it does nothing.

The call is offered to the active torch function modes, as calls of torch's own functions are; the one that records the capture counts it and
gives the count to the operators that follow. So nothing of it is ever part of a traced or compiled graph.
"""

from __future__ import annotations

from torch.overrides import handle_torch_function, has_torch_function_unary


def mark_layer_boundary() -> None:
    """Begin a new layer here: a place at which hapx may cut the model into pipeline stages.

    Call it between blocks in a model's forward. Once a model has such marks, its layers are exactly what lies between them; without any, hapx
    chooses. Inside of a checkpointed function only its beginning can be a boundary. The results of the model are the same with and without."""
    if has_torch_function_unary(None):  # some mode is active
        handle_torch_function(mark_layer_boundary, ())
