"""Tracing a module with torch.export, and saying in the user's words why it failed.

In: a module, its inputs, perhaps a loss function. Out: `Trace`: the exported program (training IR, not decomposed, not functional),
whose operator calls carry a `Mark`: the user's line and the contexts around it.

Invariant: the module is as before: weights, buffers, gradients, training flags, plain attributes; and so is the state of the random
generators. A forward that changes attributes is refused: a captured program would not.

The contexts are read from Python's stack and from torch at the moment of each call, by a mode: the exported graph's own account of
them is cut wrongly where checkpoints nest, and its stack traces leave out helper functions.
"""

from __future__ import annotations

import io
import linecache
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.traceback import annotate, preserve_node_meta
from torch.overrides import TorchFunctionMode

from hapx import functions
from hapx.errors import CaptureError, HapError
from hapx.graph.capture_boundaries import mark_layer_boundary
from hapx.graph.capture_checks import ONE_ROW, STAND_INS, InOneRow, unvalidated
from hapx.graph.capture_functions import functions_as_operators
from hapx.graph.capture_inputs import Inputs
from hapx.graph.capture_outputs import container_of, split_output
from hapx.graph.capture_raises import CheckLeftOutWarning, passes
from hapx.graph.capture_refusals import KEEP, TORCH, World, is_inside_functorch_grad, refuse_gradients, user_functions
from hapx.graph.capture_state import Changes, same_module, write_assigned_buffers
from hapx.graph.quiet import quiet
from hapx.graph.regions import Mark
from hapx.ir import Container
from hapx.warnings import warn

MARK = "hapx"  # key of the mark among a node's annotations

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_OPERATORS = os.path.abspath(functions.__file__)  # of the user's functions
_CHECKPOINT = os.path.join(TORCH, "utils", "checkpoint.py")
_TRACING = threading.RLock()  # of the one thread that traces: the exporter allows no other, and what is changed of torch is every thread's


@dataclass
class Trace:
    """`prefix`: what the names of parameters and modules begin with. `results`: where in the module's output each tensor after the loss was;
    `container`: what it is."""

    program: ExportedProgram
    prefix: str
    results: tuple[str, ...]
    container: Container | None
    device: torch.device


class _Seen:
    """What a run of forward showed: where in the output the tensors after the loss were, in what container, what it changed, which checks of values
    were left out. (The exporter copies lists, so it is an object.)"""

    def __init__(self) -> None:
        self.places: tuple[str, ...] = ()
        self.container: Container | None = None
        self.changes = Changes()
        self.left_out: dict[str, None] = {}  # by their lines


