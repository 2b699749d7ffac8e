"""Models on tables in files: ids and numbers by name, one array of numbers, runs that are resumed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.runs import assert_equal_bits, result

ROWS = 300
RUN = ("--global_batch_size=16", "--jit=off", "--progress=plain", "--seed=3", "--resident_data_mb=0")


def columns(rows=ROWS):
    number = np.arange(rows)
    return {"user": number * 7 % 31, "item": number * 5 % 17, "age": number % 9 / 9, "label": number * 7 % 31 % 2}


def parquet(folder):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    pq.write_table(pa.table(columns()), folder / "a.parquet", row_group_size=32)


def texts(rows):
    """Text, of which one column decides the label, and numbers that say nothing."""
    draws = np.random.default_rng(0)
    city, street = draws.integers(0, 20, rows), draws.integers(0, 300, rows)
    price = np.where(draws.random(rows) < 0.1, np.nan, draws.random(rows))
    return {
        "city": [f"city {n}" for n in city],
        "street": [f"{n} street" for n in street],
        "price": price,
        "label": np.where(city % 3 == 1, "yes", "no"),
    }


def csv(folder):
    folder.mkdir()
    made = columns()
    lines = [",".join(made), *(",".join(map(str, row)) for row in zip(*made.values(), strict=True))]
    (folder / "a.csv").write_text("\n".join(lines))


WRITTEN = {"parquet": parquet, "csv": csv}


@pytest.fixture(params=WRITTEN)
def data(request, tmp_path):
    WRITTEN[request.param](tmp_path / "data")
    return f"--input={request.param}", f"--data_dir={tmp_path}/data", "--validation_split=0.2"


# Where a run stands in a table does not depend on how the table is read.
@pytest.mark.parametrize("data", ["parquet", pytest.param("csv", marks=pytest.mark.slow)], indirect=True)
def test_a_resumed_run_is_one_that_was_not(inside, tmp_path, data):
    model = ("--model=wide_deep", "--model_arg=hidden_units=4", "--model_arg=width=2", "--learning_rate=0.05")
    for steps, name in ((10, "parts"), (40, "parts"), (40, "whole")):  # an epoch is 15 steps
        inside(*RUN, *data, *model, f"--train_steps={steps}", f"--run_dir={tmp_path}/{name}").ok()
    assert_equal_bits(tmp_path / "parts", tmp_path / "whole", "eval")
    assert result(tmp_path / "whole")["eval"]["auc"] > 0.9


def test_one_array_of_numbers_is_for_any_model(inside, tmp_path, data):
    columns = ("--input_arg=array=true", "--input_arg=features=user,age")
    inside(*RUN, *data, *columns, "--model=logistic", "--train_steps=5", f"--run_dir={tmp_path}/run").ok()
    assert set(result(tmp_path / "run")["eval"]) >= {"accuracy", "loss"}


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("csv", ("--model=wide_deep", "--model_arg=hidden_units=8")),
        ("parquet", ("--model=wide_deep", "--model_arg=hidden_units=8", "--model_arg=hash_buckets=5000")),
        ("parquet", ("--model=dlrm", "--input_arg=text=hash", "--model_arg=hash_buckets=5000")),
    ],
    ids=["words", "words hashed", "hashed"],
)
def test_a_label_that_text_decides_is_learnt(inside, tmp_path, kind, flags):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table(texts(1500))
    if kind == "csv":
        pytest.importorskip("pyarrow.csv").write_csv(table, tmp_path / "a.csv")
    else:
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=128)
    data = (f"--input={kind}", f"--data_dir={tmp_path}", "--validation_split=0.2", "--input_arg=missing=column")
    run = ("--progress=plain", "--learning_rate=0.05", "--train_epochs=4", f"--run_dir={tmp_path}/run")
    outcome = inside(*RUN, *data, *flags, *run).ok()
    assert result(tmp_path / "run")["eval"]["auc"] > 0.95
    lines = [line.split() for line in outcome.out.splitlines()]
    assert ["price", "float32", "number,", "and", "price.missing"] in lines
    assert ["label", "text", "label", "of", "2", "classes"] in lines
