"""What the public datasets look like on disk: folders, files, readers, published sizes."""

from __future__ import annotations

from dataclasses import dataclass

from fedscale.data import folders, formats, mnist_m
from fedscale.data.formats import LETTERS, Reader

MMAFEDB_SIDE = 48
DTD_SIDE = 224


@dataclass(frozen=True)
class Source:
    """One dataset on disk.

    Attributes:
        about: its name, for people.
        classes: labels are 0 to classes - 1.
        folders: where it may lie below a root; the first is where it is downloaded to.
        forms: what a folder must hold, in one of these forms, of which the first is downloaded;
            a file whose name ends in .gz may be unpacked, a name that ends in "/" is a folder.
        read: see formats.py and folders.py.
        published: training and test images it has, (0, 0) where versions differ.
        kind: what download.py knows it by, or "".
        system: other folders to look in.
        layout: what belongs into the folder, where a list of the files would not tell.
        command: what fetches it, when that is not `fedscale data fetch`; {root} stands for the
            root.
    """

    about: str
    classes: int
    folders: tuple[str, ...]
    forms: tuple[tuple[str, ...], ...]
    read: Reader
    published: tuple[int, int] = (0, 0)
    kind: str = ""
    system: tuple[str, ...] = ()
    layout: str = ""
    command: str = ""


_IDX = tuple(
    f"{split}-{content}-ubyte.gz"
    for split in ("train", "t10k")
    for content in ("images-idx3", "labels-idx1")
)
_CIFAR10 = {True: [f"data_batch_{number}" for number in range(1, 6)], False: ["test_batch"]}
_CIFAR100 = {True: ["train"], False: ["test"]}
_CINIC10 = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_EMOTIONS = ("angry", "disgust", "fear", "happy", "neutral", "sad", "surprise")


def _both_splits(classes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{split}/{name}/" for split in ("train", "test") for name in classes)


SOURCES: dict[str, Source] = {
    "mnist": Source(
        "MNIST",
        10,
        ("mnist", "MNIST/raw"),
        (_IDX,),
        formats.mnist,
        (60_000, 10_000),
        "MNIST",
    ),
    "fmnist": Source(
        "Fashion-MNIST",
        10,
        ("fmnist", "fashion-mnist", "FashionMNIST/raw"),
        (_IDX,),
        formats.mnist,
        (60_000, 10_000),
        "FashionMNIST",
        system=("/usr/share/datasets/fashion-mnist",),
        command="sudo apt-get install dataset-fashion-mnist",
    ),
    "cifar10": Source(
        "CIFAR-10",
        10,
        ("cifar10", "cifar-10-batches-py"),
        ((*_CIFAR10[True], *_CIFAR10[False]),),
        formats.cifar(_CIFAR10, "labels"),
        (50_000, 10_000),
        "CIFAR10",
    ),
    "cifar100": Source(
        "CIFAR-100, fine labels",
        100,
        ("cifar100", "cifar-100-python"),
        ((*_CIFAR100[True], *_CIFAR100[False]),),
        formats.cifar(_CIFAR100, "fine_labels"),
        (50_000, 10_000),
        "CIFAR100",
    ),
    "svhn": Source(
        "SVHN, cropped digits",
        10,
        ("svhn", "SVHN", "."),
        (("train_32x32.mat", "test_32x32.mat"),),
        formats.svhn,
        (73_257, 26_032),
        "SVHN",
    ),
    "dtd": Source(
        f"Describable Textures, partition 1, centred squares at {DTD_SIDE}x{DTD_SIDE}",
        folders.DTD_CLASSES,
        ("dtd", "dtd/dtd"),
        (("images/", "labels/train1.txt", "labels/val1.txt", "labels/test1.txt"),),
        folders.dtd(DTD_SIDE),
        (3_760, 1_880),
        "DTD",
        layout="the folders images and labels of dtd-r1.0.1.tar.gz",
    ),
    "notmnist": Source(
        "notMNIST, from a folder",
        len(LETTERS),
        ("notmnist", "notMNIST_large", "notMNIST_small"),
        (tuple(f"{letter}/" for letter in LETTERS),),
        folders.letters,
        layout="folders A to J of PNG files (notMNIST)",
        # Into a folder that is not read, and renamed when tar has met the archive's end.
        command="mkdir -p {root}/.notmnist && curl -L https://commondatastorage.googleapis.com/"
        "books1000/notMNIST_large.tar.gz | tar xz -C {root}/.notmnist && "
        "mv {root}/.notmnist/notMNIST_large {root}/notmnist",
    ),
    "mnist_m": Source(
        "MNIST-M",
        10,
        ("mnist_m", "MNIST-M", "MNISTM", "mnist_m/processed", "MNIST-M/processed"),
        (
            ("mnist_m_train.pt", "mnist_m_test.pt"),
            tuple(f"mnist_m_{s}{end}" for s in ("train", "test") for end in ("/", "_labels.txt")),
        ),
        mnist_m.read,
        kind="mnist_m",
        layout="mnist_m_train.pt and mnist_m_test.pt, or the folders mnist_m_train and "
        "mnist_m_test with their _labels.txt (a pickle is not read),",
    ),
    "cinic10": Source(
        "CINIC-10, its valid images unused",
        len(_CINIC10),
        ("cinic10", "CINIC-10", "cinic-10"),
        (_both_splits(_CINIC10),),
        folders.class_folders(_CINIC10),
        (90_000, 90_000),
        "cinic10",
        layout="train/<class>/*.png and test/<class>/*.png of CINIC-10.tar.gz",
    ),
    "mmafedb": Source(
        f"MMAFEDB, 7 emotions at {MMAFEDB_SIDE}x{MMAFEDB_SIDE}, from a folder",
        len(_EMOTIONS),
        ("mmafedb", "MMAFEDB", "mmafedb/MMAFEDB"),
        (_both_splits(_EMOTIONS),),
        folders.class_folders(_EMOTIONS, MMAFEDB_SIDE),
        layout=f"train/<emotion>/*.jpg and test/<emotion>/*.jpg ({', '.join(_EMOTIONS)})",
        command="kaggle datasets download yuulind/mmafedb-clean --unzip -p {root}/mmafedb",
    ),
}
