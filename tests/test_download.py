"""Downloads over HTTP: one between many processes, and none that broke off is ever read."""

import contextlib
import hashlib
import http.server
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tiny

from fedscale.data import sources
from fedscale.data.download import download, unpack
from fedscale.data.layouts import SOURCES
from fedscale.data.sources import DataUnavailable


class Server:
    """Serves a folder on localhost, counts requests, and breaks off or stalls when told to."""

    def __init__(self, folder: Path) -> None:
        server, self.requests, self.behave = self, [], "whole"

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                server.requests.append(self.path)
                content = (folder / self.path.removeprefix("/")).read_bytes()
                self.send_response(200)
                self.close_connection = True
                if server.behave == "chunks":
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    self.wfile.write(b"%x\r\n" % len(content) + content[: len(content) // 2])
                    return
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2])
                self.wfile.flush()
                if server.behave == "stall":
                    server.stalled.set()
                    server.go_on.wait(60)
                if server.behave in ("whole", "slow"):
                    time.sleep(0.2 if server.behave == "slow" else 0)
                    self.wfile.write(content[len(content) // 2 :])

            def log_message(self, *args):
                pass

        self.stalled, self.go_on = threading.Event(), threading.Event()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}/"


@pytest.fixture
def svhn(tmp_path, monkeypatch):
    """A server of SVHN's two files: (server, listing, content, root)."""
    monkeypatch.setenv("FEDSCALE_DATA", str(tmp_path / "my data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    content = tiny.svhn(tmp_path / "origin")
    server = Server(tmp_path / "origin")
    listing = [
        (path.name, [server.address + path.name], hashlib.md5(path.read_bytes()).hexdigest())
        for path in sorted((tmp_path / "origin").iterdir())
    ]
    monkeypatch.setattr(sources, "remote", lambda kind: listing)
    yield server, listing, content, tmp_path / "my data"
    server.go_on.set()
    server.server.shutdown()
    server.server.server_close()


def start(listing, code: str) -> subprocess.Popen:
    head = f"from fedscale.data import sources; sources.remote = lambda kind: {listing!r}\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def test_processes_that_start_together_download_once_between_them(svhn):
    server, listing, content, root = svhn
    server.behave = "slow"
    code = (
        "print('ready', flush=True); input()\n"
        "print(sources.load('svhn', True)[1].tolist(), flush=True)"
    )
    runs = [start(listing, code) for _ in range(5)]
    for run in runs:
        assert run.stdout.readline() == b"ready\n"
    for run in runs:
        run.stdin.write(b"\n")
        run.stdin.flush()
    answers = [run.communicate(timeout=120)[0] for run in runs]
    assert answers == 5 * [f"{content[True][1].tolist()}\n".encode()]
    assert sorted(server.requests) == ["/test_32x32.mat", "/train_32x32.mat"]
    assert {path.name for path in root.iterdir()} <= {"svhn", ".svhn.lock"}


@pytest.mark.parametrize("behave", ["cut", "chunks"])
def test_a_download_that_breaks_off_is_one_line_and_is_fetched_again(svhn, behave):
    server, _, content, root = svhn
    server.behave = behave
    with pytest.raises(DataUnavailable, match="download failed") as caught:
        sources.load("svhn", True)
    assert "\n" not in str(caught.value)
    assert sources.find("svhn") is None
    assert {path.name for path in root.iterdir()} <= {".svhn.lock"}
    server.behave = "whole"
    assert np.array_equal(sources.load("svhn", True)[0], content[True][0])


def test_a_killed_download_is_not_read_and_is_fetched_again(svhn):
    server, listing, content, root = svhn
    server.behave = "stall"
    run = start(listing, "sources.load('svhn', True)")
    assert server.stalled.wait(60)
    run.send_signal(signal.SIGKILL)
    run.communicate(timeout=60)
    remains = [path for path in root.glob(".svhn-*") if path.is_dir()]
    assert remains and sources.find("svhn") is None
    server.behave = "whole"
    server.go_on.set()
    assert np.array_equal(sources.load("svhn", True)[0], content[True][0])
    assert not any(path.exists() for path in remains)


def test_the_next_address_is_tried_and_the_sizes_are_told(svhn, tmp_path):
    [(file, [address], md5), _] = svhn[1]
    told = []
    download(tmp_path / file, ["http://127.0.0.1:9/", address], md5, told.append)
    size = (tmp_path / file).stat().st_size / 2**20
    assert told == [f"downloading {file} ({size:,.1f} MiB)"]
    with pytest.raises(OSError, match=r"127\.0\.0\.1:9/.*; .*MD5 is .*, expected 0"):
        download(tmp_path / file, ["http://127.0.0.1:9/", address], "0", told.append)


@pytest.mark.parametrize(
    ("name", "write", "top"),
    [
        ("cinic10", tiny.cinic10, ""),
        ("cinic10", tiny.cinic10, "./"),
        ("dtd", tiny.dtd, "dtd/"),
        ("mnist_m", tiny.mnist_m_tensors, "processed/"),
    ],
)
def test_an_archive_of_folders_is_unpacked_as_far_as_it_is_read(
    tmp_path, monkeypatch, name, write, top
):
    monkeypatch.setenv("FEDSCALE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "origin")
    for file in ("readme", "images/.directory", "train/frog/.hidden"):
        with contextlib.suppress(FileNotFoundError):
            (tmp_path / "origin" / file).write_text("")
    archive = tmp_path / "archive.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(tmp_path / "origin", top or "x")
        for evil in ("../../images/evil.png", "/../train/frog/evil.png", "train/frog/../../evil"):
            tar.addfile(tarfile.TarInfo(evil))
        link = tarfile.TarInfo("train/frog/evil.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    listing = [
        (archive.name, [archive.as_uri()], hashlib.md5(archive.read_bytes()).hexdigest()),
    ]
    monkeypatch.setattr(sources, "remote", lambda kind: listing)
    folder = sources.fetch(name)
    assert folder == tmp_path / "data" / name
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    origin = tmp_path / "origin"
    there = {str(path.relative_to(origin)) for path in origin.rglob("*") if path.is_file()}
    form = SOURCES[name].forms[0]
    assert found == {
        path
        for path in there
        if path.startswith(tuple(part for part in form if part.endswith("/"))) or path in form
        if "/." not in path
    }
    assert len(sources.load(name, True)[1]) > 0
    assert not list(tmp_path.rglob("*evil*"))


def test_a_file_that_is_no_archive_takes_its_own_name(tmp_path):
    (tmp_path / "into").mkdir()
    (tmp_path / "a.mat").write_bytes(b"x")
    unpack(tmp_path / "a.mat", tmp_path / "into", ["a.mat"])
    assert os.listdir(tmp_path / "into") == ["a.mat"]
