"""`crankshaft prepare`: shards train as their input does, to the bit, and a call that ended is taken up again."""

import json
import os
import shutil
import signal
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf
from filelock import lock_descriptor

from crankshaft.input import array_record, images, tfrecord
from crankshaft.input.checks import InputError
from crankshaft.input.files import tokens
from crankshaft.launch import command
from tests.input.test_tfrecord import example
from tests.limits import files_no_larger_than
from tests.runs import assert_equal_bits

pytestmark = pytest.mark.thorough

ARRAYS = """
    import numpy as np

    def load(data_dir, seed, *, examples=10, evaluated=4, wide=False):
        def split(count, first):
            k = np.arange(first, first + count)
            features = {
                "x": (k[:, np.newaxis] / 7).astype(np.float64 if wide else np.float32),
                "label": np.stack([k, -k], 1).astype(np.int16),
                "text": np.array([f"example {each} \\u00e9" for each in k]),
                "flag": k % 2 == 0,
            }
            return features, k.astype(np.int64), (k + 1).astype(np.float32)
        return split(examples, 0), split(evaluated, 1000), None, {"label": 2000}
"""


@pytest.fixture
def prepared(capfd):
    """`prepared(*flags)`: the command in this process: (exit code, what it printed, its one error)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as exit:
            command.execute("prepare", ["--processes=1", *map(str, arguments)])
        out, err = capfd.readouterr()
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(errors) == (1 if exit.value.code else 0), err
        return exit.value.code or 0, out, "".join(errors)

    return run


@pytest.fixture
def own_input(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(textwrap.dedent(ARRAYS))
    return path


def content(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.rglob("*.tfrecord"))}


def test_shards_train_to_the_bit_as_their_input_does(prepared, inside, tmp_path):
    out = tmp_path / "out of digits"
    code, said, _ = prepared("--input=digits", f"--output_dir={out}", "--shards=3")
    assert code == 0
    assert said.endswith(f"train on it by crankshaft train --input=tfrecord '--data_dir={out}'\n")  # can be pasted
    assert "1,437 examples in 3 shards of train and 360 examples in 1 shard of eval" in said
    runs = [tmp_path / "arrays", tmp_path / "shards"]
    for run_dir, given in zip(runs, (["--input=digits"], ["--input=tfrecord", f"--data_dir={out}"]), strict=True):
        flags = ["--model=mlp", "--model_arg=hidden_units=8", "--jit=off", "--train_steps=30", "--resident_data_mb=0"]
        inside(*flags, *given, f"--run_dir={run_dir}").ok()
    assert_equal_bits(*runs, "train", "eval")


@pytest.mark.parametrize("kind", ["tfrecord", "array_record"])
def test_every_form_of_an_example_comes_back_as_it_was(prepared, own_input, tmp_path, kind):
    out = tmp_path / "out"
    prepared(f"--input={own_input}", f"--output_dir={out}", "--shards=4", f"--format={kind}")
    splits = (tfrecord if kind == "tfrecord" else array_record).load(str(out), 0)
    assert splits.vocabulary == {"label": 2000}
    for split, first, count in ((splits.train, 0, 10), (splits.evaluation, 1000, 4)):
        k = np.arange(first, first + count)
        features, labels, weights = split.read(np.arange(count))
        np.testing.assert_array_equal(features["x"], (k[:, np.newaxis] / 7).astype(np.float32))
        np.testing.assert_array_equal(features["label"], np.stack([k, -k], 1))
        assert features["text"].tolist() == [f"example {each} é".encode() for each in k]
        np.testing.assert_array_equal(features["flag"], k % 2 == 0)
        np.testing.assert_array_equal(labels, k)
        np.testing.assert_array_equal(weights, k + 1)
        assert [features[name].dtype for name in ("x", "label", "flag")] == [np.float32, np.int16, bool]


def test_same_call_keeps_what_is_whole_and_writes_the_rest(prepared, own_input, tmp_path):
    out = tmp_path / "out"
    call = (f"--input={own_input}", f"--output_dir={out}", "--shards=4")
    prepared(*call)
    before = content(out)
    gone, flipped, *kept = before
    os.remove(gone)
    spoilt = bytearray(before[flipped][1])
    spoilt[50] ^= 1
    flipped.write_bytes(spoilt)
    code, said, _ = prepared(*call)
    assert code == 0
    assert f"{len(before) - 2} of {len(before)} shards are there and whole" in said
    after = content(out)
    assert {path: bytes for path, (_, bytes) in after.items()} == {path: bytes for path, (_, bytes) in before.items()}
    assert all(after[path] == before[path] for path in kept)
    assert len(tfrecord.load(str(out), 0).train.read(np.arange(10))[1]) == 10


@pytest.fixture
def in_the_way(tmp_path):
    """A folder in a shard's place, by which a call fails; and what a call leaves that was killed at once."""
    folder = tmp_path / "out" / "train" / "train-00002-of-00004.tfrecord" / "folder"
    folder.mkdir(parents=True)
    (tmp_path / "out" / "prepare.json").write_text("")
    return folder


