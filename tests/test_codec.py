"""The JSON codec: exact round trips of everything a plan can hold, and one clear PlanError for everything else."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapx import codec
from hapx.cluster import ClusterSpec
from hapx.codec import CLASSES, decode, encode
from hapx.errors import PlanError
from hapx.ir import Container, Graph, Kind, MicroBatches, Node, OpCall, Output, Ref, Region, TensorRef, TorchConst
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
from hapx.restriction import AUTO, BASELINES
from hapx.rules import Probed, Rule, Site
from hapx.states import INVARIANT, PARTIAL, REPLICATED, Cut, Placement, Property, Row, Sharded

SPEC = Path(__file__).parents[1] / "cluster_specs"
ROW = Row("compute", 0, 0)
CUT = Cut(ROW, 8)
KEY = ProgramKey("train", ((8, 4),))


def small_plan(repetitions: int = 1) -> Plan:
    """y = sum(relu(x @ w)), `repetitions` times, on two unequal devices: every class of data occurs once."""
    x = TensorRef("x", (8, 4), "float32", Kind.INPUT, False)
    w = TensorRef("w", (4, 4), "float32", Kind.PARAMETER, True)
    values = [TensorRef(f"v{i}", (8, 4), "float32", Kind.VALUE, True) for i in range(repetitions)]
    loss = TensorRef("loss", (), "float32", Kind.VALUE, True)
    names = ["x", *(v.name for v in values)]
    nodes = [
        Node(OpCall("aten.mm.default", (("self", Ref(a)), ("mat2", Ref("w")))), (v,), "block", "m.py:3: x @ w", (0,))
        for a, v in zip(names, values, strict=False)
    ]
    total = OpCall("aten.sum.default", (("self", Ref(names[-1])), ("dtype", TorchConst("dtype", "float32")), ("scale", math.inf), ("keep", False)))
    nodes.append(Node(total, (loss,), "", "m.py:4: .sum()", (None,)))
    graph = Graph(
        refs={t.name: t for t in (x, w, *values, loss)}, nodes=tuple(nodes), outputs=(Output("loss", "loss"),),
        regions=(Region("autocast", 0, 1, (("dtype", TorchConst("dtype", "bfloat16")),)),), tied=(("w", "head.w"),), segment_of=(0,) * len(nodes),
        block_of=(*((0, i) for i in range(repetitions)), None), input_names=("x",), batch=8, mode="train",
        constants={"c": (1, 2.5, True)}, hash="abc",
        returns=Container("tuple", (("0", Ref("")), ("1", None))),
        probed=(Probed("mylib.twist.default", (0,), (Rule((Site(0),), (PARTIAL,)),), "a note"),),
        micro_batches=MicroBatches(2, ("x",), None, (), (("aten.mm.default", "m.py:3"),)),
    )  # fmt: skip
    shard, whole = Placement((Sharded(0, 1, 1, CUT),)), Placement((REPLICATED,))
    instructions = [
        Instruction(
            Triple(None, (Property("x", whole),), (Property("x", shard),), (Communication(0, REPLICATED, shard.states[0], Form.NONE, False),))
        )
    ]
    for i, node in enumerate(graph.nodes[:-1]):
        pre = (Property(names[i], shard), Property("w", whole))
        instructions.append(Instruction(Triple(i, pre, (Property(names[i + 1], shard),), node.call, (CUT,)), remat=None))
    partial = Placement((PARTIAL,))
    local = total.replace(scale=(
            LocalShape((8, 4), shard), LocalSize(8, shard), LocalOffset(0, shard), LocalIndices((8, 4), shard), LocalBlock(0, shard), Axes((0,))
        ))  # fmt: skip
    instructions.append(Instruction(Triple(len(nodes) - 1, (Property(names[-1], shard),), (Property("loss", partial),), local, (CUT,)), remat=1))
    reduce = Communication(0, PARTIAL, INVARIANT, Form.PADDED, True)
    done = Property("loss", Placement((INVARIANT,)))
    instructions.append(Instruction(Triple(None, (Property("loss", partial),), (done,), (reduce,))))
    mesh = Mesh("flat", (Axis("devices", 2, "devices"),), (0, 1), 0)
    needs = (Property("x", whole), Property("w", Placement((INVARIANT,), nest=(0,))))
    program = Program(KEY, mesh, tuple(instructions), needs, (done,))
    stage = Stage((0, 1), {KEY: (0, 1)}, mesh, {ROW: (0.75, 0.25)}, {KEY: {CUT: (6, 2)}}, {KEY: program})
    return Plan(
        version=VERSION, graphs={KEY: graph}, cluster=ClusterSpec.load(SPEC / "rtx4090_rtx3060.yaml"), restriction=AUTO,
        storage=(Storage("w", ("head.w",), (Copy(0, Placement((INVARIANT,))),)),), stages=(stage,),
        schedules={KEY: Schedule("1f1b", (4, 4), ((Action("forward", 0, 0),), (Action("send", 0, 0, 1),)))},
        iteration_time=1e-3, memory=(10, 20), shares=(0.75, 0.25), precision="fp32", optimizer="adamw",
        statistics={"search_time": 0.5, "tried": [1, None]},
    )  # fmt: skip


def test_every_class_of_the_registry_occurs_and_round_trips() -> None:
    plan = small_plan()
    data = json.loads(json.dumps(encode(plan)))
    seen = {entry["$class"] for entry in data["table"]}
    assert set(CLASSES) - seen == {"Device"}  # derived from the machines, never stored
    again = decode(data, Plan)
    assert again == plan
    assert again.statistics == plan.statistics
    assert list(again.stages[0].programs) == [KEY]
    assert again.first == KEY
    assert encode(again) == encode(plan)


def test_every_dataclass_of_the_data_modules_is_registered() -> None:
    from dataclasses import is_dataclass
    from enum import Enum
    from importlib import import_module

    from hapx import ir, restriction, states
    from hapx.cluster import spec

    plan = import_module("hapx.plan")  # `hapx.plan` is the public function

    for module in (ir, plan, restriction, states, spec):
        for name, cls in vars(module).items():
            if isinstance(cls, type) and cls.__module__ == module.__name__ and (is_dataclass(cls) or issubclass(cls, Enum)):
                assert CLASSES.get(name) is cls


@pytest.mark.parametrize("name", list(BASELINES))
def test_restrictions(name: str) -> None:
    assert decode(json.loads(json.dumps(encode(BASELINES[name])))) == BASELINES[name]


@pytest.mark.parametrize("path", sorted(SPEC.glob("*.yaml")), ids=lambda p: p.stem)
def test_clusters(path: Path) -> None:
    spec = ClusterSpec.load(path)
    assert decode(json.loads(json.dumps(encode(spec))), ClusterSpec) == spec


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.just("$")
LEAVES = SCALARS | st.sampled_from([ROW, CUT, KEY, Kind.INPUT, Form.PADDED, Placement((REPLICATED,)), Ref("x"), TorchConst("dtype", "int64")])
HASHABLE = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3), max_leaves=6)
VALUES = st.recursive(
    HASHABLE,
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(HASHABLE, inner, max_size=3),
    max_leaves=8,
)


def types_of(value: Any) -> Any:
    """The types all the way down: == does not tell 1 from 1.0 from True."""
    if isinstance(value, dict):
        return [(types_of(k), types_of(v)) for k, v in value.items()]
    if isinstance(value, frozenset):
        return sorted(map(repr, map(types_of, value)))
    return (type(value), [types_of(v) for v in value]) if isinstance(value, list | tuple) else type(value)


@given(VALUES)
def test_values_round_trip_with_their_types(value: Any) -> None:
    again = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert again == value
    assert types_of(again) == types_of(value)


def test_numbers_json_cannot_say() -> None:
    again = decode(json.loads(json.dumps(encode((math.inf, -math.inf, math.nan)), allow_nan=False)))
    assert again[:2] == (math.inf, -math.inf)
    assert math.isnan(again[2])
    turns = (1 + 2j, -0.5j, complex(0.0, math.inf))
    again = decode(json.loads(json.dumps(encode(turns), allow_nan=False)))
    assert again == turns
    assert types_of(again) == types_of(turns)


def test_one_and_one_point_zero_stay_apart() -> None:
    calls = tuple(OpCall("aten.add.Tensor", (("alpha", a),)) for a in (1, 1.0, True))
    assert [type(c["alpha"]) for c in decode(encode(calls))] == [int, float, bool]


def test_equal_objects_are_one_entry_and_stay_one_object() -> None:
    placements = tuple(Placement((Sharded(0, 1, 1, Cut(Row("compute", 0, 0), 8)),)) for _ in range(50))
    data = encode(placements)
    assert len(data["table"]) == 4
    again = decode(data)
    assert all(p is again[0] for p in again)


def test_order_of_mappings_is_kept() -> None:
    assert list(decode(encode({"b": 1, "a": 2}))) == ["b", "a"]
    assert list(decode(encode({CUT: 1, ROW: 2}))) == [CUT, ROW]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (object(), "root: builtins.object is not data"),
        ((1, {"a": {3}}), r"root\[1\]\.a: builtins.set"),
        (OpCall("t", (("x", np.int64(3)),)), r"root\.args\[0\]\[1\]: numpy.int64"),
        (replace(small_plan(), memory=(1, b"2")), r"root\.memory\[1\]: builtins.bytes"),  # type: ignore[arg-type]
    ],
)
def test_what_is_not_data_is_refused(value: Any, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        encode(value)


def entry(data: dict[str, Any], name: str, field: str | None = None) -> dict[str, Any]:
    return next(e for e in data["table"] if e["$class"] == name and (field is None or field in e))


def setter(name: str, field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: entry(data, name).__setitem__(field, value)


DAMAGE: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (setter("Row", "kind", "fast"), r"table\[\d+\] \(Row\)\.kind: is 'fast'; allowed: 'compute', 'storage', 'even'"),
    (setter("Row", "axis", "0"), r"\(Row\)\.axis: is '0'; allowed: int"),
    (setter("Row", "axis", True), r"\(Row\)\.axis: is True; allowed: int"),
    (setter("Row", "axis", 0.0), r"\(Row\)\.axis: is 0\.0; allowed: int"),
    (setter("Cut", "row", 3), r"\(Cut\)\.row: is 3; allowed: Row"),
    (setter("Placement", "states", [3]), r"\(Placement\)\.states: is \(3,\); allowed: tuple"),
    (setter("Placement", "states", {"$list": []}), r"\(Placement\)\.states: is \[\]; allowed: tuple"),
    (setter("Form", "value", "broken"), r"\(Form\)\.value: is 'broken'; allowed: 'none', 'padded'"),
    (setter("TensorRef", "shape", [8, None]), r"\(TensorRef\)\.shape: is \(8, None\); allowed: tuple\[int, \.\.\.\]"),
    (setter("TensorRef", "kind", "input"), r"\(TensorRef\)\.kind: is 'input'; allowed: Kind"),
    (setter("Graph", "nodes", [None]), r"\(Graph\)\.nodes"),
    (setter("Graph", "mode", "test"), r"\(Graph\)\.mode: is 'test'; allowed: 'train', 'eval'"),
    (setter("Plan", "memory", [1, "2"]), r"\(Plan\)\.memory: is \(1, '2'\)"),
    (setter("Plan", "schedules", 0), r"\(Plan\)\.schedules: is 0"),
    (setter("Stage", "shares", {"a": [1.0]}), r"\(Stage\)\.shares"),
    (setter("Stage", "nodes", [0]), r"\(Stage\)\.nodes: is \(0,\)"),
    (setter("Row", "speed", 1), r"table\[\d+\] \(Row\): unknown field 'speed'; allowed: kind, segment, axis"),
    (lambda d: entry(d, "Row").pop("axis"), r"\(Row\): missing field 'axis'"),
    (setter("Row", "$class", "Rows"), r"table\[\d+\]: unknown class 'Rows'; allowed: \d+ classes: Row"),
    (setter("Row", "$class", "os.system"), "unknown class 'os.system'"),
    (setter("Row", "$class", ["Row"]), "unknown class"),
    (lambda d: entry(d, "Row").pop("$class"), "unknown class None"),
    (setter("Cut", "row", {"$": 10**6}), r"\(Cut\)\.row: refers to entry 1000000; allowed: a whole number below"),
    (setter("Cut", "row", {"$": -1}), "refers to entry -1"),
    (setter("Cut", "row", {"$": True}), "refers to entry True"),
    (setter("Cut", "row", {"$pickle": ""}), r"unknown tag in \{'\$pickle': ''\}; allowed: \$"),
    (setter("Cut", "row", {"$": 0, "x": 1}), "unknown tag"),
    (setter("Plan", "shares", [{"$float": "1.0"}, 0.5]), r"is '1\.0'; allowed: inf, -inf, nan"),
    (setter("Plan", "shares", [{"$complex": [1.0]}, 0.5]), r"is \[1\.0\]; allowed: the real and the imaginary part"),
    (setter("Stage", "shares", {"$map": [[1]]}), r"\.shares\[0\]: 1 values; allowed: a key and a value"),
    (setter("Stage", "shares", {"$map": [[{"$list": []}, 1]]}), "cannot be a key"),
    (setter("Stage", "shares", {"$map": {}}), "a JSON list"),
    (setter("Plan", "statistics", {"$map": [["a", 1], ["a", 2]]}), "duplicate key 'a'"),
    (setter("Restriction", "forms", {"$set": [1]}), r"\(Restriction\)\.forms"),
    (setter("Plan", "iteration_time", float("nan")), "nan is not a JSON value"),
    (lambda d: d.update(root={"$": 0}), r"root: is .*; allowed: Plan"),
    (lambda d: d.update(root={"$": 10**6}), "root: refers to entry"),
    (lambda d: d.update(more=1), r"\$: not encoded data"),
    (lambda d: d.update(table={}), r"\$: not encoded data"),
    (lambda d: d["table"].__setitem__(0, 3), r"table\[0\]: is 3; allowed: a JSON object"),
    (lambda d: d["table"].reverse(), "refers to entry"),
]


@pytest.mark.parametrize(("damage", "told"), DAMAGE, ids=[re.sub(r"[^\w ]", "", told)[:40] for _, told in DAMAGE])
def test_damaged_data_is_one_clear_error(damage: Callable[[dict[str, Any]], Any], told: str) -> None:
    data = copy.deepcopy(ENCODED)
    damage(data)
    with pytest.raises(PlanError, match=told):
        decode(data, Plan)


ENCODED = json.loads(json.dumps(encode(small_plan())))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 60) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["$", "$map", "$set", "$class", "$list", "a"]), inner, max_size=2),
    max_leaves=4,
)


@given(data=st.data(), value=JSON)
def test_no_damage_ends_in_another_error(data: st.DataObject, value: Any) -> None:
    damaged = copy.deepcopy(ENCODED)
    chosen = data.draw(st.sampled_from(damaged["table"]))
    chosen[data.draw(st.sampled_from(sorted(chosen)))] = value
    try:
        assert isinstance(decode(damaged, Plan), Plan)
    except PlanError as error:
        assert error.where


def test_deep_nesting_is_an_error() -> None:
    value: Any = 1
    for _ in range(100_000):
        value = [value]
    with pytest.raises(PlanError, match="nested too deeply"):
        decode({"table": [], "root": value})


def test_file_round_trip(tmp_path: Path) -> None:
    plan, path = small_plan(), tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert Plan.load(str(path)).digest == plan.digest
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    data = json.loads(path.read_text())
    assert (data["format"], data["version"]) == ("hapx-plan", VERSION)
    path.write_text(json.dumps(data, indent=1))  # laid out otherwise, the same content
    assert Plan.load(path) == plan


def test_digest_ignores_statistics_only() -> None:
    plan = small_plan()
    assert replace(plan, statistics={"search_time": 9.0}).digest == plan.digest
    assert replace(plan, optimizer="sgd").digest != plan.digest
    assert small_plan().digest == plan.digest


def damaged_file(path: Path, change: Callable[[dict[str, Any]], Any], rehash: bool = False) -> None:
    small_plan().save(path)
    data = json.loads(path.read_text())
    change(data)
    if rehash:
        data["sha256"] = codec._content_hash(data["content"])
    path.write_text(json.dumps(data))


def test_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    damaged_file(path, lambda d: entry(d["content"], "Cut").update(units=9))
    with pytest.raises(PlanError, match=r"plan\.json: the content does not match its sha256; the file is damaged"):
        Plan.load(path)
    damaged_file(path, lambda d: entry(d["content"], "Cut").update(units="9"), rehash=True)
    with pytest.raises(PlanError, match=r"plan\.json: table\[\d+\] \(Cut\)\.units: is '9'; allowed: int"):
        Plan.load(path)
    damaged_file(path, lambda d: d.update(version=99))
    with pytest.raises(PlanError, match=r"has version 99; allowed: version 2; plan again"):
        Plan.load(path)
    damaged_file(path, lambda d: entry(d["content"], "Plan").update(version=1), rehash=True)
    with pytest.raises(PlanError, match="holds a plan of version 1"):
        Plan.load(path)
    damaged_file(path, lambda d: d.pop("content"))
    with pytest.raises(PlanError, match="does not match its sha256"):
        Plan.load(path)
    damaged_file(path, lambda d: d.pop("format"))
    with pytest.raises(PlanError, match="not a plan file"):
        Plan.load(path)


def test_files_that_are_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(PlanError, match=r"cannot be read: No such file"):
        Plan.load(path)
    small_plan().save(path)
    text = path.read_text()
    for cut in (0, 1, len(text) // 2, len(text) - 2):
        path.write_text(text[:cut])
        with pytest.raises(PlanError, match="not JSON"):
            Plan.load(path)
    path.write_bytes(b"\x80\x04pickle")
    with pytest.raises(PlanError, match="not JSON"):
        Plan.load(path)
    path.write_text("[" * 200_000)
    with pytest.raises(PlanError, match="not JSON"):
        Plan.load(path)
    path.write_text("[]")
    with pytest.raises(PlanError, match="not a plan file"):
        Plan.load(path)


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    small_plan().save(path)
    before = path.read_text()
    with pytest.raises(PlanError, match="not data of a plan"):
        replace(small_plan(), statistics={"x": object()}).save(path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(PlanError, match="cannot be written"):
        small_plan().save(tmp_path / "folder")
    with pytest.raises(PlanError, match="cannot be written"):
        small_plan().save(tmp_path / "none" / "plan.json")
    assert path.read_text() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "plan.json"]


def test_repetitions_cost_little(tmp_path: Path) -> None:
    """Interning: 400 layers take one entry per node, instruction and name, and not one per placement."""
    plan = small_plan(400)
    data = encode(plan)
    classes = [e["$class"] for e in data["table"]]
    assert classes.count("Placement") <= 6
    assert classes.count("Sharded") == 1
    assert decode(data, Plan) == plan
