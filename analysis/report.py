"""The table and the figures of a sweep, from its Parquet records alone.

    python -m analysis.report RESULTS [--sweep NAME]

prints the tables of all sweeps below RESULTS and draws their figures into RESULTS/figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from analysis import claims
from analysis.figures import rounds_curve, save, sweep_curve
from analysis.tables import describe, render, sweep_table, varying_keys
from fedscale import store


def report(
    results: store.Place,
    sweep: str,
    key: str | Sequence[str] = (),
    figure: Callable[..., Figure] | None = None,
    order: Sequence[object] = (),
) -> list[str]:
    """Print a sweep's table; write it as CSV, and the figures as PNG and SVG.

    Args:
        results: folder or URI of the results.
        sweep: name of the sweep.
        key: the swept key, or several (the first one is the figure's horizontal axis); () = the
            keys that vary.
        figure: draws (rounds, key, runs=runs, order=order), in place of `sweep_curve`.
        order: values of the first key in the order in which they are shown; () = sorted.

    Returns:
        Where the files are: `<results>/figures/<sweep>.png`, …

    Raises:
        StoreError: no such sweep, or the files cannot be written.
        ValueError: a key that the records do not have.
    """
    place = store.join(results, sweep)
    rounds, runs = store.load(place), store.load(place, "runs")
    keys = ([key] if isinstance(key, str) else list(key)) or varying_keys(runs)
    table = sweep_table(rounds, keys, runs=runs, order=order)
    console = terminal()
    console.print(render(table, f"{sweep}: {describe(runs)}"))
    written = [save_table(results, sweep, table)]
    if not (runs["status"] == "completed").any():
        console.print("no run is completed yet: no figure")
        return written
    claimed = claims.compare(rounds, sweep)
    if len(claimed):
        console.print(claims.render(claimed, ", ".join(sorted(set(rounds["scale"])))))
        written.append(save_table(results, f"{sweep}_claims", claimed))
    if keys:
        drawn = (figure or sweep_curve)(rounds, keys[0], runs=runs, order=order)
        written += save(drawn, store.join(results, "figures", sweep))
    drawn = rounds_curve(rounds, keys, runs=runs)
    return written + save(drawn, store.join(results, "figures", f"{sweep}_rounds"))


def terminal() -> Console:
    """Return the console that tables are printed on, wide where the output is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def save_table(results: store.Place, name: str, table: pd.DataFrame) -> str:
    """Write a table as `<results>/figures/<name>.csv` and return where it is.

    Raises:
        StoreError: it cannot be written.
    """
    text = table.to_csv(index=False, float_format="%.6g")
    return store.write_bytes(results, f"figures/{name}.csv", text.encode())


def compare_report(
    key: str = "method",
    figure: Callable[..., Figure] | None = None,
    order: Sequence[object] = (),
) -> Callable[[str, str], list[str]]:
    """Return the report (results, sweep) over a key, methods or cases, for a sweep script."""
    return lambda results, sweep: report(results, sweep, key, figure, order)


def report_all(results: store.Place, sweep: str | None = None) -> list[str]:
    """Report every sweep below `results`, or the one named; return what was written.

    Raises:
        StoreError: there is none.
    """
    names = [sweep] if sweep else store.sweeps(results)
    if not names:
        raise store.StoreError(f"{store.shown(results)}: no sweep is recorded here")
    written = []
    for name in names:
        for path in (files := report(results, name)):
            print(store.shown(path))
        written += files
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m analysis.report`; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m analysis.report", description=__doc__)
    parser.add_argument("results", help="folder or URI of the results")
    parser.add_argument("--sweep", help="only this sweep")
    try:
        options = parser.parse_args(arguments)
        report_all(options.results, options.sweep)
    except (store.StoreError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
