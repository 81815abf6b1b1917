"""Records: what is written is what is read, by this package and by any other Parquet reader."""

import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import records

from fedscale import schemas, store
from fedscale.store import StoreError

TABLES = ("runs", "rounds", "clients", "clusters")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("written")
    records.write_sweep(root)
    return root


@pytest.fixture
def results(tmp_path, written):
    return shutil.copytree(written, tmp_path / "res ü=1 100%20")


def one_line(error):
    return "\n" not in str(error.value)


# What other readers see


def test_pandas_alone_reads_every_table(results):
    runs = pd.read_parquet(results / "eps" / "runs")
    rounds = pd.read_parquet(results / "eps" / "rounds")
    clients = pd.read_parquet(results / "eps" / "clients")
    assert (len(runs), len(rounds), len(clients)) == (15, 15 * 6, 15 * 3 * 4)
    for frame in (runs, rounds, clients):
        assert list(frame.columns).count("run_id") == 1
        assert set(frame["run_id"]) == set(runs["run_id"])
        assert all(isinstance(name, str) for name in frame["run_id"])
    assert not runs["merge.epsilon"].isna().any()
    joined = rounds.merge(runs, on="run_id")
    assert sorted(joined["merge.epsilon"].unique()) == [0.001, 0.01, 0.1, 1.0]


def test_a_file_alone_has_its_run_id(results):
    for table in TABLES:
        path = next((results / "eps" / table).rglob("*.parquet"))
        frame = pd.read_parquet(path)
        assert {f"run_id={name}" for name in frame["run_id"]} == {path.parent.name}


def test_types_do_not_depend_on_the_data(tmp_path):
    one, two = records.config(0), records.config(1)
    empty = dict.fromkeys(store.SCHEMAS["rounds"].names, None)
    for config, row in ((one, records.round_row(1, 0.5, 1.0)), (two, empty)):
        record = records.run_record(config, reason=None, seconds=None, threads=None)
        store.write_run(tmp_path, "s", record)
        row = {k: v for k, v in row.items() if k != "run_id"} | {"round": 1, "phase": "gossip"}
        store.write_rounds(tmp_path, "s", record["run_id"], "rounds", 1, 1, [row])
    files = [pq.read_schema(path) for path in (tmp_path / "s" / "rounds").rglob("*.parquet")]
    assert len(files) == 2 and files[0] == files[1] == store.SCHEMAS["rounds"]
    assert pd.read_parquet(tmp_path / "s" / "rounds")["accuracy_mean"].dtype == float


def test_the_sweep_folder_as_one_dataset_stacks_the_tables(results):
    (results / "eps" / "_state").mkdir()
    (results / "eps" / "_state" / "x.safetensors").write_bytes(b"state")
    (results / "eps" / "_lock").write_bytes(b"")
    stacked = pd.read_parquet(results / "eps")
    tables = {table: pd.read_parquet(results / "eps" / table) for table in TABLES}
    assert len(stacked) == sum(len(frame) for frame in tables.values())
    for frame in tables.values():
        assert set(frame.columns) <= set(stacked.columns)
    assert stacked["accuracy_mean"].sum() == pytest.approx(tables["rounds"]["accuracy_mean"].sum())
    assert stacked["merge.epsilon"].sum() == pytest.approx(tables["runs"]["merge.epsilon"].sum())


def test_the_file_of_all_columns_is_written_when_a_column_is_new(tmp_path):
    first, path = records.config(0), tmp_path / "s" / "all-columns.parquet"

    def record(config):
        store.write_run(tmp_path, "s", records.run_record(config, "running"))
        return path.stat().st_ino, set(pq.read_schema(path).names)

    file, columns = record(first)
    assert record(first) == (file, columns) == record(records.config(1))
    more = records.config(2, extra=1)
    other, wider = record(more)
    assert other != file and wider == columns | {"merge.extra"}
    assert record(first) == (other, wider) == record(more)
    path.write_bytes(b"damaged")
    assert record(first)[1] == columns and record(more)[1] == wider
    path.unlink()
    assert record(first)[1] == columns
    record(records.config(3, extra="text"))
    assert pq.read_schema(path).field("merge.extra").type == pa.string()


