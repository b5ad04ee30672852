"""Plans as JSON, strictly: `encode` and `decode` are inverse on the project's frozen data, and nothing else passes.

In: objects made of the classes in `CLASSES`, None, bool, int, float, complex, str, tuples, lists, frozensets, mappings. Out: JSON values

    {"table": [{"$class": "Row", "kind": "compute", ...}, ...], "root": {"$": 7}}

Each different object (or enum member) is one entry of the table and is referred to by number, {"$": 7}; entries come after those they
refer to, so there are no cycles and one pass decodes them. A GPT-2 plan has some 100 000 small objects, nearly all repetitions.
JSON lists are tuples, {"$list": []} are lists, {"$set": []} frozensets, {"$map": [[k, v]]} mappings with keys that are not text (or
look like tags), {"$float": "inf"} and {"$complex": [1.0, 2.0]} what JSON cannot say. Invariant: decode(encode(x)) == x, with the same types, and
every field has a value of its annotated type; whatever else is in a file is a PlanError that names the path. No pickle, no eval, no import by name.

A file adds a format, a version and the sha256 of its content. The hash finds damage, not malice: `Plan.verify` proves plans.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from uuid import uuid4

from hapx import ir, restriction, rules, states
from hapx.cluster import spec
from hapx.errors import PlanError
from hapx.plan import (
    VERSION,
    Action,
    Axes,
    Axis,
    Communication,
    Copy,
    Form,
    Instruction,
    LocalBlock,
    LocalIndices,
    LocalOffset,
    LocalShape,
    LocalSize,
    Mesh,
    Plan,
    Program,
    ProgramKey,
    Schedule,
    Stage,
    Storage,
    Triple,
)

FORMAT = "hapx-plan"

CLASSES: Mapping[str, type[Any]] = {
    c.__name__: c
    for c in (
        states.Row, states.Cut, states.Replicated, states.Invariant, states.Partial, states.Sharded, states.Placement, states.Property,
        ir.Kind, ir.TensorRef, ir.Ref, ir.TorchConst, ir.OpCall, ir.Node, ir.Region, ir.Output, ir.Container, rules.Site, rules.Rule, rules.Probed,
        ir.MicroBatches, ir.Graph,
        spec.Link, spec.DeviceType, spec.Machine, spec.Device, spec.ClusterSpec, restriction.Restriction,
        Axis, Mesh, Form, Communication, LocalShape, LocalSize, LocalOffset, LocalIndices, LocalBlock, Axes,
        Triple, Instruction, ProgramKey, Program, Copy, Storage, Stage, Action,
        Schedule, Plan,
    )
}  # fmt: skip

Check = Callable[[Any], bool]


# ---- encode ----------------------------------------------------------------------------------------------------------


def encode(obj: Any) -> dict[str, Any]:
    """JSON values for `obj`. Raises PlanError, naming the path, for an object that is not the project's data."""
    encoder = _Encoder()
    root = encoder.value(obj, "root")
    return {"table": encoder.table, "root": root}


class _Encoder:
    def __init__(self) -> None:
        self.table: list[dict[str, Any]] = []
        self.by_id: dict[int, int] = {}  # objects seen; all of them live as long as the root
        self.by_text: dict[str, int] = {}  # equal content, whatever Python's == says of 1 and 1.0

    def value(self, v: Any, path: str) -> Any:
        kind = type(v)
        if v is None or kind is bool or kind is str or kind is int:
            return v
        if isinstance(v, float):  # numpy's float64 is one
            return float(v) if math.isfinite(v) else {"$float": repr(float(v))}
        if kind is complex:
            return {"$complex": [self.value(x, path) for x in (v.real, v.imag)]}
        if kind is tuple:
            return [self.value(x, f"{path}[{i}]") for i, x in enumerate(v)]
        if CLASSES.get(kind.__name__) is kind:
            return {"$": self.entry(v, path)}
        if kind is list:
            return {"$list": [self.value(x, f"{path}[{i}]") for i, x in enumerate(v)]}
        if kind is frozenset:
            return {"$set": sorted((self.value(x, path) for x in v), key=_text)}
        if isinstance(v, Mapping):
            if all(type(k) is str and not k.startswith("$") for k in v):
                return {k: self.value(x, f"{path}.{k}") for k, x in v.items()}
            return {"$map": [[self.value(k, f"{path} key"), self.value(x, f"{path}[{k}]")] for k, x in v.items()]}
        raise PlanError(
            f"{kind.__module__}.{kind.__qualname__} is not data of a plan", where=path, allowed="classes of hapx.codec.CLASSES and plain values"
        )

    def entry(self, obj: Any, path: str) -> int:
        found = self.by_id.get(id(obj))
        if found is not None:
            return found
        name = type(obj).__name__
        if isinstance(obj, Enum):
            entry = {"$class": name, "value": obj.value}
        else:
            entry = {"$class": name} | {f: self.value(getattr(obj, f), f"{path}.{f}") for f in _schema(name)}
        number = self.by_text.setdefault(_text(entry), len(self.table))
        if number == len(self.table):
            self.table.append(entry)
        self.by_id[id(obj)] = number
        return number


