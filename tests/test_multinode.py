"""Clusters of several machines: where workers go, what is refused, and that every wait ends.

The GPUs are declared to Ray, not there: placement and shares are Ray's own, nothing computes on
them. Runs that compute ask for no GPU.
"""

import json
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_run import config

import fedscale
from fedscale import cluster, pools, room
from fedscale.config import ConfigError
from fedscale.room import Machine

HEAD = Machine(2, 0)
GPU = Machine(4, 1)


@pytest.fixture(scope="module")
def nodes():
    """A head of 2 CPUs and two machines of 4 CPUs and 1 declared GPU."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="mn-", dir="/tmp")
    small = {"object_store_memory": 100_000_000, "include_dashboard": False}
    started = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "temp_dir": folder, **small}
    )
    try:
        started.add_node(num_cpus=4, num_gpus=1, **small)
        started.add_node(num_cpus=4, num_gpus=1, **small)
        yield started
    finally:
        started.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def joined(nodes):
    """The nodes, with this process attached as a sweep would be."""
    place = cluster.resolve(nodes.address)
    with cluster.session(place):
        yield nodes


def layout(workers, gpus="auto", cpus=1, clients=100):
    return config(
        **{"data.partition": "iid", "data.clients": clients, "graph.degree": 4},
        workers=workers,
        gpus_per_worker=gpus,
        cpus_per_worker=cpus,
    )


def packed(machines, cpus, share):
    """Workers placed one after the other, every GPU and CPU counted: what `fitting` computes."""
    count = 0
    for machine in machines:
        free, gpus = machine.cpus, [1.0] * int(machine.gpus)
        while free >= cpus and count < 10_000:
            room_on = [i for i, left in enumerate(gpus) if left >= min(share, 1) - 1e-9]
            if share and len(room_on) < max(1, int(share)):
                break
            for i in room_on[: max(1, int(share)) if share else 0]:
                gpus[i] -= min(share, 1)
            free, count = free - cpus, count + 1
    return count


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.builds(Machine, st.integers(0, 9), st.integers(0, 4)), max_size=4),
    st.integers(1, 4),
    st.sampled_from([0, 1, 2, 3, 0.5, 0.3333, 0.25, 0.1666, 0.1]),
)
def test_fitting_is_what_a_placement_of_one_after_the_other_finds(machines, cpus, share):
    assert room.fitting(machines, cpus, share) == packed(machines, cpus, share)


@pytest.mark.parametrize(
    ("asked", "machines", "share"),
    [
        (layout(6, "0.4"), [Machine(8, 2)], 0.3333),
        (layout(10, "0.6"), [Machine(16, 8)], 0.5),
        (layout(48, "0.18"), [Machine(64, 8)], 0.1666),
        (layout(16), [Machine(16, 2)], 0.125),
        (layout(2), [HEAD, GPU, GPU], 1.0),
        (layout(2), [HEAD], 0.0),
        (layout(2, "0"), [HEAD, GPU], 0.0),
        (layout(3, "2"), [Machine(4, 5), Machine(4, 3)], 2.0),
    ],
)
def test_shares_that_pack(asked, machines, share):
    assert room.fit(asked, machines) == share


@pytest.mark.parametrize(
    ("asked", "machines", "says"),
    [
        (layout(80, "0.18"), [Machine(99, 8)], "80 worker.* 8 GPUs.* 48 would fit.*worker=0.1"),
        (layout(17, "0.6"), [Machine(99, 8)], "16 would fit, or gpus_per_worker=0.3333"),
        (layout(2, "0.5"), [HEAD, HEAD], "0 GPUs there are; 0 would fit, or gpus_per_worker=0"),
        (layout(2, "2"), [Machine(9, 3), Machine(9, 1)], "1 would fit, or gpus_per_worker=1"),
        (layout(1, "2"), [GPU, GPU], "0 would fit"),  # two GPUs, on two machines
        (layout(4, "0", 2), [Machine(1)] * 8, "on one machine.* 8 × 1 CPUs; at most cpus_per_w"),
        (layout(4, "0.5", 3), [HEAD, GPU, GPU], "2 × 4 CPUs \\+ 1 GPUs.*; workers=2 would fit"),
        (layout(1, "0.5", 9), [Machine(64), GPU], "at most cpus_per_worker=4"),
        (layout(1, "0"), [], "no machines"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(asked, machines, says):
    with pytest.raises(ConfigError, match=says) as caught:
        room.fit(asked, machines)
    assert "\n" not in str(caught.value)


def test_what_would_fit_fits():
    with pytest.raises(ConfigError, match=r"gpus_per_worker=0.1$"):
        room.fit(layout(80, "0.18"), [Machine(99, 8)])
    assert room.fit(layout(80, "0.1"), [Machine(99, 8)]) == 0.1
    assert room.fit(layout(48, "0.18"), [Machine(99, 8)]) == 0.1666


@pytest.fixture
def stub(monkeypatch):
    """In place of ClientWorker, which imports torch: says where Ray put it."""

    class Where:
        def __init__(self, threads, device):
            self.said = (threads, device)

        def where(self):
            import ray

            return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids(), self.said

    monkeypatch.setattr(pools, "ClientWorker", Where)


def test_shares_fill_every_gpu_of_every_machine(joined, stub):
    share = room.admit(layout(6, "0.4"), "local")
    pool = pools.RayPool(6, 1, share, timeout_s=60)
    try:
        found = [pool.get(pool.call(i, "where")) for i in range(6)]
    finally:
        pool.close()
    assert share == 0.3333
    assert sorted(Counter(node for node, _, _ in found).values()) == [3, 3]
    assert all(len(gpus) == 1 and said == (1, "cuda") for _, gpus, said in found)


def test_a_trial_and_its_workers_are_one_group_over_the_machines(joined):
    import ray
    from ray.util import placement_group_table, remove_placement_group

    from fedscale.trial import resources

    asked = layout(4, "0.5")
    group = resources(asked, room.admit(asked, "local")).to_placement_group()
    try:
        assert group.wait(60)
        placed = placement_group_table(group)["bundles_to_node_id"].values()
    finally:
        remove_placement_group(group)
    gpus = {n["NodeID"]: n["Resources"].get("GPU", 0) for n in ray.nodes()}
    assert sorted(Counter(placed).values()) == [2, 2] and all(gpus[node] == 1 for node in placed)


def test_workers_that_find_no_room_are_named_in_time(joined, stub):
    with pytest.raises(RuntimeError, match=r"workers \(each 1 CPUs, 0.5 GPUs\) did not start"):
        pools.RayPool(5, 1, 0.5, timeout_s=2)


def test_a_run_over_two_machines_computes_what_one_process_computes(joined):
    two = config(workers=2, cpus_per_worker=3, gpus_per_worker="0", rounds=1)
    found = fedscale.run(two, address=joined.address)
    assert found.summary["threads"] == 3  # what it asked for, whatever Ray or OMP would take
    alone = fedscale.run(config(rounds=1, gpus_per_worker="0"))
    for key, value in alone.payload.items():
        np.testing.assert_allclose(found.payload[key], value, atol=1e-4)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (layout(5, "0.5"), "4 would fit"),
        (layout(2, "0", 5), "at most cpus_per_worker=4"),
        (layout(3, "0", 4), "workers=2 would fit"),
        (layout(1, "2"), "0 would fit"),
    ],
)
def test_a_cluster_that_cannot_grow_refuses_at_once(joined, asked, says):
    started = time.monotonic()
    with pytest.raises(ConfigError, match=says):
        room.admit(asked, joined.address)
    assert time.monotonic() - started < 5


@pytest.fixture
def limits(monkeypatch, tmp_path):
    """Write what `ray up` leaves on the head for its autoscaler."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)

    def write(most, least=0):
        kinds = {
            "head": {"max_workers": 0, "resources": {"CPU": 2, "GPU": 0}},
            "gpu": {
                "min_workers": least,
                "max_workers": 8,
                "resources": {"CPU": 4, "GPU": 1},
            },
        }
        text = json.dumps({"available_node_types": kinds, "max_workers": most})
        (tmp_path / "ray_bootstrap_config.yaml").write_text(text)

    return write


