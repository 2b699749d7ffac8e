"""Text as windows of tokens: each token a label once, borders of documents kept, damage found."""

import json
import pathlib

import numpy as np
import pytest

from crankshaft.engine.errors import UsageError
from crankshaft.input import text
from crankshaft.input.checks import InputError
from crankshaft.input.files import tokens

SEPARATOR = 256


def written(folder, *texts):
    for number, each in enumerate(texts):
        (folder / f"{number}.txt").write_bytes(each)
    return str(folder)


def row_of(source):
    """The row that was cut: the windows' features, and the last label that counts."""
    features, labels = source.read(np.arange(len(source)))
    assert features.dtype == labels.dtype == np.int32
    counted = labels[labels >= 0]
    assert len(counted) == source.labels
    row = features.ravel()[: len(counted) + 1].tolist()
    row += [counted[-1]] if len(row) == len(counted) else []
    np.testing.assert_array_equal(row[1:], counted)
    return row


def documents_of(row):
    """The bytes of each document of a row."""
    assert row[0] == row[-1] == SEPARATOR
    found, each = [], []
    for token in row[1:]:
        if token == SEPARATOR:
            found.append(bytes(each))
            each = []
        else:
            each.append(token)
    return found


@pytest.mark.parametrize("context", [1, 3, 4, 7, 8, 9, 100])
def test_each_token_is_a_label_once(tmp_path, context):
    folder = written(tmp_path, b"abc", b"\x00\xff\n", b"a")
    source = text.load(folder, 0, context=context).train
    assert documents_of(row_of(source)) == [b"abc", b"\x00\xff\n", b"a"]
    assert source.labels == 7 + 3  # of bytes and of documents' ends
    assert len(source) == -(-10 // context)
    features, labels = source.read(np.array([len(source) - 1]))
    padding = labels[0] == -1
    assert padding.sum() == len(source) * context - 10
    assert set(features[0, 1:][padding[:-1]]) <= {SEPARATOR}


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_documents_are_files_paragraphs_or_lines(tmp_path, end):
    given = [end.join([b"\xef\xbb\xbfone", b"two", b"", b" ", b"", b"three"]), end.join([b"", b"four", b"", b""])]
    folder = written(tmp_path, *given)

    def found(documents):
        return documents_of(row_of(text.load(folder, 0, context=4, documents=documents).train))

    assert found("file") == [given[0].removeprefix(b"\xef\xbb\xbf"), given[1]]
    assert found("line") == [b"one", b"two", b"three", b"four"]
    assert found("paragraph") == [end.join([b"one", b"two"]), b"three", b"four"]


@pytest.mark.parametrize("documents", ["file", "paragraph", "line"])
def test_documents_do_not_depend_on_the_pieces_that_are_read(tmp_path, monkeypatch, documents):
    rng = np.random.default_rng(0)
    given = bytes(rng.choice(list(b"ab \n\n"), 3000).astype(np.uint8))
    found = []
    for piece in (1 << 20, 7, 1):
        monkeypatch.setattr(text, "_PIECE_BYTES", piece)
        monkeypatch.setattr(text, "_BATCH_BYTES", 50)
        folder = tmp_path / str(piece)
        folder.mkdir()
        row = row_of(text.load(written(folder, given), 0, context=16, documents=documents).train)
        found.append([each.strip(b"\n") for each in documents_of(row)])
    assert found[0] == found[1] == found[2]


def vocabulary(path, **arguments):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "one": 1, "two": 2, "<|end|>": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_truncation(2)  # which a file may have on, and which would lose text
    made.save(str(path))
    return str(path)


def test_tokens_of_a_vocabulary(tmp_path):
    folder = written(tmp_path, b"one two one", b"two three")
    path = vocabulary(tmp_path / "words.json")
    splits = text.load(folder, 0, context=4, tokenizer=path)
    assert row_of(splits.train) == [4, 1, 2, 1, 4, 2, 0, 4]
    assert splits.num_classes == 5
    splits = text.load(folder, 0, context=4, tokenizer=path, separator="<|end|>")
    assert row_of(splits.train) == [3, 1, 2, 1, 3, 2, 0, 3]
    assert splits.num_classes == 4


def test_a_vocabulary_is_made_of_the_text_to_train_on(tmp_path):
    pytest.importorskip("tokenizers")
    for name in ("train", "eval"):
        (tmp_path / name).mkdir()
    folder = written(tmp_path / "train", 30 * b"the cat sat on the mat\n")
    other = written(tmp_path / "eval", "the cat ate the fish, é".encode())
    made = text.load(folder, 0, context=8, vocabulary_size=262, eval_data_dir=other)
    assert made.num_classes == 263  # and the separator
    assert made.train.labels < 15 * 30
    again = text.load(folder, 0, context=8, vocabulary_size=262, eval_data_dir=other)
    assert (again.ids, again.train.identity(), again.evaluation.identity()) == (
        made.ids,
        made.train.identity(),
        made.evaluation.identity(),
    )


def test_many_tokens_are_kept_in_four_bytes(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "far": 70_000}, unk_token="[UNK]"))
    made.save(str(tmp_path / "far.json"))
    source = text.load(written(tmp_path, b"far"), 0, context=2, tokenizer=str(tmp_path / "far.json")).train
    assert row_of(source) == [70_001, 70_000, 70_001]


