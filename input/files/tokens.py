"""Tokenizers: bytes, or a vocabulary by the library `tokenizers`."""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ...engine.errors import importing
from ..checks import InputError
from .prepared import PreparedWriter, prepared
from .storage import Files

_BYTES = 256
_LEARN_BYTES = 64 << 20  # beginning of the text to which a vocabulary is fitted


class TextPiece(NamedTuple):
    """A piece of text: a document, or a part of one; `ends` if it is the document's last."""

    text: bytes
    path: str
    at: int  # its first byte in the file
    ends: bool

    def decoded(self) -> str:
        """Decodes UTF-8. Raises `InputError`, which names the position of other bytes."""
        try:
            return self.text.decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{self.path}: expected text in UTF-8, found 0x{self.text[error.start]:02x} at byte "
                f"{self.at + error.start:,}; convert the file, or use tokenizer=bytes"
            ) from None


class TokenDecoder(NamedTuple):
    """Decodes tokens. `text(token)` returns the complete characters so far; `rest()` the remainder at the end."""

    text: Callable[[int], str]
    rest: Callable[[], str]


class Bytes:
    """A token for each byte, and one between documents.

    A run's files contain `kept`, from which `from_saved` restores the object.

    Attributes:
      count: number of tokens.
      separator: the token between documents.
      identity: identifies the numbering of tokens.
      ids: `identity` as a number.
    """

    count = _BYTES + 1
    separator = _BYTES
    identity = "bytes"
    ids = zlib.crc32(identity.encode())

    def tokens(self, pieces: list[TextPiece]) -> list[np.ndarray]:
        """Returns the tokens of each piece of text."""
        return [np.frombuffer(piece.text, np.uint8) for piece in pieces]

    def to_saved(self) -> dict[str, str]:
        """Returns the argument of `from_saved`, plain JSON."""
        return {"kind": "bytes"}

    def decoder(self) -> TokenDecoder:
        """Returns a decoder of consecutive tokens."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return TokenDecoder(
            lambda token: decoder.decode(bytes([token]) if token < _BYTES else b""), lambda: decoder.decode(b"", True)
        )


class Vocabulary:
    """Tokens of a vocabulary written by `tokenizers.Tokenizer.save`; the attributes are those of `Bytes`.

    It is parsed on first use, so training on existing tokens needs no library.

    Args:
      text: JSON text of the vocabulary.
      path: path that the text was read from, for messages.
      separator: the vocabulary's token between documents; "" adds one.

    Raises:
      UsageError: the library is missing, the JSON is not a vocabulary, or it lacks the token; raised on first use.
    """

    def __init__(self, text: str, path: str, separator: str):
        self._text, self._path, self._separator = text, path, separator

    @functools.cached_property
    def _tokenizer(self) -> Any:
        library = _library()
        try:
            tokenizer = library.Tokenizer.from_str(self._text)
        except Exception as error:  # the library's errors have no class of their own
            raise InputError(
                f"tokenizer={self._path} is not a vocabulary ({str(error)[:80]}); give a JSON that Tokenizer.save of "
                "the library tokenizers has written, or tokenizer=bytes"
            ) from None
        # A saved vocabulary may ask for both, which would shorten or fill up documents.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @functools.cached_property
    def _vocabulary_size(self) -> int:
        """The numbers up to which the vocabulary has tokens."""
        count = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not count:
            raise InputError(f"tokenizer={self._path} has no tokens; train it before it is saved")
        return count

    @functools.cached_property
    def separator(self) -> int:
        count = self._vocabulary_size  # raises for a vocabulary without tokens, before a token is looked up
        token = self._tokenizer.token_to_id(self._separator) if self._separator else count
        if token is None:
            raise InputError(
                f"separator={self._separator} is not a token of {self._path}; name one of them, or leave it out"
            )
        return token

    @property
    def count(self) -> int:
        return max(self._vocabulary_size, self.separator + 1)

    @property
    def identity(self) -> str:
        return f"{hashlib.blake2b(self._text.encode(), digest_size=10).hexdigest()} {self.separator}"

    @property
    def ids(self) -> int:
        return zlib.crc32(self.identity.encode())

    def tokens(self, pieces: list[TextPiece]) -> list[np.ndarray]:
        """Returns the tokens of each piece of text. Raises `InputError` if one is not UTF-8."""
        encodings = self._tokenizer.encode_batch([piece.decoded() for piece in pieces], add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def to_saved(self) -> dict[str, str]:
        return {"kind": "vocabulary", "tokenizer": self._text, "separator": self._separator}

    def decoder(self) -> TokenDecoder:
        stream = _library().decoders.DecodeStream(skip_special_tokens=False)
        held: list[int] = []  # tokens of an incomplete character

        def text(token: int) -> str:
            held.append(token)
            if (text := stream.step(self._tokenizer, token)) is not None:
                held.clear()
            return text or ""

        return TokenDecoder(text, lambda: self._tokenizer.decode(held, skip_special_tokens=False))


def tokenizer(name: str, separator: str) -> Bytes | Vocabulary:
    """Returns a tokenizer: `bytes`, or the vocabulary in a JSON file, possibly a run's."""
    if name == "bytes":
        if separator:
            raise InputError(f"separator={separator} is a token's name, and bytes have none; leave it out")
        return Bytes()
    path = os.path.expanduser(name)
    try:
        text = Files([path]).read(0).decode()
    except UnicodeDecodeError:
        raise InputError(f"tokenizer={path} is not text, and so no JSON of a vocabulary; give one") from None
    try:
        restored = from_saved(json.loads(text)["tokens"], path)
    except (KeyError, RecursionError, TypeError, ValueError):  # the library explains other mistakes
        return Vocabulary(text, path, separator)
    if separator:
        raise InputError(f"separator={separator}: tokenizer={path} is of a run, which has its own; leave it out")
    return restored


def from_saved(kept: dict[str, str], path: str) -> Bytes | Vocabulary:
    """Restores a tokenizer from its saved form. Raises KeyError or TypeError for anything else."""
    if kept["kind"] == "bytes":
        return Bytes()
    return Vocabulary(str(kept["tokenizer"]), path, str(kept["separator"]))


def learned(size: int, files: Files, pieces: Iterable[TextPiece], folder: str | None) -> Vocabulary:
    """Fits a vocabulary to the first 64 MiB of text by byte-pair encoding, and keeps it with the prepared files.

    Args:
      size: number of tokens, 256 or more.
      folder: folder of the prepared file, see `prepared`.
    """
    if size < _BYTES:
        raise InputError(f"vocabulary_size={size} has no room for the {_BYTES} bytes; give more, or tokenizer=bytes")
    library = _library()

    def texts():
        read = 0
        for piece in pieces:
            yield piece.decoded()
            read += len(piece.text)
            if read >= _LEARN_BYTES:
                return

    def write(writer: PreparedWriter) -> None:
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        trainer = library.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(texts(), trainer)
        writer.write(json.dumps(json.loads(tokenizer.to_str())).encode())
        writer.metadata["bytes"] = writer.offset

    vocabulary = prepared(files, "vocabulary", {"size": size}, write, folder)
    return Vocabulary(vocabulary.read(0, vocabulary.metadata["bytes"]).decode(), vocabulary.path, "")


def _library() -> Any:
    missing = "a vocabulary needs the library tokenizers; pip install tokenizers, or use tokenizer=bytes"
    with importing("tokenizers", missing):
        import tokenizers
    return tokenizers
