"""Files of public datasets: read in their true formats, fetched once, damaged ones refused."""

import hashlib
import io
import os
import pickle
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import tiny

from fedscale.data import download, sources
from fedscale.data.layouts import SOURCES
from fedscale.data.sources import DataUnavailable

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
        ("mnist_m", tiny.mnist_m_tensors, "mnist_m_test.pt"),
        ("mnist_m", tiny.mnist_m, "mnist_m_test/0007.png"),
        ("cinic10", tiny.cinic10, "test/frog/0001.png"),
        ("mmafedb", tiny.mmafedb, "test/sad/0001.jpg"),
        ("dtd", tiny.dtd, "images/polka-dotted/0002.jpg"),
        ("dtd", tiny.dtd, "labels/test1.txt"),
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


def test_labels_beyond_the_classes_are_refused(root):
    tiny.mnist(root / "mnist", packed=False)
    file = root / "mnist" / "train-labels-idx1-ubyte"
    file.write_bytes(file.read_bytes()[:-1] + b"\x0a")
    with pytest.raises(DataUnavailable) as caught:
        sources.load("mnist", True)
    assert_one_line(caught, "labels run from 0 to 10, not 0 to 9")


# Absence


@pytest.mark.parametrize("name", SOURCES)
def test_absent_data_is_one_line_with_places_target_and_command(root, name):
    with pytest.raises(DataUnavailable) as caught:
        sources.load(name, True)
    command = SOURCES[name].command.format(root=f"'{root}'") or f"fedscale data fetch {name}"
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
    assert {path.name for path in (root / "cifar10").iterdir()} == {*SOURCES["cifar10"].forms[0]}
    assert not list(tmp_path.rglob("evil"))


def test_every_download_has_addresses_and_a_checksum():
    fetched = {source.kind: source for source in SOURCES.values() if source.kind}
    assert set(fetched) >= {"MNIST", "FashionMNIST", "CIFAR10", "CIFAR100", "SVHN", "DTD"}
    for kind, source in fetched.items():
        for file, addresses, md5 in (listing := download.remote(kind)):
            assert all(address.startswith("http") for address in addresses)
            assert addresses[0].endswith(file)
            assert len(bytes.fromhex(md5)) == 16
        files = {file for file, _, _ in listing}
        assert files == set(source.forms[0]) or all(file.endswith(".tar.gz") for file in files)
        unpacked = {file.removesuffix(".gz") for file in source.forms[0]}
        assert set(download.checksums(kind)) in ({*unpacked}, set())
