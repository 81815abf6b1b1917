"""Command lines: the flags that every sweep script shares, and errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from fedscale.config import ConfigError
from fedscale.files import StoreError
from fedscale.interrupt import STOPPED

BAD_INPUT = 2
"""Exit status of bad input, before anything has started."""


class Seeds(click.ParamType):
    """Seeds as "0,1,2"."""

    name = "seeds"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        """Return the seeds as a tuple."""
        if isinstance(value, tuple):
            return value
        try:
            seeds = tuple(int(word) for word in str(value).split(","))
        except ValueError:
            raise ConfigError(f"seeds={value}: allowed: whole numbers >= 0, as 0,1,2") from None
        if not seeds or min(seeds) < 0 or max(seeds) > 2**62:
            raise ConfigError(f"seeds={value}: allowed: 0 to 2^62")
        if len(set(seeds)) != len(seeds):
            raise ConfigError(f"seeds={value}: each seed once")
        return seeds


def sweep_options(
    name: str,
    about: str,
    keys: Sequence[str],
    seeds: Sequence[int],
    run: Callable[..., int],
) -> click.Command:
    """Return the command of a sweep script."""

    @click.command(
        name=name,
        help=f"{about}\n\nSweeps {', '.join(keys)}; KEY=VALUE changes the "
        "rest of the configuration (for example rounds=6 graph.name=ring).",
    )
    @click.option(
        "--scale",
        default="offline",
        type=click.Choice(["offline", "paper"]),
        show_default=True,
        help="Data, backbone and budget.",
    )
    @click.option(
        "--search",
        default="grid",
        type=click.Choice(["grid", "optuna"]),
        show_default=True,
        help="Every point of the grid, or Optuna's suggestions.",
    )
    @click.option(
        "--num-samples",
        default=16,
        type=click.IntRange(1, 100_000),
        show_default=True,
        help="Suggestions of an Optuna search.",
    )
    @click.option(
        "--seeds",
        default=",".join(str(seed) for seed in seeds),
        type=Seeds(),
        show_default=True,
        help="Every point is run once per seed.",
    )
    @click.option(
        "--workers",
        default=1,
        type=click.IntRange(0, 100_000),
        show_default=True,
        help="Client workers per run (0: clients live in the trial's own process).",
    )
    @click.option(
        "--address",
        default="auto",
        show_default=True,
        help="Ray cluster: auto (a running one, else local), local, or host:port.",
    )
    @click.option(
        "--results",
        default="results",
        envvar="FEDSCALE_RESULTS",  # cluster.yaml sets it on every machine
        show_default=True,
        show_envvar=True,
        help="Folder or URI (s3://…, gs://…) of the records.",
    )
    @click.option("--resume", is_flag=True, help="Go on from the last committed rounds.")
    @click.option("--fresh", is_flag=True, help="Repeat runs that are complete in the records.")
    @click.option(
        "--shared-path",
        is_flag=True,
        help="The results folder is on a disk that all nodes of the cluster share.",
    )
    @click.option(
        "--dry-run",
        is_flag=True,
        help="Print the configuration, the number of runs and what they will ask for.",
    )
    @click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
    def command(**flags: Any) -> int:
        return run(**flags)

    return command


def run_command(command: click.Command, arguments: Sequence[str] | None = None) -> int:
    """Run a click command; bad input becomes one line on stderr and status 2."""
    try:
        return command.main(args=arguments, standalone_mode=False) or 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except (click.Abort, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        return STOPPED
    except click.ClickException as error:
        print(f"error: {' '.join(error.format_message().split())}", file=sys.stderr)
        return BAD_INPUT
    except (ConfigError, StoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
