"""Copies a state's variables into a tree of plain values, and compares a state with a checkpoint file. Host code.

TensorFlow names a checkpoint's entries by the shortest path of attributes from the root to each variable, and matches
by that graph when it reads. Both are followed here, for variables of any strategy and for Keras's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from ..internals.keras import KEPT_IN_LISTS
from ..internals.tensorflow import TrackableNode, has_state_beside_variables
from ..internals.variables import tf_variable
from ..layers.embeddings import Embedding
from ..mesh.cuts import cut_of
from ..reduction import per_replica
from . import slices
from .manifest import CheckpointError
from .slices import SlicedVariable, host_of

_LISTED = 8
# Some variables are copied when they are read: tables, some parts of cut variables, and their slots. So many bytes of
# them are copied for the writer; the rest is written slice by slice before training goes on. With the slices being
# copied that is 256 MiB at most.
COPIED_BYTES = 128 << 20
_ATTRIBUTE = ".ATTRIBUTES/VARIABLE_VALUE"
# Entries that TensorFlow adds at the first save; they belong to no state.
_NOT_STATE = {"save_counter/" + _ATTRIBUTE, "_CHECKPOINTABLE_OBJECT_GRAPH"}


@dataclasses.dataclass(frozen=True)
class Value:
    """One variable's value at the moment of the snapshot, on the host."""

    tensor: tf.Tensor


def take(state) -> tuple[dict, dict]:
    """Reads every variable under `state`, except large tables' rows, which have to be written before they change.

    Where a variable lives on another host's CPU, as parameter servers' do, so does its copy: its host writes it. On a
    CPU nothing is copied here: a read shares the variable's buffer, and the next update, finding it shared, writes to a
    new one (dense, sparse and XLA's alike). From an accelerator the values are copied to the host, and the call waits
    for that. A mirrored variable gives its first replica's value; one that is cut over a mesh, the parts whose first
    holder is in this process; one that is summed on read, its sum; one that differs by replica, a row for each replica:
    where replicas live in several processes, all have to take their snapshots.

    Returns:
      (tree, variables): `tree` holds `Value`s and `SlicedVariable`s at the leaves and dicts {child name: ...}
      elsewhere; an object that is reached twice appears twice, by identity. `variables` is {checkpoint key: [shape,
      dtype name]}.
    """
    variables = {}
    differing = [node for _, node in walk(state) if per_replica.differs(node)]
    gathered = {id(node): rows for node, rows in zip(differing, per_replica.gather(differing), strict=True)}

    live = _too_large_to_copy(state)

    def value(path, variable):
        key = _key(path)
        variables[key] = [_whole_shape(variable), tf.as_dtype(variable.dtype).name]
        if cut_of(variable):
            return slices.of_parts(variable, key, id(variable) in live)
        if id(variable) in live:
            return slices.of_table(per_replica.components(variable)[0], key)
        read = Value(gathered[id(variable)] if id(variable) in gathered else _read(variable))
        variables[key][0] = read.tensor.shape.as_list()
        return read

    return _tree(state, value), variables


def _too_large_to_copy(state) -> set[int]:
    """Returns ids of variables, of those whose reading copies them, that are more than may be copied together.

    They are tables and their slots, found by a table's shape, and parts of what is cut over a mesh.
    """
    nodes = [node for _, node in walk(state) if is_variable(node)]
    tables = [node for _, node in walk(state) if isinstance(node, Embedding)]
    shapes = {tuple(shard.shape) for table in tables for shard in table.shards}
    copied = [node for node in nodes if isinstance(node, tf.Variable) and tuple(node.shape) in shapes]
    copied = [node for node in copied if not per_replica.differs(node) and not cut_of(node)]
    copied += [
        node for node in nodes if cut_of(node) and slices.copies_when_read(per_replica.components(tf_variable(node))[0])
    ]
    large, total = set(), 0
    for node in sorted(copied, key=lambda node: node.shape.num_elements()):
        total += node.shape.num_elements() * tf.as_dtype(node.dtype).size
        if total > COPIED_BYTES:
            large.add(id(node))
    return large


def slices_in(tree: dict) -> list[SlicedVariable]:
    """Lists what is written in slices of a tree made by `take`, each once."""
    found, queue, seen = {}, [tree], {id(tree)}
    for part in queue:
        for child in part.values():
            if isinstance(child, SlicedVariable):
                found[child.key] = child
            elif isinstance(child, dict) and id(child) not in seen:
                seen.add(id(child))
                queue.append(child)
    return list(found.values())


