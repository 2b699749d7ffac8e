"""Models on tables in files: ids and numbers by name, one array of numbers, exported and read by name.

Runs of models with embedding tables, as a user starts them: resumed, started from, looked at.
"""

from __future__ import annotations

import functools
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Embedding, UsageError, load_model, run
from crankshaft.input import csv as csv_input
from crankshaft.input import tfrecord
from crankshaft.launch import command
from tests import runs
from tests.engine.trainers import Squares


def write_mixed(folder, rows=400):
    """Writes a table of every kind of column, each with values that are missing; returns its raw rows."""
    rng = np.random.default_rng(0)
    words = np.char.add("city ", rng.integers(0, 9, rows).astype(str)).astype(object)
    day = np.datetime64("2023-12-25") + rng.integers(0, 90, rows)
    seconds = np.datetime64("2024-02-28T12:00:00.25") + rng.integers(-(10**6), 10**6, rows).astype("m8[s]")
    raw = {
        "city": np.where(rng.random(rows) < 0.1, "", words),
        "user": rng.integers(0, 30, rows),
        "price": np.where(rng.random(rows) < 0.2, np.nan, rng.random(rows)).astype(np.float32),
        "day": np.where(rng.random(rows) < 0.2, "", day.astype(str).astype(object)),
        "seen": np.where(rng.random(rows) < 0.2, "", seconds.astype(str).astype(object)),
    }
    raw["user"][::7] = np.iinfo(np.int64).min
    fields = {name: values.astype(str) for name, values in raw.items()}
    fields["user"][::7], fields["price"][np.isnan(raw["price"])] = "", ""
    fields["label"] = np.where(np.char.endswith(fields["city"], "3"), "1", "0")
    folder.mkdir()
    lines = [",".join(fields), *(",".join(row) for row in zip(*fields.values(), strict=True))]
    (folder / "a.csv").write_text("\n".join(lines))
    return raw


def of_days(times):
    """Returns days since 1970-01-01 and seconds of the day, NaN where there is no time."""
    days = times.astype("M8[D]")
    return days.astype(float) + np.where(np.isnat(times), np.nan, 0), (times - days) / np.timedelta64(1, "s")


NUMBERS = ("user", "price", "day", "seen")


@pytest.mark.parametrize(
    ("arguments", "features"),
    [
        pytest.param({"missing": "mean"}, 6, marks=pytest.mark.slow),
        pytest.param({"missing": "column", "text": "hash"}, 10, marks=pytest.mark.thorough),
        pytest.param({"missing": "-1.5", "array": True, "features": NUMBERS}, None, marks=pytest.mark.slow),
        ({"missing": "column", "array": True, "features": NUMBERS}, None),
    ],
    ids=["words, means", "hashes, flags", "array", "array, flags"],
)
def test_exports_treat_raw_rows_as_training_did(tmp_path, arguments, features):
    pytest.importorskip("pyarrow")
    raw = write_mixed(tmp_path / "data")
    source = csv_input.load(str(tmp_path / "data"), 0, **arguments).train
    read = source.read(np.arange(len(source)))[0]
    is_array = "array" in arguments
    model = {"model": "logistic"} if is_array else {"model": "wide_deep", "model_arg": ["hash_buckets=500", "width=2"]}
    how = dict(
        input="csv",
        data_dir=str(tmp_path / "data"),
        input_arg=[f"{name}={','.join(v) if isinstance(v, tuple) else v}" for name, v in arguments.items()],
        run_dir=tmp_path / "run",
        **model,
    )
    trained = run(mode="train", train_steps=3, global_batch_size=32, jit="off", progress="off", **how)
    expected = trained.predict(read)
    assert len(np.unique(expected)) > 100
    if is_array:
        days, seen = (np.where(raw[name] == "", "NaT", raw[name]).astype("M8[us]") for name in ("day", "seen"))
        user = np.where(raw["user"] < 0, np.nan, raw["user"])
        parts = [user, raw["price"], of_days(days)[0], *of_days(seen)]
        raw = np.stack(parts, 1).astype(np.float32)
    else:
        assert len(read) == features
    np.testing.assert_array_equal(trained.predict(raw), expected)
    tf.nest.map_structure(np.testing.assert_array_equal, load_model(tmp_path / "run").names.ids(raw), read)
    if not is_array:
        with pytest.raises(UsageError, match="feature 'day' has a value that is not a date; write 2024-02-29"):
            trained.predict({**raw, "day": np.where(raw["day"] == "", "2023-02-29", raw["day"])})
    folder = run(mode="export", progress="off", **how).result["export"]
    serve = tf.saved_model.load(folder).signatures["serving_default"]
    given = {name: tf.constant(x) for name, x in ({"features": raw} if is_array else raw).items()}
    np.testing.assert_allclose(serve(**given)["outputs"], expected, rtol=1e-6)


