"""Every kind of bad input: one line that names key, value and what is allowed; exit status 2."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from fedscale import tuning
from fedscale.cli import cli
from fedscale.config import ConfigError
from fedscale.options import BAD_INPUT, run_command

BAD = {
    "unknown method": (["dfrosty"], "method=dfrosty", "dfrost"),
    "unknown key": (["dfrost", "merge.epsilom=0.1"], "merge.epsilom=0.1", "merge.epsilon"),
    "key without its part": (["dfrost", "epsilon=0.1"], "epsilon=0.1", "merge.epsilon"),
    "not key=value": (["dfrost", "merge.epsilon"], "merge.epsilon", "key=value"),
    "empty key": (["dfrost", "=3"], "=3", "key=value"),
    "key twice": (["dfrost", "rounds=3", "rounds=4"], "rounds=4", "twice"),
    "no round": (["dfrost", "rounds=0"], "rounds=0", "at least 1"),
    "score of a cycle without mixing": (
        ["ssdfl", "regime.accept=cycle", "regime.tau_r=0"],
        "regime.tau_r=0",
        "at least 1",
    ),
    "fewer test images than classes": (
        ["dfrost", "data.test_size=5"],
        "data.test_size=5",
        "at least 10",
    ),
    "fewer training images than classes": (
        ["dfrost", "data.train_size=5", "data.clients=4"],
        "data.train_size=5",
        "at least 10",
    ),
    "epsilon zero": (["dfrost", "merge.epsilon=0"], "merge.epsilon=0", "greater than 0"),
    "epsilon negative": (["dfrost", "merge.epsilon=-1"], "merge.epsilon=-1", "greater than 0"),
    "epsilon infinite": (["dfrost", "merge.epsilon=inf"], "merge.epsilon=inf", "finite"),
    "epsilon text": (["dfrost", "merge.epsilon=small"], "merge.epsilon=small", "number"),
    "epsilon empty": (["dfrost", "merge.epsilon="], "merge.epsilon=", "number"),
    "lambda negative": (["dfrost", "merge.lam=-0.1"], "merge.lam=-0.1", "0"),
    "sigma2 zero": (["dfrost", "merge.sigma2=0"], "merge.sigma2=0", "greater than 0"),
    "no merge steps": (["dfrost", "merge.steps=0"], "merge.steps=0", "1"),
    "unknown merge": (["dfrost", "merge.name=median"], "merge.name=median", "'mean'"),
    "unknown start": (["dfrost", "merge.start=zero"], "merge.start=zero", "'previous'"),
    "anneal upwards": (
        ["dfrost", "merge.schedule=anneal", "merge.epsilon=2"],
        "merge.epsilon_init=1",
        "at least",
    ),
    "anneal with an early stop": (
        ["dfrost", "merge.schedule=anneal", "merge.tolerance=0.1"],
        "merge.tolerance=0.1",
        "must be 0",
    ),
    "NaN learning rate": (["dfrost", "local.lr=nan"], "local.lr=nan", "finite"),
    "negative learning rate": (["dfrost", "local.lr=-1"], "local.lr=-1", "greater than 0"),
    "momentum one": (["dfrost", "local.momentum=1"], "local.momentum=1", "less than 1"),
    "batch size zero": (["dfrost", "local.batch_size=0"], "local.batch_size=0", "1"),
    "epochs fraction": (["dfrost", "local.epochs=1.5"], "local.epochs=1.5", "integer"),
    "unknown optimizer": (["dfrost", "local.optimizer=lion"], "local.optimizer=lion", "'adam'"),
    "degree times clients odd": (
        ["dfrost", "graph.degree=3", "data.clients=21"],
        "graph.degree=3",
        "even",
    ),
    "degree too large": (["dfrost", "graph.degree=20"], "graph.degree=20", "11"),
    "unknown graph": (["dfrost", "graph.name=star"], "graph.name=star", "'ring'"),
    "link drop one": (["dfrost", "graph.link_drop=1"], "graph.link_drop=1", "less than 1"),
    "participation zero": (["dfrost", "graph.participation=0"], "graph.participation=0", "0"),
    "probability above one": (
        ["dfrost", "graph.name=erdos_renyi", "graph.probability=1.5"],
        "graph.probability=1.5",
        "1",
    ),
    "more clients than samples": (
        ["dfrost", "data.clients=400", "data.train_size=40", "data.partition=dirichlet"],
        "data.clients=400",
        "clients per domain",
    ),
    "more clients than iid samples": (
        ["dfrost", "data.partition=iid", "data.clients=2000", "data.train_size=40"],
        "data.clients=2000",
        "160",
    ),
    "fewer clients than domains": (["dfrost", "data.clients=2"], "data.clients=2", "4 domains"),
    "too many labels": (
        ["dfrost", "data.partition=labels_per_client", "data.labels_per_client=11"],
        "data.labels_per_client=11",
        "10",
    ),
    "alpha zero": (["dfrost", "data.alpha=0"], "data.alpha=0", "greater than 0"),
    "unknown dataset": (["dfrost", "data.name=imagenet"], "data.name='imagenet'", "offline"),
    "unknown partition": (["dfrost", "data.partition=odd"], "data.partition=odd", "'extreme'"),
    "negative seed": (["dfrost", "seed=-1"], "seed=-1", "0"),
    "huge seed": (["dfrost", f"seed={2**63}"], f"seed={2**63}", str(2**62)),
    "no rounds": (["dfrost", "rounds=0"], "rounds=0", "1"),
    "no prompts": (["dfrost", "prompts.count=0"], "prompts.count=0", "1"),
    "unknown backbone": (["dfrost", "backbone.name=resnet"], "backbone.name=resnet", "'nano'"),
    "weights not there": (
        ["dfrost", "backbone.weights=/nowhere/w.safetensors"],
        "/nowhere/w.safetensors",
        "backbone.weights",
    ),
    "unknown precision": (["dfrost", "precision=float8"], "precision=float8", "'bfloat16'"),
    "negative workers": (["dfrost", "workers=-1"], "workers=-1", "0"),
    "more workers than clients": (["dfrost", "workers=13"], "workers=13", "12"),
    "more workers than processors": (
        ["dfrost", "workers=12", "cpus_per_worker=1000"],
        "workers=12",
        "CPUs",
    ),
    "layout keys disagree": (
        ["dfrost", "workers=2", "clients_per_worker=1"],
        "clients_per_worker=1",
        "12",
    ),
    "no clients per worker": (
        ["dfrost", "clients_per_worker=0"],
        "clients_per_worker=0",
        "auto",
    ),
    "one and a half GPUs": (["dfrost", "gpus_per_worker=1.5"], "gpus_per_worker=1.5", "1/k"),
    "share of a GPU that is not there": (
        ["dfrost", "workers=1", "gpus_per_worker=999"],
        "gpus_per_worker=999",
        "GPU",
    ),
    "clusters on a graph that is redrawn": (
        ["ssdfl", "graph.resample=true"],
        "graph.resample=True",
        "False",
    ),
    "no training in a cycle": (["ssdfl", "regime.tau_a=0"], "regime.tau_a=0", "1"),
    "unknown rule": (["ssdfl", "regime.rule=best"], "regime.rule=best", "'literal'"),
    "part of the devices in a cycle": (
        ["ssdfl", "graph.participation=0.5"],
        "graph.participation=0.5",
        "must be 1",
    ),
    "links that fail twice": (["stc", "graph.link_drop=0.1"], "graph.link_drop=0.1", "must be 0"),
    "mixed devices with Adam": (["ssdfl", "local.optimizer=adam"], "local.devices=mixed", "sgd"),
    "mixed devices with one momentum": (
        ["ssdfl", "local.momentum=0.5"],
        "local.momentum=0.5",
        "must be 0",
    ),
    "transport of a CNN": (["ssdfl", "merge.name=ot"], "merge.name=ot", "mean"),
    "transport in cycles": (
        ["ssdfl", "backbone.name=nano", "merge.name=ot"],
        "merge.name=ot",
        "gossip",
    ),
    "odd channels": (["ssdfl", "backbone.channels=8,16"], "backbone.channels=8,16", "pattern"),
    "a pool smaller than a choice": (
        ["dfrost_pp", "prompts.pool=5"],
        "prompts.pool=5",
        "prompts.count=10",
    ),
    "a limit below the start": (["pfpt_dec", "prompts.limit=2"], "prompts.limit=2", "4"),
    "negative ridge": (["fedopal", "head.lam=-1"], "head.lam=-1", "0"),
    "closed form of a CNN": (["fedopal", "backbone.name=cnn"], "head.name=ridge", "trained"),
    "mixtures without a server": (
        ["fedpft", "regime.name=gossip"],
        "head.name=fedpft",
        "server",
    ),
    "distilling prompts": (["fedavg", "server.name=dense"], "server.name=dense", "cnn"),
    "a second pass of trained heads": (["fedavg", "head.restat=true"], "head.restat=True", "ridge"),
    "few clients in a small world": (
        ["dfrost", "graph.name=watts_strogatz", "data.clients=3", "data.partition=iid"],
        "data.clients=3",
        "more than 3",
    ),
    "radius of SAM": (["dfedsam_pt", "local.rho=0"], "local.rho=0", "greater than 0"),
    "unknown scale": (["dfrost", "--scale", "huge"], "scale=huge", "offline"),
    "unknown flag": (["dfrost", "--fast"], "--fast", ""),
    "no method": ([], "METHOD", ""),
    "address nonsense": (["dfrost", "workers=1", "--address", "here"], "address=here", "host:port"),
    "nobody at the address": (
        ["dfrost", "workers=1", "--address", "127.0.0.1:1"],
        "address=127.0.0.1:1",
        "no cluster",
    ),
    "results under a file": (["dfrost", "--results", f"{__file__}/x"], f"results={__file__}", ""),
    "results of no filesystem": (["dfrost", "--results", "ftp://x/y"], "results=ftp://x/y", ""),
}


@pytest.mark.parametrize("case", BAD)
def test_one_line_and_status_2(case, capsys):
    arguments, names, allowed = BAD[case]
    assert run_command(cli, ["run", *arguments]) == BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("error: ")
    assert names in err and allowed in err
    assert "Traceback" not in err


def test_a_report_of_nothing_is_one_line(tmp_path, capsys):
    assert run_command(cli, ["report", str(tmp_path / "none")]) == BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "none" in err


def test_there_are_at_least_thirty():
    assert len(BAD) >= 30


def test_bad_input_as_a_user_types_it_starts_no_ray():
    code = (
        "import sys; from fedscale.cli import cli; from fedscale.options import run_command;"
        "status = run_command(cli, ['run', 'dfrost', 'merge.epsilon=0', 'workers=2']);"
        "print('ray' in sys.modules, 'torch' in sys.modules, status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False", "2"]
    assert done.stderr.count("\n") == 1


def test_a_folder_of_this_machine_is_refused_on_a_cluster():
    def check(nodes, **keys):
        request = SimpleNamespace(**{"results": "results", "shared_path": False, **keys})
        tuning._check_shared(SimpleNamespace(request=request), nodes)

    check(1)
    check(3, results="s3://bucket/results")
    check(3, shared_path=True)
    with pytest.raises(ConfigError, match=r"^results=results: .* may have 3 nodes; allowed: a URI"):
        check(3)
