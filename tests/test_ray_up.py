"""`ray up`, a sweep on the head, its records, `ray down`, with clusters/own.yaml as it is shipped.

The two machines are two loopback addresses with a home folder each; `ssh` and `rsync` are
stand-ins that run and copy here. What is started carries a mark in its environment and is ended by
process id; `ray stop`, which would end every Ray process of this machine, is never run.
"""

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from fedscale import cluster

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
HEAD, WORKER = "127.0.0.2", "127.0.0.3"
TINY = (
    "--seeds 0 rounds=1 eval_every=1 data.clients=8 graph.degree=3 data.train_size=20 "
    "data.test_size=10 backbone.weights=random local.epochs=1 merge.steps=2 precision=float32"
)
SSH = """#!/bin/bash
# ssh OPTIONS USER@ADDRESS COMMAND...: run the command as that machine.
while [[ $1 == -* ]]; do [[ $1 == -[oiL] ]] && shift; shift; done
machine=${{1#*@}}; shift
case "$*" in
    *"(uptime)"*) exit ;;
    *"ray stop"*) exec "{python}" "{this}" {mark} ;;
esac
cd "{root}/$machine" && exec env -i HOME="$PWD" ADDRESS=$machine {mark}=1 RAY_TMPDIR={root}/tmp \\
    PATH="{root}/bin:/usr/local/bin:/usr/bin:/bin" PYTHONPATH="$PWD/fedscale" bash -c "$*"
"""
RSYNC = """#!{python}
# rsync OPTIONS SOURCE USER@ADDRESS:TARGET: copy, but for what is excluded.
import shutil, sys
from pathlib import Path
places, leave_out, words = [], [], sys.argv[1:]
while words:
    word = words.pop(0)
    if word == "--exclude":
        leave_out.append(words.pop(0))
    elif word in ("--rsh", "--filter"):
        words.pop(0)
    elif not word.startswith("-"):
        places.append(word)
source, (machine, target) = Path(places[0]), places[1].split("@")[1].split(":")
target = Path("{root}", machine, target.removeprefix("~/"))
if (source / ".gitignore").exists():
    leave_out += [line.rstrip("/") for line in (source / ".gitignore").read_text().split()]
if source.is_dir():
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*leave_out), dirs_exist_ok=True)
else:
    shutil.copy(source, target)
"""
ENVIRONMENT = {  # what the setup commands of a machine would make: the interpreter of these tests
    "activate": 'PATH="$HOME/fedscale-venv/bin:{root}/bin:$PATH"\n',
    "pip": "",
    "python": """#!/bin/bash
[[ "$1 $2" == "-m pip" ]] && echo "$PWD: $*" >> ~/pip.log && exit
exec "{python}" "$@"
""",
    "ray": '#!/bin/bash\nexec "{python}" -m ray.scripts.scripts "$@"\n',
}


def marked(mark):
    """Processes whose environment has the mark, and all that they started; not this one."""
    parents, found = {}, set()
    for entry in Path("/proc").iterdir():
        try:
            pid = int(entry.name)
            parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if f"\0{mark}=1\0".encode() in b"\0" + (entry / "environ").read_bytes():
                found.add(pid)
        except (ValueError, OSError):  # not a process, or gone, or another user's
            continue
    size = -1
    while size < len(found):
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {os.getpid()}


def end(mark):
    for pid in marked(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


class Laptop:
    """Where `ray up` is typed."""

    def __init__(self, root, mark):
        self.root, self.mark, self.name = root, mark, f"test-{mark[-12:].lower()}"
        self.home = root / "laptop"
        self.file = root / "own.yaml"
        self.environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            "HOME": str(self.home),
            "TMPDIR": str(self.home),
            "RAY_TMPDIR": str(self.home),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{root}/bin{os.pathsep}{os.environ['PATH']}",
        }

    def ray(self, *words):
        # A session of its own has no terminal that an interactive shell could take from the tests.
        done = subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", *words],
            capture_output=True,
            text=True,
            env=self.environ,
            cwd=ROOT,
            start_new_session=True,
            timeout=150,
        )
        print(done.stdout, done.stderr, sep="\n")  # shown where a test fails
        assert done.returncode == 0, words
        return done.stdout


