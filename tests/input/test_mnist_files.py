"""MNIST's and Fashion-MNIST's files: read as they are, refused in one line when they are not."""

import gzip
import os
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from crankshaft.input import fashion_mnist, mnist
from crankshaft.input.checks import InputError
from tests.waiting import PATIENCE

pytestmark = pytest.mark.thorough

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
EVAL_IMAGES, EVAL_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DEBIAN_FOLDER = "/usr/share/datasets/fashion-mnist"


def idx_bytes(array: np.ndarray) -> bytes:
    codes = {"uint8": 0x08, "int32": 0x0C, "float32": 0x0D}
    header = bytes([0, 0, codes[array.dtype.name], array.ndim])
    lengths = struct.pack(f">{array.ndim}I", *array.shape)
    return header + lengths + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_data_set(folder, compressed: bool, train_count: int = 7, eval_count: int = 3):
    """Writes the four files; returns the arrays in them by file name (without `.gz`)."""
    rng = np.random.default_rng(0)
    arrays = {
        TRAIN_IMAGES: rng.integers(256, size=(train_count, 28, 28), dtype=np.uint8),
        TRAIN_LABELS: rng.integers(10, size=train_count, dtype=np.uint8),
        EVAL_IMAGES: rng.integers(256, size=(eval_count, 28, 28), dtype=np.uint8),
        EVAL_LABELS: rng.integers(10, size=eval_count, dtype=np.uint8),
    }
    for name, array in arrays.items():
        content = idx_bytes(array)
        if compressed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return arrays


def refusal(data_dir) -> str:
    """The message with which the folder is refused; every one has to be a single line."""
    with pytest.raises(InputError) as caught:
        mnist.load(str(data_dir), 0)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


@pytest.fixture
def folder(tmp_path):
    write_data_set(tmp_path, compressed=False)
    return tmp_path


@pytest.mark.parametrize("module", [mnist, fashion_mnist])
@pytest.mark.parametrize("compressed", [False, True])
def test_files_come_back_scaled_and_in_their_order(tmp_path, module, compressed):
    arrays = write_data_set(tmp_path, compressed)
    splits = module.load(str(tmp_path), 0)
    assert splits.num_classes == 10
    for (features, labels), images_name, labels_name in [
        (splits.train, TRAIN_IMAGES, TRAIN_LABELS),
        (splits.evaluation, EVAL_IMAGES, EVAL_LABELS),
    ]:
        assert features.dtype == np.float32
        assert labels.dtype == np.int32
        assert features.shape == (len(labels), 28, 28, 1)
        # One float32 division, correctly rounded: so equal, not close.
        expected = arrays[images_name].astype(np.float32)[..., np.newaxis] / np.float32(255)
        np.testing.assert_array_equal(features, expected)
        np.testing.assert_array_equal(labels, arrays[labels_name])


def test_plain_and_gzip_files_may_be_mixed_and_misnamed(folder):
    content = (folder / TRAIN_IMAGES).read_bytes()
    expected, _ = mnist.load(str(folder), 0).train
    (folder / TRAIN_IMAGES).unlink()
    # A browser that unpacks while it downloads leaves a plain file under the name with .gz.
    for name, misnamed in [(TRAIN_IMAGES + ".gz", content), (TRAIN_IMAGES, gzip.compress(content))]:
        (folder / name).write_bytes(misnamed)
        np.testing.assert_array_equal(mnist.load(str(folder), 0).train[0], expected)
        (folder / name).unlink()