class _Traced(nn.Module):
    """Flat tensors in, (loss, *other tensors) out, around the user's module."""

    def __init__(self, module: nn.Module, inputs: Inputs, loss_fn: Callable[..., Tensor] | None, device: torch.device):
        super().__init__()
        self.module = module
        self._inputs = inputs
        self._device = device
        self._loss_fn = (loss_fn,)  # in a tuple: a loss that is a module must not become part of this one
        self.seen = _Seen()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        changes = self.seen.changes = Changes()
        world = World(user_functions(self.module, self._loss_fn[0]), type(self.module).__name__)
        recorder = _Recorder(_Traced._call.__code__, self._device, self.seen)
        with same_module(self.module, changes), recorder, functions_as_operators(self._device.type, recorder, recorder.refuse):
            outputs = self._call(tensors)
            write_assigned_buffers(self.module, changes)
        world.check()
        return outputs

    def _call(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        args, kwargs = self._inputs.call(tensors)
        (loss_fn,) = self._loss_fn
        if loss_fn is None:
            maker, output = "forward", self.module(*args, **kwargs)
        else:
            positional, keyword, targets = args
            maker, output = "loss_fn", loss_fn(self.module(*positional, **keyword), *targets)
        loss, results = split_output(output, maker)
        self.seen.places, self.seen.container = tuple(results), container_of(output)
        return (loss, *results.values())


class _Recorder(TorchFunctionMode):
    """Gives every operator call its mark, and counts the boundaries of layers. `root`: the code where the user's frames begin. seen: gets the checks
    that are left out."""

    def __init__(self, root: CodeType, device: torch.device, seen: _Seen):
        super().__init__()
        self._root = root
        self._device = device.type
        self._seen = seen
        self._layer = 0
        self._checkpoints: dict[int, tuple[int, FrameType]] = {}  # frames are kept: a freed one's id could come again

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is mark_layer_boundary:
            self._layer += 1
            return None
        if func.__name__ == "__get__":  # a property such as x.shape
            return func(*args, **(kwargs or {}))
        caller = sys._getframe(1)
        if func is Tensor.__bool__ and (goes_on := self._passes(caller)) is not None:
            return goes_on
        mark = self._mark(caller)
        refuse_gradients(func, mark.where)
        if func.__name__ == "_pack_padded_sequence":
            raise CaptureError(
                "packed sequences cannot be captured: their shapes depend on the values of the lengths",
                where=mark.where,
                hint="give the recurrent module the padded batch, and mask what is behind the end of each sequence",
            )
        with annotate({MARK: mark}):
            return STAND_INS.get(func, func)(*args, **(kwargs or {}))

    def __enter__(self) -> TorchFunctionMode:
        """Numbers of tensors (`.item()`) may be checked as tensors may: what they are compared to is a `torch.SymBool`."""
        before = self._before = torch.SymBool.__bool__

        def truth(own: torch.SymBool) -> bool:
            goes_on = self._passes(sys._getframe(1))
            return before(own) if goes_on is None else goes_on

        torch.SymBool.__bool__ = truth  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        torch.SymBool.__bool__ = self._before  # type: ignore[method-assign]
        super().__exit__(*error)

    def _passes(self, frame: FrameType) -> bool | None:
        """The truth with which the user's code goes on that asks for one, and it is noted, if that is only a check."""
        goes_on = passes(frame) if not _internal(frame.f_code.co_filename) else None
        if goes_on is not None:
            self._seen.left_out[self._mark(frame).where] = None
        return goes_on

    def _mark(self, frame: FrameType | None) -> Mark:
        user: FrameType | None = None
        checkpoint: FrameType | None = None
        while frame is not None and frame.f_code is not self._root:
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            if file == _CHECKPOINT and name == "checkpoint":
                checkpoint = frame
            elif user is None and not _internal(file):
                user = frame
            frame = frame.f_back
        file, line, code = _place(user.f_code.co_filename, user.f_lineno) if user else ("", 0, "")
        mark = Mark(file, line, code, self._number(checkpoint), torch.is_grad_enabled(), self._autocast(), self._layer)
        if is_inside_functorch_grad():
            raise CaptureError("a gradient of torch.func cannot be captured", where=mark.where, hint="write the gradient as operators")
        return mark

    def _number(self, frame: FrameType | None) -> int | None:
        return None if frame is None else self._checkpoints.setdefault(id(frame), (len(self._checkpoints), frame))[0]

    def _autocast(self) -> str | None:
        if not torch.is_autocast_enabled(self._device):
            return None
        return str(torch.get_autocast_dtype(self._device)).removeprefix("torch.")

    def refuse(self, name: str, why: str) -> None:
        """Of a torch.autograd.Function that is called now: tracing goes through its forward and loses its backward, without a word."""
        mark = self._mark(sys._getframe(1))
        if mark.checkpoint is not None and name == "_NoopSaveInputs":  # how torch before 2.13 starts a non-reentrant checkpoint
            return
        if mark.checkpoint is not None and name == "CheckpointFunction":
            raise CaptureError(
                "a reentrant checkpoint cannot be captured: its gradients would be lost", where=mark.where, hint="pass use_reentrant=False"
            )
        raise CaptureError(
            f"the torch.autograd.Function {name} cannot be captured: {why}",
            where=mark.where,
            hint="write it with torch operators, or as a torch.library.custom_op with register_autograd",
        )


def _internal(file: str) -> bool:
    return file.startswith((TORCH, _HERE, _OPERATORS, "<frozen", "<string>", "<eval"))


def _place(file: str, line: int) -> tuple[str, int, str]:
    return file, line, linecache.getline(file, line).strip()


def trace(module: nn.Module, inputs: Inputs, device: torch.device, loss_fn: Callable[..., Tensor] | None, training: bool) -> Trace:
    """Export `module` for inputs like `inputs`, in the given mode, under the caller's autocast.

    A forward that sets attributes when it is called first (hooks that it installs, tables that it notes) is traced as it is from then on, if
    that is the same computation. One that goes on changing them is refused."""
    with _TRACING, _quiet(), _same_generators(device), same_module(module), _mode(module, training), _contexts():
        with _off_meta(module, device) as device:
            twins = inputs.empty_twins(device)
        program, seen = _export(module, inputs, twins, device, loss_fn)
        if seen.changes.names:
            names = seen.changes.names
            first, settled = _text(program), seen.changes.repeat(module)
            if settled:
                program, seen = _export(module, inputs, twins, device, loss_fn)
            if not settled or seen.changes.names or _text(program) != first:
                once = "" if settled else "if only the first call makes it, call the model once with the example inputs before; else "
                raise CaptureError(
                    f"forward changes {', '.join(names)}: a captured program would not",
                    where=type(module).__name__,
                    hint=once + KEEP,
                )
    for where in seen.left_out:
        warn(f"a check of values is not part of the captured program: {where}", CheckLeftOutWarning)
    return Trace(program, "module.", seen.places, seen.container, device)


def load_exporter() -> None:
    """Loads what torch only loads when it exports for the first time (0.2 s). Called before the process is copied, it is done once."""
    with _quiet():
        torch.export.export(nn.Identity(), (torch.zeros(1, device="cpu"),), strict=False)


def _export(
    module: nn.Module, inputs: Inputs, twins: Any, device: torch.device, loss_fn: Callable[..., Tensor] | None
) -> tuple[ExportedProgram, _Seen]:
    wrapper = _Traced(module, inputs, loss_fn, device)
    try:
        return torch.export.export(wrapper, twins, strict=False), wrapper.seen
    except HapError:
        raise
    except Exception as error:
        raise _explain(error, type(module).__name__) from error


def _text(program: ExportedProgram) -> list[str]:
    """All graphs of a program as text: equal for equal computations."""
    return [str(m.graph) for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]


@contextmanager
def _contexts() -> Iterator[None]:
    """Of torch: gradients, notes on nodes, and distributions that do not look at values."""
    with torch.enable_grad(), preserve_node_meta(), unvalidated():
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings and log lines of the exporter: what matters becomes an error. And no stack for every node, a tenth of its time: places are noted by
    `_Recorder`."""
    before = getattr(fx.config, "do_not_emit_stack_traces", False)
    fx.config.do_not_emit_stack_traces = True
    try:
        with quiet(), redirect_stderr(io.StringIO()):
            yield
    finally:
        fx.config.do_not_emit_stack_traces = before


@contextmanager
def _same_generators(device: torch.device) -> Iterator[None]:
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(state)


@contextmanager
def _off_meta(module: nn.Module, device: torch.device) -> Iterator[torch.device]:
    """For a module on `meta`: gives it fake tensors on a real kind of device, without memory, and makes such tensors inside; autocast does
    nothing on `meta`. (`_same_module` puts the old ones back.)"""
    if device.type != "meta":
        yield device
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        done: dict[int, Tensor] = {}
        for m in module.modules():
            for own in (m._parameters, m._buffers):
                for name, t in own.items():
                    if t is not None and id(t) not in done:
                        done[id(t)] = _on(t, device)
                    own[name] = None if t is None else done[id(t)]  # type: ignore[assignment]
        yield device


def _on(t: Tensor, device: torch.device) -> Tensor:
    """An empty tensor like a `meta` one."""
    new = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    return nn.Parameter(new, t.requires_grad) if isinstance(t, nn.Parameter) else new


@contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Train or eval mode; afterwards every submodule has its own flag again."""
    flags = [(m, m.training) for m in module.modules()]
    if training != module.training:
        module.train(training)
    try:
        yield
    finally:
        for m, flag in flags:
            m.training = flag


def _explain(error: BaseException, model: str) -> CaptureError:
    """A CaptureError with the user's line and what to change."""
    where, text = _user_line(error), str(error).strip()
    first = text.split("\n")[0]
    kind = type(error).__name__
    if "DataDependent" in kind or "data-dependent" in text or "DynamicOutputShape" in kind or "Unbacked" in text or InOneRow.__name__ in text:
        frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        if any(code.co_name == "_detect_is_causal_mask" for code in frames):
            told = "tgt_is_causal (mask_is_causal, is_causal) beside a mask, True or False"
            return CaptureError("nn.Transformer looks whether a mask is causal", where=where or model, hint=f"pass {told}")
        if any(code.co_filename.endswith("batchnorm.py") for code in frames):
            return CaptureError("batch norm with momentum=None reads how often it ran", where=where or model, hint="give it a momentum, such as 0.1")
        return CaptureError(
            "the computation depends on the values of a tensor",
            where=where or model,
            hint="use torch.where or a mask instead of Python's if, .item(), .tolist(), nonzero() or boolean indexing",
        )
    if "was assigned during export" in text or "were assigned during export" in text:
        return CaptureError(f"forward assigns a tensor to an attribute ({first})", where=where or model, hint="use register_buffer")
    for sign, what, hint in KNOWN_FAILURES:
        if sign in text or any(sign in file for file in _files(error)):
            return CaptureError(what, where=where or model, hint=hint)
    return CaptureError(
        f"tracing forward failed with {kind}: {first}", where=where or model, hint="does model(*example_inputs) run? If so, rewrite this line"
    )


# what a failure says, or a file of torch that it passes through; what is wrong in the user's words; what to do
KNOWN_FAILURES = (
    (".numpy() is not supported", "forward turns a tensor into a numpy array", "use torch operators: numpy's are not seen, nor differentiated"),
    (
        "fake tensor in the exported program constant",
        "forward changes a tensor through .data or an attribute",
        "use a registered buffer, or no .data",
    ),
    (ONE_ROW, f"{ONE_ROW}: where one ends depends on values", "pass rows, padded: (batch, longest target)"),
    ("a leaf Variable that requires grad is being used in an in-place", "forward changes a parameter in place", "use a new tensor, or a buffer"),
    (os.path.join("torch", "nested"), "nested tensors cannot be captured", "use a padded tensor and a mask"),
    ("_nested_", "nested tensors cannot be captured", "use a padded tensor and a mask"),
    (os.path.join("torch", "distributed"), "forward communicates itself (torch.distributed)", "pass the model as it is on one device"),
    ("no fake impl registered", "a custom operator has no fake implementation", "register one: my_op.register_fake"),
    ("torch.classes.quantized", "a quantized module cannot be captured", "train the module from before its quantization"),
)


def _files(error: BaseException) -> Iterator[str]:
    """Files that the failure passed through."""
    return (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))


def _user_line(error: BaseException) -> str:
    """file:line: code of the innermost frame that is the user's."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        inside = False
        found = ""
        for frame, line in traceback.walk_tb(current.__traceback__):
            inside = inside or frame.f_code is _Traced._call.__code__
            if inside and not _internal(frame.f_code.co_filename):
                file, number, code = _place(frame.f_code.co_filename, line)
                found = f"{file}:{number}: {code}"
        if found:
            return found
        current = current.__cause__ or current.__context__
    return ""
