"""Files of public datasets: read in their true formats, fetched once, damaged ones refused."""

import hashlib
import http.server
import io
import os
import pickle
import subprocess
import sys
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny

from fedscale.data import sources
from fedscale.data.sources import SOURCES, DataUnavailable

REMOTE = sources.remote  # the fixture replaces it
NOBODY = "http://127.0.0.1:9/"  # the discard port: refused at once


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """A folder for data with a space in its name; nothing else is looked at or downloaded."""
    monkeypatch.setenv("FEDSCALE_DATA", str(tmp_path / "my data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(SOURCES, "fmnist", replace(SOURCES["fmnist"], system=()))
    monkeypatch.setattr(sources, "remote", lambda kind: [("file", [NOBODY], "0" * 32)])
    return tmp_path / "my data"


def assert_one_line(caught, *words):
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message, message


# Formats


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "MNIST/raw"), ("mnist", "mnist"), ("fmnist", "fashion-mnist")]
)
def test_mnist_files_packed_or_not_in_each_folder(root, name, folder, packed):
    content = tiny.mnist(root / folder, packed=packed)
    for train in (True, False):
        images, labels = sources.load(name, train)
        assert images.shape == (20, 28, 28, 3) and images.dtype == np.uint8
        assert all(np.array_equal(images[..., c], content[train][0]) for c in range(3))
        assert labels.dtype == np.int64 and np.array_equal(labels, content[train][1])


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar_batches_as_python_2_pickled_them(root, name, classes):
    content = tiny.cifar(root / name, classes, per_batch=classes)
    for train in (True, False):
        images, labels = sources.load(name, train)
        assert np.array_equal(images, content[train][0]) and images.dtype == np.uint8
        assert np.array_equal(labels, content[train][1]) and labels.dtype == np.int64


def test_the_tiny_cifar_file_is_a_pickle_of_the_published_kind(root):
    content = tiny.cifar(root)
    batch = pickle.loads((root / "test_batch").read_bytes(), encoding="latin1")
    assert set(batch) == {"batch_label", "labels", "data"}
    assert batch["data"].shape == (20, 3072) and batch["labels"] == content[False][1].tolist()


def test_svhn_matlab_files(root):
    content = tiny.svhn(root / "svhn")
    for train in (True, False):
        images, labels = sources.load("svhn", train)
        assert np.array_equal(images, content[train][0])
        assert np.array_equal(labels, content[train][1])


def test_notmnist_folders_split_and_skip_what_is_no_image(root):
    content = tiny.notmnist(root / "notMNIST_small")
    lookup = {pixels.tobytes(): name for name, pixels in content.items()}
    found = {}
    for train in (True, False):
        images, labels = sources.load("notmnist", train)
        found[train] = [lookup[image[..., 0].tobytes()] for image in images]
        assert [name[0] for name in found[train]] == ["ABCDEFGHIJ"[label] for label in labels]
    assert sorted(found[True] + found[False]) == sorted(content)
    assert len(found[True]) == pytest.approx(180, abs=2)
    few, _ = sources.load("notmnist", True, size=30)
    assert [lookup[image[..., 0].tobytes()] for image in few[:3]] == found[True][:3]
    assert len(few) == 30


# Damage


def test_a_pickle_that_calls_something_is_refused(root):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(root / "called"),)

    tiny.cifar(root / "cifar10")
    (root / "cifar10" / "test_batch").write_bytes(pickle.dumps({"data": Evil()}, protocol=2))
    with pytest.raises(DataUnavailable) as caught:
        sources.load("cifar10", False)
    assert_one_line(caught, "damaged", "mkdir")
    assert not (root / "called").exists()


