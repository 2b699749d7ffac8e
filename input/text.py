"""Plain text as windows of tokens (bytes, or a vocabulary's) for language models. One is bundled.

NumPy only, and the library `tokenizers` for a vocabulary.
"""

from __future__ import annotations

import functools
import os
import re
import zlib
from collections.abc import Callable, Generator, Iterator

import numpy as np

from ..engine.data.run_data import Data
from ..engine.data.source import Source, Spec
from ..engine.errors import BadRecordError
from .checks import InputError, check_at_least
from .files import listing, storage, tokens
from .files.prepared import BUNDLED, Prepared, PreparedWriter, prepared, progress
from .files.storage import Files

_BUNDLED = {split: os.path.join(BUNDLED, f"constitution.{split}.txt") for split in ("train", "eval")}
Tokens = tokens.Bytes | tokens.Vocabulary
FITTED = ("vocabulary_size",)
_KIND = listing.FileKind(
    "plain text (*.txt, else *.md)", (r".*\.txt", r".*\.md"), "expected text, found 0 bytes; give text"
)
_BORDERS = {"paragraph": re.compile(rb"\r?\n(?:[ \t]*\r?\n)+"), "line": re.compile(rb"\r?\n")}
_EMPTY_LINES = re.compile(rb"(?:[ \t]*\r?\n)*")
_PIECE_BYTES = 1 << 20  # text that is tokenized at once
_BATCH_BYTES = 4 << 20
_CHECKSUM = np.dtype("<u4")
_INTACT = 0x2144DF1C  # the CRC-32 of any bytes with their own CRC-32 after them
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_REMOTE_CHUNK = 1024  # windows to read at once where single reads are slow


def load(
    data_dir: str | None,
    seed: int,
    *,
    context: int = 256,
    tokenizer: str = "bytes",
    separator: str = "",
    vocabulary_size: int = 0,
    documents: str = "file",
    eval_data_dir: str = "",
    prepared_dir: str = "",
    trained_on: Data | None = None,
) -> Data:
    """Reads text files as one row of tokens, cut into windows, see `Windows`.

    The tokens are computed once and kept, see `input.files.prepared`.

    Args:
      data_dir: a folder, whose *.txt are read (else its *.md), or files or globs, separated by commas. None is the
        bundled text (input/data/README.md), with every tenth paragraph for evaluation.
      seed: not used.
      context: number of tokens in a window.
      tokenizer: `bytes`, 256 and the separator; or a JSON file of the library `tokenizers`, or a run's `model.json`.
      separator: the vocabulary's token between documents, e.g. `<|endoftext|>`; by default an additional one.
      vocabulary_size: above 0, fits a vocabulary of this size to the first 64 MiB of the training text.
      documents: the unit of a document: a `file`; a `paragraph`, between empty lines; a `line` that is not empty. A
        file of more than 1 MiB is tokenized in pieces, split at ends of lines.
      eval_data_dir: evaluation text, as data_dir.
      prepared_dir: folder of the tokens, instead of `.crankshaft` beside the files.
      trained_on: the data of a trained run, whose vocabulary is used instead of fitting one again.

    Returns:
      Features int32 [context], labels int32 [context]; as many classes as tokens, the separator among them.

    Raises:
      InputError: files are missing, all empty or not UTF-8 (for a vocabulary), or an argument is out of range.
    """
    check_at_least("context", context, 1)
    if documents not in ("file", *_BORDERS):
        raise InputError(f"documents={documents} is unknown; use file, {' or '.join(_BORDERS)}")
    if vocabulary_size and (tokenizer != "bytes" or separator):
        raise InputError(f"vocabulary_size={vocabulary_size} makes a vocabulary; leave tokenizer and separator out")
    if not data_dir:
        data_dir, eval_data_dir = _BUNDLED["train"], eval_data_dir or _BUNDLED["eval"]
    files = _files(data_dir, "data_dir")
    if vocabulary_size and trained_on and trained_on.tokens:
        token_maker: Tokens = trained_on.tokens
    elif vocabulary_size:
        token_maker = tokens.learned(vocabulary_size, files, _pieces(files, documents), prepared_dir)
    else:
        token_maker = tokens.tokenizer(tokenizer, separator)

    def windows(files: Files) -> Windows:
        recipe = {"tokens": token_maker.identity, "context": context, "documents": documents}
        write = functools.partial(_write, files=files, documents=documents, token_maker=token_maker, context=context)
        return Windows(prepared(files, "text", recipe, write, prepared_dir))

    evaluation = windows(_files(eval_data_dir, "eval_data_dir")) if eval_data_dir else None
    return Data(windows(files), evaluation, token_maker.count, None, token_maker.ids, token_maker)


