"""Records of runs as Parquet: written whole or not at all, read by anything that reads Parquet.

    <root>/<sweep>/runs/run_id=…/run.parquet                     one row: what was run, how it ended
    <root>/<sweep>/rounds/run_id=…/rounds-00001-00005.parquet    one row per round
    <root>/<sweep>/clients/run_id=…/clients-00001-00005.parquet  one row per client, measured rounds
    <root>/<sweep>/clusters/run_id=…/clusters.parquet            the partitions of a run in cycles
    <root>/<sweep>/all-columns.parquet                           no rows, the columns of all tables

`root` is a folder or any URI that pyarrow knows (s3://, gs://, …). A table's folder is a Parquet
dataset: `pandas.read_parquet("results/dfrost_eps/rounds")` needs nothing of this package, and its
types do not depend on the data. `run_id` is in the path and in the file, there as a dictionary of
strings, the type that pyarrow gives it from the path: the two then count as one column, and a
file read alone has it too. The sweep's whole folder read as one dataset gives the tables
stacked, with nulls where a table has no such column (`all-columns.parquet` sorts first, and the
first file decides the columns).

A file's name says its content, so a replay overwrites it. Locally a file appears by rename, after
it is on the disk; in an object store when its upload is complete. Names starting with "." or "_"
are never read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from fedscale import files
from fedscale.files import Place, StoreError, check_writable, join, shown, write_bytes
from fedscale.schemas import SCHEMAS, STATUSES, all_columns, check_names, run_table, to_table

__all__ = [
    "SCHEMAS",
    "STATUSES",
    "Place",
    "StoreError",
    "check_writable",
    "completed",
    "discard",
    "join",
    "load",
    "reaches",
    "shown",
    "sweeps",
    "write_bytes",
    "write_clusters",
    "write_rounds",
    "write_run",
]

_JOINED = ("label", "method", "seed", "status", "precision")
_ALL_COLUMNS = "all-columns.parquet"


def write_run(root: Place, sweep: str, record: Mapping[str, Any]) -> str:
    """Write a run's row, over an earlier one; return the path of the file.

    Args:
        root: folder or URI of the results.
        sweep: name of the sweep.
        record: the fields of `SCHEMAS["runs"]` without `sweep`; the columns of the configuration's
            leaves are taken from `record["config"]`.

    Raises:
        ValueError: a field is missing, unknown or of the wrong type; a bad name or status.
        StoreError: the file cannot be written.
    """
    row = run_table({**record, "sweep": sweep})
    check_names(sweep, record["run_id"])
    system, folder = files.locate(join(root, sweep))
    _add_columns(system, f"{folder}/{_ALL_COLUMNS}", all_columns(row.schema))
    path = f"{folder}/runs/run_id={record['run_id']}/run.parquet"
    files.put(system, path, _parquet(row))
    return path


def write_rounds(
    root: Place,
    sweep: str,
    run_id: str,
    table: str,
    first: int,
    last: int,
    rows: Sequence[Mapping[str, Any]],
) -> str:
    """Write the rows of the rounds first..last of a recorded run; return the path of the file.

    The same range overwrites. A range inside of one that is there is not written again, and
    files of ranges inside the new one are removed once it is there, so no round is there twice.

    Args:
        root: folder or URI of the results.
        sweep: name of the sweep.
        run_id: a run that `write_run` has recorded.
        table: "rounds" (exactly one row for each round) or "clients".
        first: first round of the range, at least 1.
        last: last round of the range, included.
        rows: one mapping per row, with every field of `SCHEMAS[table]` but `run_id`; None or NaN
            for what was not measured.

    Raises:
        ValueError: a field is missing, unknown or of the wrong type; rows outside of the range.
        StoreError: the run has no record (never written, or its folder was removed), or the
            file cannot be written; a file that overlaps the range in part.
    """
    check_names(sweep, run_id)
    if table not in ("rounds", "clients"):
        raise ValueError(f"table={table!r}: allowed values: rounds, clients")
    if not 1 <= first <= last <= 99_999:
        raise ValueError(f"first={first}, last={last}: need 1 <= first <= last <= 99999")
    data = _rows(table, run_id, rows)
    seen = [row["round"] for row in rows]
    if table == "rounds" and sorted(seen) != list(range(first, last + 1)):
        raise ValueError(f"rounds: need one row for each round {first}..{last}, got {seen}")
    keys = {(row["round"], row.get("client")) for row in rows}
    if len(keys) < len(rows) or any(not first <= number <= last for number in seen):
        raise ValueError(f"{table}: a row is double or not of the rounds {first}..{last}")
    system, folder = _recorded(root, sweep, run_id)
    path = f"{folder}/{table}/run_id={run_id}/{table}-{first:05d}-{last:05d}.parquet"
    superseded = []
    for other, _, begin, end in _listed(system, f"{folder}/{table}/run_id={run_id}", table):
        if other == path or end < first or last < begin:
            continue
        if begin <= first and last <= end:
            return other
        if not (first <= begin and end <= last):
            raise StoreError(f"{other}: overlaps the rounds {first}..{last}; discard the run first")
        superseded.append(other)
    files.put(system, path, _parquet(data))
    for other in superseded:
        with files.named(other):
            system.delete_file(other)
    return path


def write_clusters(root: Place, sweep: str, run_id: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the partitions of a recorded run, over earlier ones; return the path of the file.

    Args:
        root: folder or URI of the results.
        sweep: name of the sweep.
        run_id: a run that `write_run` has recorded.
        rows: one mapping per partition, with every field of `SCHEMAS["clusters"]` but `run_id`.

    Raises:
        ValueError: a field is missing, unknown or of the wrong type.
        StoreError: the run has no record, or the file cannot be written.
    """
    check_names(sweep, run_id)
    data = _rows("clusters", run_id, rows)
    system, folder = _recorded(root, sweep, run_id)
    path = f"{folder}/clusters/run_id={run_id}/clusters.parquet"
    files.put(system, path, _parquet(data))
    return path


