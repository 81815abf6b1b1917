"""Pictures of clustered networks and of scores, from the records alone."""

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from test_methods import config, finish, run

from analysis import networks
from fedscale import schedule, store


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("networks"))
    keys = {"graph.connect": "resample", "local.lr": 0.01, "case": "mild"}
    for accept in ("score", "cycle"):
        for tau_a in (1, 3):
            run(
                config(
                    "ssdfl", rounds=0, **keys, **{"regime.accept": accept, "regime.tau_a": tau_a}
                ),
                root,
            )
    finish(run(config("cstc", rounds=1, case="mild"), root))
    return f"{root}/tiny"


def marks(figure):
    """What the left panel shows: numbers of devices and of colours."""
    nodes = [c for c in figure.axes[0].collections if isinstance(c, PathCollection)]
    devices = sum(len(c.get_offsets()) for c in nodes)
    colours = {tuple(row) for c in nodes for row in np.round(c.get_facecolor(), 6)}
    return devices, len(colours)


def test_the_picture_shows_every_device_and_a_colour_per_cluster(place):
    figure = networks.network_picture(place)
    chosen = store.load(place, "clusters").query("chosen and method == 'ssdfl'").iloc[0]
    devices, colours = marks(figure)
    assert devices == 10 and colours == len(chosen["clusters"])
    assert f"{len(chosen['clusters'])} clusters" in figure.get_suptitle()
    right = figure.axes[1]
    assert list(right.lines[0].get_xdata()) == list(range(1, len(right.lines[0].get_xdata()) + 1))
    assert right.lines[2].get_xdata().tolist() == [chosen["S"]]


def test_markers_are_the_devices_optimizers(place):
    figure = networks.network_picture(place)
    runs = store.load(place, "runs")
    c = config("ssdfl", rounds=0, case="mild", **{"graph.connect": "resample", "local.lr": 0.01})
    kinds = {kind for kind, _, _ in schedule.kinds(c, range(10))}
    shown = {text.get_text() for text in figure.axes[0].get_legend().get_texts()}
    assert {networks._KINDS[kind] for kind in kinds} <= shown
    assert not ({networks._KINDS[kind] for kind in {"sgd", "prox", "momentum"} - kinds} & shown)
    assert len(runs) == 5


def test_a_baseline_can_be_drawn_and_a_wrong_name_is_told(place):
    name = store.load(place, "runs").query("method == 'cstc'")["run_id"].iloc[0]
    assert marks(networks.network_picture(place, name))[0] == 10
    with pytest.raises(ValueError, match="run_id='other': no clusters in"):
        networks.network_picture(place, "other")


def test_scores_over_the_number_of_clusters(place):
    clusters = store.load(place, "clusters")
    table = networks.score_table(clusters, ["regime.accept", "regime.tau_a"])
    assert len(table) == 4 and (table["runs"] == 1).all()
    own = clusters.query("`regime.accept` == 'score' and `regime.tau_a` == 3")
    row = table.query("`regime.accept` == 'score' and `regime.tau_a` == 3").iloc[0]
    finite = own[np.isfinite(own["score"].astype(float))]
    assert row["lowest"] == finite.loc[finite["score"].astype(float).idxmin(), "S"]
    assert row["chosen"] == own.loc[own["chosen"], "S"].iloc[0]
    figure = networks.score_curve(clusters)
    assert [panel.get_title() for panel in figure.axes] == [
        "bound (28), mean over clusters",
        "bound (33) of a cycle",
    ]
    line = figure.axes[0].lines[0]
    assert min(line.get_ydata()) == pytest.approx(1)
    paths = networks.score_report()(place.removesuffix("/tiny"), "tiny")
    assert [path.rsplit("/", 1)[1] for path in paths][:2] == ["tiny.csv", "tiny.png"]
