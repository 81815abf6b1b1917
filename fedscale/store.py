"""Records of runs as Parquet: written whole or not at all, read by anything that reads Parquet.

    <root>/<sweep>/runs/run_id=…/run.parquet                     one row: what was run, how it ended
    <root>/<sweep>/rounds/run_id=…/rounds-00001-00005.parquet    one row per round
    <root>/<sweep>/clients/run_id=…/clients-00001-00005.parquet  one row per client, measured rounds
    <root>/<sweep>/all-columns.parquet                           no rows, the columns of all three

`root` is a folder or any URI that pyarrow knows (s3://, gs://, …). A table's folder is a Parquet
dataset: `pandas.read_parquet("results/dfrost_eps/rounds")` needs nothing of this package, and its
types do not depend on the data. `run_id` is in the path and in the file, there as a dictionary of
strings, the type that pyarrow gives it from the path: the two then count as one column, and a
file read alone has it too. The sweep's whole folder read as one dataset gives the three tables
stacked, with nulls where a table has no such column (`all-columns.parquet` sorts first, and the
first file decides the columns).

A file's name says its content, so a replay overwrites it. Locally a file appears by rename, after
it is on the disk; in an object store by one put. Names starting with "." are never read.
"""

from __future__ import annotations

import contextlib
import json
import numbers
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

_ID = pa.dictionary(pa.int32(), pa.string())
_FLOAT, _LONG, _INT, _TEXT = pa.float64(), pa.int64(), pa.int32(), pa.string()


def _schema(keys: Mapping[str, pa.DataType], measures: Mapping[str, pa.DataType]) -> pa.Schema:
    fields = [pa.field(name, kind, nullable=False) for name, kind in keys.items()]
    return pa.schema(fields + [pa.field(name, kind) for name, kind in measures.items()])


_ACCURACY = ("accuracy_mean", "accuracy_min", "accuracy_max", "accuracy_std", "accuracy_averaged")
_SECONDS = ("train_seconds", "merge_seconds", "measure_seconds")

SCHEMAS: dict[str, pa.Schema] = {
    "runs": _schema(
        dict.fromkeys(("sweep", "method", "label", "config", "status"), _TEXT) | {"seed": _LONG},
        dict.fromkeys(("reason", "versions", "revision", "device", "precision", "start"), _TEXT)
        | {"threads": _INT, "seconds": _FLOAT},
    ).insert(0, pa.field("run_id", _ID, nullable=False)),
    "rounds": _schema(
        {"run_id": _ID, "round": _INT, "phase": _TEXT},
        dict.fromkeys((*_ACCURACY, "loss", "consensus_error", "prompt_norm", "rho"), _FLOAT)
        | dict.fromkeys(("bytes_sent", "bytes_prompts"), _LONG)
        | dict.fromkeys(_SECONDS, _FLOAT)
        | {"active_clients": _INT},
    ),
    "clients": _schema(
        {"run_id": _ID, "round": _INT, "client": _INT},
        {"domain": _TEXT, "samples": _LONG, "accuracy": _FLOAT, "loss": _FLOAT, "prompts": _INT},
    ),
}
"""Columns of the tables. Accuracies are shares (0 to 1) over clients, on the global test set;
bytes are sums over the clients of a round, seconds are wall time of a round; null = not measured.
`runs` has one more column per leaf of `config` (canonical JSON), named by its dotted key."""

STATUSES = ("running", "completed", "diverged", "failed")
_JOINED = ("label", "method", "seed", "status")
_ALL_COLUMNS = "all-columns.parquet"


class StoreError(RuntimeError):
    """Records cannot be written or read; one line naming the place and the reason."""


def join(root: str | os.PathLike[str], *names: str) -> str:
    """Append path parts to a folder or URI (before the URI's query, where there is one)."""
    base, mark, query = os.fspath(root).partition("?") if "://" in str(root) else (root, "", "")
    return "/".join([os.fspath(base).rstrip("/"), *names]) + mark + query


def check_writable(root: str | os.PathLike[str]) -> None:
    """Try to write below `root` and leave nothing behind, not even `root` if it was not there.

    Raises:
        StoreError: nothing can be written there, and why.
    """
    files, folder = _locate(root)
    probe = f"{folder}/.writable-{uuid.uuid4().hex}"
    if not _is_local(files):
        _put(files, probe, b"")
        with _named(probe):
            files.delete_file(probe)
        return
    made = folder
    missing = []
    while not os.path.lexists(made):
        missing.append(made)
        made = os.path.dirname(made)
    try:
        _put(files, probe, b"")
    finally:
        with contextlib.suppress(OSError):
            os.unlink(probe)
        for path in missing:
            with contextlib.suppress(OSError):
                os.rmdir(path)