def test_a_cluster_that_may_grow_is_waited_for(joined, limits):
    limits(most=3)
    assert room.most_machines(joined.address) == 4
    said, three = [], layout(3, "1")
    with pytest.raises(ConfigError, match="did not find room within 1 s; there are"):
        room.admit(three, joined.address, said.append, growth_s=1)
    assert len(said) == 1 and "waiting for the cluster to grow" in said[0]
    with pytest.raises(ConfigError, match="more than the 3 GPUs there are; 3 would fit"):
        room.admit(layout(4, "1"), joined.address)
    with pytest.raises(ConfigError, match="2 GPUs"):  # of a local session nothing may grow
        room.admit(three, "local")

    with ThreadPoolExecutor() as elsewhere:  # nodes are added by the main thread only
        asked = elsewhere.submit(room.admit, three, joined.address, growth_s=60)
        time.sleep(1)
        assert not asked.done()
        added = joined.add_node(object_store_memory=100_000_000, num_cpus=4, num_gpus=1)
        assert asked.result() == 1.0
    joined.remove_node(added)


def test_machines_that_are_promised_are_waited_for(joined, limits):
    limits(most=9, least=7)
    said = []
    assert room.admit(layout(1, "1"), joined.address, said.append, join_s=0.2) == 1.0
    assert said == ["waiting for 8 machines, at most 0 s ..."]