def restore(prefix: str, root, comparison: Comparison, at: tuple[str, ...] = ()) -> None:
    """Reads the checkpoint's values under the path `at` into the variables under `root`; see `compare`.

    Variables that differ by replica take rows of an array, those that are cut over a mesh each replica's part.
    """

    def stand_in(_, node):
        if cut_of(node):
            return TrackableNode()
        return per_replica.Rows(node) if per_replica.differs(node) else node

    holder = _tree(root, stand_in)
    for part in reversed(at):
        holder = {part: holder}
    to_checkpoint(holder).read(prefix).expect_partial()
    for node, key in comparison.matched_nodes:
        if cut_of(node):
            slices.read_parts(prefix, key, node)


def _tree(state, make_leaf) -> dict:
    """Returns `state` as dicts {child name: ...}, with `make_leaf(path, variable)` for each variable."""
    built = {}
    nodes = list(walk(state))
    for path, node in nodes:
        if is_variable(node):
            built[id(node)] = make_leaf(path, node)
        else:
            _refuse_other_state(path, node)
            built[id(node)] = {}
    for path, node in nodes:
        if not is_variable(node):
            for name, child in _children(node, is_root=not path):
                built[id(node)][name] = built[id(child)]
    return built[id(state)]


def to_checkpoint(tree: dict) -> tf.train.Checkpoint:
    """Makes a checkpoint with the keys and graph of the state; values become plain host variables.

    Not to be called within a strategy's scope, where the variables would be mirrored.
    """
    made = {}

    def make(part):
        if id(part) not in made:
            if isinstance(part, Value):
                with tf.device(host_of(part.tensor.device)):
                    made[id(part)] = tf.Variable(part.tensor, trainable=False)
            elif isinstance(part, SlicedVariable):
                made[id(part)] = part.stand_in
            elif not isinstance(part, dict):
                made[id(part)] = part
            else:
                node = made[id(part)] = TrackableNode()
                for name, child in part.items():
                    setattr(node, name, make(child))
        return made[id(part)]

    return tf.train.Checkpoint(**{name: make(part) for name, part in tree.items()})


def walk(root) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yields (path, object) of all that is tracked under `root`, each once, breadth first as the keys are named."""
    queue: list[tuple[tuple[str, ...], Any]] = [((), root)]
    seen = {id(root)}
    for path, node in queue:
        yield path, node
        for name, child in _children(node, is_root=not path):
            if id(child) not in seen:
                seen.add(id(child))
                queue.append(((*path, name), child))


def is_variable(node) -> bool:
    """Returns whether a trackable holds a value that a checkpoint keeps."""
    return isinstance(node, (tf.Variable, tf.keras.Variable))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How a state differs from a checkpoint: lines for people, one a variable; (variable, key) of those that fit."""

    matched: list[str]
    missing: list[str]
    extra: list[str]
    reshaped: list[str]
    matched_nodes: list[tuple[Any, str]]

    def message(self) -> str:
        """Formats the lists that are not empty, on one line."""
        lists = [
            ("missing in the checkpoint", self.missing),
            ("only in the checkpoint", self.extra),
            ("of another shape or type", self.reshaped),
        ]
        return "; ".join(
            f"{title} ({len(lines)}): {'; '.join(lines[:_LISTED])}"
            + (f" and {len(lines) - _LISTED} more" if len(lines) > _LISTED else "")
            for title, lines in lists
            if lines
        )


def compare(prefix: str, root, at: tuple[str, ...] = ()) -> Comparison:
    """Matches the variables under `root` with those of the checkpoint under the path `at`. Reads no value.

    Matches as TensorFlow will: the two graphs are walked together, by the names of children. Under an object whose
    `optional_in_checkpoint` is true, variables may be missing and extra, and are not listed.
    """
    reader = tf.train.load_checkpoint(prefix)
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    keys = _keys_of_nodes(prefix)
    view = tf.train.CheckpointView(prefix)
    start = 0
    for name in at:
        start = view.children(start).get(name) if start is not None else None
    optional = tuple(_prefix(at + path) for path, node in walk(root) if getattr(node, "optional_in_checkpoint", False))
    matched_keys, matched, reshaped, fitting = {}, [], [], []
    for path, node, node_id in _walk_together(root, view, start):
        key = keys.get(node_id)
        if not is_variable(node) or key not in shapes:
            continue
        matched_keys[id(node)] = key
        here, there = _form_here(node), _form(shapes[key], dtypes[key])
        if per_replica.differs(node) and shapes[key]:  # the number of rows is the number of replicas that the run had
            there = _form(_any_rows(shapes[key][1:]), dtypes[key])
        name = _readable(at + path)
        if here != there:
            reshaped.append(f"{name}: {here} here, {there} in the checkpoint")
        else:
            matched.append(name)
            fitting.append((node, key))
    missing = [
        f"{_readable(at + path)} {_form_here(node)}"
        for path, node in walk(root)
        if is_variable(node) and id(node) not in matched_keys and not _key(at + path).startswith(optional)
    ]
    inside = _prefix(at)
    left = set(shapes) - set(matched_keys.values()) - _NOT_STATE
    extra = [
        f"{_readable_key(key)} {_form(shapes[key], dtypes[key])}"
        for key in sorted(left)
        if key.startswith(inside) and not key.startswith(optional)
    ]
    return Comparison(matched, missing, extra, reshaped, fitting)