@pytest.mark.parametrize(
    ("name", "write", "file"),
    [
        ("mnist", tiny.mnist, "t10k-images-idx3-ubyte.gz"),
        ("fmnist", tiny.mnist, "t10k-labels-idx1-ubyte.gz"),
        ("cifar10", tiny.cifar, "test_batch"),
        ("svhn", tiny.svhn, "test_32x32.mat"),
    ],
)
@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_a_file_cut_short_is_one_line_that_names_the_folder(root, name, write, file, keep):
    write(root / name)
    whole = (root / name / file).read_bytes()
    (root / name / file).write_bytes(whole[: int(keep * len(whole)) if keep < 1 else keep])
    with pytest.raises(DataUnavailable) as caught:
        sources.load(name, False)
    assert_one_line(caught, name, "damaged", root / name)


def test_images_and_labels_of_different_number_are_refused(root):
    tiny.mnist(root / "mnist", per_class=2)
    tiny.mnist(root / "other", per_class=3)
    file = "train-labels-idx1-ubyte.gz"
    os.replace(root / "other" / file, root / "mnist" / file)
    with pytest.raises(DataUnavailable) as caught:
        sources.load("mnist", True)
    assert_one_line(caught, "20 images and 30 labels")


# Absence


@pytest.mark.parametrize("name", SOURCES)
def test_absent_data_is_one_line_with_places_target_and_command(root, name):
    with pytest.raises(DataUnavailable) as caught:
        sources.load(name, True)
    command = (
        SOURCES[name].command.format(root=f"'{root}'") or f"python -m fedscale.data.sources {name}"
    )
    assert_one_line(caught, f"{name} is not here: looked in", root / name, command)
    assert not list(root.glob("[!.]*")), "nothing is left under a name that is read"


def test_a_root_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDSCALE_DATA", str(tmp_path / "file" / "below"))
    with pytest.raises(DataUnavailable) as caught:
        sources.load("mnist", True)
    assert_one_line(caught, "NotADirectoryError")


def test_an_incomplete_folder_is_named_and_left_alone(root):
    tiny.svhn(root / "svhn")
    (root / "svhn" / "test_32x32.mat").unlink()
    with pytest.raises(DataUnavailable) as caught:
        sources.load("svhn", True)
    assert_one_line(caught, root / "svhn", "lacks test_32x32.mat")
    assert (root / "svhn" / "train_32x32.mat").exists()


def test_the_order_is_environment_system_cache(root, tmp_path, monkeypatch):
    system, cache = tmp_path / "system", tmp_path / "cache" / "fedscale" / "fmnist"
    monkeypatch.setitem(SOURCES, "fmnist", replace(SOURCES["fmnist"], system=(str(system),)))
    for place in (cache, system, root / "fmnist"):
        tiny.mnist(place)
        assert sources.find("fmnist") == place
    monkeypatch.delenv("FEDSCALE_DATA")
    assert sources.find("fmnist") == system


# Download


@pytest.fixture
def origin(tmp_path, monkeypatch):
    """SVHN's two files at file: addresses, with their true checksums."""
    content = tiny.svhn(tmp_path / "origin")
    listing = [
        (path.name, [path.as_uri()], hashlib.md5(path.read_bytes()).hexdigest())
        for path in sorted((tmp_path / "origin").iterdir())
    ]
    monkeypatch.setattr(sources, "remote", lambda kind: listing)
    return content, listing


def test_a_download_takes_its_name_when_complete_and_happens_once(root, origin, monkeypatch):
    content = origin[0]
    images, _ = sources.load("svhn", True)
    assert np.array_equal(images, content[True][0])
    assert sources.find("svhn") == root / "svhn"
    assert {path.name for path in root.iterdir()} <= {"svhn", ".svhn.lock"}
    monkeypatch.setattr(sources, "remote", lambda kind: pytest.fail("downloaded twice"))
    sources.load("svhn", False)


def test_the_next_address_is_tried(origin, monkeypatch):
    content, listing = origin
    more = [(file, [NOBODY + file, *addresses], md5) for file, addresses, md5 in listing]
    monkeypatch.setattr(sources, "remote", lambda kind: more)
    assert np.array_equal(sources.load("svhn", True)[1], content[True][1])