def test_call_that_failed_is_taken_up_again(prepared, own_input, in_the_way, tmp_path):
    out = tmp_path / "out"
    call = (f"--input={own_input}", f"--output_dir={out}", "--shards=4")
    code, _, error = prepared(*call)
    assert code == 1
    assert "complete shards are kept, and the same command continues" in error
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.tfrecord") if path.is_file()}
    assert len(before) == 2
    assert not [*out.rglob("*.tmp")]
    assert not (out / "features.json").exists()
    (out / "train" / "train-00003-of-00004.tfrecord.0123456789abcdef.tmp").write_text("half")
    os.removedirs(in_the_way)
    code, said, _ = prepared(*call)
    assert code == 0
    assert "2 of 6 shards are there and whole" in said
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert sorted(path.name for path in out.iterdir()) == ["eval", "features.json", "prepare.json", "train"]
    assert not [*out.rglob("*.tmp")]


@pytest.mark.parametrize("change", ["contents", "time alone", "number"])
def test_call_that_was_ended_begins_again_where_its_source_has_changed(prepared, in_the_way, tmp_path, change):
    """So that no shard has old labels beside those of new ones."""
    source = tmp_path / "source"
    source.mkdir()

    def write(labels):
        with tf.io.TFRecordWriter(str(source / "a.tfrecord")) as writer:
            for label in labels:
                writer.write(example(x=[0.0] * 2, label=label))

    write([0] * 12)
    call = ("--input=tfrecord", f"--data_dir={source}", f"--output_dir={tmp_path / 'out'}", "--shards=4")
    assert prepared(*call)[0] == 1
    os.removedirs(in_the_way)
    labels = [1] * (3 if change == "number" else 12)
    write(labels) if change != "time alone" else os.utime(source / "a.tfrecord", (1, 1))
    code, said, _ = prepared(*call)
    assert code == 0
    assert "the data has changed since the last call, which was ended: all shards are written again" in said
    found = tfrecord.load(str(tmp_path / "out"), 0).train
    assert found.read(np.arange(len(found)))[1].tolist() == ([0] * 12 if change == "time alone" else labels)


def test_folder_with_something_else_is_refused(prepared, own_input, tmp_path):
    out = tmp_path / "out"
    call = (f"--input={own_input}", f"--output_dir={out}")
    prepared(*call, "--shards=2")
    code, _, error = prepared(*call, "--shards=3")
    assert code == 2
    assert f"--output_dir={out} has shards of something else (of other shards)" in error
    assert "of other input_arg, examples" in prepared(*call, "--shards=2", "--input_arg=examples=11")[2]
    assert len(tfrecord.load(str(out), 0).train) == 10  # as it was
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("")
    code, _, error = prepared(f"--input={own_input}", f"--output_dir={other}")
    assert (code, [path.name for path in other.iterdir()]) == (2, ["thesis.txt"])
    assert "has other files in it (thesis.txt)" in error