def write_named(folder, names):
    """Writes a table of ids and three numbers, the first of which decides the label, by these names."""
    rng = np.random.default_rng(5)
    values = [rng.integers(0, 8, 240).astype(str), *rng.normal(size=[3, 240]).round(4).astype(str)]
    label = np.where(np.char.startswith(values[1], "-"), "no", "yes")
    folder.mkdir(exist_ok=True)
    rows = zip(*values, label, strict=True)
    (folder / "a.csv").write_text("\n".join([",".join([*names, "label"]), *map(",".join, rows)]))


def named_run(folder, mode, model, **more):
    how = {"input": "csv", "data_dir": str(folder / "data"), "validation_split": 0.25, "run_dir": folder / "run"}
    how |= {"learning_rate": 0.05, "jit": "off", "progress": "off", "global_batch_size": 20, **model, **more}
    return run(mode=mode, **how)


NAMES = ("user", "b1", "b2", "b3")
MODELS = {"dict": {"model": "wide_deep"}, "array": {"model": "logistic", "input_arg": {"array": True}}}


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["dict", pytest.param("array", marks=pytest.mark.slow)])
def test_columns_of_other_names_are_refused_by_each_mode(tmp_path, form):
    pytest.importorskip("pyarrow")
    write_named(tmp_path / "data", NAMES)
    named_run(tmp_path, "train_and_eval", MODELS[form], train_steps=4)
    kept = (tmp_path / "run" / "model.json").read_text()
    write_named(tmp_path / "data", ("user", "c1", "b2", "b3"))
    line = (
        r"data has other features than this run was trained on \(missing: b1; unknown: c1\); name them as they were, "
    )
    calls = {"eval": {}, "predict": {"output": tmp_path / "a.npz"}, "train_and_eval": {"train_steps": 5}}
    for mode, more in calls.items():
        for allowed in (False, True):
            with pytest.raises(UsageError, match=line):
                named_run(tmp_path, mode, MODELS[form], allow_changed_config=allowed, **more)
    assert (tmp_path / "run" / "model.json").read_text() == kept
    assert named_run(tmp_path, "export", MODELS[form]).result["step"] == 4  # which reads no data
    model = load_model(tmp_path / "run")
    columns = {"user": np.arange(4) % 2, **{name: np.ones([4], np.float32) for name in ("c1", "b2", "b3")}}
    for examples in (None, columns, {**columns, "b1": columns["b2"]}):
        with pytest.raises(UsageError, match=r"than this run was trained on \(.*unknown: c1\)"):
            model.predict(examples, verbose=0)


@pytest.mark.thorough
def test_columns_whose_names_no_signature_can_have_are_exported_under_others(tmp_path):
    pytest.importorskip("pyarrow")
    write_named(tmp_path / "data", ("größe id", "b-1", "b_1", "2nd"))
    trained = named_run(tmp_path, "train", MODELS["dict"], train_steps=20)
    folder = pathlib.Path(named_run(tmp_path, "export", MODELS["dict"]).result["export"])
    serve = tf.saved_model.load(folder).signatures["serving_default"]
    table = csv_input.load(str(tmp_path / "data"), 0).train
    rows = table.read(np.arange(-30, 0) % len(table))[0]
    own = {"gr__e_id": "größe id", "b_1_2": "b-1", "b_1": "b_1", "x2nd": "2nd"}
    served = serve(**{name: tf.constant(rows[column]) for name, column in own.items()})["outputs"]
    np.testing.assert_allclose(served, trained.predict(rows), rtol=1e-6)