def _rows(table: str, run_id: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    return to_table(table, [{"run_id": run_id, **row} for row in rows])


def _recorded(root: Place, sweep: str, run_id: str) -> tuple[fs.FileSystem, str]:
    """Return the sweep's filesystem and folder, if the run has a record there."""
    system, folder = files.locate(join(root, sweep))
    record = f"{folder}/runs/run_id={run_id}/run.parquet"
    with files.named(record):
        if system.get_file_info(record).type != fs.FileType.File:
            raise StoreError(f"{record}: no record of this run; was the results folder removed?")
    return system, folder


def discard(root: Place, sweep: str, run_id: str) -> None:
    """Remove all records of a run, before it starts anew.

    Raises:
        StoreError: something cannot be removed.
    """
    check_names(sweep, run_id)
    system, folder = files.locate(join(root, sweep))
    for table in ("rounds", "clients", "clusters", "runs"):
        path = f"{folder}/{table}/run_id={run_id}"
        with files.named(path):
            if system.get_file_info(path).type == fs.FileType.Directory:
                system.delete_dir(path)


def load(
    path_or_uri: Place,
    table: str = "rounds",
    where: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """Read one table of a sweep.

    Args:
        path_or_uri: folder of the sweep (`results/dfrost_eps`, `s3://bucket/results/dfrost_eps`).
        table: "rounds", "clients", "runs" or "clusters".
        where: rows to keep, as column → value or list of values.

    Returns:
        The table's columns; for all but `runs` also the run's label, method, seed, status,
        precision and one column per configuration key, so that one can group by "merge.epsilon".
        Sorted by the configuration keys that vary over the sweep, seed, round (S) and client.

    Raises:
        ValueError: an unknown table or column.
        StoreError: no such sweep, or a file that is not a complete file of this store.
    """
    if table not in SCHEMAS:
        raise ValueError(f"table={table!r}: allowed values: {', '.join(SCHEMAS)}")
    said = ""
    while True:
        try:
            return _load(path_or_uri, table, where)
        except (_Odd, files.NotThere) as error:
            # While others write, a run or file may come or go between two looks at the folder.
            if str(error) == said:
                raise
            said = str(error)


class _Odd(StoreError):
    """Files that do not belong together, or one that is not whole."""


def _load(path_or_uri: Place, table: str, where: Mapping[str, Any] | None) -> pd.DataFrame:
    system, folder = files.locate(path_or_uri)
    runs = _load_runs(system, folder, path_or_uri)
    leaves = [name for name in runs.columns if name not in SCHEMAS["runs"].names]
    joined = runs if table == "runs" else runs[["run_id", *_JOINED, *leaves]]
    columns = list(dict.fromkeys([*SCHEMAS[table].names, *joined.columns]))
    wanted = {
        name: list(value) if pd.api.types.is_list_like(value) else [value]
        for name, value in (where or {}).items()
    }
    for name in wanted:
        if name not in columns:
            raise ValueError(f"where: unknown column {name!r}; {table} has {', '.join(columns)}")
    joined = _keep(joined, wanted)
    if table == "runs":
        return joined.reset_index(drop=True)
    frame = _load_rows(system, folder, table, set(runs["run_id"]), set(joined["run_id"]))
    order = dict(zip(joined["run_id"], range(len(joined)), strict=True))
    keys = [name for name in ("round", "client", "S") if name in SCHEMAS[table].names]
    frame = _keep(frame.assign(_order=frame["run_id"].map(order)), wanted)
    frame = frame.sort_values(["_order", *keys], kind="stable").drop(columns="_order")
    return frame.merge(joined, on="run_id", how="left")[columns]


def completed(root: Place, sweep: str) -> frozenset[str]:
    """Return the runs that need not run again: status completed, and every round is there.

    Raises:
        StoreError: a file that is not a complete file of this store.
    """
    system, folder = files.locate(join(root, sweep))
    if not _listed(system, f"{folder}/runs", "runs"):
        return frozenset()
    place, ended = join(root, sweep), {"status": "completed"}
    runs, rounds = load(place, "runs", ended), load(place, "rounds", ended)
    present = rounds.groupby("run_id")["round"].nunique()
    done = runs["run_id"].map(present).fillna(0) == runs["steps"]
    return frozenset(runs.loc[done, "run_id"])


def reaches(root: Place, sweep: str, run_id: str, last: int) -> bool:
    """Whether the files of a run's rounds 1..last, and of the clients at the last, are there.

    Raises:
        StoreError: a file that is not of this store.
    """
    system, folder = files.locate(join(root, sweep))
    covered = 0
    for *_, begin, end in sorted(
        _listed(system, f"{folder}/rounds/run_id={run_id}", "rounds"), key=lambda file: file[2]
    ):
        if begin <= covered + 1:
            covered = max(covered, end)
    clients = _listed(system, f"{folder}/clients/run_id={run_id}", "clients")
    return covered >= last and any(begin <= last <= end for *_, begin, end in clients)


def sweeps(root: Place) -> list[str]:
    """Return the names of the sweeps recorded below `root`, sorted.

    Raises:
        StoreError: there is no such folder.
    """
    system, folder = files.locate(root)
    with files.named(folder):
        inside = system.get_file_info(fs.FileSelector(folder))
        names = sorted(info.base_name for info in inside if info.type == fs.FileType.Directory)
        tables = system.get_file_info([f"{folder}/{name}/runs" for name in names])
    return [
        name
        for name, info in zip(names, tables, strict=True)
        if info.type == fs.FileType.Directory and not name.startswith((".", "_"))
    ]


def _add_columns(system: fs.FileSystem, path: str, columns: pa.Schema) -> None:
    """Write the file of all columns if it lacks one of these, with those that it has already.

    Of two writers at once one may lose a column of the other, which brings it back when it next
    records its run.
    """
    try:
        known = pq.read_schema(path, filesystem=system)
        columns = pa.unify_schemas([known, columns])
        if columns.equals(known):
            return
    except (pa.ArrowException, OSError):
        pass  # not there, damaged, or of other types: the newest columns count
    files.put(system, path, _parquet(columns.empty_table()))


def _load_runs(system: fs.FileSystem, folder: str, given: Place) -> pd.DataFrame:
    found = _listed(system, f"{folder}/runs", "runs")
    if not found:
        inside = sweeps(given)
        hint = f"; sweeps in it: {', '.join(inside)}" if inside else ""
        raise StoreError(
            f"{files.shown(given)}: not the folder of a sweep (it has no runs table){hint}"
        )
    tables = _read_all(system, "runs", [(path, run_id) for path, run_id, *_ in found])
    try:
        frame = pa.concat_tables(tables, promote_options="permissive").to_pandas()
    except pa.ArrowException as error:
        raise StoreError(
            f"{folder}/runs: one key has two types ({files.one_line(error)})"
        ) from None
    frame["run_id"] = frame["run_id"].astype(str)
    leaves = [name for name in frame.columns if name not in SCHEMAS["runs"].names]
    varying = sorted(name for name in leaves if frame[name].nunique(dropna=False) > 1)
    return frame.sort_values(["label", *varying, "seed", "run_id"], kind="stable")


def _load_rows(
    system: fs.FileSystem, folder: str, table: str, known: set[str], chosen: set[str]
) -> pd.DataFrame:
    latest: dict[str, tuple[str, int]] = {}
    paths = []
    # Wider ranges come before the narrower ones that they supersede.
    for path, run_id, begin, end in sorted(
        _listed(system, f"{folder}/{table}", table), key=lambda file: (file[1], file[2], -file[3])
    ):
        if run_id not in known:
            raise _Odd(f"{path}: there is no record of this run in {folder}/runs")
        before, covered = latest.get(run_id, ("", 0))
        if run_id not in chosen or 0 < end <= covered:
            continue
        if 0 < begin <= covered:
            raise _Odd(f"{path}: has rounds {begin}..{covered} that {before} has too")
        latest[run_id] = (path, end)
        paths.append((path, run_id))
    tables = _read_all(system, table, paths) or [SCHEMAS[table].empty_table()]
    frame = pa.concat_tables(tables).to_pandas()
    return frame.assign(run_id=frame["run_id"].astype(str))


def _keep(frame: pd.DataFrame, wanted: Mapping[str, list[Any]]) -> pd.DataFrame:
    for name, values in wanted.items():
        if name in frame.columns:
            frame = frame[frame[name].isin(values)]
    return frame


def _listed(system: fs.FileSystem, folder: str, table: str) -> list[tuple[str, str, int, int]]:
    """Return (path, run_id, first, last) of the committed files below a table's folder.

    First and last are 0 where a table has one file per run.
    """
    with files.named(folder):
        found = system.get_file_info(fs.FileSelector(folder, recursive=True, allow_not_found=True))
    name = {"runs": "run", "clusters": "clusters"}.get(table, rf"{table}-(\d{{5}})-(\d{{5}})")
    pattern = re.compile(rf"run_id=([^/]+)/{name}\.parquet$")
    listed = []
    for info in found:
        parts = info.path.removeprefix(folder).split("/")
        if info.type != fs.FileType.File or any(part.startswith((".", "_")) for part in parts):
            continue
        match = pattern.search(info.path)
        if match is None:
            raise StoreError(f"{info.path}: not a file of the {table} table; move it elsewhere")
        first, last = map(int, match.groups()[1:] or (0, 0))
        listed.append((info.path, match[1], first, last))
    return sorted(listed)


def _read_all(
    system: fs.FileSystem, table: str, paths: Sequence[tuple[str, str]]
) -> list[pa.Table]:
    with ThreadPoolExecutor(min(16, len(paths) or 1)) as pool:
        return list(pool.map(lambda file: _read(system, table, *file), paths))


def _read(system: fs.FileSystem, table: str, path: str, run_id: str) -> pa.Table:
    schema = SCHEMAS[table]
    try:
        with system.open_input_file(path) as source:
            data = pq.ParquetFile(source, page_checksum_verification=True).read()
        missing = [f.name for f in schema if f.name not in data.column_names and not f.nullable]
        if missing or set(data["run_id"].to_pylist()) - {run_id}:
            raise StoreError(f"{path}: not a {table} file of run {run_id} (column or run differs)")
        columns = {
            field.name: data[field.name].cast(field.type)
            if field.name in data.column_names
            else pa.nulls(len(data), field.type)
            for field in schema
        }
        if table == "runs":
            columns |= {n: data[n] for n in data.column_names if n not in schema.names}
    except (pa.ArrowException, OSError) as error:
        raise _Odd(f"{path}: not a complete Parquet file ({files.one_line(error)})") from None
    return pa.table(columns)


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue().to_pybytes()
