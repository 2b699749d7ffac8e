"""JPEG, PNG, GIF and BMP files: in --data_dir a folder for each class, or a list of path,label.

They are read, decoded and augmented during the run, and never kept. Decoding is TensorFlow's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from typing import Any

import numpy as np

from ..engine.data.run_data import Data
from ..engine.data.source import Source, Spec
from ..engine.errors import BadRecordError
from .checks import InputError, check_at_least
from .data_json import as_bytes, numbering_digest
from .files import image_headers, labelled_files, listing, storage

_KIND = listing.FileKind(
    ".jpg, .jpeg, .jpe, .jfif, .png, .gif, .bmp",
    (r".*\.(jpe?g|jpe|jfif|png|gif|bmp)|[^.]+",),
    subfolders=".*",
)
_ENDS = (b"\xff\xd9", b"IEND\xae\x42\x60\x82")  # last bytes of a whole JPEG and PNG
# TensorFlow's default is a fast integer transform, which differs from libjpeg's default by up to 255 a pixel.
_TRANSFORM = "INTEGER_ACCURATE"
_ASPECTS = (3 / 4, 4 / 3)  # range of a random crop's width / height
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
    orientation: bool = True,
    max_pixels: int = 50_000_000,
    allow_outside: bool = True,
) -> Data:
    """Finds the images; reads none yet.

    Training takes a random crop of each image, another one each epoch, resizes it to size x size, bilinearly, and flips
    every second one (Szegedy et al., "Going deeper with convolutions", 2014). Evaluation takes the centre, as does
    training without `augment`. Crops and flips are a function of (seed, epoch, image).

    `seed` is not used: the run's order and samples depend on it. Images of class folders are shuffled once, so that
    --validation_split takes some of each class; those of a list keep its order.

    Args:
      data_dir: see `labelled_files.find`.
      eval_data_dir: evaluation images, as `data_dir`, with the classes of data_dir; None if there are none.
      size: width and height of the images for the model, in pixels.
      channels: 3 for colours, 1 for grey.
      augment: whether training crops and flips at random.
      min_area: smallest fraction of an image's area that a random crop has.
      flip: whether every second image is flipped, left to right.
      crop: size of the centre crop, as a fraction of the shorter side.
      pixels: float32 in [0, 1], as the project's models take them, all 16 bits of a PNG that has them, or uint8 from 0
        to 255, a quarter of the memory, for a model that scales them itself.
      orientation: whether images are rotated by the orientation in their EXIF data, as viewers do.
      max_pixels: larger images are refused before they are decoded; a few hundred kilobytes may expand to gigabytes.
      allow_outside: whether a list may name, and a folder may have links to, files that are not below its folder; false
        by default where the images are copied, by crankshaft prepare.

    Returns:
      Sources of features [size, size, channels] and labels int32.

    Raises:
      InputError: there are no files, or an argument is out of range.
    """
    _check_fraction("min_area", min_area)
    form = ImageForm(size, channels, crop, pixels, orientation, max_pixels)
    is_image, outside = image_headers.is_image, allow_outside
    train = labelled_files.find(data_dir, _KIND, is_image, "data_dir", allows_outside=outside)
    evaluation = eval_data_dir and labelled_files.find(eval_data_dir, _KIND, is_image, "eval_data_dir", train, outside)
    return Data(
        train=Images(train, form, min_area if augment else 0.0, flip=augment and flip),
        evaluation=Images(evaluation, form) if evaluation else None,
        num_classes=train.num_classes,
        ids=numbering_digest(train.names) if train.names else None,
        classes=tuple(train.names) if train.names else None,
    )


@dataclasses.dataclass(frozen=True)
class ImageForm:
    """How each image is converted: see `load`."""

    size: int
    channels: int
    crop: float
    pixels: str
    orientation: bool = dataclasses.field(repr=False)
    max_pixels: int = dataclasses.field(repr=False)  # no effect on examples

    def __post_init__(self):
        check_at_least("size", self.size, 1)
        check_at_least("max_pixels", self.max_pixels, 1)
        if self.channels not in (1, 3):
            raise InputError(f"channels={self.channels} is not possible; use 3 for colours or 1 for grey")
        _check_fraction("crop", self.crop)
        if self.pixels not in _PIXELS:
            raise InputError(f"pixels={self.pixels} is unknown; use one of {', '.join(_PIXELS)}")


def _check_fraction(name: str, fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise InputError(f"{name}={fraction:g} is not a share; use a number above 0, up to 1")


class Images(Source):
    """Image files and their classes.

    Args:
      form: conversion of an image to an example.
      min_area: smallest fraction of an image's area that a random crop has; 0 takes the centre.
      flip: whether every second image is flipped.
    """

    def __init__(self, labelled: labelled_files.Labelled, form: ImageForm, min_area: float = 0.0, flip: bool = False):
        self.element_spec = (Spec((form.size, form.size, form.channels), form.pixels), Spec((), np.int32))
        self.is_random = bool(min_area) or flip
        self._labelled = labelled
        self._form = form
        self._min_area, self._flip = min_area, flip
        self._files = storage.Files(labelled.paths)
        self._decodes = np.zeros(len(labelled.paths), bool)  # images that were decoded completely

    def __len__(self) -> int:
        return len(self._labelled.paths)

    @property
    def stored_spec(self) -> Any:
        return (Spec((), object), self.element_spec[1])

    def read(self, indices: np.ndarray) -> Any:
        contents = np.empty(len(indices), object)
        for at, example in enumerate(indices.tolist()):
            contents[at] = self._whole_file(example)
        return contents, self._labelled.labels[indices]

    def read_labels(self) -> np.ndarray:
        return self._labelled.labels

    def _whole_file(self, example: int) -> bytes:
        """Returns a file's bytes after one byte with its orientation, for `_image`."""
        content = self._files.read(example)
        if why := image_headers.unreadable_reason(content):
            raise self._bad(example, why)
        header = image_headers.read(content)
        if header.pixels > (most := self._form.max_pixels):
            fault = f"has {header.pixels:,} pixels, and `max_pixels` allows {most:,}; raise that, if it is to be read"
            raise self._bad(example, fault)
        if not content.endswith(_ENDS) and not self._decodes[example]:
            self._decode_whole(example, content)  # probably truncated; a part of it may decode
        return bytes([header.orientation if self._form.orientation else 1]) + content

    def verify(self, indices: np.ndarray, stored: Any) -> None:
        for example, content in zip(indices.tolist(), stored[0], strict=True):
            if not self._decodes[example]:
                self._decode_whole(example, content[1:])

    def _decode_whole(self, example: int, content: bytes) -> None:
        import tensorflow as tf

        try:
            with tf.device("CPU:0"):
                if content.startswith(image_headers.JPEG):
                    tf.io.decode_jpeg(content, dct_method=_TRANSFORM)
                else:
                    tf.io.decode_image(content, expand_animations=False)
        except tf.errors.InvalidArgumentError as error:
            first_line = next(iter(error.message.splitlines()), "")
            why = re.sub(r"\{\{.*?\}\} *", "", first_line)  # without the kernel's position in the graph
            raise self._bad(example, f"does not decode ({why.rstrip('.')})") from None
        self._decodes[example] = True

    def _bad(self, example: int, fault: str) -> BadRecordError:
        fix = "replace it, or let max_bad_records leave such images out"
        return BadRecordError(example, f"{self._labelled.paths[example]} {fault}; {fix}")

    def decode(self, stored: Any, seeds: Any) -> Any:
        import tensorflow as tf

        contents, labels = stored
        spec = self.element_spec[0]

        def images():
            examples = tf.data.Dataset.from_tensor_slices((contents, seeds))
            examples = examples.map(self._image, num_parallel_calls=_SIDE_BY_SIDE)
            return examples.batch(tf.shape(contents, tf.int64)[0]).get_single_element()

        # Of no images, the data set would have no element to get.
        return tf.cond(tf.size(contents) > 0, images, lambda: tf.zeros([0, *spec.shape], spec.dtype)), labels

    def _image(self, stored, seed):
        """Makes an example of what `_whole_file` returns; [size, size, channels]."""
        import tensorflow as tf

        channels, size = self._form.channels, self._form.size
        orientation = tf.cast(tf.io.decode_raw(tf.strings.substr(stored, 0, 1), tf.uint8)[0], tf.int32)
        content = tf.strings.substr(stored, 1, tf.int32.max)

        def crop_jpeg():  # decodes only the crop
            shape = tf.image.extract_jpeg_shape(content)
            window = self._window(shape, orientation, seed)

            def decoded(channels):
                return tf.image.decode_and_crop_jpeg(content, window, channels=channels, dct_method=_TRANSFORM)

            if channels == 3:
                return decoded(3)
            # libjpeg can't convert CMYK to grey.
            return tf.cond(shape[2] == 4, lambda: tf.image.rgb_to_grayscale(decoded(3)), lambda: decoded(1))

        def crop(image):
            window = self._window(tf.shape(image), orientation, seed)
            return tf.slice(image, [*tf.unstack(window[:2]), 0], [*tf.unstack(window[2:]), channels])

        def decode_png(dtype=tf.uint8):
            return tf.io.decode_png(content, channels=channels, dtype=dtype)

        def crop_others():
            return crop(tf.cond(_begins_with(content, image_headers.PNG), decode_png, decode_gif_or_bmp))

        def decode_gif_or_bmp():
            image = tf.io.decode_image(content, expand_animations=False)[..., :3]
            return image if channels == 3 else tf.image.rgb_to_grayscale(tf.ensure_shape(image, [None, None, 3]))

        def resized(image):
            image = tf.cond(orientation > 1, lambda: _upright(image, orientation), lambda: image)
            return tf.image.resize(image, [size, size])

        def from_8_bits():
            return resized(tf.cond(_begins_with(content, image_headers.JPEG), crop_jpeg, crop_others))

        def from_16_bits():
            return resized(crop(decode_png(tf.uint16))) / 257.0  # their most is 257 times that of 8 bits

        is_deep = _begins_with(content, image_headers.PNG) & (tf.strings.substr(content, 24, 1) == b"\x10")
        image = tf.cond(is_deep, from_16_bits, from_8_bits)
        if self._flip:
            # Another stream than the crop's, with which the flip would otherwise correlate.
            flips = tf.random.stateless_uniform([], tf.bitwise.invert(seed)) < 0.5
            image = tf.cond(flips, lambda: tf.reverse(image, [1]), lambda: image)
        if self._form.pixels == "uint8":
            return tf.saturate_cast(tf.round(image), tf.uint8)
        return image / 255.0

    def _window(self, shape, orientation, seed):
        """Returns the part of an image of this shape to decode: int32 (top, left, height, width).

        It is chosen in the upright image, and returned in the coordinates of the stored one.
        """
        import tensorflow as tf

        is_turned, from_below, from_right = _turns(orientation)
        shape = tf.concat([tf.where(is_turned, shape[1::-1], shape[:2]), shape[2:]], 0)
        first, extent = self._upright_window(shape, seed)
        first = tf.where(tf.stack([from_below, from_right]), shape[:2] - first - extent, first)
        return tf.concat([tf.where(is_turned, part[::-1], part) for part in (first, extent)], 0)

    def _upright_window(self, shape, seed):
        """Returns the first corner and the extent of the part that is taken, both int32 (rows, columns)."""
        import tensorflow as tf

        if not self._min_area:
            sides = shape[:2]
            side = tf.maximum(tf.cast(self._form.crop * tf.cast(tf.reduce_min(sides), tf.float32), tf.int32), 1)
            return (sides - side) // 2, tf.stack([side, side])
        first, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
            shape,
            tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
            seed,
            min_object_covered=0.0,
            aspect_ratio_range=_ASPECTS,
            area_range=(self._min_area, 1.0),
            max_attempts=10,  # then the whole image
        )
        return first[:2], extent[:2]

    def ids(self, indices: np.ndarray) -> list[str]:
        return [self._labelled.paths[example] for example in indices.tolist()]

    def for_evaluation(self) -> Source:
        return Images(self._labelled, self._form)

    def files(self) -> list[str]:
        return self._files.paths

    def identity(self) -> str:
        digest = hashlib.sha256(repr((_TRANSFORM, self._form, self._min_area, self._flip)).encode())
        digest.update(b"upright" if self._form.orientation else b"")
        for path, nbytes, label in zip(
            self._labelled.paths, self._files.sizes, self._labelled.labels.tolist(), strict=True
        ):
            digest.update(as_bytes(f"{os.path.basename(path)} {nbytes} {label}\n"))
        return f"{digest.hexdigest()} {self._files.sample}"


def _begins_with(content, magic: bytes):
    import tensorflow as tf

    return tf.equal(tf.strings.substr(content, 0, len(magic)), magic)


def _turns(orientation):
    """Returns whether an orientation exchanges rows and columns, and whether it then reverses either."""
    import tensorflow as tf

    def is_among(*orientations: int):
        return tf.reduce_any(orientation == tf.constant(orientations))

    return is_among(5, 6, 7, 8), is_among(3, 4, 7, 8), is_among(2, 3, 6, 7)


def _upright(image, orientation):
    """Turns an image, [rows, columns, channels], upright."""
    import tensorflow as tf

    is_turned, from_below, from_right = _turns(orientation)
    image = tf.cond(is_turned, lambda: tf.transpose(image, [1, 0, 2]), lambda: image)
    image = tf.cond(from_below, lambda: tf.reverse(image, [0]), lambda: image)
    return tf.cond(from_right, lambda: tf.reverse(image, [1]), lambda: image)
