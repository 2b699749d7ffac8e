"""Data sources, one module each, found by the module's name: `--input=digits` is `input/digits.py`. Runs on the host.

A source is a module with a function `load(data_dir, seed, *, <arguments with typed defaults>) -> Data`; the first line
of its docstring describes the data. The other modules have code that sources share. No module imports TensorFlow when
it is imported, so files and arguments are checked before TensorFlow starts.
"""

if __name__ == "input":
    raise ImportError("input is a part of crankshaft; write `import crankshaft.input` instead of `import input`")

# Of the modules that are sources.
NAMES = (
    "array_record",
    "criteo",
    "csv",
    "digits",
    "fashion_mnist",
    "images",
    "mnist",
    "parquet",
    "synthetic",
    "synthetic_clicks",
    "text",
    "tfrecord",
)
