"""Datasets that lie as folders of pictures, read as torchvision reads them, and MNIST-M."""

import os
import pickle
import shutil

import numpy as np
import pytest
import tiny
from PIL import Image
from torchvision import datasets, transforms

from fedscale.data import folders, layouts, mnist_m, sources
from fedscale.data.shares import balanced
from fedscale.data.sources import DataUnavailable


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSCALE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "remote", lambda kind: [("x", ["http://127.0.0.1:9/"], "0")])
    return tmp_path / "data"


def assert_same(found, images, labels):
    assert found[0].dtype == np.uint8 and found[1].dtype == np.int64
    assert np.array_equal(found[0], images) and np.array_equal(found[1], labels)


# CINIC-10 and MMAFEDB


@pytest.mark.parametrize("folder", ["cinic10", "CINIC-10"])
def test_cinic_10_is_what_torchvisions_image_folder_reads(root, folder):
    content = tiny.cinic10(root / folder)
    for junk in (".DS_Store", "Thumbs.db"):
        (root / folder / "train" / "frog" / junk).write_bytes(b"junk")
    for train, split in ((True, "train"), (False, "test")):
        found = sources.load("cinic10", train)
        assert_same(found, *content[train])
        oracle = datasets.ImageFolder(str(root / folder / split))
        assert [label for _, label in oracle.samples] == found[1].tolist()
        assert np.array_equal(found[0][7], np.asarray(oracle[7][0]))
        assert oracle.classes == list(tiny.CINIC10)


def test_hidden_files_are_not_pictures(root):
    content = tiny.cinic10(root / "cinic10")
    (root / "cinic10" / "test" / "frog" / "._0001.png").write_bytes(b"junk")
    assert_same(sources.load("cinic10", False), *content[False])


def test_only_the_pictures_of_the_balanced_subset_are_opened(root, monkeypatch):
    images, labels = tiny.cinic10(root / "cinic10", per_class=5)[True]
    opened = []
    picture = folders.picture
    monkeypatch.setattr(folders, "picture", lambda p, side: opened.append(p) or picture(p, side))
    found = sources.read("cinic10", True, 20)
    assert len(opened) == len(set(opened)) == 20 and found.there == 50
    chosen = balanced(labels, 20)
    assert_same(found, images[chosen], labels[chosen])
    smaller = sources.load("cinic10", True, 10)[0]
    assert {x.tobytes() for x in smaller} <= {x.tobytes() for x in found.images}


def test_pictures_of_another_size_are_named(root):
    tiny.cinic10(root / "cinic10")
    Image.new("RGB", (31, 32)).save(root / "cinic10" / "train" / "frog" / "0001.png")
    with pytest.raises(DataUnavailable, match=r"frog/0001\.png is 31x32, 0000\.png 32x32"):
        sources.load("cinic10", True)


def test_mmafedb_has_seven_emotions_in_one_size_gray_or_not(root):
    counts = tiny.mmafedb(root / "MMAFEDB", per_class=4, rare=2)
    images, labels = sources.load("mmafedb", True)
    assert images.shape == (26, 48, 48, 3)
    assert np.bincount(labels).tolist() == [counts[name] for name in tiny.EMOTIONS]
    gray = (images == images[..., :1]).all(axis=(1, 2, 3))
    assert gray.tolist() == [label % 2 == 0 for label in labels]
    oracle = datasets.ImageFolder(str(root / "MMAFEDB" / "test"))
    images, labels = sources.load("mmafedb", False)
    assert oracle.targets == labels.tolist() and oracle.classes == list(tiny.EMOTIONS)
    assert np.array_equal(images[-1], np.asarray(oracle[-1][0]))  # 48x48 as it is


def test_a_rare_class_gives_all_it_has(root):
    tiny.mmafedb(root / "mmafedb", per_class=6, rare=2)
    images, labels, there = sources.read("mmafedb", True, 35)
    assert np.bincount(labels).tolist() == [5, 2, 5, 5, 5, 5, 5] and there == 38
    assert len(images) == len(labels)


def test_a_class_folder_that_is_missing_is_named(root):
    tiny.cinic10(root / "cinic10")
    shutil.rmtree(root / "cinic10" / "test" / "truck")
    with pytest.raises(DataUnavailable, match="exists but lacks test/truck/"):
        sources.load("cinic10", True)


# DTD