def test_a_wrong_checksum_leaves_nothing_that_is_read(root, origin, monkeypatch):
    (first, second) = origin[1]
    monkeypatch.setattr(sources, "remote", lambda kind: [first, (*second[:2], "0" * 32)])
    with pytest.raises(DataUnavailable) as caught:
        sources.load("svhn", True)
    assert_one_line(caught, "MD5 is", second[0])
    assert sources.find("svhn") is None
    assert {path.name for path in root.iterdir()} <= {".svhn.lock"}


def test_the_remains_of_a_killed_download_are_cleared(root, origin):
    (root / ".svhn-abc" / "complete").mkdir(parents=True)
    (root / ".svhn-abc" / "complete" / "train_32x32.mat").write_bytes(b"half")
    sources.fetch("svhn")
    assert not (root / ".svhn-abc").exists()


def test_threads_download_once_between_them(origin, monkeypatch):
    listing, calls = origin[1], []
    monkeypatch.setattr(sources, "remote", lambda kind: calls.append(kind) or listing)
    with ThreadPoolExecutor(6) as pool:
        folders = set(pool.map(lambda _: sources.fetch("svhn"), range(6)))
    assert len(folders) == 1 and calls == ["SVHN"]


def test_processes_download_once_between_them_over_http(tmp_path, origin):
    requests = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path / "origin"))

        def log_request(self, code="-", size="-"):
            requests.append(self.path)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    listing = [(file, [address + file], md5) for file, _, md5 in origin[1]]
    code = (
        "from fedscale.data import sources; "
        f"sources.remote = lambda kind: {listing!r}; "
        "print(sources.load('svhn', True)[1].tolist())"
    )
    environment = {**os.environ, "no_proxy": "127.0.0.1"}
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
        for _ in range(3)
    ]
    answers = {run.communicate(timeout=120)[0] for run in runs}
    server.shutdown()
    server.server_close()
    assert answers == {f"{origin[0][True][1].tolist()}\n".encode()}
    assert sorted(requests) == ["/test_32x32.mat", "/train_32x32.mat"]


def test_of_an_archive_only_the_files_that_are_read_reach_the_disk(root, tmp_path, monkeypatch):
    content = tiny.cifar(tmp_path / "origin" / "cifar-10-batches-py")
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "origin" / "cifar-10-batches-py", "cifar-10-batches-py")
        for name in ("../../evil", "cifar-10-batches-py/readme.html"):
            info = tarfile.TarInfo(name)
            info.size = 4
            tar.addfile(info, io.BytesIO(b"evil"))
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    listing = [(archive.name, [archive.as_uri()], md5)]
    monkeypatch.setattr(sources, "remote", lambda kind: listing)
    assert np.array_equal(sources.load("cifar10", True)[0], content[True][0])
    assert {path.name for path in (root / "cifar10").iterdir()} == set(SOURCES["cifar10"].files)
    assert not list(tmp_path.rglob("evil"))


def test_torchvision_keeps_an_address_and_a_checksum_of_every_file():
    for source in SOURCES.values():
        if not source.torchvision:
            continue
        listing = REMOTE(source.torchvision)
        for file, addresses, md5 in listing:
            assert all(address.startswith("http") for address in addresses)
            assert all(address.endswith(file) for address in addresses)
            assert len(bytes.fromhex(md5)) == 16
        names = {file for file, _, _ in listing}
        assert names == set(source.files) or all(name.endswith(".tar.gz") for name in names)


def test_the_command_fetches_by_name(root, origin, capsys):
    assert sources.main(["svhn"]) == 0
    assert str(root / "svhn") in capsys.readouterr().out
    assert sources.main(["notmnist"]) == 1
    assert "curl" in capsys.readouterr().err
    assert sources.main(["imagenet"]) == 2
    assert Path(root / "svhn").is_dir()