def test_a_file_of_something_else_means_nothing(joined, limits, tmp_path):
    for text in ("", "{}", "cluster_name: x", '{"available_node_types": {}}'):
        (tmp_path / "ray_bootstrap_config.yaml").write_text(text)
        assert room.machines_to_come(joined.address) == []


def test_records_of_several_machines_need_a_place_that_all_reach(joined, tmp_path):
    from fedscale.sweep import Request, Sweep

    sweep = Sweep(name="none", methods=("dfrost",), report=lambda results, name: [])
    tiny = {k: v for k, v in config().flat().items() if k.split(".")[0] in ("data", "graph")}
    tiny["backbone.weights"] = "random"
    request = Request(address=joined.address, results=str(tmp_path), seeds=(0,), overrides=tiny)
    with pytest.raises(ConfigError, match=r"results=.*nodes; allowed: a URI"):
        sweep.run(request)


@pytest.fixture
def silent():
    """Servers that are not Ray's: the first says nothing, the second the wrong thing."""
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):

        def answer():
            for _ in range(9):
                link, _ = other.accept()
                link.sendall(b"-ERR unknown command\r\n")
                link.close()

        threading.Thread(target=answer, daemon=True).start()
        yield [f"127.0.0.1:{server.getsockname()[1]}" for server in (mute, other)]


def test_an_address_where_something_else_answers_is_refused_soon(silent, monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    for address in silent:
        started = time.monotonic()
        with pytest.raises(ConfigError, match=f"address={address}: no cluster answers there; run"):
            cluster.resolve(address)
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert cluster.resolve("auto") == "local"
        assert time.monotonic() - started < 10


def test_a_named_cluster_that_is_gone_is_not_replaced_by_this_machine(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=127.0.0.1:1: no cluster answers there"):
        cluster.resolve("auto")
    for address in ("ray://127.0.0.1:1", "http://127.0.0.1:8265", "here", ":1", "a:0", "a:99999"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=r"allowed: auto, local, host:port"):
            cluster.resolve("auto")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert cluster.resolve("auto") == "local"


def test_gpus_are_left_to_ray():
    for path in (Path(cluster.__file__).parent).rglob("*.py"):
        assert "CUDA_VISIBLE_DEVICES" not in path.read_text(), path