@pytest.mark.thorough
def test_raw_ids_are_numbered_however_the_rows_come(tmp_path):
    """In predictions, evaluations, a loaded model and an export, and of a run on prepared shards."""
    pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(1)
    frame = pandas.DataFrame({"user": 100_000_000 + 7919 * rng.integers(0, 50, 400), "item": rng.integers(0, 9, 400)})
    raw, unseen = {name: frame[name].to_numpy() for name in frame}, {"user": np.array([12]), "item": np.array([3])}
    frame["label"] = frame["user"] // 7919 % 2
    frame.to_csv(tmp_path / "a.csv", index=False)
    how = {"model": "wide_deep", "model_arg": {"hidden_units": 4}, "train_steps": 30, "learning_rate": 0.05}
    how |= {"jit": "off", "progress": "off", "global_batch_size": 20}
    shards = tmp_path / "shards"
    flags = ["--processes=1", "--input=csv", f"--data_dir={tmp_path}/a.csv", f"--output_dir={shards}"]
    with pytest.raises(SystemExit) as ended:
        command.execute("prepare", flags)
    assert not ended.value.code
    for source in ({"input": "csv", "data_dir": tmp_path / "a.csv"}, {"input": "tfrecord", "data_dir": shards}):
        how |= {**source, "run_dir": tmp_path / source["input"]}
        trained = run(mode="train", **how)
        assert trained.data_info.vocabulary == {"user": 51, "item": 9}
        expected = trained.predict(split="train")
        assert len(np.unique(expected)) > 50
        dataset = tf.data.Dataset.from_tensor_slices((raw, frame["label"].to_numpy())).batch(32)
        predict_loaded = functools.partial(load_model(how["run_dir"]).predict, verbose=0)
        read = (
            csv_input.load(str(how["data_dir"]), 0) if how["input"] == "csv" else tfrecord.load(str(shards), 0)
        ).train
        for predict in (trained.predict, predict_loaded):
            for given in (raw, frame[["user", "item"]], dataset, read) if how["input"] == "csv" else (raw, read):
                np.testing.assert_allclose(predict(given), expected, rtol=1e-5)
            assert np.isfinite(predict(unseen)).all()
        assert trained.evaluate(dataset) == pytest.approx(trained.evaluate((raw, frame["label"].to_numpy())))
        folder = run(mode="export", **how).result["export"]
        served = tf.saved_model.load(folder).signatures["serving_default"](**tf.nest.map_structure(tf.constant, raw))
        np.testing.assert_allclose(served["outputs"], expected, rtol=1e-5)
    how |= {"input": "csv", "data_dir": tmp_path / "a.csv", "run_dir": tmp_path / "hashed"}
    hashed = run(mode="train", **{**how, "model_arg": {"hash_buckets": 500}})
    assert not hashed.data_info.preprocessing.columns["user"].values


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["dict", pytest.param("array", marks=pytest.mark.slow)])
def test_rows_to_predict_on_need_no_labels(tmp_path, form):
    pytest.importorskip("pyarrow")
    write_named(tmp_path / "data", NAMES)
    how = {"validation_split": 0, "eval_data_dir": str(tmp_path / "data")}
    trained = named_run(tmp_path, "train", MODELS[form], train_steps=20, **how)
    expected = trained.predict(columns=True)
    lines = (tmp_path / "data" / "a.csv").read_text().splitlines()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "b.csv").write_text("\n".join(line.rpartition(",")[0] for line in lines))
    new = str(tmp_path / "new")
    unlabelled = {"input_arg": {**MODELS[form].get("input_arg", {}), "label": "none"}}
    calls = [{"eval_data_dir": new}, {"data_dir": new, "eval_data_dir": new}]
    for number, more in enumerate([*calls, calls[1] | unlabelled]):
        output = tmp_path / f"{number}.npz"
        named_run(tmp_path, "predict", {**MODELS[form], **how, **more}, output=output)
        with np.load(output) as found:
            assert {*found} == {*expected}
            for name, values in expected.items():
                np.testing.assert_array_equal(found[name], values)
    with pytest.raises(UsageError, match=r"b.csv has no column 'label', and .*a.csv has; give both the same columns"):
        named_run(tmp_path, "eval", {**MODELS[form], **how, "eval_data_dir": new})


CLICKS = (
    "--input=synthetic_clicks",
    *(f"--input_arg={arg}" for arg in ("examples=640", "eval_examples=200", "rows=30", "fields=3")),
    *("--model=wide_deep", "--model_arg=hidden_units=8", "--model_arg=width=4", "--model_arg=crosses=all"),
    *("--global_batch_size=64", "--optimizer=adam", "--progress=plain"),
)


