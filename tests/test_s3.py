"""Records and states in an S3: written, read, gone on from in another process, and refused."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pandas as pd
import pytest
import records
from tiny_run import config, finish, orchestrator, same, untimed, words

from fedscale import checkpoint, claim, files, store
from fedscale.files import StoreError

SCRIPT = str(Path(__file__).parent.parent / "sweeps" / "dfrost_eps.py")
BUCKET = "bucket"


def place(port, bucket=BUCKET, path="some results", user=""):
    endpoint = quote(f"http://127.0.0.1:{port}", safe="")
    return f"s3://{user}{bucket}/{path}?endpoint_override={endpoint}&scheme=http"


@contextmanager
def silent_port():
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield server.getsockname()[1]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(port, environment) of an S3 with one bucket, for one user with one key."""
    import boto3

    port = free_port()
    log = tmp_path_factory.mktemp("s3") / "log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=sink,
            stderr=sink,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{url}/moto-api/", timeout=5).read()
                break
            except urllib.error.URLError:
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
        anyone = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
        made = {"endpoint_url": url, "region_name": "us-east-1", **anyone}
        boto3.client("s3", **made).create_bucket(Bucket=BUCKET)
        iam = boto3.client("iam", **made)
        iam.create_user(UserName="user")
        allow = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [allow]})
        iam.put_user_policy(UserName="user", PolicyName="all", PolicyDocument=policy)
        key = iam.create_access_key(UserName="user")["AccessKey"]
        # From here on every request is refused that is not signed with that key.
        plain = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{url}/moto-api/reset-auth", b"0", plain)
        urllib.request.urlopen(request, timeout=5).read()
        yield (
            port,
            {
                "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
                "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
                "AWS_EC2_METADATA_DISABLED": "true",
            },
        )
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def root(server, monkeypatch, request):
    """A place in the bucket, with the key in the environment."""
    for name, value in server[1].items():
        monkeypatch.setenv(name, value)
    return place(server[0], path=f"some results/{request.node.name}")


def names(root):
    system, folder = files.locate(root)
    selector = files.fs.FileSelector(folder, recursive=True, allow_not_found=True)
    found = system.get_file_info(selector)
    return sorted(info.path.removeprefix(f"{folder}/") for info in found if info.is_file)


def test_records_are_those_of_a_folder(root, tmp_path):
    for where in (root, tmp_path):
        assert store.completed(where, "eps") == frozenset()
        records.write_sweep(where, epsilons=(0.01, 0.1), seeds=(0, 1))
    sweep = store.join(root, "eps")
    for table in store.SCHEMAS:
        if not (tmp_path / "eps" / table).exists():
            continue
        pd.testing.assert_frame_equal(store.load(sweep, table), store.load(tmp_path / "eps", table))
    inside = [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()]
    assert names(root) == sorted(inside)
    assert store.sweeps(root) == ["eps"]
    done = store.completed(root, "eps")
    assert done == store.completed(tmp_path, "eps") and len(done) == 6
    gone = min(done)
    store.discard(root, "eps", gone)
    store.discard(root, "eps", gone)
    assert store.completed(root, "eps") == done - {gone}
    assert not any(gone in name for name in names(root))


def test_a_range_is_replaced_and_a_run_without_record_is_refused(root):
    name = records.write(root, "s", records.config(), upto=4)
    rows = [records.round_row(r, loss=9.0) for r in range(1, 5)]
    store.write_rounds(root, "s", name, "rounds", 1, 4, rows)
    assert list(store.load(store.join(root, "s"))["loss"]) == [9.0] * 4
    assert len([n for n in names(root) if "/rounds/" in n]) == 1
    store.discard(root, "s", name)
    with pytest.raises(StoreError, match="no record of this run"):
        store.write_rounds(root, "s", name, "rounds", 5, 5, [records.round_row(5)])


