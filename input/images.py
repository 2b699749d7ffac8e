"""JPEG and PNG files: in --data_dir a folder for each class, or a list of path,label.

They are read, decoded and augmented while the run goes on, and never kept. Host code; decoding is TensorFlow's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from typing import Any

import numpy as np

from ..engine.data.source import BadRecordError, Source, Spec
from .data import Data, InputError, check_at_least
from .files import labelled_files, listing, storage

_KIND = listing.Kind(
    ".jpg, .jpeg, .jpe, .jfif, .png",
    (r".*\.(jpe?g|jpe|jfif|png)|[^.]+",),
    subfolders=".*",
    beside=r"thumbs\.db|desktop\.ini",
)
_JPEG, _JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
_PNG, _PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xae\x42\x60\x82"
# Where libjpeg finds the next marker, markers with an image's size after them, and markers that stand alone.
_MARKER = re.compile(rb"\xff+([^\0\xff])")
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_ALONE = {0x01, *range(0xD0, 0xDA)}
# TensorFlow's default is a fast integer transform, which differs from libjpeg's default by up to 255 a pixel.
_TRANSFORM = "INTEGER_ACCURATE"
_ASPECTS = (3 / 4, 4 / 3)  # of a random crop, width to height
_SIDE_BY_SIDE = 8  # images that are decoded at once, if there are as many threads
_PIXELS = ("float32", "uint8")


def load(
    data_dir: str | None,
    seed: int,
    *,
    eval_data_dir: str | None = None,
    size: int = 224,
    channels: int = 3,
    augment: bool = True,
    min_area: float = 0.08,
    flip: bool = True,
    crop: float = 0.875,
    pixels: str = "float32",
    max_pixels: int = 50_000_000,
) -> Data:
    """Finds the images; reads none yet.

    Training takes a random part of an image, another one each epoch, scales it to size x size, bilinearly, and flips
    every second one (Szegedy et al., "Going deeper with convolutions", 2014). Evaluation takes the centre, as does
    training without `augment`. What is drawn is a function of (seed, epoch, image).

    `seed` is not used here: a run's order and draws have it. Images of class folders stand in an order that is shuffled
    once and for all, so that --validation_split takes some of each class; those of a list stand as it has them.

    Args:
      data_dir: see `labelled_files.find`.
      seed: not used.
      eval_data_dir: likewise, of classes that data_dir has; None where there are none.
      size: pixels, both ways, of what the model is given.
      channels: 3 for colours, 1 for grey.
      augment: whether training draws.
      min_area: the least share of an image's area that is drawn.
      flip: whether every second image is flipped, left to right.
      crop: share of the shorter side that is the centre.
      pixels: float32 in [0, 1], as the project's models take them, or uint8 from 0 to 255, a quarter of the memory, for
        a model that scales them itself.
      max_pixels: an image file of more is refused before it is decoded; a few hundred kilobytes may hold gigabytes.

    Returns:
      Sources of features [size, size, channels] and labels int32.

    Raises:
      InputError: nothing is there, or an argument is out of range.
    """
    _check_share("min_area", min_area)
    form = ImageForm(size, channels, crop, pixels, max_pixels)
    train = labelled_files.find(data_dir, _KIND, _is_image, "data_dir")
    evaluation = eval_data_dir and labelled_files.find(eval_data_dir, _KIND, _is_image, "eval_data_dir", train)
    names = train.names and hashlib.sha256("\0".join(train.names).encode()).digest()
    return Data(
        train=Images(train, form, min_area if augment else 0.0, flip=augment and flip),
        evaluation=Images(evaluation, form) if evaluation else None,
        num_classes=train.num_classes,
        ids=int.from_bytes(names[:4], "big") if names else None,
        classes=tuple(train.names) if train.names else None,
    )


def _is_image(head: bytes) -> bool:
    return head.startswith((_JPEG, _PNG))


@dataclasses.dataclass(frozen=True)
class ImageForm:
    """What is made of each image: see `load`."""

    size: int
    channels: int
    crop: float
    pixels: str
    max_pixels: int = dataclasses.field(repr=False)  # it changes no example

    def __post_init__(self):
        check_at_least("size", self.size, 1)
        check_at_least("max_pixels", self.max_pixels, 1)
        if self.channels not in (1, 3):
            raise InputError(f"channels={self.channels} is not possible; use 3 for colours or 1 for grey")
        _check_share("crop", self.crop)
        if self.pixels not in _PIXELS:
            raise InputError(f"pixels={self.pixels} is unknown; use one of {', '.join(_PIXELS)}")


def _check_share(name: str, share: float) -> None:
    if not 0 < share <= 1:
        raise InputError(f"{name}={share:g} is not a share; use a number above 0, up to 1")


class Images(Source):
    """Image files and their classes.

    Args:
      labelled: the files.
      form: of an example.
      min_area: the least share of an image's area that is drawn; 0 takes the centre.
      flip: whether every second image is flipped.
    """

    def __init__(self, labelled: labelled_files.Labelled, form: ImageForm, min_area: float = 0.0, flip: bool = False):
        self.element_spec = (Spec((form.size, form.size, form.channels), form.pixels), Spec((), np.int32))
        self.draws = bool(min_area) or flip
        self._found = labelled
        self._form = form
        self._min_area, self._flip = min_area, flip
        self._files = storage.Files(labelled.paths)
        self._decodes = np.zeros(len(labelled.paths), bool)  # what was decoded from end to end

    def __len__(self) -> int:
        return len(self._found.paths)

    @property
    def stored_spec(self) -> Any:
        return (Spec((), object), self.element_spec[1])

    def read(self, indices: np.ndarray) -> Any:
        contents = np.empty(len(indices), object)
        for at, example in enumerate(indices.tolist()):
            contents[at] = self._whole_file(example)
        return contents, self._found.labels[indices]

    def _whole_file(self, example: int) -> bytes:
        content = self._files.read(example)
        if not content.startswith((_JPEG, _PNG)):
            what = f"begins with {content[:8]!r}" if content else "is empty"
            raise self._bad(example, f"{what}, as no JPEG or PNG does")
        if (pixels := _num_pixels(content)) > (most := self._form.max_pixels):
            what = f"has {pixels:,} pixels, and `max_pixels` allows {most:,}; raise that, if it is one to train on"
            raise self._bad(example, what)
        if not content.endswith((_JPEG_END, _PNG_END)) and not self._decodes[example]:
            self._decode_all_of(example, content)  # cut off, most likely, and a part of it may decode
        return content

    def verify(self, indices: np.ndarray, stored: Any) -> None:
        for example, content in zip(indices.tolist(), stored[0], strict=True):
            if not self._decodes[example]:
                self._decode_all_of(example, content)

    def _decode_all_of(self, example: int, content: bytes) -> None:
        import tensorflow as tf

        try:
            with tf.device("CPU:0"):
                if content.startswith(_JPEG):
                    tf.io.decode_jpeg(content, dct_method=_TRANSFORM)
                else:
                    tf.io.decode_png(content)
        except tf.errors.InvalidArgumentError as error:
            why = re.sub(r"\{\{.*?\}\} *", "", next(iter(error.message.splitlines()), ""))  # without the kernel's place
            raise self._bad(example, f"does not decode ({why.rstrip('.')})") from None
        self._decodes[example] = True

    def _bad(self, example: int, what: str) -> BadRecordError:
        line = f"{self._found.paths[example]} {what}; replace it, or let `max_bad_records` leave such images out"
        return BadRecordError(example, line)

    def decode(self, stored: Any, seeds: Any) -> Any:
        import tensorflow as tf

        contents, labels = stored
        spec = self.element_spec[0]

        def images():
            examples = tf.data.Dataset.from_tensor_slices((contents, seeds))
            examples = examples.map(self._image, num_parallel_calls=_SIDE_BY_SIDE)
            return examples.batch(tf.shape(contents, tf.int64)[0]).get_single_element()

        def none():
            return tf.zeros([0, *spec.shape], spec.dtype)

        return tf.cond(tf.size(contents) > 0, images, none), labels

    def _image(self, content, seed):
        """Makes an example of a file's bytes; [size, size, channels]."""
        import tensorflow as tf

        channels, size = self._form.channels, self._form.size

        def of_jpeg():  # only what is in the window is decoded
            window = self._window(tf.image.extract_jpeg_shape(content), seed)
            return tf.image.decode_and_crop_jpeg(content, window, channels=channels, dct_method=_TRANSFORM)

        def of_png():
            image = tf.io.decode_png(content, channels=channels)
            window = self._window(tf.shape(image), seed)
            return tf.slice(image, [*tf.unstack(window[:2]), 0], [*tf.unstack(window[2:]), channels])

        is_jpeg = tf.equal(tf.strings.substr(content, 0, len(_JPEG)), _JPEG)
        image = tf.image.resize(tf.cond(is_jpeg, of_jpeg, of_png), [size, size])
        if self._flip:
            # Another stream than the window's, which would else decide the flip as well.
            flips = tf.random.stateless_uniform([], tf.bitwise.invert(seed)) < 0.5
            image = tf.cond(flips, lambda: tf.reverse(image, [1]), lambda: image)
        if self._form.pixels == "uint8":
            return tf.saturate_cast(tf.round(image), tf.uint8)
        return image / 255.0

    def _window(self, shape, seed):
        """Returns the part of an image of some shape that is taken: int32 (top, left, height, width)."""
        import tensorflow as tf

        if not self._min_area:
            sides = shape[:2]
            side = tf.maximum(tf.cast(self._form.crop * tf.cast(tf.reduce_min(sides), tf.float32), tf.int32), 1)
            return tf.concat([(sides - side) // 2, [side, side]], 0)
        first, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
            shape,
            tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
            seed,
            min_object_covered=0.0,
            aspect_ratio_range=_ASPECTS,
            area_range=(self._min_area, 1.0),
            max_attempts=10,  # then the whole image
        )
        return tf.concat([first[:2], extent[:2]], 0)

    def ids(self, indices: np.ndarray) -> list[str]:
        return [self._found.paths[example] for example in indices.tolist()]

    def for_evaluation(self) -> Source:
        return Images(self._found, self._form)

    def files(self) -> list[str]:
        return self._files.paths

    def identity(self) -> str:
        digest = hashlib.sha256(repr((_TRANSFORM, self._form, self._min_area, self._flip)).encode())
        for path, nbytes, label in zip(self._found.paths, self._files.sizes, self._found.labels.tolist(), strict=True):
            digest.update(f"{os.path.basename(path)} {nbytes} {label}\n".encode())
        return digest.hexdigest()


def _num_pixels(content: bytes) -> int:
    """Returns how many pixels a JPEG or PNG file has by its header; 0 if that does not say."""
    if content.startswith(_PNG):
        return int.from_bytes(content[16:20], "big") * int.from_bytes(content[20:24], "big")
    at = 2
    while marker := _MARKER.search(content, at):
        at, code = marker.end(), marker[1][0]
        if code in _FRAMES:
            return int.from_bytes(content[at + 3 : at + 5], "big") * int.from_bytes(content[at + 5 : at + 7], "big")
        if code not in _ALONE:
            at += int.from_bytes(content[at : at + 2], "big")
    return 0
