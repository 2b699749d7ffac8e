"""Image files: found and numbered, decoded and sampled by (seed, epoch, example) alone, and refused in one line."""

import io
import os
import pathlib
import struct
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps

from crankshaft.engine.data.order import Order
from crankshaft.engine.data.reader import Reader, raising_source_error
from crankshaft.engine.data.source import SourceSlice, WithoutBadRecords
from crankshaft.engine.errors import BadRecordError
from crankshaft.input import images
from crankshaft.input.checks import InputError

pytestmark = pytest.mark.thorough


def picture(number: int, height: int = 40, width: int = 60, channels: int = 3) -> np.ndarray:
    """A smooth picture, so that JPEG keeps it, of another colour for each number; its left is darker than its right."""
    across, down = np.meshgrid(np.linspace(0, 120, width), np.linspace(0, 40, height))
    shades = [across + down + (number * 37 + channel * 60) % 90 for channel in range(channels)]
    return np.stack(shades, -1).astype(np.uint8)


def jpeg(number: int, **form) -> bytes:
    return tf.io.encode_jpeg(picture(number, **form), quality=98, chroma_downsampling=False).numpy()


def png(number: int, **form) -> bytes:
    return tf.io.encode_png(picture(number, **form)).numpy()


def write(path: pathlib.Path, content: bytes) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def folder(tmp_path):
    """12 images in three classes, JPEG and PNG."""
    for number in range(12):
        name, content = (f"{number}.JPG", jpeg(number)) if number % 2 else (f"{number}.png", png(number))
        write(tmp_path / "images" / "abc"[number % 3] / name, content)
    return tmp_path / "images"


def reading_of(source, count: int, seed: int = 5):
    """A function of (epoch, indices): what `count` examples of a source are in an epoch, (features, labels)."""
    reader = Reader(source, Order(len(source), max(1, count), 1, seed))

    @tf.function(autograph=False)
    def read(epoch, indices):
        return reader.read(indices[tf.newaxis], epoch)

    def read_eagerly(epoch: int, at):
        with raising_source_error(reader):
            found = read(tf.constant(epoch, tf.int64), tf.constant(at, tf.int64, [count]))
        return [part.numpy()[0] for part in found]

    return read_eagerly


def examples(source, epoch: int = 0, seed: int = 5, at=None):
    """(features, labels) of a source's examples as an epoch has them."""
    at = range(len(source)) if at is None else at
    return reading_of(source, len(at), seed)(epoch, [*at])


def loaded(data_dir, **arguments):
    return images.load(str(data_dir), 0, **{"size": 16, **arguments})


def test_classes_are_folders_in_the_order_of_their_names(folder):
    found = loaded(folder, augment=False)
    assert (found.num_classes, found.classes, found.evaluation, len(found.train)) == (3, ("a", "b", "c"), None, 12)
    features, labels = examples(found.train)
    assert features.shape == (12, 16, 16, 3)
    assert features.dtype == np.float32
    assert labels.tolist() == ["abc".index(os.path.basename(os.path.dirname(p))) for p in found.train.files()]
    assert sorted(labels) == [0] * 4 + [1] * 4 + [2] * 4
    assert sorted(labels[-6:]) != [2] * 6, "the end of a folder's images is of all classes"


def test_a_class_has_its_name_in_a_locale_that_is_not_utf_8_too(tmp_path):
    for name in ("k\xe4se", "\u732b"):
        write(tmp_path / name / "a.png", png(0))
    program = f"from crankshaft.input import images; print(ascii(images.load({os.fspath(tmp_path)!r}, 0).classes))"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **locale}, capture_output=True, text=True, check=True)
    assert done.stdout == "('k\\xe4se', '\\u732b')\n"


@pytest.mark.parametrize("encode", [jpeg, png])
@pytest.mark.parametrize("pixels", ["float32", "uint8"])
def test_the_centre_is_what_an_evaluation_gets(tmp_path, encode, pixels):
    write(tmp_path / "a" / ("1.jpg" if encode is jpeg else "1.png"), encode(3))
    ((found,), _) = examples(loaded(tmp_path, augment=False, crop=0.8, pixels=pixels).train)
    centre = tf.image.resize(picture(3)[4:36, 14:46], [16, 16]).numpy()
    shades = found * 255 if pixels == "float32" else found
    np.testing.assert_allclose(shades, centre, atol=3 if encode is jpeg else 0.51)  # JPEG loses a little


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("form", [{"subsampling": 0}, {"subsampling": 2}, {"progressive": True}], ids=str)
def test_a_jpeg_is_decoded_as_pillow_does(tmp_path, mode, form):
    """Blocks of black and white: by TensorFlow's fast transform whole blocks are off, by up to 255."""
    blocks = np.random.default_rng(0).integers(0, 2, (16, 16, len(mode)), np.uint8) * np.uint8(255)
    content = io.BytesIO()
    Image.fromarray(np.kron(blocks, np.ones((4, 4, 1), np.uint8)).squeeze()).save(content, "JPEG", quality=95, **form)
    write(tmp_path / "a" / "1.jpg", content.getvalue())
    arguments = {"size": 64, "channels": len(mode), "augment": False, "crop": 1.0, "pixels": "uint8"}
    ((found,), _) = examples(loaded(tmp_path, **arguments).train)
    np.testing.assert_array_equal(found.squeeze(), np.asarray(Image.open(content)))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("stored", [1, 3])
