"""Synthetic records of runs, written through the store."""

import hashlib
import json

import numpy as np

from fedscale import diagnostics, store

LABEL = "index-wise mean"


def run_id(config):
    text = json.dumps(config, sort_keys=True)
    return f"{config['method']}-s{config['seed']}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def config(seed=0, rounds=6, method="dfrost", **merge):
    return {
        "method": method,
        "seed": seed,
        "rounds": rounds,
        "precision": "auto",
        "workers": 0,
        "data": {"name": "offline", "partition": "extreme", "clients": 4},
        "graph": {"name": merge.pop("graph", "ring")},
        "merge": {"name": "ot" if method == "dfrost" else "mean", "epsilon": 0.01, **merge},
    }


def run_record(config, status="completed", label="", **changes):
    return {
        "run_id": run_id(config),
        "method": config["method"],
        "label": label,
        "config": json.dumps(config, sort_keys=True),
        "seed": config["seed"],
        "status": status,
        "reason": "",
        "warnings": "",
        "steps": config["rounds"],
        "versions": "{}",
        "revision": "",
        "device": "cpu",
        "threads": 1,
        "precision": "float32",
        "start": "2026-01-01T00:00:00+00:00",
        "seconds": 1.5,
        **changes,
    }


def round_row(number, accuracy=None, error=None, **changes):
    return {
        "round": number,
        "phase": "gossip",
        "accuracy_mean": accuracy,
        "accuracy_min": accuracy,
        "accuracy_max": accuracy,
        "accuracy_std": None if accuracy is None else 0.0,
        "accuracy_averaged": accuracy,
        "loss": 1.0,
        "consensus_error": error,
        "prompt_norm": None,
        "prompts_mean": None,
        "head_error": None,
        **dict.fromkeys(("merge_objective", "merge_delta", "merge_bound")),
        **dict.fromkeys(diagnostics.COLUMNS),
        "disagreement": None,
        "cycle": 0,
        "rho": 0.5,
        "bytes_sent": 4000,
        "bytes_prompts": 1000,
        "train_seconds": 0.5,
        "merge_seconds": 0.01 * number,
        "measure_seconds": None,
        "active_clients": 4,
        **changes,
    }


def client_row(number, client, accuracy=0.5):
    return {
        "round": number,
        "client": client,
        "domain": "digits",
        "samples": 10,
        "accuracy": accuracy,
        "loss": 1.0,
        "prompts": 4,
    }


def clusters_row(clusters, chosen=True, **changes):
    return {
        "S": len(clusters),
        "clusters": clusters,
        **dict.fromkeys(("conductances", "lower_bounds", "thresholds", "score", "feasible")),
        "links": [[0, 1], [2, 3], [1, 2]],
        "optimizers": ["sgd", "prox", "momentum", "sgd"],
        "chosen": chosen,
        **changes,
    }


def write(root, sweep, config, status="completed", label="", upto=None, accuracy=0.5, error=1.0):
    """Write a run of which every second round is measured; return its run_id.

    Accuracy and consensus error are those of the last round, and linear in the round before.
    """
    record = run_record(config, status, label)
    store.write_run(root, sweep, record)
    rounds = config["rounds"]
    for first in range(1, (rounds if upto is None else upto) + 1, 2):
        share = (first + 1) / rounds
        rows = [round_row(first), round_row(first + 1, accuracy * share, error * share)]
        store.write_rounds(root, sweep, record["run_id"], "rounds", first, first + 1, rows)
        clients = [client_row(first + 1, k, accuracy) for k in range(4)]
        store.write_rounds(root, sweep, record["run_id"], "clients", first + 1, first + 1, clients)
    store.write_clusters(root, sweep, record["run_id"], [clusters_row([[0, 1], [2, 3]])])
    return record["run_id"]


def write_sweep(root, sweep="eps", epsilons=(0.001, 0.01, 0.1, 1.0), seeds=(0, 1, 2)):
    """Write a sweep over ε with a reference; return {(ε or label, seed): (accuracy, error)}."""
    rng = np.random.default_rng(0)
    truth = {}
    for seed in seeds:
        for epsilon in epsilons:
            truth[epsilon, seed] = accuracy, error = rng.uniform(0.2, 0.8), rng.uniform(0.5, 2)
            write(root, sweep, config(seed, epsilon=epsilon), accuracy=accuracy, error=error)
        truth[LABEL, seed] = accuracy, error = rng.uniform(0.2, 0.8), rng.uniform(0.5, 2)
        mean = config(seed, method="davg_adam_pt")
        write(root, sweep, mean, label=LABEL, accuracy=accuracy, error=error)
    return truth
