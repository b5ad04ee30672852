"""Whether a model needs more memory than a cluster has as one program of the whole batch: a quick look before a long search.

In: a setting. Out: yes, or nothing known. A search that ends with "nothing fits" takes longer than one that finds something.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hapx.cost.memory import states_of
from hapx.cost.model import CostModel
from hapx.cost.remat import with_blocks
from hapx.planner import views
from hapx.setting import Setting
from hapx.synth.domain import Synthesis
from hapx.synth.problem import build
from hapx.theory.derive import derive


def lacks_memory(setting: Setting) -> bool:
    """Whether the least bytes that every step keeps, with blocks computed again, added up and dealt out evenly, are more than there is. That is a
    sum: in rare cases a program's peak, which decides, is less. False says nothing."""
    graph, cluster, rule = setting.graph, setting.cluster, setting.rule
    there = sum(cluster.type_of(d).memory for d in range(cluster.num_devices))
    if sum(ref.bytes for ref in graph.refs.values()) * (1 + states_of(setting.optimizer)) < there:
        return False
    graph = with_blocks(graph) if rule.remat != "none" and graph.mode == "train" else graph
    theory = derive(graph, views(cluster, replace(rule, mesh="flat"))[0])
    costs = CostModel(theory, cluster, setting.precision, setting.optimizer, setting.key.mode)
    problem = build(theory, costs, rule)
    # no shares leave the fullest device less than even ones would leave each, if all had the same memory
    even, mean = np.full(len(costs.sizes), 1.0 / sum(costs.sizes)), (costs.capacity * costs.sizes).sum() / sum(costs.sizes)
    shares = dict.fromkeys((cut for cut in problem.cuts if cut.row.kind != "even"), even)
    return Synthesis(problem, shares, tuple([mean] * len(even))).start() is None