def test_grey_and_colours_become_what_is_asked(tmp_path, stored, channels):
    write(tmp_path / "a" / "1.png", png(1, channels=stored))
    write(tmp_path / "a" / "2.jpg", tf.io.encode_jpeg(picture(1, channels=stored)).numpy())
    features, _ = examples(loaded(tmp_path, channels=channels).train)
    assert features.shape == (2, 16, 16, channels)


def test_samples_are_of_seed_epoch_and_example_alone(folder):
    train = loaded(folder).train
    assert train.is_random
    first, _ = examples(train)
    some, _ = examples(train, at=[7, 2])
    np.testing.assert_array_equal(some, first[[7, 2]])  # whoever reads them, with whichever others
    later, _ = examples(train, epoch=1)
    other_seed, _ = examples(train, seed=6)
    for other in (later, other_seed):
        assert (other != first).any((1, 2, 3)).all()


def test_sampled_parts_lie_in_the_image_and_half_are_flipped(tmp_path):
    write(tmp_path / "a" / "1.png", png(0))
    read = reading_of(loaded(tmp_path, min_area=0.3).train, 1)
    found = np.stack([read(epoch, [0])[0][0] for epoch in range(60)]) * 255
    whole = picture(0)
    assert (found >= whole.min((0, 1)) - 0.5).all()
    assert (found <= whole.max((0, 1)) + 0.5).all()
    flipped = found[:, 8, 0, 0] > found[:, 8, -1, 0]
    assert 15 < flipped.sum() < 45  # 30 and 4 standard deviations
    widths = np.abs(found[:, 8, -1, 0] - found[:, 8, 0, 0])
    assert widths.max() > 1.2 * widths.min()
    # Whether one is flipped tells nothing of how large a part it is.
    assert abs(np.corrcoef(flipped, widths)[0, 1]) < 0.5
    read = reading_of(loaded(tmp_path, flip=False).train, 1)
    unflipped = np.stack([read(epoch, [0])[0][0] for epoch in range(20)])
    assert (unflipped[:, 8, 0, 0] < unflipped[:, 8, -1, 0]).all()


def test_a_part_for_evaluation_samples_nothing(folder):
    part = SourceSlice(loaded(folder).train, 8, 12).for_evaluation()
    assert not part.is_random
    centres, labels = examples(loaded(folder, augment=False).train)
    features, part_labels = examples(part, epoch=3)
    np.testing.assert_array_equal(features, centres[8:])
    np.testing.assert_array_equal(part_labels, labels[8:])


def test_no_examples_are_an_empty_batch(folder):
    features, labels = examples(loaded(folder).train, at=[])
    assert (features.shape, labels.shape) == ((0, 16, 16, 3), (0,))


@pytest.mark.parametrize(
    "lines",
    [
        "a.jpg,7\nin/b c.png,2\n\n",
        "path,label\na.jpg, 7\nin/b c.png, 2",
        "a.jpg\t7\nin/b c.png 2",
        '\ufeff"a.jpg","7"\r\n"in/b c.png","2"\r\n',
    ],
)
def test_a_list_names_files_and_numbers(tmp_path, lines):
    write(tmp_path / "a.jpg", jpeg(1))
    write(tmp_path / "in" / "b c.png", png(2))
    (tmp_path / "list.csv").write_text(lines, encoding="utf-8")
    found = loaded(tmp_path / "list.csv", augment=False)
    assert (found.num_classes, found.classes, examples(found.train)[1].tolist()) == (8, None, [7, 2])


