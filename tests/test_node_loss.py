"""A machine of the cluster is lost in the middle: the records are those of an undisturbed run."""

import shutil
import tempfile

import pandas as pd
import pytest
from tiny_run import KEYS, config, untimed

import fedscale
from fedscale import cluster
from fedscale.progress import Display
from fedscale.sweep import Request, Sweep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SMALL = {"object_store_memory": 100_000_000, "include_dashboard": False}
SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 4,
}
RUN = config(workers=2, rounds=6, eval_every=1)


@pytest.fixture
def nodes():
    """A head without CPUs and three machines with one each: two workers and a spare place."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="nl-", dir="/tmp")
    head = {"num_cpus": 0, "temp_dir": folder, "_system_config": SOON, **SMALL}
    started = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(3):
            started.add_node(num_cpus=1, **SMALL)
        with cluster.session(cluster.resolve(started.address)):
            yield started
    finally:
        started.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def homes(name):
    """The machines where living actors of a class are."""
    from ray._private import state

    return {
        actor["Address"]["NodeID"]
        for actor in state.actors().values()
        if actor["ActorClassName"].endswith(name) and actor["State"] == "ALIVE"
    }


def lose(nodes, home):
    node = next(n for n in nodes.worker_nodes if n.node_id == home)
    nodes.remove_node(node, allow_graceful=False)


def test_a_run_goes_on_without_a_machine_that_held_a_worker(nodes):
    whole = fedscale.run(RUN, address=nodes.address)
    lost = []

    def measured(record):
        if record["round"] == 3:
            lost.append(sorted(homes("ClientWorker") - homes("_Session"))[0])
            lose(nodes, lost[0])

    found = fedscale.run(RUN, address=nodes.address, on_measure=measured)
    assert lost and found.summary["status"] == "completed"
    for name in ("rounds", "clients"):
        a, b = (untimed(getattr(run, name)) for run in (whole, found))
        pd.testing.assert_frame_equal(a, b, check_exact=True)


@pytest.mark.parametrize("whose", ["ClientWorker", "Trial"])
def test_a_sweep_goes_on_without_a_machine(nodes, tmp_path, monkeypatch, whose):
    sweep = Sweep(name="small", methods=("dfrost",), report=lambda results, name: [])
    keys = {**KEYS, "rounds": 6, "eval_every": 1}
    lost, whole = [], Display.measured

    def measured(display, result):
        whole(display, result)
        if not lost and fedscale.load(tmp_path / "small")["round"].max() >= 3:
            trial = homes("ResourceTrainable")
            mine = trial if whose == "Trial" else homes("ClientWorker") - trial
            here = sorted(mine & {node.node_id for node in nodes.worker_nodes})
            lost.append(here[0] if here else "")
            if here:
                lose(nodes, here[0])

    monkeypatch.setattr(Display, "measured", measured)
    request = Request(
        address=nodes.address,
        results=str(tmp_path),
        workers=2,
        seeds=(0, 1),
        overrides=keys,
        shared_path=True,
    )
    assert sweep.run(request) == 0
    if lost == [""]:
        pytest.skip("the trial lives on the head, which is not lost")
    assert lost
    for seed in (0, 1):
        again = fedscale.run(RUN.replace({"seed": seed}), address=nodes.address)
        stored = fedscale.load(tmp_path / "small", where={"seed": seed})
        columns = list(untimed(again.rounds).columns)
        plain = again.rounds[columns].astype(stored[columns].dtypes.to_dict())
        pd.testing.assert_frame_equal(stored[columns], plain, check_exact=True)