def test_a_state_comes_back_and_a_damaged_one_is_none(root):
    state = {"prompts": np.arange(3_000_000, dtype=np.float32)}  # more than one part of an upload
    assert checkpoint.read(root, "s", "run") is None
    checkpoint.write(root, "s", "run", 3, state)
    checkpoint.write(root, "s", "run", 4, state)
    found = checkpoint.read(root, "s", "run")
    assert found is not None and found[0] == 4 and same(found[1], state)
    files.write_bytes(root, "s/_state/run.safetensors", b"damaged")
    assert checkpoint.read(root, "s", "run") is None
    checkpoint.remove(root, "s", "run")
    checkpoint.remove(root, "s", "run")
    assert names(root) == []


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_state_in_another_process(root):
    """A process is killed between two commits; a new one ends with the undisturbed numbers."""
    code = f"""
import os, signal, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from tiny_run import config, orchestrator
run = orchestrator(config(rounds=4, eval_every=2), {root!r})
run.advance()
run._advance = lambda: os.kill(os.getpid(), signal.SIGKILL)
run.advance()
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    c = config(rounds=4, eval_every=2)
    whole = finish(orchestrator(c))
    second = orchestrator(c, root, resume=True)
    assert second.committed == 2
    assert same(finish(second).payload(), whole.payload())
    assert store.completed(root, "tiny") == {c.run_id}
    for name in ("rounds", "clients"):
        plain = untimed(pd.DataFrame(whole.tables[name]))
        plain = plain.where(plain.notna(), np.nan)
        stored = store.load(store.join(root, "tiny"), name)[list(plain.columns)]
        pd.testing.assert_frame_equal(stored, plain, check_dtype=False)


def test_a_place_has_one_writer_until_its_mark_is_void(root, monkeypatch):
    monkeypatch.setattr(claim, "RENEW_S", 0.3)
    monkeypatch.setattr(claim, "DEAD_S", 3.0)
    sweep = store.join(root, "s")
    with claim.claimed(sweep), claim.claimed(store.join(root, "other")):
        time.sleep(4)
        with (
            pytest.raises(
                claim.Claimed, match="another sweep is writing to s3://bucket/"
            ) as caught,
            claim.claimed(sweep),
        ):
            pass
        assert "\n" not in str(caught.value)
    assert names(root) == []
    files.write_bytes(root, "s/_writer-dead", b"")
    with pytest.raises(claim.Claimed), claim.claimed(sweep):
        pass
    time.sleep(4)
    with claim.claimed(sweep):
        assert len(names(root)) == 1 and names(root) != ["s/_writer-dead"]
    assert names(root) == []


@pytest.mark.slow
def test_a_second_sweep_of_the_same_name_is_refused_and_takes_nothing_away(root, server):
    records.write(root, "dfrost_eps", records.config(), status="running", upto=2)
    with claim.claimed(store.join(root, "dfrost_eps")):
        before = names(root)
        refused(root, server[1], "another sweep is writing to", start="error: ")
        assert names(root) == before


def sweep(results, environment, timeout=280):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    return subprocess.run(
        [
            *(sys.executable, SCRIPT, "--results", results, "--address", "local"),
            *("--workers", "1", "--seeds", "0", *words(rounds=1, eval_every=1)),
        ],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=clean | environment,
    )


@pytest.mark.slow
def test_a_sweep_ends_with_table_and_figure_beside_its_records(root, server, monkeypatch):
    port, environment = server
    key, secret = environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]
    results = place(port, path="swept results", user=f"{key}:{quote(secret, safe='')}@")
    done = sweep(results, {"AWS_EC2_METADATA_DISABLED": "true"})
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "run 6/6" in done.stdout and "accuracy %" in done.stdout
    printed = re.findall(r"^(?:records|wrote): +(s3://.*?) *(?:\(|$)", done.stdout, re.MULTILINE)
    assert secret not in done.stdout and key not in done.stdout
    assert f"s3://{BUCKET}/swept results/figures/dfrost_eps.png?" in done.stdout
    system = files.locate(printed[0])[0]
    assert len(printed) > 3
    for where in printed[1:]:
        assert system.get_file_info(files.locate(where)[1]).size > 100
    runs = store.load(printed[0], "runs")
    assert len(runs) == 6 and (runs["status"] == "completed").all()
    again = sweep(results, {"AWS_EC2_METADATA_DISABLED": "true"})
    assert again.returncode == 0 and "6 of 6 runs are complete in s3://" in again.stdout


def refused(results, environment, says, start="error: results=s3://"):
    done = sweep(results, environment, timeout=120)
    assert done.returncode == 2 and done.stdout == "", done.stdout
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(start)
    assert re.search(says, done.stderr), done.stderr
    return done.stderr


def test_no_such_bucket_is_one_line(server):
    refused(place(server[0], bucket="none"), server[1], "NO_SUCH_BUCKET.* in bucket 'none'|none")


@pytest.mark.parametrize("change", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_keys_are_one_line(server, change):
    wrong = {**server[1], change: "x" * 20}
    refused(place(server[0]), wrong, "INVALID_ACCESS_KEY_ID|SIGNATURE|ACCESS_DENIED")


def test_a_key_in_the_uri_is_not_printed(server):
    shown = refused(place(server[0], user="HIDDENKEY:HIDDENSECRET@"), {}, "s3://bucket/")
    assert "HIDDEN" not in shown


def test_a_server_that_is_away_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(files, "ATTEMPTS", 1)
    with pytest.raises(
        StoreError, match=r"^s3://bucket/.*: cannot be written to: .*connect"
    ) as found:
        files.check_writable(place(free_port(), user="HIDDENKEY:HIDDENSECRET@"))
    assert "\n" not in str(found.value) and "HIDDEN" not in str(found.value)


@pytest.mark.slow
def test_a_sweep_whose_server_is_away_ends_before_it_starts():
    refused(place(free_port()), {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, "connect")


@pytest.mark.slow
def test_a_server_that_is_silent_is_given_up():
    with silent_port() as port:
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        refused(place(port), keys, "Timeout")


def test_a_state_that_cannot_be_read_now_is_not_taken_for_none(root, monkeypatch):
    """Else a run whose store is away for a moment would throw its records away and start over."""
    monkeypatch.setattr(files, "ATTEMPTS", 1)
    with pytest.raises(StoreError, match=r"_state/run\.safetensors: .*connect"):
        checkpoint.read(place(free_port()), "s", "run")