def test_a_list_of_names_numbers_them_in_their_order(tmp_path):
    for number in range(3):
        write(tmp_path / f"{number}.jpg", jpeg(number))
    (tmp_path / "list.txt").write_text("0.jpg dog\n1.jpg cat\n2.jpg dog\n")
    (tmp_path / "eval.txt").write_text("1.jpg dog\n")
    found = loaded(tmp_path / "list.txt", eval_data_dir=str(tmp_path / "eval.txt"))
    assert (found.num_classes, examples(found.train)[1].tolist(), examples(found.evaluation)[1].tolist()) == (
        2,
        [1, 0, 1],
        [1],
    )
    assert not found.evaluation.is_random


def test_classes_of_evaluation_are_those_of_training(folder, tmp_path):
    write(tmp_path / "eval" / "b" / "1.jpg", jpeg(1))
    found = loaded(folder, eval_data_dir=str(tmp_path / "eval"))
    assert examples(found.evaluation)[1].tolist() == [1]
    write(tmp_path / "eval" / "d" / "1.jpg", jpeg(1))
    with pytest.raises(
        InputError, match=r"eval_data_dir: .*d/1\.jpg is of class d, which the training data lacks \(a, b, c\)"
    ):
        loaded(folder, eval_data_dir=str(tmp_path / "eval"))


def rotated(shades: np.ndarray, orientation: int, form: str, path: pathlib.Path, **how) -> np.ndarray:
    """Writes a picture as a camera does that was held otherwise; returns it as viewers show it."""
    exif = Image.Exif()
    exif[0x010F] = "a maker"  # an entry before
    exif[0x0112] = orientation
    write(path, b"")
    Image.fromarray(shades).save(path, form, exif=exif, **how)
    return np.asarray(ImageOps.exif_transpose(Image.open(path)))


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_turned_upright_as_exif_says(tmp_path, channels):
    """The part that is taken is that of the upright image, sampled or not."""
    shades = picture(2, height=41, width=64)
    for orientation in range(1, 9):
        for form, how in (("JPEG", {"subsampling": 0}), ("PNG", {})):
            name = f"a/{orientation}.{form[:3].lower()}"
            right = rotated(shades, orientation, form, tmp_path / "exif" / name, **how)
            write(tmp_path / "plain" / name, tf.io.encode_png(right).numpy())
    for given in ({"augment": True, "min_area": 0.3}, {"augment": False, "crop": 0.7}):
        given = {"channels": channels, "pixels": "uint8", **given}
        found, wanted = (examples(loaded(tmp_path / each, **given).train)[0] for each in ("exif", "plain"))
        np.testing.assert_allclose(found.astype(int), wanted.astype(int), atol=0 if channels == 3 else 2)


def test_the_orientation_may_be_left_as_it_is_stored(tmp_path):
    right = rotated(picture(2, height=40, width=40, channels=3), 6, "PNG", tmp_path / "a" / "1.png")
    stored = np.asarray(Image.open(tmp_path / "a" / "1.png"))
    given = {"size": 40, "augment": False, "crop": 1.0, "pixels": "uint8"}
    turned, as_stored = loaded(tmp_path, **given).train, loaded(tmp_path, orientation=False, **given).train
    np.testing.assert_array_equal(examples(turned)[0][0], right)
    np.testing.assert_array_equal(examples(as_stored)[0][0], stored)
    assert turned.identity() != as_stored.identity()


@pytest.mark.parametrize("channels", [1, 3])
def test_each_format_gives_the_pixels_of_pillow(tmp_path, channels):
    shades = picture(1, height=7, width=10)  # rows of bytes that BMP pads
    forms = {
        "1.jpe": "JPEG",
        "2.JFIF": "JPEG",
        "3.bmp": "BMP",
        "4.gif": "GIF",
        "5": "JPEG",
    }
    for name, form in forms.items():
        write(tmp_path / "a" / name, b"")
        Image.fromarray(shades).convert("RGB").save(tmp_path / "a" / name, form)
    source = loaded(tmp_path, size=7, augment=False, crop=1.0, pixels="uint8", channels=channels).train
    found, _ = examples(source)
    assert len(found) == len(forms)
    for path, pixels in zip(source.files(), found, strict=True):
        right = Image.open(path).convert("L" if channels == 1 else "RGB")
        wanted = np.asarray(right).reshape(7, 10, channels)[:, 1:8]
        np.testing.assert_allclose(pixels.astype(int), wanted.astype(int), atol=2 if channels == 1 else 0)
    source.verify(np.arange(5), source.read(np.arange(5)))