@pytest.mark.parametrize("folder", ["dtd", "dtd/dtd"])
def test_dtd_is_what_torchvision_reads_from_the_same_files(root, folder):
    lists = tiny.dtd(root / "dtd" / "dtd")
    images, labels = sources.load("dtd", True)
    assert images.shape == (47 * 4, 224, 224, 3)
    if folder == "dtd":
        for name in ("images", "labels"):
            os.rename(root / "dtd" / "dtd" / name, root / "dtd" / name)
        assert_same(sources.load("dtd", True), images, labels)
        os.renames(root / "dtd" / "images", root / "dtd" / "dtd" / "images")
        os.renames(root / "dtd" / "labels", root / "dtd" / "dtd" / "labels")
    parts = [datasets.DTD(str(root), split=split, partition=1) for split in ("train", "val")]
    assert [label for part in parts for label in part._labels] == labels.tolist()
    files = [file for part in parts for file in part._image_files]
    for index in (0, 1, 50, 100, 187):
        assert np.array_equal(folders.picture(files[index], 224), images[index])
    test_images, test_labels = sources.load("dtd", False)
    oracle = datasets.DTD(str(root), split="test", partition=1)
    assert oracle._labels == test_labels.tolist() and oracle.classes == sorted(tiny.DTD)
    assert len(lists["test1"]) == len(test_images) == 94


def test_squares_are_what_torchvision_resizes_and_crops(tmp_path):
    pixels = np.add.outer(np.arange(300), np.arange(400))[..., None] * [1, 2, 3] % 256 // 64 * 64
    smooth = Image.fromarray(pixels.astype(np.uint8)).resize((60, 45)).resize((400, 300))
    smooth.save(tmp_path / "x.png")
    mine = folders.picture(tmp_path / "x.png", 224)
    steps = [transforms.Resize(224, transforms.InterpolationMode.BICUBIC)]
    theirs = np.asarray(transforms.Compose([*steps, transforms.CenterCrop(224)])(smooth))
    assert mine.shape == theirs.shape == (224, 224, 3)
    assert np.abs(mine.astype(int) - theirs).mean() < 1.0  # they round the size before the crop


@pytest.mark.parametrize("line", ["../../secret.jpg", "a/b/c.jpg", "nothing", "/x.jpg", "a/.."])
def test_a_line_of_dtds_lists_that_leaves_its_folder_is_refused(root, line):
    tiny.dtd(root / "dtd")
    with (root / "dtd" / "labels" / "test1.txt").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataUnavailable, match="is not <class>/<file>"):
        sources.load("dtd", False)


def test_dtd_with_other_classes_is_refused(root):
    tiny.dtd(root / "dtd")
    for file in (root / "dtd" / "labels").iterdir():
        file.write_text(file.read_text().replace("polka-dotted", "texture00"))
    with pytest.raises(DataUnavailable, match="names 46 classes, not 47"):
        sources.load("dtd", True)


# MNIST-M


def test_mnist_m_as_folders_with_lists(root):
    content = tiny.mnist_m(root / "mnist_m")
    for train in (True, False):
        assert_same(sources.load("mnist_m", train), *content[train])
    few = sources.load("mnist_m", True, 10)
    chosen = balanced(content[True][1], 10)
    assert_same(few, content[True][0][chosen], content[True][1][chosen])


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("folder", ["mnist_m", "MNIST-M/processed"])
def test_mnist_m_as_tensors(root, folder, zipped):
    content = tiny.mnist_m_tensors(root / folder, zipped=zipped)
    for train in (True, False):
        assert_same(sources.load("mnist_m", train), *content[train])


@pytest.mark.parametrize("line", ["0001.png 10", "../0001.png 3", "0001.png", " 3", "x.png -1"])
def test_a_line_of_mnist_ms_lists_that_is_none_is_refused(root, line):
    tiny.mnist_m(root / "mnist_m")
    with (root / "mnist_m" / "mnist_m_train_labels.txt").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataUnavailable, match="is not <name> <digit>"):
        sources.load("mnist_m", True)


def test_tensors_that_call_something_are_refused(root):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(root / "called"),)

    import torch

    tiny.mnist_m_tensors(root / "mnist_m")
    for save in (lambda file: torch.save(Evil(), file), lambda file: pickle.dump(Evil(), file)):
        with (root / "mnist_m" / "mnist_m_train.pt").open("wb") as file:
            save(file)
        with pytest.raises(DataUnavailable, match="damaged") as caught:
            sources.load("mnist_m", True)
        assert "\n" not in str(caught.value) and not (root / "called").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda t: t.zeros(3), "not a pair of tensors"),
        (lambda t: (t.zeros(3), 3), "not a pair of tensors"),
        (lambda t: (t.zeros(2, 28, 28, 3), t.zeros(2)), "float32"),
        (lambda t: (t.zeros(2, 3, 28, 28, dtype=t.uint8), t.zeros(2)), r"\(2, 3, 28, 28\)"),
        (lambda t: (t.zeros(2, 28, 28, 3, dtype=t.uint8), t.full((2,), t.nan)), "labels of float"),
        (lambda t: (t.zeros(2, 28, 28, 3, dtype=t.uint8), t.zeros(3).long()), "2 images and 3"),
    ],
)
def test_tensors_of_another_kind_are_refused(root, content, words):
    import torch

    tiny.mnist_m_tensors(root / "mnist_m")
    torch.save(content(torch), root / "mnist_m" / "mnist_m_train.pt")
    with pytest.raises(DataUnavailable, match=words):
        sources.load("mnist_m", True)


