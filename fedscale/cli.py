"""The `fedscale` command: run, doctor, data, report."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from fedscale import cluster
from fedscale.config import ConfigError, parse_overrides
from fedscale.data import catalogue, check, layouts, sources
from fedscale.files import StoreError, check_writable, join, shown
from fedscale.options import run_command
from fedscale.presets import METHODS, preset, scales

FAILED = 1


@click.group(help="Decentralized, semi-decentralized and one-shot federated learning.")
def cli() -> None:
    """Group of the commands below."""


@cli.command("run", help="Run one METHOD once. KEY=VALUE changes its configuration.")
@click.argument("method")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--scale", default="offline", show_default=True, help=f"{' or '.join(scales())}.")
@click.option("--results", default="", help="Folder or URI of the records (default: none kept).")
@click.option("--address", default="auto", show_default=True, help="auto, local or host:port.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and stop.")
def run_(
    method: str,
    overrides: Sequence[str],
    scale: str,
    results: str,
    address: str,
    dry_run: bool,
) -> int:
    """Run one configuration; prints a line per measured round."""
    config = preset(method, scale, parse_overrides(overrides))
    place = cluster.resolve(address) if config.uses_ray else "local"
    cluster.preflight(config, place)
    if results:
        try:
            check_writable(results)
        except StoreError as error:
            raise ConfigError(f"results={shown(results)}: {error}") from None
    console = Console(soft_wrap=True, highlight=False)
    if dry_run:
        for key, value in config.flat().items():
            console.print(f"{key} = {value}", markup=False)
        console.print(f"run_id = {config.run_id}")
        return 0

    from fedscale.api import run
    from fedscale.pools import WorkerLost
    from fedscale.worker import ClientFailed, Diverged

    def line(record: dict[str, Any]) -> None:
        console.print(
            f"round {record['round']:>4}/{config.total_steps}  accuracy "
            f"{100 * record['accuracy_mean']:5.1f} % (clients {100 * record['accuracy_min']:.1f} "
            f"to {100 * record['accuracy_max']:.1f}){_more(record)}"
        )

    try:
        found = run(config, address=place, results=results or None, on_measure=line)
    except (Diverged, ClientFailed, WorkerLost, StoreError) as error:
        print(f"{config.run_id}: {error}", file=sys.stderr)
        return FAILED
    if found.summary["warnings"]:
        console.print(f"warning: {found.summary['warnings']}")
    if config.cycles:
        chosen = found.clusters.loc[found.clusters["chosen"], "clusters"].iloc[0]
        sizes = ", ".join(str(len(members)) for members in chosen)
        console.print(f"clusters: {len(chosen)}, of {sizes} devices")
    console.print(f"run_id {found.summary['run_id']}: {found.summary['status']}")
    if results:
        console.print(f"records: {shown(join(results, 'runs'))}")
    return 0


def _more(record: dict[str, Any]) -> str:
    """What not every method has: consensus error and training loss."""
    parts = [("consensus error", record["consensus_error"]), ("loss", record["loss"])]
    return "".join(f"  {name} {value:.4g}" for name, value in parts if value is not None)


@cli.group("data", help="The datasets.")
def data() -> None:
    """Group of the dataset commands."""


@data.command("list", help="List every dataset, its size, and whether it is here.")
def data_list() -> None:
    """Print one row per dataset."""
    table = Table(box=None, pad_edge=False)
    for title in ("name", "domains", "classes", "train", "test", "here", "where, or how to get it"):
        table.add_column(title, overflow="fold")
    for name, domains in catalogue.CATALOGUE.items():
        here, text = catalogue.available(name)
        table.add_row(
            name,
            ", ".join(d.name for d in domains),
            str(sum(d.classes for d in domains)),
            str(sum(d.train_size for d in domains)),
            str(sum(d.test_size for d in domains)),
            "yes" if here else "no",
            text,
        )
    _console().print(table)


@data.command("fetch", help="Download what is missing of NAME..., once per machine.")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def data_fetch(names: Sequence[str]) -> int:
    """Print where each source lies, or on stderr where its files go; 1 if one is missing."""
    failed = False
    for name in dict.fromkeys(domain.name for _, domain in _data_domains(names)):
        if name not in layouts.SOURCES:
            print(f"{name}: ships with fedscale and the packages it depends on")
            continue
        try:
            print(f"{name}: {sources.fetch(name, lambda text: print(text, file=sys.stderr))}")
        except sources.DataUnavailable as error:
            failed = True
            print(error, file=sys.stderr)
    return FAILED if failed else 0


@data.command("check", help="Open every file of NAME... and compare it with what is published.")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def data_check(names: Sequence[str]) -> int:
    """Print one line per domain; 1 if one is missing or not whole."""
    _data_domains(names)
    failed = False
    for finding in check.check(names):
        print(f"{finding.name}: {finding.text}", flush=True)
        failed = failed or not finding.ok
    return FAILED if failed else 0


def _data_domains(names: Sequence[str]) -> list[tuple[str, catalogue.Domain]]:
    try:
        return check.domains(names)
    except ValueError as error:
        raise ConfigError(str(error)) from None


@cli.command("doctor", help="What this machine has, and how to get what is missing.")
def doctor() -> None:
    """Print hardware, versions, data, weights and the cluster that would be used."""
    import torch

    from fedscale.models import backbone
    from fedscale.problems import resolve_precision

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = torch.backends.cpu.get_cpu_capability()
    table.add_row("processors", f"{cluster.cpu_count()} ({kind})")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    table.add_row("memory", f"{memory:.1f} GiB")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    table.add_row("GPUs", ", ".join(names) or "none (runs on the processors)")
    table.add_row("precision", f"auto means {resolve_precision('auto', device)} here")
    table.add_row("python", sys.version.split()[0])
    for name in ("fedscale-sweeps", "ray", "torch", "torchvision", "timm", "pot", "optuna"):
        try:
            table.add_row(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            table.add_row(name, f"missing: pip install {name}")
    address = cluster.running_cluster()
    table.add_row("Ray cluster", address or "none running; sweeps start a local one")
    for name in catalogue.CATALOGUE:
        here, text = catalogue.available(name)
        table.add_row(f"data {name}", text if here else f"missing: {text}")
    for name in backbone.BACKBONES:
        here, text = backbone.available(name)
        table.add_row(f"weights {name}", text if here else f"missing: {text}")
    table.add_row("methods", ", ".join(METHODS))
    _console().print(table)


@cli.command("report", help="Tables and figures from the records in RESULTS.")
@click.argument("results", default="results")
@click.option("--sweep", "name", default=None, help="Only this sweep.")
def report(results: str, name: str | None) -> None:
    """Print every sweep's table and draw its figure."""
    from analysis.report import report_all

    report_all(results, name)


def _console() -> Console:
    width = None if sys.stdout.isatty() else 160
    return Console(width=width, highlight=False)


def main() -> None:
    """Entry point of the `fedscale` command."""
    sys.exit(run_command(cli))


if __name__ == "__main__":
    main()