def _walk_together(root, view, start):
    """Yields (path, object, checkpoint's node) of what both have."""
    if start is None:
        return
    queue: list[tuple[tuple[str, ...], Any, int]] = [((), root, start)]
    seen = {id(root)}
    for path, node, node_id in queue:
        yield path, node, node_id
        in_checkpoint = view.children(node_id)
        for name, child in _children(node, is_root=not path):
            if name in in_checkpoint and id(child) not in seen:
                seen.add(id(child))
                queue.append(((*path, name), child, in_checkpoint[name]))


def _keys_of_nodes(prefix: str) -> dict[int, str]:
    view = tf.train.CheckpointView(prefix)
    queue: list[tuple[tuple[str, ...], int]] = [((), 0)]
    keys = {0: _key(())}
    for path, node_id in queue:
        for name, child in view.children(node_id).items():
            if child not in keys:
                keys[child] = _key((*path, name))
                queue.append(((*path, name), child))
    return keys


def _children(node, is_root: bool) -> list[tuple[str, object]]:
    if is_variable(node):
        return []
    children = tf.train.TrackableView.children(node)
    found = [(name, child) for name, child in children.items() if not (is_root and name == "save_counter")]
    return found + (_held_by_keras(node, children.values()) if isinstance(node, tf.keras.layers.Layer) else [])


def _held_by_keras(layer: tf.keras.layers.Layer, children: Iterable) -> list[tuple[str, object]]:
    """Returns what a layer holds and TensorFlow does not see.

    Keras 3 hides the layers and variables in a layer's list or dictionary, and TensorFlow's checkpoints would silently
    leave out their weights.
    """
    held = [(f"{store}_{n}", child) for store in KEPT_IN_LISTS for n, child in enumerate(getattr(layer, store, ()))]
    reached = {id(child): child for child in children}
    if all(id(child) in reached for _, child in held):
        return []
    queue = list(reached.values())
    for node in queue:
        for child in [] if is_variable(node) else tf.train.TrackableView.children(node).values():
            if id(child) not in reached:
                reached[id(child)] = child
                queue.append(child)
    return [(name, child) for name, child in held if id(child) not in reached]


def _read(variable) -> tf.Tensor:
    if isinstance(variable, tf.keras.Variable):
        variable = variable.value
    with tf.device(host_of(variable.device)):
        return tf.identity(variable.read_value())


def _refuse_other_state(path, node) -> None:
    """Raises CheckpointError for tables, iterators and other state that is no variable, rather than leave it out.

    An empty table keeps none: Keras's lookup layers count words in one while they adapt, and empty it.
    """
    if isinstance(node, tf.lookup.experimental.MutableHashTable) and not node.size():
        return
    if has_state_beside_variables(node):
        raise CheckpointError(
            f"{_readable(path)} is a {type(node).__name__}, and only variables are saved; "
            "keep its state in a tf.Variable, or in the host's state"
        )


def _key(path: tuple[str, ...]) -> str:
    return _prefix(path) + _ATTRIBUTE


def _prefix(path: tuple[str, ...]) -> str:
    return "".join(_escape(name) + "/" for name in path)


def _escape(name: str) -> str:
    return name.replace(".", "..").replace("/", ".S")


def _readable(path: tuple[str, ...]) -> str:
    parts = [f"[{name}]" if name.isdigit() else f".{name}" for name in path]
    return "".join(parts).lstrip(".")


def _readable_key(key: str) -> str:
    names = key.removesuffix("/" + _ATTRIBUTE).split("/")
    return _readable(tuple(name.replace(".S", "/").replace("..", ".") for name in names))


def _form_here(node) -> str:
    return _form(_any_rows(node.shape) if per_replica.differs(node) else _whole_shape(node), node.dtype)


def _whole_shape(node) -> list[int]:
    cut = cut_of(node)
    return list(cut.shape) if cut else tf.TensorShape(node.shape).as_list()


def _any_rows(shape) -> list[int | None]:
    """Returns [None, *shape], which a message shows as it is: of any number of replicas."""
    return [None, *tf.TensorShape(shape).as_list()]


def _form(shape, dtype) -> str:
    return f"{tf.TensorShape(shape).as_list()} {tf.as_dtype(dtype).name}"