def test_a_png_of_16_bits_keeps_them(tmp_path):
    shades = np.random.default_rng(0).integers(0, 1 << 12, (16, 16, 1), np.uint16)  # an X-ray's
    write(tmp_path / "a" / "1.png", tf.io.encode_png(shades).numpy())
    arguments = {"channels": 1, "augment": False, "crop": 1.0}
    ((found,), _) = examples(loaded(tmp_path, **arguments).train)
    np.testing.assert_allclose(found, shades / 65535, rtol=1e-6)
    ((found,), _) = examples(loaded(tmp_path, pixels="uint8", **arguments).train)
    np.testing.assert_array_equal(found, np.rint(shades / 257))


def test_what_no_decoder_takes_is_a_bad_record(tmp_path):
    write(tmp_path / "a" / "1", b"")
    Image.new("P", (2, 2)).save(tmp_path / "a" / "1", "BMP")
    with pytest.raises(BadRecordError, match="is a BMP of 8 bits a pixel; 24 and 32 are read"):
        examples(loaded(tmp_path).train)


def test_grey_of_a_cmyk_jpeg_is_that_of_its_colours(tmp_path):
    write(tmp_path / "a" / "1.jpg", b"")
    Image.fromarray(picture(1, channels=3)).convert("CMYK").save(tmp_path / "a" / "1.jpg", quality=95)
    colours, grey = (examples(loaded(tmp_path, channels=channels, augment=False).train)[0] for channels in (3, 1))
    np.testing.assert_allclose(grey, tf.image.rgb_to_grayscale(colours), atol=1 / 255)


def test_images_in_folders_of_a_class_are_of_the_class_and_others_are_logged(tmp_path, caplog):
    for name in ("a/1.jpg", "a/in/1.jpg", "a/in/deep/2", "b/1.jpe", ".c/1.jpg", "a/.in/1.jpg", "a/._1.jpg", "1.jpg"):
        write(tmp_path / name, jpeg(1))
    write(tmp_path / "a" / "Thumbs.db", b"x")
    write(tmp_path / "b" / "LICENSE", b"text")
    (tmp_path / "b" / "same.jpg").symlink_to("1.jpe")
    (tmp_path / "b" / "of-a.jpg").symlink_to("../a/1.jpg")
    data = loaded(tmp_path, augment=False)
    assert data.classes == ("a", "b")
    found = sorted(os.path.relpath(path, tmp_path) for path in data.train.files())
    assert found == ["a/1.jpg", "a/in/1.jpg", "a/in/deep/2", "b/1.jpe", "b/of-a.jpg"]
    assert caplog.messages == [
        f"data_dir={tmp_path}: 4 not read: 1.jpg (beside the folders of classes); ._1.jpg (hidden, backup or "
        "temporary); LICENSE, Thumbs.db (other names)"
    ]


def test_names_that_are_not_utf8_are_classes_of_their_own(tmp_path):
    for name in (b"k\xe4se", b"k\xf6se"):
        os.makedirs(os.fsencode(tmp_path) + b"/" + name)
        write(pathlib.Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)) / "1.jpg", jpeg(1))
    data = loaded(tmp_path)
    assert data.num_classes == len({*data.classes}) == 2
    assert data.train.identity() == loaded(tmp_path).train.identity()


def test_another_numbering_of_classes_is_told_apart(folder):
    before = loaded(folder)
    write(folder / "aa" / "1.jpg", jpeg(1))
    assert loaded(folder).ids != before.ids
    assert loaded(folder).train.identity() != before.train.identity()


def listed(content: bytes):
    return lambda here: write(here / "list.csv", content)


def an_image(here):
    write(here / "a" / "1.png", png(1))


MISTAKES = [
    (lambda here: None, {}, "expected a folder of classes with .jpg, .jpeg, .* files, or a list"),
    (lambda here: write(here / "1.jpg", b""), {}, "expected a folder of classes .* found 1.jpg"),
    (lambda here: write(here / "train/a/1.jpg", b""), {}, "the class folder train has no .* file, but a; each"),
    (lambda here: write(here / "a/1.webp", b""), {}, r"a/1\.webp is of a kind that is not read; convert it"),
    (lambda here: write(here / "a/1.ppm", b""), {}, r"a/1\.ppm is of a kind that is not read; convert it"),
    (listed(b""), {}, "names no file"),
    (listed(b"a.jpg,1\nb.jpg\n"), {}, "line 2: expected path,label, found one of them"),
    (listed(b"a.jpg,\n"), {}, "line 1: expected path,label"),
    (listed(b"\xff\xfe\x00"), {}, "is not text in UTF-8"),
    (listed(b"absent.jpg,1\n"), {}, r"absent\.jpg can't be read \(No such file"),
    (an_image, {"size": 0}, "size=0 is too small"),
    (an_image, {"max_pixels": 0}, "max_pixels=0 is too small"),
    (an_image, {"channels": 2}, "channels=2 is not possible"),
    (an_image, {"crop": 1.5}, "crop=1.5 is not a share"),
    (an_image, {"min_area": 0.0}, "min_area=0 is not a share"),
    (an_image, {"pixels": "float64"}, "pixels=float64 is unknown"),
]


