"""Where workers go: conditions by label, preferences by strategy, room counted as it will be."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.pools.config import PlacementSettings, Strategy
from coordinator.pools.placement import Node, Placed, choose
from coordinator.routing.views import Role
from protos.ids import WorkerId

NEEDS = {"GPU": 1.0}


def node(name: str, gpus: float = 8.0, *, free: float | None = None, **labels: str) -> Node:
    return Node(node_id=name, address=name, labels=labels, total={"GPU": gpus}, free={"GPU": gpus if free is None else free})


def placed(worker: str, on: str) -> Placed:
    pool = worker.rpartition("-")[0]
    return Placed(worker_id=WorkerId(worker), pool=pool, role=Role(pool), node_id=on, needs=NEEDS)


def fill(pools: Sequence[str], nodes: Sequence[Node], strategy: Strategy, **rules: object) -> dict[str, str]:
    """Place one worker after the other; the node of each."""
    settings = PlacementSettings.model_validate({"strategy": strategy, **rules})
    there: list[Placed] = []
    for number, pool in enumerate(pools):
        choice = choose(pool, Role(pool), NEEDS, nodes, there, settings)
        if choice.node is not None:
            there.append(placed(f"{pool}-{number}", choice.node.node_id))
    return {worker.worker_id: worker.node_id for worker in there}


PAIRS = ["prefill", "prefill", "decode", "decode"]


def test_spread_puts_a_pool_on_as_many_nodes_as_there_are_and_pools_beside_each_other_last() -> None:
    assert list(fill(["prefill", "decode"], [node("a"), node("b")], "spread").values()) == ["a", "b"]
    homes = fill(PAIRS, [node("a"), node("b")], "spread")
    assert sorted(homes[w] for w in ("prefill-0", "prefill-1")) == ["a", "b"]
    assert sorted(homes[w] for w in ("decode-2", "decode-3")) == ["a", "b"]


def test_same_host_makes_pairs() -> None:
    homes = fill(PAIRS, [node("a", 2), node("b", 2), node("c", 2)], "same_host")
    assert {homes["prefill-0"], homes["prefill-1"]} == {homes["decode-2"], homes["decode-3"]}
    assert homes["prefill-0"] != homes["prefill-1"], "each beside an accelerator for its partner"


def test_same_rack_makes_pairs_of_racks_and_a_node_without_the_label_is_a_rack_of_its_own() -> None:
    nodes = [node("a", 1, rack="1"), node("b", 1, rack="2"), node("c", 1, rack="1"), node("d", 1)]
    homes = fill(["prefill", "decode"], nodes, "same_rack", rack_label="rack")
    assert homes == {"prefill-0": "a", "decode-1": "c"}


def test_a_partner_that_does_not_fit_is_placed_apart_and_that_is_said() -> None:
    rules = PlacementSettings(strategy="same_host")
    choice = choose("decode", Role.DECODE, NEEDS, [node("a", 1), node("b", 1)], [placed("prefill-1", "a")], rules)
    assert choice.node is not None
    assert choice.node.node_id == "b"
    assert "same_host" in choice.note
    first = choose("prefill", Role.PREFILL, NEEDS, [node("a", 1)], [], rules)
    assert not first.note, "nobody waits for it"


def test_what_was_placed_counts_before_ray_reports_it() -> None:
    choice = choose(
        "decode", Role.DECODE, NEEDS, [node("a", 1)], [placed("prefill-1", "a")], PlacementSettings(strategy="spread")
    )
    assert choice.node is None
    assert "room" in choice.note
    taken = node("a", 1, free=0.0)
    assert choose("decode", Role.DECODE, NEEDS, [taken], [], PlacementSettings(strategy="spread")).node is None, "others' work"


def test_labels_of_a_pool_are_conditions() -> None:
    rules = PlacementSettings(strategy="spread", pool_labels={"prefill": {"accelerator": "h200"}})
    nodes = [node("a"), node("b", accelerator="h200")]
    found = choose("prefill", Role.PREFILL, NEEDS, nodes, [placed("decode-1", "b")], rules)
    assert found.node is nodes[1]
    other = choose("prefill", Role.PREFILL, NEEDS, nodes[:1], [], rules)
    assert other.node is None
    assert "h200" in other.note


def test_a_silent_node_gets_nothing() -> None:
    nodes = [node("a"), node("b")]
    rules = PlacementSettings()
    assert choose("decode", Role.DECODE, NEEDS, nodes, [], rules, silent={"a"}).node is nodes[1]
    assert choose("decode", Role.DECODE, NEEDS, nodes, [], rules, silent={"a", "b"}).node is None


def test_colocated_workers_have_no_partner() -> None:
    found = fill(["colocated", "colocated"], [node("a"), node("b")], "same_host")
    assert sorted(found.values()) == ["a", "b"]