@pytest.mark.parametrize(
    ("given", "arguments", "line"),
    [
        (b"", {}, "0.txt is empty: expected text, found 0 bytes; give text"),
        (b"\x1f\x8b\x08 etc", {}, "0.txt is gzip: expected plain text; unpack it"),
        (b"\n \n", {"documents": "line"}, "0.txt: expected documents, found empty lines alone; give text"),
        (b"a", {"documents": "page"}, "documents=page is unknown; use file, paragraph or line"),
        (b"a", {"context": 0}, "context=0 is too small; use at least 1"),
        (b"a", {"separator": "</s>"}, "separator=</s> is a token's name, and bytes have none; leave it out"),
        (b"a", {"vocabulary_size": 100}, "vocabulary_size=100 has no room for the 256 bytes"),
        (b"a", {"vocabulary_size": 300, "tokenizer": "a.json"}, "leave tokenizer and separator out"),
        (b"a", {"tokenizer": "absent.json"}, "absent.json can't be read (No such file or directory)"),
        (b"one \xff", {"tokenizer": "words"}, "0.txt: expected text in UTF-8, found 0xff at byte 4; convert the file"),
        (b"one", {"tokenizer": "words", "separator": "<s>"}, "separator=<s> is not a token of "),
        (b"one", {"tokenizer": "empty"}, "empty.json is not a vocabulary ( ... ); give a JSON that Tokenizer.save"),
    ],
)
def test_mistakes_are_one_line(tmp_path, given, arguments, line):
    files = {"words": vocabulary(tmp_path / "words.json"), "empty": str(tmp_path / "empty.json")}
    (tmp_path / "empty.json").write_text("{}")
    if "tokenizer" in arguments:
        arguments = {**arguments, "tokenizer": files.get(arguments["tokenizer"], arguments["tokenizer"])}
    with pytest.raises(InputError) as caught:
        text.load(written(tmp_path, given), 0, **arguments)
    assert all(part in str(caught.value) for part in line.split(" ... "))
    assert "\n" not in str(caught.value)


def test_without_the_library_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"needs the library tokenizers; pip install tokenizers"):
        text.load(written(tmp_path, b"a"), 0, vocabulary_size=300)


def test_remote_text_is_read_by_chunks(tmp_path):
    import tensorflow as tf

    with tf.io.gfile.GFile("ram://texts/a.txt", "wb") as file:
        file.write(bytes(range(100)))
    source = text.load("ram://texts", 0, context=8).train
    assert source.chunk_examples > 1
    assert documents_of(row_of(source)) == [bytes(range(100))]
    assert source.identity() == text.load(written(tmp_path, bytes(range(100))), 0, context=8).train.identity()


def test_without_a_folder_it_is_the_bundled_text_which_is_not_written_to(tmp_path):
    folder = pathlib.Path(text.__file__).parent / "data"
    before = sorted(path.name for path in folder.rglob("*"))
    for more in ({}, {"vocabulary_size": 300}):
        found = text.load(None, 0, context=64, **more)
        for name, source in (("train", found.train), ("eval", found.evaluation)):
            decoder, row = found.tokens.decoder(), row_of(source)[1:-1]
            decoded = "".join(map(decoder.text, row)) + decoder.rest()
            assert decoded == (folder / f"constitution.{name}.txt").read_text()
            assert source.files() == []
    assert sorted(path.name for path in folder.rglob("*")) == before
    (tmp_path / "a.txt").write_text("abc")
    assert text.load(None, 0, eval_data_dir=str(tmp_path)).evaluation.labels == 4


def test_what_cut_the_text_is_kept_and_tells_tokens_back(tmp_path):
    pytest.importorskip("tokenizers")
    said = "naïve € 🎈 end"
    folder = written(tmp_path, said.encode())
    for arguments in ({}, {"vocabulary_size": 258}):
        made = text.load(folder, 0, context=4, **arguments).tokens
        again = tokens.from_saved(json.loads(json.dumps(made.to_saved())), "here")
        assert (again.count, again.separator, again.identity, again.ids) == (
            made.count,
            made.separator,
            made.identity,
            made.ids,
        )
        (row,) = again.tokens([tokens.TextPiece(said.encode(), "", 0, True)])
        decoder = again.decoder()
        pieces = [decoder.text(int(token)) for token in row]
        assert "".join(pieces) == said
        assert decoder.rest() == ""
        assert "" in pieces  # nothing is told of a character before it is whole
        decoder = again.decoder()
        cut = "".join(decoder.text(int(token)) for token in row[: len(row) - len(" end") - 1])
        assert cut + decoder.rest() in ("naïve € \ufffd", "naïve € \ufffd\ufffd\ufffd")