def _text(value: Any) -> str:
    """Canonical JSON. The order of mappings is kept: it has a meaning (the first program is the one for training)."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


# ---- decode ----------------------------------------------------------------------------------------------------------


def decode(data: Any, expected_type: Any = None) -> Any:
    """The object of `encode`'s JSON values. `expected_type`: an annotation the root must satisfy. Raises PlanError."""
    if not isinstance(data, dict) or set(data) != {"table", "root"} or not isinstance(data["table"], list):
        raise PlanError("not encoded data", where="$", allowed='{"table": [...], "root": ...}')
    decoder = _Decoder()
    try:
        for number, entry in enumerate(data["table"]):
            decoder.objects.append(decoder.entry(entry, number))
        root = decoder.value(data["root"], "root")
    except RecursionError:
        raise PlanError("nested too deeply", where="$") from None
    if expected_type is not None and not _check(expected_type)(root):
        raise PlanError(f"is {_shown(root)}", where="root", allowed=_name(expected_type))
    return root


class _Decoder:
    def __init__(self) -> None:
        self.objects: list[Any] = []

    def value(self, v: Any, path: str) -> Any:
        kind = type(v)
        if kind is dict:
            return self.tagged(v, path)
        if kind is list:
            return tuple([self.value(x, path) for x in v])
        if v is None or kind is str or kind is int or kind is bool or (kind is float and math.isfinite(v)):
            return v
        raise PlanError(f"{v!r} is not a JSON value", where=path)

    def tagged(self, v: dict[str, Any], path: str) -> Any:
        number = v.get("$")
        if number is not None and len(v) == 1:
            if type(number) is not int or not 0 <= number < len(self.objects):
                raise PlanError(f"refers to entry {number!r}", where=path, allowed=f"a whole number below {len(self.objects)}, an earlier entry")
            return self.objects[number]
        tags = [k for k in v if k.startswith("$")]
        if not tags:
            return {k: self.value(x, f"{path}.{k}") for k, x in v.items()}
        if len(v) != 1 or tags[0] not in _TAGS:
            raise PlanError(f"unknown tag in {_shown(v)}", where=path, allowed=", ".join(("$", *_TAGS)))
        return _TAGS[tags[0]](self, v[tags[0]], path)

    def as_list(self, v: Any, path: str) -> list[Any]:
        return [self.value(x, path) for x in _expect(v, list, path)]

    def as_set(self, v: Any, path: str) -> frozenset[Any]:
        return frozenset(self.hashable(x, path) for x in _expect(v, list, path))

    def as_map(self, v: Any, path: str) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for i, pair in enumerate(_expect(v, list, path)):
            if len(_expect(pair, list, f"{path}[{i}]")) != 2:
                raise PlanError(f"{len(pair)} values", where=f"{path}[{i}]", allowed="a key and a value")
            key = self.hashable(pair[0], f"{path}[{i}]")
            if key in result:
                raise PlanError(f"duplicate key {_shown(key)}", where=f"{path}[{i}]", allowed="each key once")
            result[key] = self.value(pair[1], f"{path}[{i}]")
        return result

    def as_float(self, v: Any, path: str) -> float:
        if v not in ("inf", "-inf", "nan"):
            raise PlanError(f"is {_shown(v)}", where=path, allowed="inf, -inf, nan")
        return float(v)

    def as_complex(self, v: Any, path: str) -> complex:
        parts = [self.value(x, path) for x in _expect(v, list, path)]
        if len(parts) != 2 or any(type(x) is not float for x in parts):
            raise PlanError(f"is {_shown(v)}", where=path, allowed="the real and the imaginary part")
        return complex(*parts)

    def hashable(self, v: Any, path: str) -> Any:
        value = self.value(v, path)
        try:
            hash(value)
        except TypeError:
            raise PlanError(f"{_shown(value)} cannot be a key or a member of a set", where=path) from None
        return value

    def entry(self, entry: Any, number: int) -> Any:
        path = f"table[{number}]"
        name = _expect(entry, dict, path).get("$class")
        if not isinstance(name, str) or name not in CLASSES:
            raise PlanError(f"unknown class {_shown(name)}", where=path, allowed=f"{len(CLASSES)} classes: {', '.join(CLASSES)}")
        path = f"{path} ({name})"
        schema, cls = _schema(name), CLASSES[name]
        unknown, missing = [k for k in entry if k != "$class" and k not in schema], [k for k in schema if k not in entry]
        if unknown:
            raise PlanError(f"unknown field {unknown[0]!r}", where=path, allowed=", ".join(schema) or "no fields")
        if missing:
            raise PlanError(f"missing field {missing[0]!r}", where=path, allowed=", ".join(schema))
        values = []
        for field, (annotation, check) in schema.items():
            value = self.value(entry[field], f"{path}.{field}")
            if not check(value):
                raise PlanError(f"is {_shown(value)}", where=f"{path}.{field}", allowed=_name(annotation))
            values.append(value)
        return cls(*values)


