"""Datasets by name: sizes, offsets, subsets, and what is said when one is absent."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import tiny

from fedscale.data import catalogue, sources
from fedscale.data.catalogue import CATALOGUE, DataUnavailable, Domain, available, load


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSCALE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fmnist = replace(sources.SOURCES["fmnist"], system=())
    monkeypatch.setitem(sources.SOURCES, "fmnist", fmnist)
    monkeypatch.setattr(sources, "remote", lambda kind: [("x", ["http://127.0.0.1:9/"], "0")])
    return tmp_path / "data"


@pytest.fixture
def everything(root):
    tiny.mnist(root / "mnist", per_class=3)
    tiny.mnist(root / "fmnist", per_class=3, seed=1)
    tiny.cifar(root / "cifar10")
    tiny.cifar(root / "cifar100", 100, 200)
    tiny.svhn(root / "svhn")
    tiny.notmnist(root / "notmnist")
    tiny.mnist_m(root / "mnist_m")
    tiny.cinic10(root / "cinic10")
    tiny.mmafedb(root / "mmafedb")
    tiny.dtd(root / "dtd")


def assert_well_formed(dataset):
    for split in (dataset.train, dataset.test):
        assert len(split) == len(split.labels) == len(split.domains) == sum(map(len, split.images))
        assert split.labels.dtype == split.domains.dtype == np.int64
        assert np.all(np.diff(split.domains) >= 0)
        offset = 0
        for number, (images, classes) in enumerate(zip(split.images, dataset.classes, strict=True)):
            mine = split.labels[split.domains == number]
            assert len(mine) == len(images)
            assert images.dtype == np.uint8 and images.ndim == 4 and images.shape[3] == 3
            assert mine.min() >= offset and mine.max() < offset + classes
            offset += classes
        assert dataset.num_classes == offset


def test_the_offline_dataset_has_the_catalogues_sizes():
    dataset = load("offline")
    assert_well_formed(dataset)
    assert dataset.domains == ("fashion", "digits", "digits_m", "glyphs")
    assert dataset.num_classes == 40 and set(dataset.train.labels) == set(range(40))
    for domain, train, test in zip(
        CATALOGUE["offline"], dataset.train.images, dataset.test.images, strict=True
    ):
        assert (domain.train_size, domain.test_size) == (len(train), len(test))


def test_smaller_sizes_are_balanced_nested_and_the_same_every_time():
    large, small, again = load("offline", 500, 100), load("offline", 250, 45), load("offline", 250)
    assert_well_formed(small)
    assert np.all(np.bincount(large.train.labels) == 50)
    assert np.all(np.bincount(small.train.labels) == 25)
    assert np.all(np.bincount(small.test.labels) == 4)  # 45 // 10
    for few, many, same in zip(
        small.train.images, large.train.images, again.train.images, strict=True
    ):
        assert np.array_equal(few, same)
        assert {image.tobytes() for image in few} <= {image.tobytes() for image in many}


def test_more_than_there_is_gives_what_there_is():
    assert len(load("offline", 10**6, 10**6).train) == len(load("offline").train)


def test_groups_give_the_images_of_any_indices_by_domain():
    split = load("offline", 50, 10).train
    flat = [image for images in split.images for image in images]
    indices = np.random.default_rng(0).permutation(len(split))[:120]
    seen = np.zeros(len(indices), int)
    for positions, images in split.groups(indices):
        seen[positions] += 1
        for position, image in zip(positions, images, strict=True):
            assert np.array_equal(image, flat[indices[position]])
    assert np.all(seen == 1)
    only = indices[split.domains[indices] == 2]
    assert len(list(split.groups(only))) == 1
    assert not list(split.groups(np.array([], int)))


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name not in ("offline", "fashion")])
def test_every_public_dataset_loads_from_files_in_its_own_format(everything, name):
    size = max(domain.classes for domain in CATALOGUE[name])
    dataset = load(name, size, size)
    assert_well_formed(dataset)
    assert np.all(np.bincount(dataset.train.labels) == 1)
    assert np.all(np.bincount(dataset.test.labels) == 1)
    assert len(np.bincount(dataset.train.labels)) == dataset.num_classes
    assert available(name)[0]


def test_five_is_the_papers_order_with_fifty_classes(everything):
    dataset = load("five", 20, 10)
    assert dataset.domains == ("cifar10", "mnist", "fmnist", "svhn", "notmnist")
    assert dataset.num_classes == 50
    assert {(d.train_size, d.test_size) for d in CATALOGUE["five"]} == {(20_000, 2_000)}


def test_four_is_the_papers_order_with_37_classes(everything):
    dataset = load("four", 20, 10)
    assert dataset.domains == ("mnist_m", "fmnist", "cinic10", "mmafedb")
    assert dataset.classes == (10, 10, 10, 7) and dataset.num_classes == 37
    assert [len(images) for images in dataset.train.images] == [20, 20, 20, 14]  # 20 // 7 = 2
    assert {(d.train_size, d.test_size) for d in CATALOGUE["four"]} == {(30_000, 2_500)}
    assert [d.size(True) for d in CATALOGUE["four"]] == [30_000, 30_000, 30_000, 29_995]
    assert [d.size(False) for d in CATALOGUE["four"]] == [2_500, 2_500, 2_500, 2_499]


def test_dtd_has_47_classes_in_one_size(everything):
    dataset = load("dtd", 94, 47)
    assert dataset.num_classes == 47 and dataset.train.images[0].shape == (94, 224, 224, 3)
    assert (CATALOGUE["dtd"][0].train_size, CATALOGUE["dtd"][0].test_size) == (3_760, 1_880)


@pytest.mark.parametrize(
    ("name", "arguments", "there", "size"),
    [
        ("mnist", (), "30 training images", "60,000"),
        ("mnist", (40, 10), "30 training images", "40"),
        ("five", (100, 10), "30 training images", "100"),
        ("four", (), "30 training images", "30,000"),
        ("four", (20, 100), "30 test images", "100"),
        ("mmafedb", (0, 0), "42 training images", "29,995"),
        ("dtd", (), "188 training images", "3,760"),
    ],
)
def test_files_with_fewer_images_than_needed_are_one_line(
    everything, root, monkeypatch, name, arguments, there, size
):
    monkeypatch.setitem(CATALOGUE, "mmafedb", CATALOGUE["four"][3:])
    with pytest.raises(DataUnavailable, match=rf"holds {there}; {size} are needed") as caught:
        load(name, *arguments)
    assert "\n" not in str(caught.value) and str(root) in str(caught.value)


def test_a_rare_class_gives_all_it_has_and_is_told(root, caplog):
    tiny.mmafedb(root / "mmafedb", per_class=6, rare=2)
    domain = Domain("mmafedb", 7, 30, 30, "", whole=False)
    for train in (True, False):
        caplog.clear()
        images, labels = catalogue._domain(domain, train, 0)
        assert np.bincount(labels).tolist() == [4, 2, 4, 4, 4, 4, 4] and len(images) == 26
        assert "26 of 28" in caplog.text and "2 of class 1 (4 wanted)" in caplog.text


def test_an_empty_class_is_one_line(everything, root):
    for file in (root / "cinic10" / "train" / "frog").iterdir():
        file.unlink()
    with pytest.raises(DataUnavailable, match=r"holds 27 .*, none of 1 of its 10 classes; 10 are"):
        catalogue._domain(CATALOGUE["four"][2], True, 10)


def test_a_subset_is_balanced_even_of_exactly_its_size(root):
    tiny.mmafedb(root / "mmafedb", per_class=6, rare=13)  # 49 images
    domain = Domain("mmafedb", 7, 49, 49, "", whole=False)
    images, labels = catalogue._domain(domain, True, 0)
    assert np.bincount(labels).tolist() == [6, 7, 6, 6, 6, 6, 6] and len(images) == 43


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name not in ("offline", "fashion")])
def test_absent_data_is_one_line_and_available_agrees(root, name):
    there, text = available(name)
    assert not there and "\n" not in text
    assert str(root) in text or f"fedscale data fetch {name}" in text
    with pytest.raises(DataUnavailable) as caught:
        load(name, 100, 100)
    assert "\n" not in str(caught.value) and str(root) in str(caught.value)


def test_offline_is_always_available(root):
    assert available("offline")[0]


@pytest.mark.parametrize("call", [load, available])
def test_an_unknown_name_lists_the_known_ones(call):
    with pytest.raises(
        ValueError, match=r"data\.name='imagenet' is unknown; allowed: offline, five"
    ):
        call("imagenet")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [((5, 0), "data.train_size=5: fashion has 10 classes"), ((0, -1), "data.test_size=-1")],
)
def test_a_size_that_leaves_a_class_empty_is_one_line(sizes, words):
    with pytest.raises(ValueError, match=words) as caught:
        load("offline", *sizes)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(sources.find("fmnist") is None, reason="the full Fashion-MNIST is not here")
def test_fashion_mnist_in_full():
    dataset = load("fmnist")
    assert len(dataset.train) == 60_000 and len(dataset.test) == 10_000
    assert np.all(np.bincount(dataset.train.labels) == 6_000)
    small = load("fmnist", 6_000, 1_000)
    shipped = load("offline")
    for mine, theirs in ((small.train, shipped.train), (small.test, shipped.test)):
        order = np.argsort(mine.labels, kind="stable")
        assert np.array_equal(mine.images[0][order], theirs.images[0])


def test_importing_the_catalogue_is_light():
    code = (
        "import sys, fedscale.data.check, fedscale.data.partition; "
        "print([m for m in ('torch','torchvision','sklearn','scipy','PIL','matplotlib','filelock')"
        " if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
    assert catalogue.CATALOGUE
