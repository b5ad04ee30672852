"""Actions in words, for errors and traces. Invariant: ASCII."""

from __future__ import annotations

from hapx.plan import Action


def action_text(action: Action) -> str:
    """ "send of micro-batch 3's activations from stage 1 to stage 2"."""
    if action.kind == "synchronise":
        return f"synchronise of stage {action.stage}"
    if action.kind not in ("send", "receive"):
        return f"{action.kind} of micro-batch {action.micro_batch} on stage {action.stage}"
    what = "activations" if action.direction == "forward" else "cotangents"
    way = f"from stage {action.stage} to stage {action.peer}" if action.kind == "send" else f"on stage {action.stage} from stage {action.peer}"
    return f"{action.kind} of micro-batch {action.micro_batch}'s {what} {way}"


def run_text(run: Action, stages: bool) -> str:
    """ "F3", "B0"; with the stage where a group has several: "F3@1"."""
    return f"{run.kind[0].upper()}{run.micro_batch}" + (f"@{run.stage}" if stages else "")


def span_text(action: Action) -> str:
    """Short, for traces: "F3@1", "F3 1>2" and "B3 2>1" for what is on its way, "synchronise 1"."""
    if action.kind in ("forward", "backward"):
        return run_text(action, stages=True)
    if action.kind == "synchronise":
        return f"synchronise {action.stage}"
    source, target = (action.stage, action.peer) if action.kind == "send" else (action.peer, action.stage)
    return f"{action.direction[0].upper()}{action.micro_batch} {source}>{target}"