_TAGS: Mapping[str, Callable[[_Decoder, Any, str], Any]] = {
    "$list": _Decoder.as_list,
    "$set": _Decoder.as_set,
    "$map": _Decoder.as_map,
    "$float": _Decoder.as_float,
    "$complex": _Decoder.as_complex,
}


def _expect(v: Any, kind: type[Any], path: str) -> Any:
    if type(v) is not kind:
        raise PlanError(f"is {_shown(v)}", where=path, allowed="a JSON list" if kind is list else "a JSON object")
    return v


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# ---- types of fields -------------------------------------------------------------------------------------------------


@cache
def _schema(name: str) -> Mapping[str, tuple[Any, Check]]:
    """Per field of a class, in the order of its constructor: annotation and check. Enums have the one field `value`."""
    cls = CLASSES[name]
    if issubclass(cls, Enum):
        values = Literal[tuple(m.value for m in cls)]  # type: ignore[valid-type]
        return {"value": (values, _check(values))}
    hints = get_type_hints(cls)
    return {f.name: (hints[f.name], _check(hints[f.name])) for f in fields(cls)}


def _check(annotation: Any) -> Check:
    """A predicate for an annotation. A float field takes an int; a bool is neither int nor float; 1 and 1.0 are not alike in a Literal."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return lambda v: True
    if annotation is None or annotation is NoneType:
        return lambda v: v is None
    if annotation is float:
        return lambda v: type(v) is float or type(v) is int
    if origin is Literal:
        allowed = frozenset((type(a), a) for a in args)
        return lambda v: isinstance(v, str | int) and (type(v), v) in allowed
    if origin in (Union, UnionType):
        return _check_union(args)
    if origin is tuple:
        return _check_tuple(args)
    if origin in (frozenset, list):
        member, container = _check(args[0]), origin
        return lambda v: type(v) is container and all(map(member, v))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, value = map(_check, args)
        return lambda v: isinstance(v, Mapping) and all(map(key, v)) and all(map(value, v.values()))
    assert annotation in (bool, int, complex, str, tuple, list, dict) or is_dataclass(annotation) or issubclass(annotation, Enum), annotation
    return lambda v: type(v) is annotation


def _check_union(args: tuple[Any, ...]) -> Check:
    options = tuple(map(_check, args))
    return lambda v: any(option(v) for option in options)


def _check_tuple(args: tuple[Any, ...]) -> Check:
    if len(args) == 2 and args[1] is Ellipsis:
        member = _check(args[0])
        return lambda v: type(v) is tuple and all(map(member, v))
    members = tuple(map(_check, args))
    return lambda v: type(v) is tuple and len(v) == len(members) and all(check(x) for check, x in zip(members, v, strict=True))


def _name(annotation: Any) -> str:
    """An annotation as people read it: tuple[int, ...] | None."""
    if get_origin(annotation) is Literal:
        return ", ".join(map(repr, get_args(annotation)))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(map(_name, get_args(annotation)))
    if annotation is NoneType:
        return "null"
    if get_origin(annotation) is None and isinstance(annotation, type):
        return annotation.__name__
    return str(annotation).replace("typing.", "").replace("collections.abc.", "").replace("hapx.", "")


# ---- files -----------------------------------------------------------------------------------------------------------


def digest(value: Plan) -> str:
    """sha256 of a plan without its statistics, which differ from run to run: equal plans have equal digests."""
    return _sha256(_text(encode(replace(value, statistics={}))))


def save(value: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a plan; a reader sees the old file or the new one, never half of it."""
    target = Path(path)
    content = _text(encode(value))
    head = _text({"format": FORMAT, "version": value.version, "sha256": _sha256(content)})
    text = f'{head[:-1]},"content":{content}}}\n'
    temporary = target.with_name(f".{target.name}.{uuid4().hex}.tmp")
    try:
        try:
            with open(temporary, "x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)  # only left where something failed
    except OSError as error:
        raise PlanError(f"cannot be written: {error.strerror or error}", where=str(target)) from None


def load(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan. Raises PlanError for a file that cannot be read, is damaged, or is of another version."""
    where = str(path)
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"cannot be read: {error.strerror or error}", where=where, allowed="the path of a plan file") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"not JSON: {error}", where=where, hint="the file is damaged or not a plan; plan again") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanError("not a plan file", where=where, allowed="a file that Plan.save wrote")
    if data.get("version") != VERSION:
        raise PlanError(f"has version {_shown(data.get('version'))}", where=where, allowed=f"version {VERSION}", hint="plan again with this hapx")
    if "content" not in data or data.get("sha256") != _content_hash(data["content"]):
        raise PlanError("the content does not match its sha256", where=where, hint="the file is damaged; plan again")
    try:
        result: Plan = decode(data["content"], Plan)
    except PlanError as error:
        raise PlanError(error.what, where=f"{where}: {error.where}", allowed=error.allowed, hint=error.hint) from None
    if result.version != VERSION:
        raise PlanError(f"holds a plan of version {result.version}", where=where, allowed=f"version {VERSION}")
    return result


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _content_hash(content: Any) -> str | None:
    """The hash that `save` wrote for this content, however the file is laid out; None for what it cannot have written."""
    try:
        return _sha256(_text(content))
    except ValueError:  # NaN
        return None