def test_files_are_zstd_and_have_fixed_names(results):
    paths = sorted((results / "eps" / "rounds").rglob("*.*"))
    assert len(paths) == 15 * 3
    assert {p.name for p in paths} == {f"rounds-0000{i}-0000{i + 1}.parquet" for i in (1, 3, 5)}
    assert pq.ParquetFile(paths[0]).metadata.row_group(0).column(1).compression == "ZSTD"


# Round trip


def test_values_come_back(tmp_path):
    config = records.config(3, epsilon=0.25)
    name = records.write(tmp_path, "s", config, accuracy=0.6, error=0.3)
    rounds = store.load(tmp_path / "s")
    assert list(rounds["round"]) == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(rounds["accuracy_mean"][1::2], [0.2, 0.4, 0.6])
    assert rounds["accuracy_mean"][::2].isna().all() and rounds["measure_seconds"].isna().all()
    assert set(rounds["run_id"]) == {name} and set(rounds["merge.epsilon"]) == {0.25}
    row = rounds.iloc[0]
    assert (row["method"], row["seed"], row["status"], row["label"]) == (
        "dfrost",
        3,
        "completed",
        "",
    )
    run = store.load(tmp_path / "s", "runs").iloc[0]
    expected = records.run_record(config)
    assert {k: run[k] for k in expected} == expected
    assert run["data.partition"] == "extreme" and run["rounds"] == 6 and run["sweep"] == "s"


def test_nan_is_null_and_infinity_is_kept(tmp_path):
    config = records.config()
    store.write_run(tmp_path, "s", records.run_record(config, "diverged"))
    row = records.round_row(1, float("nan"), np.float32("nan"), loss=float("inf"))
    path = store.write_rounds(tmp_path, "s", records.run_id(config), "rounds", 1, 1, [row])
    table = pq.ParquetFile(path).read()
    assert table["accuracy_mean"].null_count == table["consensus_error"].null_count == 1
    assert table["loss"].to_pylist() == [float("inf")]


def test_the_order_is_that_of_the_configuration(results):
    rounds = store.load(results / "eps")
    runs = rounds.drop_duplicates("run_id")
    swept = runs[runs["label"] == ""]
    order = list(zip(swept["merge.epsilon"], swept["seed"], strict=True))
    assert order == sorted(order) and len(order) == 12
    assert list(rounds["round"]) == [1, 2, 3, 4, 5, 6] * 15
    clients = store.load(results / "eps", "clients")
    keys = list(zip(clients["round"], clients["client"], strict=True))
    assert keys == [(r, k) for r in (2, 4, 6) for k in range(4)] * 15
    assert list(clients["run_id"].unique()) == list(rounds["run_id"].unique())


def test_where_takes_columns_of_the_table_and_of_the_run(results):
    found = store.load(results / "eps", where={"merge.epsilon": [0.1, 1.0], "round": 6, "seed": 0})
    assert list(found["merge.epsilon"]) == [0.1, 1.0] and list(found["round"]) == [6, 6]
    everything = store.load(results / "eps")
    pd.testing.assert_frame_equal(
        store.load(results / "eps", where={"seed": np.array([1, 2])}),
        everything[everything["seed"].isin([1, 2])].reset_index(drop=True),
    )
    none = store.load(results / "eps", "clients", where={"seed": 7})
    assert len(none) == 0 and list(none.columns) == list(store.load(results / "eps", "clients"))
    assert len(store.load(results / "eps", "runs", where={"label": records.LABEL})) == 3


def test_where_does_not_open_the_files_of_other_runs(results):
    name = store.load(results / "eps", "runs")["run_id"][0]
    for path in (results / "eps" / "rounds" / f"run_id={name}").iterdir():
        path.write_bytes(b"damaged")
    assert len(store.load(results / "eps", where={"seed": [1, 2]})) == 10 * 6


def test_an_object_store_uri(written):
    root = "fsspec+memory://bucket/my results"
    records.write_sweep(root)
    for table in TABLES:
        pd.testing.assert_frame_equal(
            store.load(f"{root}/eps", table), store.load(written / "eps", table)
        )
    assert store.sweeps(root) == ["eps"]
    assert len(store.completed(root, "eps")) == 15


# Replays