def test_a_folder_that_another_process_writes_is_refused(prepared, own_input, tmp_path):
    call = (f"--input={own_input}", f"--output_dir={tmp_path / 'out'}")
    prepared(*call)
    with (tmp_path / "out" / "prepare.json").open("r+") as plan:
        assert lock_descriptor(plan.fileno(), blocking=False)
        code, _, error = prepared(*call)
    assert (code, error.partition("out ")[2]) == (2, "is written by another process; wait for it")
    assert prepared(*call)[0] == 0


@pytest.mark.holds("`crankshaft prepare` removes only")
def test_only_shards_are_removed_and_a_file_of_another_program_is_never_replaced(prepared, own_input, tmp_path):
    """Somebody may have chosen what stands in the folder, e.g. with a data set."""
    out, precious = tmp_path / "out", tmp_path / "precious.tfrecord"
    call = (f"--input={own_input}", f"--output_dir={out}", "--shards=2")
    assert prepared(*call)[0] == 0
    plan = json.loads((out / "prepare.json").read_text())
    plan["plan"]["examples"] = {}
    (out / "features.json").unlink()
    precious.write_text("thesis")
    for name in ("../precious.tfrecord", str(precious), "train/../../precious.tfrecord", "features.json", 3, None):
        (out / "prepare.json").write_text(json.dumps({**plan, "shards": [*plan["shards"], name]}))
        code, _, error = prepared(*call)
        assert code == 2
        assert f"{out}/prepare.json is not what crankshaft prepare writes there; give another folder" in error
    assert precious.read_text() == "thesis"
    assert len([*out.rglob("*.tfrecord")]) == 3
    for content in (b"alias", b'{"plan": [1]}', b'{"a": 1}', b"[" * 100_000, b'\xff{"plan"'):
        (out / "prepare.json").write_bytes(content)
        code, _, error = prepared(*call)
        assert code == 2
        assert f"{out}/prepare.json is not what crankshaft prepare writes there" in error
        assert (out / "prepare.json").read_bytes() == content
    (out / "prepare.json").unlink()
    (out / "prepare.json").symlink_to(precious)
    code, _, error = prepared(*call)
    assert code == 1
    assert "prepare.json: it is a link" in error
    assert precious.read_text() == "thesis"
    (out / "prepare.json").unlink()
    (out / "prepare.json").write_text('{"pl')  # a call that was killed as it wrote it
    (out / "features.json").symlink_to(precious)  # is replaced
    assert prepared(*call)[0] == 0
    assert precious.read_text() == "thesis"
    assert not (out / "features.json").is_symlink()
    (out / "features.json").write_text('{"splits": [3]}')
    assert prepared(*call)[0] == 0
    assert len(tfrecord.load(str(out), 0).train) == 10


def test_shard_that_is_missing_or_cut_at_a_record_is_found(prepared, own_input, tmp_path):
    out = tmp_path / "out"
    prepared(f"--input={own_input}", f"--output_dir={out}", "--shards=2")
    path = out / "train" / "train-00001-of-00002.tfrecord"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    path.write_bytes(whole[: 16 + length])  # its first record is whole
    with pytest.raises(InputError, match=f"{path} has .* bytes, and features.json says"):
        tfrecord.load(str(out), 0)
    path.unlink()
    with pytest.raises(InputError, match=f"{path} is missing, of a set of 2 files; restore it"):
        tfrecord.load(str(out), 0)
    only = out / "train" / "train-00000-of-00002.tfrecord"
    assert len(tfrecord.load(str(only), 0).train) == 5  # who names one means it