@pytest.mark.slow
def test_a_run_gets_and_loses_the_eviction_of_ids_as_another_configuration(inside, tmp_path):
    common = (*CLICKS, "--model_arg=table_capacity=300", f"--run_dir={tmp_path}/run")
    evicting = (*common, "--model_arg=evict_after=4", "--train_steps=20")
    inside(*common, "--train_steps=11").ok()
    assert "model_arg" in inside(*evicting).error
    inside(*evicting, "--allow_changed_config").ok()
    tables = runs.result(tmp_path / "run")["tables"]
    assert tables["embedding/rows_freed"] > 0
    events = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    windows = [event for event in events if event["event"] == "window"]
    assert {name: windows[-1][f"tables/{name}"] for name in tables} == tables
    inside(*evicting, "--mode=export").ok()
    inside(*common, "--train_steps=22", "--allow_changed_config").ok()
    assert "embedding/rows_freed" not in runs.result(tmp_path / "run")["tables"]
    alone = inside(*CLICKS, "--model_arg=evict_after=4")
    assert alone.code == 2
    assert "evict_after=4 frees no row; set admit_after (of a model that comes with Crankshaft" in alone.error
    replicas = ("--strategy=mirrored", "--num_virtual_devices=2", "--sync_every_steps=2")
    apart = inside(*evicting, *replicas, f"--run_dir={tmp_path}/apart")
    assert "evict_after=4 frees rows of all replicas, and sync_every_steps=2" in apart.error


@pytest.mark.thorough
def test_a_table_of_ids_continues_with_another_capacity(inside, tmp_path):
    """At a learning rate that ruins it, so that it ends with the best weights, which have the former capacity."""
    one = tuple(word for word in CLICKS if "crosses" not in word)
    common = (*one, f"--run_dir={tmp_path}/run", "--eval_every_steps=8", "--restore_best")
    inside(*common, "--model_arg=table_capacity=300", "--train_steps=16").ok()
    before = load_model(tmp_path / "run", "best").predict(split="eval", verbose=0)
    grown = (*common, "--model_arg=table_capacity=700", "--train_steps=24", "--learning_rate=9")
    assert "table_capacity: 300 -> 700" in inside(*grown).mistake
    wider = (word.replace("width=4", "width=5") for word in grown)
    error = inside(*wider, "--allow_changed_config").error
    assert "trainer.embedding.shards[0]: [700, 6] float32 here, [700, 5] float32 in the checkpoint" in error
    found = inside(*grown, "--allow_changed_config").ok().err
    assert found.count("ids move to a table of 700 rows (shards: 1); 0 get no row") == 2
    best = runs.result(tmp_path / "run")["best"]
    assert best["step"] <= 16
    shards = [x for name, x in runs.tensors(tmp_path / "run").items() if "embedding/admissions/0/keys" in name]
    assert [x.shape for x in shards] == [(44, 16)]
    inside(*grown, "--allow_changed_config", "--mode=predict", f"--output={tmp_path}/best.npz").ok()
    with np.load(tmp_path / "best.npz") as file:
        np.testing.assert_allclose(file["probability"], 1 / (1 + np.exp(-before)), rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("begun", ["--run_dir", "--init_from"])
def test_crosses_that_are_hashed_by_a_capacity_are_not_read_with_another(inside, tmp_path, begun):
    inside(*CLICKS, f"--run_dir={tmp_path}", "--model_arg=table_capacity=300", "--train_steps=1").ok()
    grown = (*CLICKS, f"{begun}={tmp_path}", "--model_arg=table_capacity=700", "--train_steps=2")
    assert "crosses that are hashed by table_capacity=300" in inside(*grown, "--allow_changed_config").mistake


def in_shards(number, rows=11):
    """A trainer with two tables of so many shards, as around as many servers, and a weight between them."""

    class Tables(Squares):
        def build_model(self):
            self.tables = [Embedding(name, size, 3, num_shards=number) for name, size in (("a", rows), ("b", 7))]
            return tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])

        def forward(self, features, training):
            first, second = (
                table(features[name], training=training) for table, name in zip(self.tables, "ab", strict=True)
            )
            return self.model(first * second, training=training)

    return Tables


def pairs():
    a, b = np.arange(48) * 5 % 11, np.arange(48) * 3 % 7
    return ({"a": a, "b": b}, np.float32(a % 2 + b % 3)), None


IN_SHARDS = ("--global_batch_size=8", "--learning_rate=0.05", "--clip_norm=1", "--progress=plain", "--mode=train")


