"""Branches that decide nothing but whether there is an error: `if labels.max() >= classes: raise ValueError(...)`, `assert mask.any()`,
`assert lengths.max().item() <= length`.

In: the frame in which a tensor, or what its number is compared to, is asked for its truth. Out: the truth with which it goes on, if with the other
one it can only raise what its own function does not catch. Values are not known while a model is captured, so such a check is left out of the
program, which a warning says.
"""

from __future__ import annotations

import dis
from functools import cache
from types import CodeType, FrameType

from hapx.warnings import HapWarning

# beginnings of instructions that do something else than make an error
OTHERS = ("JUMP", "POP_JUMP", "RETURN", "YIELD", "STORE", "DELETE", "FOR_ITER", "SEND", "IMPORT", "RERAISE", "END_")


class CheckLeftOutWarning(HapWarning):
    """A check of the model's that looks at values is not made in the captured program."""


def passes(frame: FrameType) -> bool | None:
    """See the module; None where the frame does not branch on the truth, or both ways go on."""
    return _passes(frame.f_code, frame.f_lasti)


@cache
def _passes(code: CodeType, offset: int) -> bool | None:
    bytecode = dis.Bytecode(code)
    instructions = list(bytecode)
    place = {instruction.offset: k for k, instruction in enumerate(instructions)}
    at = place.get(offset)
    if at is not None and (instructions[at].opname == "TO_BOOL" or instructions[at].argrepr.startswith("bool(")):  # Python 3.13
        at += 1
    if at is None or at + 1 >= len(instructions):
        return None
    name, target = instructions[at].opname, instructions[at].argval
    if not (name.startswith("POP_JUMP") and name.endswith(("IF_TRUE", "IF_FALSE"))) or target not in place:
        return None
    jumps = name.endswith("IF_TRUE")  # the truth with which it does
    for begin, truth in ((at + 1, jumps), (place[target], not jumps)):
        raised = _raises(instructions, begin)
        if raised is not None:
            handlers = [place[entry.target] for entry in getattr(bytecode, "exception_entries", ()) if entry.start <= raised < entry.end]
            return truth if all(instructions[k + 1].opname == "WITH_EXCEPT_START" for k in handlers) else None  # only ends of `with` get it
    return None


def _raises(instructions: list[dis.Instruction], at: int) -> int | None:
    """Where what begins there raises, if it does nothing before that but to make the error."""
    for instruction in instructions[at:]:
        if instruction.opname == "RAISE_VARARGS":
            return instruction.offset
        if instruction.opname.startswith(OTHERS):
            return None
    return None