MISTAKES = {
    "--output_dir=x": "input is missing",
    "--input=digits": "--output_dir is missing",
    "--input=digits --outputdir=x": "outputdir is unknown; did you mean output_dir",
    "--input=digits --output_dir=x --input_arg=a=1": "digits takes no arguments",
    "--input=digits --output_dir=x --format=csv": "--format=csv is unknown",
    "--input=digits --output_dir=gs://x/y": "--output_dir=gs://x/y can't be used: it is not a path of a mounted",
    "--input=digits --output_dir=x y": "'y' is not a flag",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistake_is_one_line(prepared, line):
    code, _, error = prepared(*line.split())
    assert code == 2
    assert MISTAKES[line] in error


@pytest.mark.parametrize("kind", ["tfrecord", "array_record"])
def test_a_shard_that_has_no_room_is_named_with_the_cure(prepared, tmp_path, kind):
    with files_no_larger_than(1 << 13):
        code, _, error = prepared("--input=digits", f"--output_dir={tmp_path}/out", f"--format={kind}")
    assert code == 1
    assert f"{tmp_path}/out/" in error
    assert "File too large" in error
    assert "; this process may have 8,192 bytes in a file (ulimit -f); raise that, or use less" in error


REFUSED = {
    "tf.data.Dataset.range(3).map(lambda x: (x, x))": "is a tf.data.Dataset",
    "Sampled()": "has random examples, which differ by epoch, and shards",
    "AnyLength()": "has examples that differ in length, and shards hold those of one length",
    "Bad()": "record 3 is bad",
}
SOURCES = """
    import numpy as np
    import tensorflow as tf
    from crankshaft import Source, Spec
    from crankshaft.engine.data.source import BadRecordError

    class Bad(Source):
        element_spec = (Spec((1,), np.float32), Spec((), np.int64))
        def __len__(self):
            return 5
        def read(self, indices):
            raise BadRecordError(3, "record 3 is bad")

    class Sampled(Bad):
        is_random = True

    class AnyLength(Bad):
        element_spec = (Spec((None,), np.float32), Spec((), np.int64))

    def load(data_dir, seed):
        return EXPRESSION, None
"""


@pytest.mark.parametrize("expression", REFUSED)
def test_input_that_cannot_be_written_is_one_line(prepared, tmp_path, expression):
    path = tmp_path / "own.py"
    path.write_text(textwrap.dedent(SOURCES).replace("EXPRESSION", expression))
    code, _, error = prepared(f"--input={path}", f"--output_dir={tmp_path / 'out'}")
    assert code == 2
    assert REFUSED[expression] in error


def test_ctrl_c_is_one_line_whatever_it_became_on_its_way(prepared, tmp_path):
    """Python's import of a module in C makes an ImportError of it."""
    path = tmp_path / "own.py"
    path.write_text(
        textwrap.dedent("""
        import os, signal, time

        def load(data_dir, seed):
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)  # no longer, where the signal is ignored, as in a shell's background
            except KeyboardInterrupt:
                raise ImportError("optree") from None
        """)
    )
    before = signal.getsignal(signal.SIGINT)
    code, _, error = prepared(f"--input={path}", f"--output_dir={tmp_path / 'out'}")
    assert (code, error) == (130, "error: interrupted; complete shards are kept, and the same command continues")
    assert signal.getsignal(signal.SIGINT) is before


def test_several_processes_write_what_one_writes_and_a_source_is_written_as_it_reads(prepared, own_input, tmp_path):
    call = (f"--input={own_input}", "--shards=3")
    prepared(*call, f"--output_dir={tmp_path / 'one'}")
    assert prepared(*call, f"--output_dir={tmp_path / 'two'}", "--processes=2")[0] == 0
    again = ("--input=tfrecord", f"--data_dir={tmp_path / 'one'}", f"--output_dir={tmp_path / 'again'}", "--shards=2")
    assert prepared(*again)[0] == 0
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).rglob("*-of-*")} for name in ("one", "two"))
    assert one == two
    assert len(one) == 8  # four shards and their indices
    read, other = (tfrecord.load(str(tmp_path / name), 0).train.read(np.arange(10)) for name in ("one", "again"))
    tf.nest.map_structure(np.testing.assert_array_equal, read, other)
    assert len([*(tmp_path / "again" / "train").glob("*.tfrecord")]) == 2