def test_a_replay_overwrites(tmp_path):
    config = records.config()
    records.write(tmp_path, "s", config, status="running", upto=4, accuracy=0.1)
    before = sorted((tmp_path / "s").rglob("*"))
    records.write(tmp_path, "s", config, status="running", upto=4, accuracy=0.9)
    assert sorted((tmp_path / "s").rglob("*")) == before
    assert store.load(tmp_path / "s")["accuracy_mean"].max() == pytest.approx(0.6)


def test_no_round_is_there_twice(tmp_path):
    config = records.config()
    name = records.write(tmp_path, "s", config, upto=0)

    def write(first, last, loss):
        rows = [records.round_row(r, loss=loss) for r in range(first, last + 1)]
        return store.write_rounds(tmp_path, "s", name, "rounds", first, last, rows)

    def losses():
        alone = pd.read_parquet(tmp_path / "s" / "rounds").sort_values("round")
        loaded = store.load(tmp_path / "s")
        assert list(alone["round"]) == list(loaded["round"])
        assert list(alone["loss"]) == list(loaded["loss"])
        return list(loaded["loss"])

    write(1, 3, 1.0), write(4, 5, 2.0)
    assert losses() == [1, 1, 1, 2, 2]
    write(4, 6, 3.0)
    assert losses() == [1, 1, 1, 3, 3, 3]
    assert write(4, 5, 4.0).endswith("rounds-00004-00006.parquet")
    assert losses() == [1, 1, 1, 3, 3, 3]
    with pytest.raises(StoreError, match=r"rounds-00001-00003.parquet: overlaps the rounds 3..4"):
        write(3, 4, 5.0)
    assert losses() == [1, 1, 1, 3, 3, 3]


def test_a_reader_between_a_write_and_its_clean_up(tmp_path):
    """A file inside the range of another one is superseded, whichever is listed first."""
    config = records.config()
    name = records.write(tmp_path, "s", config, upto=4)
    folder = tmp_path / "s" / "rounds" / f"run_id={name}"
    shutil.copytree(folder, tmp_path / "old")
    rows = [records.round_row(r, loss=9.0) for r in range(1, 5)]
    store.write_rounds(tmp_path, "s", name, "rounds", 1, 4, rows)
    shutil.copytree(tmp_path / "old", folder, dirs_exist_ok=True)
    assert len(list(folder.iterdir())) == 3
    assert list(store.load(tmp_path / "s")["loss"]) == [9.0] * 4
    os.rename(folder / "rounds-00003-00004.parquet", folder / "rounds-00003-00005.parquet")
    with pytest.raises(StoreError, match=r"rounds-00003-00005.parquet: has rounds 3..4 that .*too"):
        store.load(tmp_path / "s")


def test_discard_removes_one_run_only(results):
    name = store.load(results / "eps", "runs")["run_id"][0]
    store.discard(results, "eps", name)
    store.discard(results, "eps", name)
    for table in TABLES:
        frame = store.load(results / "eps", table)
        assert frame["run_id"].nunique() == 14 and name not in set(frame["run_id"])


def test_completed_is_decided_by_status_and_counted(tmp_path):
    whole = records.write(tmp_path, "s", records.config(0))
    records.write(tmp_path, "s", records.config(1), status="failed")
    records.write(tmp_path, "s", records.config(2), status="running")
    records.write(tmp_path, "s", records.config(3), upto=4)
    hole = records.write(tmp_path, "s", records.config(4))
    (tmp_path / "s" / "rounds" / f"run_id={hole}" / "rounds-00003-00004.parquet").unlink()
    records.write(tmp_path, "s", records.config(5), upto=0)
    assert store.completed(tmp_path, "s") == {whole}
    assert store.completed(tmp_path, "other") == set()
    assert store.completed(tmp_path / "nowhere", "s") == set()


# What a reader must not choke on, and what it must name


def test_folders_of_runs_without_a_record_mean_nothing_is_completed(tmp_path):
    assert store.completed(tmp_path, "s") == frozenset()
    (tmp_path / "s" / "runs" / "run_id=a").mkdir(parents=True)  # killed before the first record
    (tmp_path / "s" / "runs" / "run_id=a" / ".run.parquet.1.tmp").write_bytes(b"PAR1")
    assert store.completed(tmp_path, "s") == frozenset()


