"""Arrays on their way to workers: what arrives is what was sent, in pieces or whole."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.data import host_arrays
from crankshaft.engine.strategies.parameter_server import feed
from crankshaft.engine.strategies.parameter_server.strategy import ParameterServer


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "bool", "object"])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (10, 3), (0, 3), (9, 2, 2)], ids=str)
def test_what_is_sent_in_pieces_arrives_as_it_is(monkeypatch, dtype, shape):
    monkeypatch.setattr(feed, "_PIECE_BYTES", 8)
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    if dtype == "object":
        array = np.vectorize(str, otypes=[object])(array) if array.size else array.astype(str)
    sent = feed._sent(array)
    assert (sent.shape, sent.dtype) == (feed._spec(array).shape, feed._spec(array).dtype)
    expected = np.vectorize(str.encode, otypes=[object])(array) if sent.dtype == "string" else array
    np.testing.assert_array_equal(sent.numpy(), expected)


def test_of_a_map_what_is_sent_is_read_piece_by_piece(monkeypatch, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(30.0).reshape(10, 3))
    mapped = host_arrays.of(np.load(tmp_path / "a.npy", mmap_mode="r")).astype("float32")
    asked = []
    read = host_arrays.Mapped.__getitem__
    monkeypatch.setattr(host_arrays.Mapped, "__getitem__", lambda self, at: asked.append(at) or read(self, at))
    monkeypatch.setattr(feed, "_PIECE_BYTES", 4 * 3 * 4)
    np.testing.assert_array_equal(feed._sent(mapped), np.arange(30, dtype=np.float32).reshape(10, 3))
    assert max(len(range(*at.indices(10))) for at in asked) == 4


def test_streams_are_refused_in_one_line():
    """Before anything of the strategy is looked at."""
    with pytest.raises(ValueError, match=r"takes arrays and sources.* and the data is a stream"):
        ParameterServer.feed(None, tf.data.Dataset.range(3), 1, None)