@pytest.mark.holds("Into shards images come")
def test_a_list_of_pictures_copies_no_other_file_into_shards_unless_that_is_asked_for(prepared, tmp_path):
    """Whoever made the data set wrote the list, and the shards may be for others."""
    (tmp_path / "set").mkdir()
    for path in ("private.png", "set/0.png"):
        (tmp_path / path).write_bytes(tf.io.encode_png(np.zeros((4, 4, 3), np.uint8)).numpy())
    (tmp_path / "set" / "link.png").symlink_to(tmp_path / "private.png")
    (tmp_path / "secret.png").write_text("hunter2")
    call = ("--input=images", "--input_arg=size=4", "--input_arg=augment=false", "--shards=1")
    call += (f"--data_dir={tmp_path}/set/list.csv", f"--output_dir={tmp_path}/out")
    for name in ("../private.png", tmp_path / "private.png", "x/../../private.png", "link.png", "ram://a/b.png"):
        (tmp_path / "set" / "list.csv").write_text(f"0.png,0\n{name},1\n")
        code, _, error = prepared(*call)
        assert code == 2
        assert f"list.csv: 1 file of 2 not below its folder, first {name if '://' in str(name) else ''}" in error
        assert "input_arg=allow_outside=true" in error
    (tmp_path / "classes" / "a").mkdir(parents=True)
    shutil.copy(tmp_path / "private.png", tmp_path / "classes" / "a")
    (tmp_path / "classes" / "a" / "link.png").symlink_to(tmp_path / "private.png")
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "private.png", tmp_path / "elsewhere")
    (tmp_path / "classes" / "b").symlink_to(tmp_path / "elsewhere")
    for classes in ("classes", "classes/*/*.png"):
        code, _, error = prepared(*call[:3], f"--data_dir={tmp_path}/{classes}", f"--output_dir={tmp_path}/out")
        assert (code, f"{classes}: 2 files of 3 not below its folder, first {tmp_path}/classes/" in error) == (2, True)
    assert not (tmp_path / "out").exists()
    (tmp_path / "set" / "list.csv").write_text("0.png,0\n../secret.png,1\n")
    code, _, error = prepared(*call, "--input_arg=allow_outside=true")
    assert code == 2
    assert "secret.png does not begin as a JPEG" in error
    assert "hunter" not in error
    (tmp_path / "set" / "list.csv").write_text("0.png,0\n../private.png,1\n")
    assert prepared(*call, "--input_arg=allow_outside=true")[0] == 0
    assert len(images.load(f"{tmp_path}/set/list.csv", 0, size=4).train) == 2  # to train on them alone is as ever
    (tmp_path / "set" / "list.csv").write_text("hunter2\n")
    assert "hunter" not in prepared(*call)[2]


def test_to_train_on_shards_of_text_takes_no_library(prepared, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    out = tmp_path / "shards"
    text = ("--input=text", "--input_arg=vocabulary_size=300", f"--input_arg=prepared_dir={tmp_path}")
    assert prepared(*text, f"--output_dir={out}", "--shards=1")[0] == 0
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    kept = tfrecord.load(str(out), 0).tokens.to_saved()
    monkeypatch.undo()
    assert tokens.from_saved(kept, "here").count == 301  # the border of documents among them


@pytest.mark.parametrize("kept", [{"kind": "vocabulary"}, [], {}])
def test_shards_that_do_not_say_what_text_was_cut_into_are_refused(prepared, tmp_path, kept):
    out = tmp_path / "shards"
    assert prepared("--input=text", f"--input_arg=prepared_dir={tmp_path}", f"--output_dir={out}", "--shards=1")[0] == 0
    content = json.loads((out / "features.json").read_text())
    (out / "features.json").write_text(json.dumps({**content, "tokens": kept}))
    with pytest.raises(InputError, match=r"features\.json lacks properties of the data \(.*\); run"):
        tfrecord.load(str(out), 0)