def cluster_file(root, name, port):
    """clusters/own.yaml with addresses, port and disk put in, and small machines."""
    here = "--node-ip-address=$ADDRESS --num-cpus=1 --object-store-memory=100000000"
    text = (ROOT / "clusters" / "own.yaml").read_text()
    for old, new in {
        "fedscale-own": name,
        "10.0.0.1": HEAD,
        "10.0.0.2, 10.0.0.3": WORKER,
        "_workers: 2": "_workers: 1",
        "    ssh_private_key: ~/.ssh/id_ed25519\n": "",
        "    - ray stop\n": "",
        "file:///SHARED-DISK": f"file://{root}/disk",
        "--port=6379": f"--port={port} {here}",
        "$RAY_HEAD_IP:6379": f"$RAY_HEAD_IP:{port} {here}",
    }.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def laptop():
    if not sys.platform.startswith("linux") or not shutil.which("bash"):
        pytest.skip("needs Linux (/proc, 127.0.0.2 and 127.0.0.3 on the loopback) and bash")
    root, mark = Path(tempfile.mkdtemp(prefix="up-", dir="/tmp")), f"RAY_UP_TEST_{uuid.uuid4().hex}"
    laptop = Laptop(root, mark)
    words = {"root": root, "mark": mark, "python": sys.executable, "this": Path(__file__)}
    scripts = {"bin/ssh": SSH, "bin/rsync": RSYNC}
    for machine in (HEAD, WORKER):
        scripts |= {f"{machine}/fedscale-venv/bin/{n}": text for n, text in ENVIRONMENT.items()}
    for path, text in scripts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text.format(**words))
        (root / path).chmod(0o755)
    laptop.home.mkdir()
    with socket.socket() as any_port:
        any_port.bind((HEAD, 0))
        laptop.port = any_port.getsockname()[1]
    laptop.file.write_text(cluster_file(root, laptop.name, laptop.port))
    try:
        yield laptop
    finally:
        end(mark)
        shutil.rmtree(root, ignore_errors=True)
        folder = hashlib.sha256(laptop.name.encode()).hexdigest()[:10]  # of ssh's control sockets
        for left in Path("/tmp").glob(f"ray_ssh_*/{folder}"):
            shutil.rmtree(left, ignore_errors=True)


def test_up_sweep_results_down(laptop, monkeypatch):
    file = str(laptop.file)
    laptop.ray("get-auth-token", "--generate")
    laptop.ray("up", "-y", file)
    assert laptop.ray("get-head-ip", file).split()[-1] == HEAD

    sweep = f"python sweeps/dfrost_eps.py {TINY} --results $FEDSCALE_RESULTS"
    wrong = f"RAY_AUTH_TOKEN=wrong python sweeps/dfrost_eps.py --address {HEAD}:{laptop.port} 2>&1"
    said = laptop.ray(
        *("exec", file, f"cd ~/fedscale && {sweep} && ray status && {wrong} || echo status $?")
    )
    assert "run 6/6" in said and "accuracy %" in said
    assert "/2.0 CPU" in said  # of both machines
    assert "the cluster wants another token" in said and said.split()[-2:] == ["status", "2"]

    import pandas as pd

    tables = laptop.root / "disk" / "fedscale" / "dfrost_eps"
    runs = pd.read_parquet(tables / "runs")
    assert len(runs) == 6 and (runs["status"] == "completed").all()
    assert pd.read_parquet(tables / "rounds").groupby("run_id", observed=True).size().eq(1).all()
    assert len(pd.read_parquet(tables / "clients")) == 6 * 8
    token = (laptop.home / ".ray" / "auth_token").read_text()
    for machine in (HEAD, WORKER):
        home = laptop.root / machine
        assert (home / ".ray" / "auth_token").read_text() == token
        assert (home / "fedscale" / "sweeps" / "dfrost_eps.py").exists()
        assert not (home / "fedscale" / ".git").exists()
        installed = (home / "pip.log").read_text().split(maxsplit=1)
        assert installed[0] == f"{home}/fedscale:" and "-c constraints.txt -e ." in installed[1]

    monkeypatch.setattr(tempfile, "tempdir", str(laptop.home))
    assert "ray exec cluster.yaml 'cd ~/fedscale && python sweeps/" in cluster.elsewhere("local")

    laptop.ray("down", "-y", file)
    limit = time.monotonic() + 10
    while marked(laptop.mark) and time.monotonic() < limit:
        time.sleep(0.2)
    assert not marked(laptop.mark)
    # A cluster that was killed leaves its address behind, for which Ray itself waits minutes.
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(laptop.root / "tmp"))
    left = (laptop.root / "tmp" / "ray" / "ray_current_cluster").read_text()
    assert left == f"{HEAD}:{laptop.port}"
    started = time.monotonic()
    assert cluster.resolve("auto") == "local" and time.monotonic() - started < 20


if __name__ == "__main__":
    end(sys.argv[1])
