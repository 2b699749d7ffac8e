"""Rows of tables beside a SavedModel: what it looks up, and a delta that makes an earlier export the later one."""

from __future__ import annotations

import pathlib
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Embedding, Trainer, UsageError, mean, run
from crankshaft.parts.tables import SHARED_ROW_KEY, exported_tables

parquet = pytest.importorskip("pyarrow.parquet")
QUIET = {"jit": "off", "progress": "off"}
rng = np.random.default_rng(0)
IDS = rng.integers(-(2**63), 2**63 - 1, 60)


class Clicks(Trainer):
    """Serves the rows of its tables: `items` in two shards, read in pieces of 32 rows, and `words` of text."""

    def build_model(self):
        self.items = Embedding("items", 96, 1 << 15, admit_after=1, num_shards=2)
        self.words = Embedding("words", 64, 2, admit_after=2)
        self.plain = Embedding("plain", 8, 2)
        return tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])

    def forward(self, features, training):
        item, word = (table(features[table.name], training=training) for table in (self.items, self.words))
        outputs = self.model(item[:, :2] + word + self.plain(features["items"]), training=training)
        return {"items": item, "words": word, "score": outputs[:, 0]}

    def loss(self, outputs, batch):
        return mean(tf.square(outputs["score"] - batch[1]))


def clicks(ids):
    """Features and labels of some ids, and text made of them."""
    return {"items": ids, "words": np.array([f"word {n}" for n in ids])}, np.float32(ids % 3)


def rows_of(export, name) -> dict[int | None, bytes | None]:
    """A table's file: the bytes of each key's vector, None for one that is gone."""
    table = parquet.read_table(pathlib.Path(export) / "tables" / f"{name}.parquet").to_pydict()
    vectors = [None if vector is None else np.float32(vector).tobytes() for vector in table["vector"]]
    assert len(set(table["key"])) == len(vectors)
    keys = [SHARED_ROW_KEY if key is None else key for key in table["key"]]
    assert keys == sorted(keys)
    return dict(zip(table["key"], vectors, strict=True))


def applied(earlier: dict, delta: dict) -> dict:
    return {key: vector for key, vector in {**earlier, **delta}.items() if vector is not None}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """`exports(run_dir, ids, steps, **flags)`: a run that is trained up to a step on ids, and its export then."""
    folder = tmp_path_factory.mktemp("runs")

    def exported(run_dir, ids, steps, **flags):
        how = {"data": (clicks(ids),), "run_dir": folder / run_dir, "global_batch_size": 10, **QUIET}
        training = {"train_steps": steps, "optimizer": "adagrad", "mode": "train", "allow_changed_config": True}
        done = run(Clicks, **how, **training)
        return done, run(Clicks, mode="export", **how, **flags).result["export"]

    return exported


@pytest.mark.thorough
def test_the_files_have_the_saved_models_rows_and_a_delta_leads_to_the_next(exports):
    _, first = exports("a", IDS[:40], 9)
    done, second = exports("a", IDS[20:], 17, export_since=first)
    _, other = exports("b", IDS[10:30], 5, export_since=second)
    serve = tf.saved_model.load(second).signatures["serving_default"]
    features = clicks(np.append(IDS, [3, SHARED_ROW_KEY - 1]))[0]
    served = serve(**{name: tf.constant(ids) for name, ids in features.items()})
    for table in (done.trainer.items, done.trainer.words):
        earlier, later, others = (rows_of(export, table.name) for export in (first, second, other))
        for key, vector in zip(
            table.admission_keys(features[table.name]).numpy(), served[table.name].numpy(), strict=True
        ):
            assert later.get(key, later[None]) == vector.tobytes()
        delta = rows_of(second, f"{table.name}.delta")
        assert 0 < len(delta) < len(later)
        assert applied(earlier, delta) == later
        delta = rows_of(other, f"{table.name}.delta")
        assert None in delta.values()
        assert applied(later, delta) == others
    assert len(rows_of(second, "items")) == 61
    assert parquet.ParquetFile(pathlib.Path(second) / "tables" / "items.parquet").num_row_groups == 2  # pieces
    assert sorted(path.name for path in (pathlib.Path(first) / "tables").iterdir()) == [
        "items.parquet",
        "words.parquet",
    ]


def table(keys, rows, width=2):
    """What is exported of a table, in pieces that end anywhere."""
    keys = np.sort(np.append(keys, SHARED_ROW_KEY))
    ends = np.unique(rng.integers(1, len(keys) + 1, 4))[:-1]
    pieces = [np.split(array, ends) for array in (keys, np.resize(np.float32(rows), [len(keys), width]))]
    return types.SimpleNamespace(width=width, rows_by_key=lambda: zip(*pieces, strict=True))


def test_a_delta_of_any_two_tables_makes_the_one_the_other(tmp_path):
    """With values that compare as equal and are not, and as unequal and are."""
    before, since = {}, None
    for number in range(60):
        export = tmp_path / str(number)
        export.mkdir()
        keys = rng.choice(20, rng.integers(20), replace=False)
        exported_tables.write(str(export), {"t": table(keys, rng.choice([0.0, -0.0, 1.0, np.nan], 42))}, since)
        now = rows_of(export, "t")
        if since:
            delta = rows_of(export, "t.delta")
            assert applied(before, delta) == now
            assert all(before.get(key) != vector for key, vector in delta.items())
        before, since = now, str(export)


def test_what_is_no_earlier_export_is_one_line_and_leaves_no_new_one(exports, tmp_path, monkeypatch):
    since = tmp_path / "since"
    since.mkdir()
    items, path = {"items": table([4], [1.0], 3)}, since / "tables" / "items.parquet"
    exported_tables.write(str(since), items, None)
    content = path.read_bytes()
    path.unlink()

    def refused(match, tables):
        new = tmp_path / f"new {len([*tmp_path.iterdir()])}"
        new.mkdir()
        with pytest.raises(UsageError, match=match) as error:
            exported_tables.write(str(new), tables, str(since))
        assert "\n" not in str(error.value)

    items = {"items": table([3], [1.0], 3)}
    cure = "give export_since an earlier export of this model"
    refused(rf"items\.parquet: .*; {cure}", items)
    for broken in (content[: len(content) // 2], content[:-1], b"", content[:20] + b"?" + content[21:]):
        path.write_bytes(broken)
        refused(rf"items\.parquet: .*; {cure}", items)
    path.write_bytes(content)
    refused(rf"items\.parquet: its columns are not key, vector of 2 numbers; {cure}", {"items": table([4], [1.0])})

    with pytest.raises(UsageError, match=r"items\.parquet: its columns are not key"):
        exports("a", IDS[:40], 9, export_since=since, output=tmp_path / "out")
    assert not [*tmp_path.glob("out/*")]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"export_since=.* is read by pyarrow; pip install pyarrow"):
        exports("a", IDS[:40], 9, export_since=since)
    exported_tables.write(str(tmp_path), items, None)
    assert not (tmp_path / exported_tables.FOLDER).exists()