def write_bytes(root: str | os.PathLike[str], name: str, data: bytes) -> str:
    """Write a file that is no record (a figure) below `root`, atomically; return where it is.

    Raises:
        StoreError: it cannot be written.
    """
    files, folder = _locate(root)
    _put(files, f"{folder}/{name}", data)
    return join(root, name)


def write_run(root: str | os.PathLike[str], sweep: str, record: Mapping[str, Any]) -> str:
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
    run_id = record.get("run_id")
    _check_names(sweep, run_id)
    if record.get("status") not in STATUSES:
        raise ValueError(
            f"runs.status={record.get('status')!r}: allowed values: {', '.join(STATUSES)}"
        )
    row = {"sweep": sweep, **record}
    table = _table("runs", SCHEMAS["runs"], [row])
    for key, value in _leaves(json.loads(record["config"])):
        if key not in table.column_names:
            table = table.append_column(key, pa.array([value], _leaf_type(key, value)))
    files, folder = _locate(join(root, sweep))
    unified = pa.unify_schemas([SCHEMAS["rounds"], SCHEMAS["clients"], table.schema])
    nullable = pa.schema([field.with_nullable(True) for field in unified])
    _put(files, f"{folder}/{_ALL_COLUMNS}", _parquet(nullable.empty_table()))
    path = f"{folder}/runs/run_id={run_id}/run.parquet"
    _put(files, path, _parquet(table))
    return path


def write_rounds(
    root: str | os.PathLike[str],
    sweep: str,
    run_id: str,
    table: str,
    first: int,
    last: int,
    rows: Sequence[Mapping[str, Any]],
) -> str:
    """Write the rows of the rounds first..last of a recorded run; return the path of the file.

    The same range overwrites; files of ranges inside the new one are removed after it is there.

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
            file cannot be written.
    """
    _check_names(sweep, run_id)
    if table not in ("rounds", "clients"):
        raise ValueError(f"table={table!r}: allowed values: rounds, clients")
    if not 1 <= first <= last <= 99_999:
        raise ValueError(f"first={first}, last={last}: need 1 <= first <= last <= 99999")
    data = _table(table, SCHEMAS[table], [{"run_id": run_id, **row} for row in rows])
    seen = [row["round"] for row in rows]
    if table == "rounds" and sorted(seen) != list(range(first, last + 1)):
        raise ValueError(f"rounds: need one row for each round {first}..{last}, got {seen}")
    keys = {(row["round"], row.get("client")) for row in rows}
    if len(keys) < len(rows) or any(not first <= number <= last for number in seen):
        raise ValueError(f"{table}: a row is double or not of the rounds {first}..{last}")
    files, folder = _locate(join(root, sweep))
    record = f"{folder}/runs/run_id={run_id}/run.parquet"
    with _named(record):
        if files.get_file_info(record).type != fs.FileType.File:
            raise StoreError(f"{record}: no record of this run; was the results folder removed?")
    name = f"run_id={run_id}/{table}-{first:05d}-{last:05d}.parquet"
    path = f"{folder}/{table}/{name}"
    _put(files, path, _parquet(data))
    for other, _, begin, end in _listed(files, f"{folder}/{table}/run_id={run_id}", table):
        if first <= begin and end <= last and (begin, end) != (first, last):
            with _named(other):
                files.delete_file(other)
    return path


def discard(root: str | os.PathLike[str], sweep: str, run_id: str) -> None:
    """Remove all records of a run, before it starts anew: its row first, then its rounds.

    Raises:
        StoreError: something cannot be removed.
    """
    _check_names(sweep, run_id)
    files, folder = _locate(join(root, sweep))
    for table in SCHEMAS:
        path = f"{folder}/{table}/run_id={run_id}"
        with _named(path):
            if files.get_file_info(path).type == fs.FileType.Directory:
                files.delete_dir(path)