def test_folder_that_is_not_there_or_is_a_file_or_is_empty(tmp_path):
    assert f"data_dir={tmp_path / 'absent'}" in refusal(tmp_path / "absent")
    (tmp_path / "file").write_bytes(b"x")
    assert "found a file" in refusal(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "an empty folder" in refusal(tmp_path / "empty")


@pytest.mark.parametrize("name", [TRAIN_IMAGES, TRAIN_LABELS, EVAL_IMAGES, EVAL_LABELS])
def test_missing_file_is_named_with_what_is_there(folder, name):
    (folder / name).rename(folder / "something-else")
    message = refusal(folder)
    assert all(word in message for word in (str(folder / name), "missing", "something-else"))
    (folder / name).mkdir()
    message = refusal(folder)
    assert all(word in message for word in (str(folder / name), "is not a regular file"))


@pytest.mark.parametrize("name", [TRAIN_IMAGES, EVAL_LABELS])
@pytest.mark.parametrize("compressed", [False, True])
def test_truncated_and_trailing_bytes_are_counted(tmp_path, name, compressed):
    arrays = write_data_set(tmp_path, compressed)
    path = tmp_path / (name + ".gz" if compressed else name)
    pack = gzip.compress if compressed else bytes
    whole = idx_bytes(arrays[name])
    size = arrays[name].size
    for content, found in ((whole[:-1], f"{size - 1:,} bytes"), (whole + b"\0\0", "more")):
        path.write_bytes(pack(content))
        message = refusal(tmp_path)
        assert all(w in message for w in (str(path), f"expected {size:,} bytes", f"found {found}"))


def test_no_more_is_unpacked_than_a_header_means(folder):
    bomb = gzip.compress(bytes(1 << 26))  # 64 MB of zeros
    for header, problem in ((b"", "not an IDX file"), (idx_bytes(np.zeros(1, np.uint8)), "another length")):
        (folder / TRAIN_LABELS).write_bytes(gzip.compress(header) + bomb)
        tracemalloc.start()
        try:
            assert problem in refusal(folder)
            assert tracemalloc.get_traced_memory()[1] < 1 << 22
        finally:
            tracemalloc.stop()


def of_labels(values, dtype=np.uint8) -> bytes:
    return idx_bytes(np.array(values, dtype))


LABELS = of_labels([0] * 7)
WRONG = {
    "empty": (TRAIN_LABELS, b"", "found [] in 0 bytes"),
    "a gzip of nothing": (TRAIN_LABELS, gzip.compress(b"", mtime=0), "found [] in 0 bytes"),
    "no examples": (TRAIN_LABELS, of_labels([]), "[2049, N] with N above 0, found [2049, 0] in 8 bytes"),
    "a page": (TRAIN_LABELS, b"<htm" + LABELS[4:], "not an IDX file", "header of [2049, N]", f"[{0x3C68746D}, 7]"),
    "no such type": (TRAIN_LABELS, b"\0\0\x07\x01" + LABELS[4:], "not an IDX file", f"found [{0x0701}, 7]"),
    "turned bytes": (TRAIN_LABELS, b"\x08\x01\0\0" + LABELS[4:], "not an IDX file", f"found [{0x08010000}, 7]"),
    "another type": (TRAIN_LABELS, of_labels([0] * 7, np.int32), f"found [{0x0C01}, 7]"),
    "images": (TRAIN_LABELS, idx_bytes(np.zeros((7, 28, 28), np.uint8)), "found [2051, 7]"),
    "another size": (EVAL_IMAGES, idx_bytes(np.zeros((3, 32, 28), np.uint8)), "[2051, N, 28, 28]", "[2051, 3, 32, 28]"),
    "another count": (TRAIN_LABELS, of_labels([0] * 6), TRAIN_IMAGES, "7 images", "6 labels"),
    "a label of 10": (EVAL_LABELS, of_labels([9, 0, 10]), "expected 0..9", "found 10 at example 2"),
    "more than memory": (
        *(TRAIN_LABELS, LABELS[:4] + b"\xff\xff\xff\xff" + bytes(3)),
        "another length than its header means: expected 4,294,967,295 bytes, found 3 bytes",
    ),
    **{
        f"{length} bytes": (TRAIN_IMAGES, idx_bytes(np.zeros((7, 28, 28), np.uint8))[:length], f"in {length} bytes")
        for length in (1, 3, 4, 7, 15)
    },
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_of_something_else_is_one_line_with_what_was_expected_and_found(folder, case):
    name, content, *words = WRONG[case]
    (folder / name).write_bytes(content)
    message = refusal(folder)
    assert all(word in message for word in (str(folder / name), *words))


def test_corrupt_gzip(tmp_path):
    write_data_set(tmp_path, compressed=True)
    path = tmp_path / (TRAIN_IMAGES + ".gz")
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :]
    for content in (whole[:-5], whole[:12], whole[:2], flipped, whole + b"not gzip"):
        path.write_bytes(content)
        assert all(word in refusal(tmp_path) for word in (str(path), "not a whole gzip file"))


def test_without_a_folder_keras_provides_or_the_cure_is_told(tmp_path):
    # A process of its own: Keras reads its folder and the proxies from the environment when it
    # starts. A proxy that nobody serves stands for a machine without internet.
    cache = tmp_path / "datasets" / "fashion-mnist"
    cache.mkdir(parents=True)
    arrays = write_data_set(cache, compressed=True)
    program = (
        "from crankshaft.input import fashion_mnist, mnist\n"
        "from crankshaft.input.checks import InputError\n"
        "splits = fashion_mnist.load(None, 0)\n"
        "print(splits.train[0].shape, splits.train[0].dtype, splits.evaluation[1].tolist())\n"
        "try: mnist.load('', 0)\n"
        "except InputError as error: print(error)\n"
    )
    proxy = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **proxy, "KERAS_HOME": str(tmp_path), "no_proxy": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    found, *_, message = done.stdout.splitlines()  # Keras prints a line of its own between them.
    assert found == f"(7, 28, 28, 1) float32 {arrays[EVAL_LABELS].tolist()}"
    assert message.startswith("input=mnist has no data_dir and Keras could not download it")
    for name in (TRAIN_IMAGES, TRAIN_LABELS, EVAL_IMAGES, EVAL_LABELS, "data_dir=FOLDER"):
        assert name in message


@pytest.mark.skipif(not os.path.isdir(DEBIAN_FOLDER), reason="Debian's dataset-fashion-mnist is not installed")
def test_debians_fashion_mnist_is_whole_and_balanced():
    splits = fashion_mnist.load(DEBIAN_FOLDER, 0)
    for (features, labels), count in [(splits.train, 60000), (splits.evaluation, 10000)]:
        assert features.shape == (count, 28, 28, 1)
        assert features.min() == 0
        assert features.max() == 1
        assert np.bincount(labels).tolist() == [count // 10] * 10