def test_names_that_are_not_committed_are_never_read(results):
    before = store.load(results / "eps")
    folder = next((results / "eps" / "rounds").iterdir())
    whole = next(folder.iterdir()).read_bytes()
    (folder / ".rounds-00001-00006.parquet.0123.tmp").write_bytes(whole[:100])
    (folder / ".rounds-00007-00008.parquet").write_bytes(whole)
    (folder.parent / "_notes").write_text("hello")
    pd.testing.assert_frame_equal(store.load(results / "eps"), before)
    assert len(pd.read_parquet(results / "eps" / "rounds")) == len(before)


def damage(data, how):
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    return {
        "empty": b"",
        "truncated": data[: len(data) // 2],
        "foreign": b"not parquet at all, but long enough to hold a footer",
        "footer": data[:footer] + bytes(60) + data[footer + 60 :],
        "pages": data[:4] + bytes(200) + data[204:],
        "one bit": data[:60] + bytes([data[60] ^ 1]) + data[61:],
    }[how]


@pytest.mark.parametrize("how", ["empty", "truncated", "foreign", "footer", "pages", "one bit"])
@pytest.mark.parametrize("table", TABLES)
def test_a_damaged_file_is_named_in_one_line(results, table, how):
    path = next((results / "eps" / table).rglob("*.parquet"))
    path.write_bytes(damage(path.read_bytes(), how))
    with pytest.raises(StoreError) as caught:
        store.load(results / "eps", table)
    assert str(path) in str(caught.value) and one_line(caught)


def test_files_of_others_are_named(results):
    path = next((results / "eps" / "rounds").rglob("*.parquet"))
    other = path.with_name("rounds-00007-00007.parquet")
    pq.write_table(pa.table({"x": [1]}), other)
    with pytest.raises(StoreError, match=r"rounds-00007-00007.parquet: not a rounds file"):
        store.load(results / "eps")
    other.unlink()
    shutil.copy(path, path.parents[1] / "rounds.csv")
    with pytest.raises(StoreError, match=r"rounds.csv: not a file of the rounds table"):
        store.load(results / "eps")
    (path.parents[1] / "rounds.csv").unlink()
    wrong = path.parents[1] / "run_id=dfrost-s0-unknown"
    shutil.copytree(path.parent, wrong)
    with pytest.raises(StoreError, match=r"unknown/.*: there is no record of this run"):
        store.load(results / "eps")
    shutil.rmtree(path.parent)
    wrong.rename(path.parent)
    assert len(store.load(results / "eps")) == 90
    first, second = sorted((results / "eps" / "rounds").iterdir())[:2]
    shutil.copy(next(first.iterdir()), next(second.iterdir()))
    with pytest.raises(StoreError, match=r"not a rounds file of run"):
        store.load(results / "eps")


def test_places_that_are_no_sweep(results, monkeypatch):
    monkeypatch.chdir(results)
    with pytest.raises(StoreError, match=r"^\.: not the folder of a sweep .*sweeps in it: eps$"):
        store.load(".")
    for place in ("nowhere", "eps/rounds", "s3:///x", "nowhere://x"):
        with pytest.raises(StoreError) as caught:
            store.load(place)
        assert one_line(caught) and place.split("/")[0] in str(caught.value)
    with pytest.raises(ValueError, match="table='x': allowed values: runs, rounds, clients"):
        store.load("eps", "x")
    with pytest.raises(ValueError, match="unknown column 'epsilon'"):
        store.load("eps", where={"epsilon": 1})


def test_a_folder_removed_under_a_run_is_noticed(tmp_path):
    config = records.config()
    name = records.write(tmp_path / "r", "s", config, upto=2)
    shutil.rmtree(tmp_path / "r")
    with pytest.raises(StoreError, match=r"no record of this run; was the results folder removed"):
        store.write_rounds(tmp_path / "r", "s", name, "rounds", 3, 3, [records.round_row(3)])
    assert not (tmp_path / "r").exists()


# Rows that are wrong


def bad_rows():
    good = records.round_row(1)
    yield {k: v for k, v in good.items() if k != "rho"}, "rounds: a row has no field rho"
    yield {**good, "acuracy": 1.0}, "unknown field acuracy"
    yield {**good, "active_clients": 1.5}, r"rounds.active_clients=1.5: need int32"
    yield {**good, "active_clients": True}, r"rounds.active_clients=True: need int32"
    yield {**good, "active_clients": 2**40}, "rounds: .*1099511627776"
    yield {**good, "loss": "1"}, r"rounds.loss='1': need double"
    yield {**good, "phase": None}, r"rounds.phase=None: need string"
    yield {**good, "round": 2}, r"one row for each round 1..1, got \[2\]"


@pytest.mark.parametrize(("row", "message"), list(bad_rows()))
def test_a_bad_row_names_its_field(tmp_path, row, message):
    config = records.config()
    store.write_run(tmp_path, "s", records.run_record(config, "running"))
    with pytest.raises(ValueError, match=message) as caught:
        store.write_rounds(tmp_path, "s", records.run_id(config), "rounds", 1, 1, [row])
    assert one_line(caught)
    assert not (tmp_path / "s" / "rounds").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "done"}, "runs.status='done': allowed values: running, completed"),
        ({"run_id": "0123"}, "run_id='0123': need a letter"),
        ({"run_id": "a/b"}, "run_id='a/b': need a letter"),
        ({"config": "{"}, "runs.config='{': need a JSON object"),
        ({"config": '{"a": {"b": null}}'}, "runs.config: a.b=None: need a bool"),
        ({"config": '{"a": [1]}'}, r"runs.config: a=\[1\]: need a bool"),
        ({"config": '{"loss": 1}'}, "runs.config: loss=1: the name is a column"),
        ({"merge.epsilon": 1.0}, "unknown field merge.epsilon"),
    ],
)
def test_a_bad_run_names_its_field(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        store.write_run(tmp_path, "s", {**records.run_record(records.config()), **change})
    assert list(tmp_path.iterdir()) == []


def test_doubled_client_rows_and_odd_ranges(tmp_path):
    config = records.config()
    store.write_run(tmp_path, "s", records.run_record(config, "running"))
    twice = [records.client_row(1, 0), records.client_row(1, 0)]
    with pytest.raises(ValueError, match="clients: a row is double"):
        store.write_rounds(tmp_path, "s", records.run_id(config), "clients", 1, 1, twice)
    for first, last in ((0, 1), (2, 1), (1, 100_000)):
        with pytest.raises(ValueError, match="need 1 <= first <= last"):
            store.write_rounds(tmp_path, "s", records.run_id(config), "clients", first, last, [])


def test_keys_with_two_types_and_new_keys(tmp_path):
    one, two = records.config(0), records.config(1)
    two["merge"]["extra"] = 3
    records.write(tmp_path, "s", one), records.write(tmp_path, "s", two)
    assert store.load(tmp_path / "s", "runs")["merge.extra"].isna().tolist() == [False, True]
    one["merge"]["extra"] = "three"
    records.write(tmp_path, "s", one)
    with pytest.raises(StoreError, match=r"runs: one key has two types") as caught:
        store.load(tmp_path / "s")
    assert one_line(caught)


# Kills and imports


def test_a_killed_writer_leaves_whole_files_only(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import records
from fedscale import store
config = records.config(rounds=2000)
store.write_run({str(tmp_path)!r}, "s", records.run_record(config, "running"))
for r in range(1, 2001):
    rows = [records.round_row(r)]
    store.write_rounds({str(tmp_path)!r}, "s", records.run_id(config), "rounds", r, r, rows)
"""
    writer = subprocess.Popen([sys.executable, "-B", "-c", code])
    folder = tmp_path / "s" / "rounds"
    while len(list(folder.rglob("*.parquet"))) < 20 and writer.poll() is None:
        time.sleep(0.01)
        if folder.exists():
            store.load(tmp_path / "s")
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    rounds = list(store.load(tmp_path / "s")["round"])
    assert len(rounds) >= 20 and rounds == list(range(1, len(rounds) + 1))


@pytest.mark.parametrize("module", ["fedscale.store", "analysis.report"])
def test_neither_torch_nor_ray_is_imported(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_every_column_has_one_type_over_the_tables():
    runs = schemas.run_table({**records.run_record(records.config()), "sweep": "s"})
    columns = schemas.all_columns(runs.schema)
    assert {name for schema in store.SCHEMAS.values() for name in schema.names} <= set(
        columns.names
    )
    assert all(field.nullable for field in columns)