def load(
    path_or_uri: str | os.PathLike[str],
    table: str = "rounds",
    where: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """Read one table of a sweep.

    Args:
        path_or_uri: folder of the sweep (`results/dfrost_eps`, `s3://bucket/results/dfrost_eps`).
        table: "rounds", "clients" or "runs".
        where: rows to keep, as column → value or list of values.

    Returns:
        The table's columns; for `rounds` and `clients` also the run's label, method, seed, status
        and one column per configuration key (`merge.epsilon`), so that one can group by them.
        Sorted by the configuration keys that vary over the sweep, seed, round and client.

    Raises:
        ValueError: an unknown table or column.
        StoreError: no such sweep, or a file that is not a complete file of this store.
    """
    if table not in SCHEMAS:
        raise ValueError(f"table={table!r}: allowed values: {', '.join(SCHEMAS)}")
    files, folder = _locate(path_or_uri)
    runs = _load_runs(files, folder, os.fspath(path_or_uri))
    leaves = [name for name in runs.columns if name not in SCHEMAS["runs"].names]
    joined = runs if table == "runs" else runs[["run_id", *_JOINED, *leaves]]
    columns = list(dict.fromkeys([*SCHEMAS[table].names, *joined.columns]))
    wanted = {
        name: list(value) if isinstance(value, list | tuple | set | frozenset) else [value]
        for name, value in (where or {}).items()
    }
    for name in wanted:
        if name not in columns:
            raise ValueError(f"where: unknown column {name!r}; {table} has {', '.join(columns)}")
    joined = _keep(joined, wanted)
    if table == "runs":
        return joined.reset_index(drop=True)
    frame = _load_rows(files, folder, table, set(runs["run_id"]), set(joined["run_id"]))
    order = dict(zip(joined["run_id"], range(len(joined)), strict=True))
    keys = [name for name in ("round", "client") if name in frame.columns]
    frame = _keep(frame.assign(_order=frame["run_id"].map(order)), wanted)
    frame = frame.sort_values(["_order", *keys], kind="stable").drop(columns="_order")
    return frame.merge(joined, on="run_id", how="left")[columns]


def completed(root: str | os.PathLike[str], sweep: str) -> frozenset[str]:
    """Return the runs that need not run again: status completed, and every round is there.

    Raises:
        StoreError: a file that is not a complete file of this store.
    """
    files, folder = _locate(join(root, sweep))
    with _named(folder):
        if files.get_file_info(f"{folder}/runs").type != fs.FileType.Directory:
            return frozenset()
    rounds = load(join(root, sweep), "rounds", where={"status": "completed"})
    configured = rounds.groupby("run_id")["rounds"].first()
    present = rounds.groupby("run_id")["round"].nunique()
    return frozenset(configured.index[present == configured])


def sweeps(root: str | os.PathLike[str]) -> list[str]:
    """Return the names of the sweeps recorded below `root`, sorted.

    Raises:
        StoreError: there is no such folder.
    """
    files, folder = _locate(root)
    with _named(folder):
        inside = files.get_file_info(fs.FileSelector(folder))
        names = sorted(info.base_name for info in inside if info.type == fs.FileType.Directory)
        tables = files.get_file_info([f"{folder}/{name}/runs" for name in names])
    return [
        name
        for name, info in zip(names, tables, strict=True)
        if info.type == fs.FileType.Directory and not name.startswith((".", "_"))
    ]


def _load_runs(files: fs.FileSystem, folder: str, given: str) -> pd.DataFrame:
    found = _listed(files, f"{folder}/runs", "runs")
    if not found:
        try:
            inside = sweeps(given)
        except StoreError:
            inside = []
        hint = f"; sweeps in it: {', '.join(inside)}" if inside else ""
        raise StoreError(f"{given}: not the folder of a sweep (it has no runs table){hint}")
    tables = _read_all(files, "runs", [(path, run_id) for path, run_id, *_ in found])
    try:
        frame = pa.concat_tables(tables, promote_options="permissive").to_pandas()
    except pa.ArrowException as error:
        raise StoreError(f"{folder}/runs: a key has different types in two runs: {error}") from None
    frame["run_id"] = frame["run_id"].astype(str)
    leaves = [name for name in frame.columns if name not in SCHEMAS["runs"].names]
    varying = sorted(name for name in leaves if frame[name].nunique(dropna=False) > 1)
    return frame.sort_values(["label", *varying, "seed", "run_id"], kind="stable")


def _load_rows(
    files: fs.FileSystem, folder: str, table: str, known: set[str], chosen: set[str]
) -> pd.DataFrame:
    latest: dict[str, tuple[str, int]] = {}
    paths = []
    # Wider ranges come before the narrower ones that they supersede.
    for path, run_id, begin, end in sorted(
        _listed(files, f"{folder}/{table}", table), key=lambda file: (file[1], file[2], -file[3])
    ):
        if run_id not in known:
            raise StoreError(f"{path}: there is no record of this run in {folder}/runs")
        before, covered = latest.get(run_id, ("", 0))
        if run_id not in chosen or end <= covered:
            continue
        if begin <= covered:
            raise StoreError(f"{path}: has rounds {begin}..{covered} that {before} has too")
        latest[run_id] = (path, end)
        paths.append((path, run_id))
    tables = _read_all(files, table, paths) or [SCHEMAS[table].empty_table()]
    frame = pa.concat_tables(tables).to_pandas()
    return frame.assign(run_id=frame["run_id"].astype(str))


def _keep(frame: pd.DataFrame, wanted: Mapping[str, list[Any]]) -> pd.DataFrame:
    for name, values in wanted.items():
        if name in frame.columns:
            frame = frame[frame[name].isin(values)]
    return frame


def _listed(files: fs.FileSystem, folder: str, table: str) -> list[tuple[str, str, int, int]]:
    """Return (path, run_id, first, last) of the committed files below a table's folder."""
    with _named(folder):
        found = files.get_file_info(fs.FileSelector(folder, recursive=True, allow_not_found=True))
    ranged = r"run" if table == "runs" else rf"{table}-(\d{{5}})-(\d{{5}})"
    pattern = re.compile(rf"run_id=([^/]+)/{ranged}\.parquet$")
    listed = []
    for info in found:
        parts = info.path.removeprefix(folder).split("/")
        if info.type != fs.FileType.File or any(part.startswith((".", "_")) for part in parts):
            continue
        match = pattern.search(info.path)
        if match is None:
            raise StoreError(f"{info.path}: not a file of the {table} table; move it elsewhere")
        first, last = (int(match[2]), int(match[3])) if table != "runs" else (0, 0)
        listed.append((info.path, match[1], first, last))
    return sorted(listed)


def _read_all(
    files: fs.FileSystem, table: str, paths: Sequence[tuple[str, str]]
) -> list[pa.Table]:
    with ThreadPoolExecutor(min(16, len(paths) or 1)) as pool:
        return list(pool.map(lambda file: _read(files, table, *file), paths))


def _read(files: fs.FileSystem, table: str, path: str, run_id: str) -> pa.Table:
    schema = SCHEMAS[table]
    try:
        with files.open_input_file(path) as source:
            data = pq.ParquetFile(source).read()
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
        raise StoreError(f"{path}: not a complete Parquet file ({_one_line(error)})") from None
    return pa.table(columns)


def _table(table: str, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    for row in rows:
        if missing := [name for name in schema.names if name not in row]:
            raise ValueError(f"{table}: a row has no field {', '.join(missing)}")
        if unknown := [name for name in row if name not in schema.names]:
            raise ValueError(f"{table}: a row has the unknown field {', '.join(map(str, unknown))}")
    columns = [[_value(table, field, row[field.name]) for row in rows] for field in schema]
    try:
        return pa.table(
            [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema
        )
    except (pa.ArrowException, OverflowError) as error:
        raise ValueError(f"{table}: {_one_line(error)}") from None


def _value(table: str, field: pa.Field, value: Any) -> Any:
    # pyarrow itself would take 1.5 for an integer and True for a number.
    kind: type = str
    if pa.types.is_floating(field.type):
        kind = numbers.Real
    elif pa.types.is_integer(field.type):
        kind = numbers.Integral
    if kind is numbers.Real and isinstance(value, kind) and value != value:
        value = None
    if value is None and field.nullable:
        return None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{table}.{field.name}={value!r}: need {field.type}")
    return value


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _leaf_type(key: str, value: Any) -> pa.DataType:
    kinds = {bool: pa.bool_(), int: _LONG, float: _FLOAT, str: _TEXT}
    if type(value) not in kinds:
        raise ValueError(f"runs.config: {key}={value!r}: need a bool, int, float or str")
    return kinds[type(value)]


def _check_names(sweep: str, run_id: Any) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", str(sweep)):
        raise ValueError(f"sweep={sweep!r}: need letters, digits, '_', '.', '-'")
    # A run_id of digits would come back from the path as a number.
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", str(run_id)):
        raise ValueError(f"run_id={run_id!r}: need a letter, then letters, digits, '_', '.', '-'")


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def _locate(root: str | os.PathLike[str]) -> tuple[fs.FileSystem, str]:
    text = os.fspath(root)
    if "://" not in text:
        return fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(text))
    try:
        files, path = fs.FileSystem.from_uri(quote(text, safe="%/:?&=+,;@#~!$'()*[]"))
    except (pa.ArrowException, OSError, ImportError) as error:
        raise StoreError(f"{text}: {_one_line(error)}") from None
    return files, path.rstrip("/")


def _is_local(files: fs.FileSystem) -> bool:
    return files.type_name == "local"


def _put(files: fs.FileSystem, path: str, data: bytes) -> None:
    with _named(path):
        if not _is_local(files):
            with files.open_output_stream(path) as sink:
                sink.write(data)
            return
        folder, name = os.path.split(path)
        _make_folder(folder)
        partial = os.path.join(folder, f".{name}.{uuid.uuid4().hex}.tmp")
        try:
            with open(partial, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
        _sync_folder(folder)


def _make_folder(folder: str) -> None:
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    _make_folder(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    _sync_folder(parent)


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Turn an operating or object-store error into one line that names the path."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = os.strerror(error.errno) if getattr(error, "errno", None) else _one_line(error)
        raise StoreError(f"{path}: {reason}") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
