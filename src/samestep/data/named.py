"""Image data by name, by folder, or embedded: MNIST, Fashion-MNIST, and the digits that need no download.

Addresses and md5 sums are those of the data sets' authors and of `torchvision.datasets.MNIST` and `FashionMNIST`.
"""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from torch import Tensor

from samestep.data import embedded
from samestep.data.download import cache_folder, fetch
from samestep.data.idx import TEST, TRAIN, find_pairs, read_image_label_pair
from samestep.data.tensors import TensorData, Transform, head_tail
from samestep.errors import UsageError

TRAIN_FRACTION = 0.8


@dataclass(frozen=True)
class Download:
    """A data set on the net.

    Attributes:
        noun: what its images are called.
        mirrors: address prefixes, tried in this order.
        md5: the md5 of each file, by name.
    """

    noun: str
    mirrors: tuple[str, ...]
    md5: dict[str, str]


DOWNLOADS = {
    "mnist": Download(
        "handwritten digits",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fashion-mnist": Download(
        "pictures of clothes",
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
}
NAMES = ("digits", *DOWNLOADS)


def image_data(
    name: str | None = None, data_dir: str | PathLike[str] | None = None
) -> tuple[TensorData, TensorData, str]:
    """Grey images in 10 classes."""
    if name is not None and name not in NAMES:
        raise UsageError(
            f"unknown image data {name!r}; known by --data: {', '.join(NAMES)}; "
            "a folder of IDX files is read by --data-dir"
        )
    if name == "digits" and data_dir is not None:
        raise UsageError("the digits are embedded and read no folder; leave out --data digits or --data-dir")
    if data_dir is not None:
        return _from_folder(Path(data_dir), name or Path(data_dir).resolve().name, _noun(name))
    if name is None or name == "digits":
        train, test = head_tail(TensorData(embedded.digits(), bytes_to_unit), TRAIN_FRACTION)
        return train, test, _describe("digits", "scans", train, test)
    folder = cache_folder() / name
    for file, md5 in DOWNLOADS[name].md5.items():
        fetch([mirror + file for mirror in DOWNLOADS[name].mirrors], folder / file, md5)
    return _from_folder(folder, name, _noun(name))


def bytes_to_unit(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Turns a batch `(x, y)` of uint8 images into float32 in 0…1."""
    x, y = batch
    return x.float() / 255, y


def _noun(name: str | None) -> str:
    return DOWNLOADS[name].noun if name in DOWNLOADS else "images"


def _from_folder(folder: Path, name: str, noun: str) -> tuple[TensorData, TensorData, str]:
    transform: Transform = bytes_to_unit
    pairs = {part: read_image_label_pair(*paths, transform=transform) for part, paths in find_pairs(folder).items()}
    if len(pairs) == 2:
        train, test = pairs[TRAIN], pairs[TEST]
    else:
        (only,) = pairs.values()
        train, test = head_tail(only, TRAIN_FRACTION)
    return train, test, _describe(name, noun, train, test)


def _describe(name: str, noun: str, train: TensorData, test: TensorData) -> str:
    height, width = train.tensors[0].shape[-2:]
    size = f"{height}×{width}"
    return f"{name}: {len(train) + len(test):,} {noun}, {size} ({len(train):,} train, {len(test):,} test)"
