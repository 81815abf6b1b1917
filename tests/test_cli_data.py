"""`fedscale data fetch` and `fedscale data check`."""

import hashlib
import shutil
from dataclasses import replace

import pytest
import tiny

from fedscale import cli
from fedscale.data import catalogue, check, download, formats, layouts, sources
from fedscale.options import run_command

HERE = sources.find("fmnist")  # before the fixture hides it


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSCALE_DATA", str(tmp_path / "my data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fmnist = replace(layouts.SOURCES["fmnist"], system=())
    monkeypatch.setitem(layouts.SOURCES, "fmnist", fmnist)
    monkeypatch.setattr(sources, "remote", lambda kind: [("x", ["http://127.0.0.1:9/"], "0")])
    return tmp_path / "my data"


@pytest.fixture
def published(monkeypatch):
    """The tiny files are what is published; the datasets are as small."""

    def publish(name, sizes, files=None):
        source = replace(layouts.SOURCES[name], published=sizes)
        monkeypatch.setitem(layouts.SOURCES, name, source)
        whole = catalogue._whole(name)
        monkeypatch.setitem(catalogue.CATALOGUE, name, (whole,))
        sums = {f.name: hashlib.md5(f.read_bytes()).hexdigest() for f in files or []}
        monkeypatch.setattr(check, "checksums", lambda kind: sums)

    return publish


@pytest.fixture
def fedscale(capsys):
    def run(*words):
        status = run_command(cli.cli, ["data", *words])
        captured = capsys.readouterr()
        return status, captured.out.splitlines(), captured.err.splitlines()

    return run


# fetch


def test_fetch_prints_where_a_downloaded_source_lies_and_downloads_once(
    root, fedscale, monkeypatch, tmp_path
):
    tiny.svhn(tmp_path / "origin")
    files = sorted((tmp_path / "origin").iterdir())
    listing = [(f.name, [f.as_uri()], hashlib.md5(f.read_bytes()).hexdigest()) for f in files]
    calls = []
    monkeypatch.setattr(sources, "remote", lambda kind: calls.append(kind) or listing)
    status, out, err = fedscale("fetch", "svhn")
    assert (status, out) == (0, [f"svhn: {root / 'svhn'}"])
    assert [line.split(" (")[0] for line in err] == [f"downloading {f.name}" for f in files]
    assert fedscale("fetch", "svhn", "svhn") == (0, [f"svhn: {root / 'svhn'}"], [])
    assert calls == ["SVHN"]


def test_fetch_of_a_composite_says_for_each_source_where_it_lies_or_how_to_get_it(root, fedscale):
    tiny.mnist(root / "fmnist")
    status, out, err = fedscale("fetch", "four", "offline")
    assert status == 1
    shipped = [
        f"{d.name}: ships with fedscale and the packages it depends on"
        for d in catalogue.CATALOGUE["offline"]
    ]
    assert out == [f"fmnist: {root / 'fmnist'}", *shipped]
    assert [line.split(" ")[0] for line in err] == ["mnist_m", "cinic10", "mmafedb"]
    assert "download failed" in err[0] and "download failed" in err[1]
    assert f"into {root / 'mmafedb'}, or run `kaggle" in err[2]
    assert fedscale("fetch", "offline") == (0, shipped, [])


def test_fetch_of_mnist_m_makes_it_of_photographs_where_there_are_some(root, fedscale):
    tiny.mnist(root / "mnist")
    (root / "photographs").mkdir()
    assert fedscale("fetch", "mnist_m") == (0, [f"mnist_m: {root / 'photographs'}"], [])


@pytest.mark.parametrize("command", ["fetch", "check"])
def test_an_unknown_name_lists_the_allowed_ones(fedscale, command):
    status, out, err = fedscale(command, "offline", "imagenet")
    assert (status, out) == (2, [])
    assert err == [
        "error: NAME=imagenet: unknown; allowed: offline, five, four, fashion, mnist, fmnist, "
        "cifar10, cifar100, svhn, dtd, notmnist, mnist_m, cinic10, mmafedb"
    ]
    assert fedscale(command)[0] == 2


# check