def test_a_pickle_of_mnist_m_is_not_read_and_the_line_says_so(root):
    (root / "mnist_m").mkdir(parents=True)
    (root / "mnist_m" / "keras_mnistm.pkl.gz").write_bytes(b"")
    with pytest.raises(DataUnavailable, match="a pickle is not read"):
        sources.load("mnist_m", True)


# MNIST-M, made


@pytest.fixture
def photographs(root):
    rng = np.random.default_rng(0)
    tiny.pictures(root / "photographs", 6, rng, (50, 37))
    tiny.pictures(root / "photographs" / "more", 5, rng, (28, 29))
    return root / "photographs"


def patches(path):
    image = np.asarray(Image.open(path).convert("RGB")).astype(int)
    height, width = image.shape[:2]
    return [image[y : y + 28, x : x + 28] for y in range(height - 27) for x in range(width - 27)]


def test_mnist_m_is_made_of_mnist_and_photographs(root, photographs):
    content = tiny.mnist(root / "mnist", per_class=3)
    used = {}
    for train in (True, False):
        images, labels = sources.load("mnist_m", train)
        assert images.dtype == np.uint8 and images.shape == (30, 28, 28, 3)
        assert np.array_equal(labels, content[train][1])
        crops = {p: patches(p) for p in photographs.rglob("*.png")}
        used[train] = set()
        for digit, image in zip(content[train][0].astype(int), images, strict=True):
            origin = [
                path
                for path, all_ in crops.items()
                if any(np.array_equal(np.abs(c - digit[..., None]), image) for c in all_)
            ]
            assert len(origin) == 1
            used[train] |= set(origin)
    assert len(used[False]) == 2 and not used[True] & used[False]
    assert len(used[True]) > 5


def test_a_smaller_made_subset_lies_inside_a_larger_one(root, photographs):
    labels = tiny.mnist(root / "mnist", per_class=3)[True][1]
    images = sources.load("mnist_m", True)[0]
    few, few_labels, there = sources.read("mnist_m", True, 20)
    chosen = balanced(labels, 20)
    assert_same((few, few_labels), images[chosen], labels[chosen])
    assert there == 30


def test_its_own_files_go_before_photographs(root, photographs):
    tiny.mnist(root / "mnist")
    assert sources.find("mnist_m") == photographs
    content = tiny.mnist_m(root / "mnist_m")
    assert sources.find("mnist_m") == root / "mnist_m"
    assert_same(sources.load("mnist_m", True), *content[True])


def test_photographs_without_mnist_ask_for_mnist(root, photographs):
    assert sources.find("mnist_m") is None
    with pytest.raises(DataUnavailable, match=r"^mnist is not here"):
        sources.load("mnist_m", True)


@pytest.mark.parametrize(
    ("count", "size", "words"),
    [(0, (30, 30), "holds 0 photographs"), (1, (30, 30), "holds 1"), (3, (27, 99), "is 27x99")],
)
def test_too_few_or_too_small_photographs_are_one_line(root, count, size, words):
    tiny.mnist(root / "mnist")
    tiny.pictures(root / "photographs", count, np.random.default_rng(0), size)
    with pytest.raises(DataUnavailable, match=words) as caught:
        sources.load("mnist_m", True)
    assert "\n" not in str(caught.value) and "photographs into" in str(caught.value)


def test_blending_a_black_photograph_gives_the_digit(root):
    content = tiny.mnist(root / "mnist")
    for number in range(2):
        (root / "black").mkdir(exist_ok=True)
        Image.new("L", (40, 40)).save(root / "black" / f"{number}.JPG")
    found = mnist_m.blended(root / "mnist", root / "black", True, 0)
    assert np.array_equal(found.images, np.repeat(content[True][0][..., None], 3, axis=-1))


def test_the_layouts_name_what_they_hold():
    for name, source in layouts.SOURCES.items():
        line = sources.how_to_get(name)
        assert "\n" not in line and line.startswith("put ") and source.about
        assert all(form for form in source.forms)