@pytest.mark.parametrize(("make", "arguments", "said"), MISTAKES)
def test_a_mistake_is_one_line(tmp_path, make, arguments, said):
    made = make(tmp_path)
    with pytest.raises(InputError, match=said) as caught:
        loaded(made if made and made.suffix == ".csv" else tmp_path, **arguments)
    assert "\n" not in str(caught.value)


DAMAGES = {
    "empty": lambda content: b"",
    "no image": lambda content: b"<html>not found</html>",
    "cut off": lambda content: content[: len(content) // 2],
    "cut off by a byte": lambda content: content[:-1],
    "a header of noise": lambda content: content[:4] + bytes(60) + content[64:],
    # What is left ends as it should, so only the decoder knows.
    "a hole": lambda content: content[: len(content) // 3] + content[-30:],
}


@pytest.mark.parametrize("encode", [jpeg, png])
@pytest.mark.parametrize("damage", DAMAGES)
def test_an_image_that_does_not_decode_is_named(tmp_path, encode, damage):
    for number in range(5):
        write(tmp_path / "a" / f"{number}.jpg", DAMAGES[damage](encode(9)) if number == 3 else jpeg(number))
    train, all_five = loaded(tmp_path, min_area=1.0, flip=False).train, np.arange(5)
    bad = next(at for at, path in enumerate(train.files()) if path.endswith("3.jpg"))
    named = r"a/3\.jpg .*; replace it, or let max_bad_records"
    with pytest.raises(BadRecordError, match=named) as caught:
        train.verify(all_five, train.read(all_five))
    assert caught.value.example == bad
    assert "\n" not in str(caught.value)
    said: list[str] = []
    contents, _ = WithoutBadRecords(train, 1, said.append).read(all_five)
    assert len(said) == 1
    assert contents[bad] == contents[(bad + 1) % 5]
    if damage == "a hole":
        with pytest.raises(BadRecordError, match=named):
            examples(train)


def with_preview(content: bytes) -> bytes:
    """A JPEG with what cameras put first: a smaller one of its own, here with the header of a larger one."""
    preview = b"Exif\0\0\xff\xd8\xff\xc0\0\x11\x08" + struct.pack(">HH", 60000, 60000)
    return content[:2] + b"\xff\xe1" + struct.pack(">H", 2 + len(preview)) + preview + content[2:]


SORTS = {
    "PNG": lambda: png(1),
    "JPEG": lambda: jpeg(1),
    "grey": lambda: jpeg(1, channels=1),
    "progressive": lambda: tf.io.encode_jpeg(picture(1), progressive=True).numpy(),
    "with a preview": lambda: with_preview(jpeg(1)),
}


@pytest.mark.parametrize("sort", SORTS)
def test_an_image_of_more_pixels_than_allowed_is_refused_by_its_header(tmp_path, sort):
    write(tmp_path / "a" / "1.jpg", SORTS[sort]())
    assert examples(loaded(tmp_path, max_pixels=40 * 60).train)[0].shape == (1, 16, 16, 3)
    with pytest.raises(BadRecordError, match="has 2,400 pixels, and `max_pixels` allows 2,399; raise that, if it is "):
        examples(loaded(tmp_path, max_pixels=40 * 60 - 1).train)
    assert loaded(tmp_path).train.identity() == loaded(tmp_path, max_pixels=40 * 60).train.identity()


def test_a_few_bytes_that_mean_gigabytes_are_not_decoded(tmp_path):
    header = struct.pack(">II", 60000, 60000)
    write(tmp_path / "a" / "1.png", png(1)[:16] + header + png(1)[24:])
    with pytest.raises(BadRecordError, match=r"a/1\.png has 3,600,000,000 pixels, and `max_pixels` allows 50,000,000"):
        examples(loaded(tmp_path).train)


def test_a_lost_byte_that_decoders_forgive_is_no_fault(tmp_path):
    """Cameras and editors leave bytes after an image's end."""
    write(tmp_path / "a" / "1.jpg", jpeg(1) + bytes(100))
    write(tmp_path / "a" / "2.jpg", jpeg(1))
    features, _ = examples(loaded(tmp_path, augment=False).train)
    np.testing.assert_array_equal(features[0], features[1])