def whole_tables(run_dir):
    """What a run keeps of each table and of each slot of one, with its rows in order."""
    kept, found = runs.tensors(run_dir), {}
    updated = runs.manifests(run_dir)[-1]["about"]["updated"]["optimizer"]
    for table in (0, 1):
        names = [name for name in updated if f"tables/{table}/" in name]
        numbers = [updated.index(name) for name in names]
        keys = [names, *([f"trainer/optimizer/slots/{n:04d}_shard/{slot}/" for n in numbers] for slot in "mv")]
        for what, prefixes in zip("wmv", keys, strict=True):
            shards = [kept[f"{prefix}.ATTRIBUTES/VARIABLE_VALUE"] for prefix in prefixes]
            rows = np.empty([sum(map(len, shards)), shards[0].shape[1]], np.float32)
            for number, shard in enumerate(shards):
                rows[number :: len(shards)] = shard
            found[f"{what} {table}"] = rows
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("before", "after", "where"),
    [
        (3, 1, ()),
        (3, 1, ("--strategy=mirrored", "--num_virtual_devices=2")),
        pytest.param(2, 3, (), marks=pytest.mark.slow),
    ],
)
def test_tables_are_read_into_another_number_of_shards(inside, tmp_path, before, after, where):
    first, whole = tmp_path / "first", tmp_path / "whole"
    for run_dir, steps in ((first, 4), (whole, 9)):
        inside(*IN_SHARDS, f"--run_dir={run_dir}", f"--train_steps={steps}", trainer=in_shards(before), data=pairs).ok()
    taken = tmp_path / "taken"
    flags = ("--optimizer=sgd", "--learning_rate=0", "--train_steps=1", f"--init_from={first}", "--seed=4")
    inside(*IN_SHARDS, *flags, *where, f"--run_dir={taken}", trainer=in_shards(after), data=pairs).ok()
    tensors, expected = runs.tensors(taken), whole_tables(first)
    for table in (0, 1):
        for shard in range(after):
            found = tensors[f"trainer/tables/{table}/shards/{shard}/.ATTRIBUTES/VARIABLE_VALUE"]
            np.testing.assert_array_equal(found, expected[f"w {table}"][shard::after])
    inside(*IN_SHARDS, *where, f"--run_dir={first}", "--train_steps=9", trainer=in_shards(after), data=pairs).ok()
    found, expected = whole_tables(first), whole_tables(whole)
    for name, rows in expected.items():
        np.testing.assert_allclose(found[name], rows, atol=3e-6, err_msg=name)
    assert len(runs.manifests(first)[-1]["about"]["updated"]["optimizer"]) == 2 + 2 * after


@pytest.mark.thorough
def test_a_table_that_has_grown_begins_with_the_rows_of_a_smaller_one(inside, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    inside(*IN_SHARDS, f"--run_dir={first}", "--train_steps=3", trainer=in_shards(2), data=pairs).ok()
    flags = (*IN_SHARDS, "--optimizer=sgd", "--learning_rate=0", "--train_steps=1", "--seed=4")
    error = inside(*flags, f"--init_from={first}", trainer=in_shards(1, rows=10), data=pairs).mistake
    assert "do not fit this model; use the same model" in error
    line = (
        "trainer.tables[0].shards[0]: [10, 3] float32 here, [11, 3] float32 in the checkpoint (a table can't lose rows)"
    )
    assert line in error
    error = inside(*IN_SHARDS, f"--run_dir={first}", "--train_steps=4", trainer=in_shards(1, rows=13), data=pairs).error
    assert "with init_from, if all fit" in error
    inside(*flags, f"--run_dir={second}/fresh", trainer=in_shards(3, rows=13), data=pairs).ok()
    init = (f"--init_from={first}", f"--run_dir={second}/grown")
    out = inside(*flags, *init, trainer=in_shards(3, rows=13), data=pairs).ok().out
    assert "rows that it lacks begin as they were made: trainer.tables[0].shards[0] (4 of 5 rows)" in out
    before = whole_tables(first)["w 0"]
    fresh, grown = (runs.tensors(second / name) for name in ("fresh", "grown"))
    keys = [f"trainer/tables/0/shards/{shard}/.ATTRIBUTES/VARIABLE_VALUE" for shard in range(3)]
    for shard, key in enumerate(keys):
        old = before[shard::3]
        np.testing.assert_array_equal(grown[key], np.concatenate([old, fresh[key][len(old) :]]))


def test_the_summary_names_each_table_and_rows_of_another_number_of_ids_are_refused(inside, tmp_path):
    out = inside(*CLICKS, f"--run_dir={tmp_path}/first", "--train_steps=2").ok().out
    assert "Embedding: 'embedding', 90 rows x 5, 0.0 MB, shards: 1" in out
    assert "XLA off: the updates of embeddings touch a few rows" in out
    more = (word.replace("rows=30", "rows=31") for word in CLICKS)
    error = inside(*more, "--train_steps=1", f"--init_from={tmp_path}/first").mistake
    assert error.startswith("feature 'categories' has 31 ids, and 30 in init_from=")
    assert "model_arg=table_capacity=N" in error