class Windows(Source):
    """Windows of a row of tokens, from a prepared file.

    The row is a separator, the first document's tokens, a separator, the next one's, ..., and a separator at its end.
    Window i has its tokens from i * context on: `context` of them are the features, the next of each is its label. So
    each token and each separator but the first is a label once per epoch. Windows cross document boundaries; a model
    that must not see across them separates documents by `tf.cumsum(features == separator)`. Past the end of the row the
    last window has separators, with labels of -1, which must not count: `mean(losses, weights=labels >= 0)`.

    Args:
      data: the prepared file: for each window its tokens, the next one, and their CRC-32.

    Attributes:
      labels: number of labels other than -1.
    """

    def __init__(self, data: Prepared):
        self._prepared = data
        self._context: int = data.metadata["context"]
        token_field = ("tokens", data.metadata["dtype"], (self._context + 1,))
        self._record = np.dtype([token_field, ("checksum", _CHECKSUM)])
        self.labels: int = data.metadata["labels"]
        self.element_spec = (Spec((self._context,), np.int32), Spec((self._context,), np.int32))
        self.chunk_examples = _REMOTE_CHUNK if storage.is_remote(data.path) else 1

    def __len__(self) -> int:
        return -(-self.labels // self._context)

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        size = self._record.itemsize
        records = self._prepared.read_each((indices * size).tolist(), size)
        checksums = [*map(zlib.crc32, records)]
        if checksums.count(_INTACT) < len(records):
            bad = int(indices[next(number for number, checksum in enumerate(checksums) if checksum != _INTACT)])
            raise BadRecordError(bad, str(self._prepared.damaged(f"window {bad}")))
        row = np.frombuffer(b"".join(records), self._record)["tokens"]
        features, labels = row[:, :-1].astype(np.int32), row[:, 1:].astype(np.int32)
        labels[indices == len(self) - 1, self.labels - (len(self) - 1) * self._context :] = -1
        return features, labels

    def files(self) -> list[str]:
        return self._prepared.files()

    def identity(self) -> str:
        return f"{len(self)} windows of {self._prepared.metadata['digest']}"


def _files(data_dir: str | None, flag: str) -> Files:
    files = listing.find(data_dir, _KIND, flag)
    for number, path in enumerate(files.paths):
        if files.is_gzip(number):
            raise InputError(f"{path} is gzip: expected plain text; unpack it")
    return files


def _write(writer: PreparedWriter, files: Files, documents: str, token_maker: Tokens, context: int) -> None:
    """Writes a record for each window of all text: its tokens, the next one, and their CRC-32."""
    dtype = np.dtype("<u2" if token_maker.count <= 1 << 16 else "<u4")
    separator = np.array([token_maker.separator], dtype)
    row, labels = separator, 0  # not written yet; number written
    for batch in _batches(_pieces(files, documents), progress(f"preparing {files.paths[0]}", sum(files.sizes))):
        parts = [row]
        for piece, ids in zip(batch, token_maker.tokens(batch), strict=True):
            parts += [ids, separator] if piece.ends else [ids]
        row = np.concatenate(parts).astype(dtype)
        whole = (len(row) - 1) // context
        _write_windows(writer, row[: whole * context + 1], context)
        row, labels = row[whole * context :], labels + whole * context
    labels += len(row) - 1
    if not labels:
        raise InputError(f"{files.paths[0]}: expected documents, found empty lines alone; give text")
    if len(row) > 1:
        _write_windows(writer, np.pad(row, (0, context + 1 - len(row)), constant_values=token_maker.separator), context)
    writer.metadata.update(context=context, dtype=dtype.str, labels=labels)


def _write_windows(writer: PreparedWriter, row: np.ndarray, context: int) -> None:
    if len(row) <= context:
        return
    windows = np.lib.stride_tricks.sliding_window_view(row, context + 1)[::context]
    window_bytes = np.ascontiguousarray(windows).view(np.uint8)
    checksums = np.array([zlib.crc32(window) for window in window_bytes], _CHECKSUM).view(np.uint8)
    writer.write(np.concatenate([window_bytes, checksums.reshape(len(windows), -1)], 1).tobytes())


def _batches(pieces: Iterator[tokens.TextPiece], done: Callable[[int], None]) -> Iterator[list[tokens.TextPiece]]:
    batch: list[tokens.TextPiece] = []
    size = total = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text) + 1
        if size >= _BATCH_BYTES:
            yield batch
            done(total := total + size)
            batch, size = [], 0
    if batch:
        yield batch


def _pieces(files: Files, documents: str) -> Iterator[tokens.TextPiece]:
    for number, path in enumerate(files.paths):
        with files.stream(number) as stream:
            at = len(_BYTE_ORDER_MARK) if stream.read(len(_BYTE_ORDER_MARK)) == _BYTE_ORDER_MARK else 0
            stream.seek(at)
            rest = b""
            while block := stream.read(_PIECE_BYTES):
                rest += block
                used = 0
                if documents != "file":
                    used = yield from _documents(rest, path, at, _BORDERS[documents])
                elif len(rest) >= _PIECE_BYTES:
                    used = _cut(rest)
                    yield tokens.TextPiece(rest[:used], path, at, False)
                rest, at = rest[used:], at + used
            if documents == "file":
                yield tokens.TextPiece(rest, path, at, True)
            elif rest.strip():
                begin = next(_EMPTY_LINES.finditer(rest)).end()
                yield tokens.TextPiece(rest[begin:].rstrip(b"\r\n"), path, at + begin, True)


def _documents(text: bytes, path: str, at: int, border: re.Pattern) -> Generator[tokens.TextPiece, None, int]:
    """Yields the documents that end in this text; returns their length."""
    start = 0
    for match in border.finditer(text):
        begin = next(_EMPTY_LINES.finditer(text, start, match.start())).end()  # rest of a split border
        if text[begin : match.start()].strip():
            yield tokens.TextPiece(text[begin : match.start()], path, at + begin, True)
        start = match.end()
    return start


def _cut(text: bytes) -> int:
    """Returns where text may be split for a tokenizer: after a line, else a word, else a character."""
    if (end := text.rfind(b"\n") + 1 or text.rfind(b" ") + 1) > 0:
        return end
    end = len(text)
    while end > 1 and text[end - 1] & 0xC0 == 0x80:
        end -= 1
    return end - 1 or len(text)