def test_check_of_what_ships(fedscale):
    status, out, err = fedscale("check", "offline")
    assert status == 0 and not err
    assert [line.split(": ok: ")[0] for line in out] == [
        f"offline/{name}" for name in ("fashion", "digits", "digits_m", "glyphs")
    ]
    assert "train 6,000 (28x28, 10 classes of 600), test 1,000" in out[0]
    assert "test 397 (32x32, 10 classes of 34 to 43)" in out[1]


@pytest.mark.parametrize("packed", [True, False])
def test_check_compares_counts_and_checksums_of_the_unpacked_files(
    root, tmp_path, fedscale, published, packed
):
    tiny.mnist(tmp_path / "plain", packed=False)
    tiny.mnist(root / "mnist", packed=packed)
    published("mnist", (20, 20), (tmp_path / "plain").iterdir())
    both = "(28x28, 10 classes of 2)"
    text = f"train 20 {both}, test 20 {both}; MD5 as published, in {root / 'mnist'}"
    assert fedscale("check", "mnist") == (0, [f"mnist: ok: {text}"], [])
    tiny.mnist(root / "mnist", packed=packed, seed=1)
    status, [line], _ = fedscale("check", "mnist")
    assert status == 1
    assert line.startswith("mnist: ") and "ok" not in line
    assert line.count("is not as published (MD5)") == 4


def test_check_of_fewer_images_than_published(root, fedscale, published):
    tiny.mnist(root / "mnist")
    published("mnist", (21, 20))
    status, [line], _ = fedscale("check", "mnist")
    assert status == 1 and line.startswith("mnist: train lacks 1 of 21 images; holds 20 training")


def test_check_of_folders_counts_every_class(root, fedscale, published):
    tiny.cinic10(root / "cinic10")
    published("cinic10", (30, 30))
    both = "(32x32, 10 classes of 3)"
    text = f"train 30 {both}, test 30 {both}; in {root / 'cinic10'}"
    assert fedscale("check", "cinic10") == (0, [f"cinic10: ok: {text}"], [])
    (root / "cinic10" / "test" / "dog" / "0001.png").unlink()
    status, [line], _ = fedscale("check", "cinic10")
    assert status == 1 and "test lacks 1 of 30 images" in line and "of 2 to 3)" in line
    shutil.rmtree(root / "cinic10" / "test" / "dog")
    status, [line], _ = fedscale("check", "cinic10")
    assert status == 1 and line.startswith("cinic10: missing: put train/<class>/*.png")


def test_check_opens_every_file(root, fedscale):
    tiny.mmafedb(root / "mmafedb")
    assert fedscale("check", "mmafedb")[0] == 0
    (root / "mmafedb" / "test" / "happy" / "0005.jpg").write_bytes(b"\xff\xd8 cut")
    status, [line], _ = fedscale("check", "mmafedb")
    assert status == 1 and "happy/0005.jpg is not a whole picture" in line


def test_check_of_a_composite_says_what_its_subsets_will_have(root, fedscale, monkeypatch):
    tiny.mmafedb(root / "mmafedb", per_class=6, rare=2)
    tiny.notmnist(root / "notmnist")
    domains = catalogue._subset("mmafedb", 30, 30), catalogue._subset("notmnist", 200, 20)
    monkeypatch.setitem(catalogue.CATALOGUE, "five", domains)
    status, out, _ = fedscale("check", "five")
    assert status == 1
    assert out[0].startswith("five/mmafedb: ok: train 38 (48x48, 7 classes of 2 to 6), of which a")
    assert "a balanced subset has 26 of 28 training images, there being only 2 of class 1" in out[0]
    assert out[1].startswith("five/notmnist: holds 180 training images; 200 are needed: train 180")
    assert "beside 1 unreadable files" in out[1]


def test_check_downloads_nothing(fedscale, monkeypatch):
    monkeypatch.setattr(sources, "remote", lambda kind: pytest.fail("asked for addresses"))
    status, out, err = fedscale("check", "five", "four", "dtd", "cifar100", "mnist_m")
    assert status == 1 and len(out) == 12 and not err
    assert all(": missing: put " in line for line in out)


@pytest.mark.skipif(HERE is None, reason="the full Fashion-MNIST is not here")
def test_known_checksums_are_those_of_the_full_fashion_mnist():
    sums = download.checksums("FashionMNIST")
    assert len(sums) == 4
    for file, digest in sums.items():
        assert hashlib.md5(formats.unpacked(HERE / file)).hexdigest() == digest
