"""Columns of the records, and rows checked against them.

pyarrow by itself takes 1.5 for an integer and True for a number, so every value is checked here:
a run's last act must not be a row that no one can read.
"""

from __future__ import annotations

import json
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from fedscale.files import one_line
from fedscale.keys import leaves

_ID = pa.dictionary(pa.int32(), pa.string())
_FLOAT, _LONG, _INT, _TEXT = pa.float64(), pa.int64(), pa.int32(), pa.string()


def _schema(*columns: tuple[pa.DataType, str]) -> pa.Schema:
    """Columns as (type, names); a "!" after a name = never null."""
    return pa.schema(
        pa.field(name.rstrip("!"), kind, nullable=not name.endswith("!"))
        for kind, names in columns
        for name in names.split()
    )


SCHEMAS: dict[str, pa.Schema] = {
    "runs": _schema(
        (_ID, "run_id!"),
        (_TEXT, "sweep! method! label! config!"),
        (_LONG, "seed!"),
        (_TEXT, "status! reason warnings versions revision device precision start"),
        (_INT, "threads steps"),
        (_FLOAT, "seconds"),
    ),
    "rounds": _schema(
        (_ID, "run_id!"),
        (_INT, "round!"),
        (_TEXT, "phase!"),
        (_INT, "cycle"),
        (_FLOAT, "accuracy_mean accuracy_min accuracy_max accuracy_std accuracy_averaged"),
        (_FLOAT, "loss consensus_error disagreement prompt_norm prompts_mean head_error rho"),
        (_LONG, "bytes_sent bytes_prompts"),
        (_FLOAT, "merge_objective merge_delta merge_bound gap gap_bound"),
        (_FLOAT, "cluster_gap cluster_gap_bound stationarity stationarity_bound"),
        (_FLOAT, "train_seconds merge_seconds measure_seconds"),
        (_INT, "active_clients"),
    ),
    "clients": _schema(
        (_ID, "run_id!"),
        (_INT, "round! client!"),
        (_TEXT, "domain"),
        (_LONG, "samples"),
        (_FLOAT, "accuracy loss"),
        (_INT, "prompts"),
    ),
    "clusters": _schema(
        (_ID, "run_id!"),
        (_INT, "S!"),
        (pa.list_(pa.list_(_INT)), "clusters!"),
        (pa.list_(_FLOAT), "conductances lower_bounds thresholds"),
        (_FLOAT, "score"),
        (pa.bool_(), "feasible chosen!"),
        (pa.list_(pa.list_(_INT)), "links"),
        (pa.list_(_TEXT), "optimizers"),
    ),
}
"""Columns of the tables. Accuracies are shares (0 to 1) over clients, on the global test set;
bytes are sums over the clients of a round, seconds are summed over the workers; null = not
measured. `label` names a reference run that the swept ones are set beside, and is "" for those.
`round` counts the steps of a run (`steps` in all), `cycle` the cycles of τ_a + τ_r steps (0 where
there are none). `clusters` has the partitions that a run in cycles chose from, S clusters each:
devices of every cluster, and what `graphs.clusters` says of them, null where nothing was chosen;
beside the chosen one the network's links and the devices' kinds of optimizer, to draw it by.
`runs` has one more column per leaf of `config` (canonical JSON), named by its dotted key."""

STATUSES = ("running", "completed", "diverged", "failed")


def to_table(table: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return rows as the named table.

    Args:
        table: a name in `SCHEMAS`.
        rows: mappings with every field of the table; None or NaN for what was not measured.

    Raises:
        ValueError: a field is missing, unknown or of the wrong type; names the field and value.
    """
    schema = SCHEMAS[table]
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
        raise ValueError(f"{table}: {one_line(error)}") from None


def run_table(record: Mapping[str, Any]) -> pa.Table:
    """Return a run's row: the fields of `SCHEMAS["runs"]`, and one column per leaf of its config.

    Raises:
        ValueError: as `to_table`; an unknown status; a leaf that is no bool, int, float or str.
    """
    table = to_table("runs", [record])
    if record["status"] not in STATUSES:
        raise ValueError(f"runs.status={record['status']!r}: allowed values: {', '.join(STATUSES)}")
    others = {name for table in SCHEMAS.values() for name in table.names}
    taken = others - {*SCHEMAS["runs"].names}
    for key, value in leaves(_config(record["config"])):
        if key in taken:
            raise ValueError(f"runs.config: {key}={value!r}: the name is a column of another table")
        if key not in SCHEMAS["runs"].names:
            table = table.append_column(key, pa.array([value], _leaf_type(key, value)))
    return table


def all_columns(runs: pa.Schema) -> pa.Schema:
    """Return the columns of all tables together, all of them nullable."""
    unified = pa.unify_schemas([*(SCHEMAS[name] for name in SCHEMAS if name != "runs"), runs])
    return pa.schema([field.with_nullable(True) for field in unified])


def check_names(sweep: str, run_id: str) -> None:
    """Check that the names can be part of paths and come back from them as they were.

    Raises:
        ValueError: they cannot; says what is allowed.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", str(sweep)):
        raise ValueError(f"sweep={sweep!r}: need letters, digits, '_', '.', '-'")
    # A run_id of digits would come back from the path as a number.
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", str(run_id)):
        raise ValueError(f"run_id={run_id!r}: need a letter, then letters, digits, '_', '.', '-'")


def _value(table: str, field: pa.Field, value: Any) -> Any:
    kind: type = str
    if value is not None and pa.types.is_list(field.type):
        inside = field.type.value_field.with_name(field.name).with_nullable(False)
        return [_value(table, inside, each) for each in value]
    if pa.types.is_boolean(field.type) and isinstance(value, bool | np.bool_):
        return bool(value)
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


def _config(text: str) -> Mapping[str, Any]:
    try:
        tree = json.loads(text)
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        raise ValueError(f"runs.config={text[:80]!r}: need a JSON object")
    return tree


def _leaf_type(key: str, value: Any) -> pa.DataType:
    kinds = {bool: pa.bool_(), int: _LONG, float: _FLOAT, str: _TEXT}
    if type(value) not in kinds:
        raise ValueError(f"runs.config: {key}={value!r}: need a bool, int, float or str")
    return kinds[type(value)]
