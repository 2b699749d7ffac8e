"""The graph of objects that a checkpoint has besides the values: walked, written, compared, restored.

TensorFlow names a checkpoint's entries by the shortest path of attributes from the root to each variable, and matches
by that graph when it reads. Both are followed here, for variables of any strategy and for Keras's.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

from ..errors import CheckpointError, UsageError, reason
from ..internals.keras import KEPT_IN_LISTS, UPDATED
from ..internals.tensorflow import has_state_beside_variables
from ..internals.variables import VARIABLES, is_shard, items, state_key, tracked_variables
from ..internals.variables import tracked as tracked_by_path
from ..mesh.sharded import variable_sharding
from ..reduction import per_replica
from . import slices
from .slices import RowTable, ShardRows

KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"  # of the graph's own entry
_LISTED = 8
_MISSING, _EXTRA, _RESHAPED = "missing in the checkpoint", "only in the checkpoint", "of another shape or type"
_VALUE = "VARIABLE_VALUE"
ATTRIBUTE = f".ATTRIBUTES/{_VALUE}"
_COUNTER = "save_counter"  # a variable that TensorFlow adds at the first save; no part of the state
COUNTER_KEY = f"{_COUNTER}/{ATTRIBUTE}"
Key = str | ShardRows | Callable[[], np.ndarray]


class Moved(NamedTuple):
    """Where a checkpoint has a variable's values, or those of each shard of the variable's table.

    Attributes:
      prefixes: the prefixes of the checkpoint's keys.
      shard, number: see `slices.ShardRows`.
      positions: for each element of a vector here, its position there, or None to make it 0; None reads all.
      table: the identity of the variable's table here, see `variables.table_identity`.
    """

    prefixes: tuple[str, ...]
    shard: int = 0
    number: int = 1
    positions: tuple[int | None, ...] | None = None
    table: int | None = None


class Matching(NamedTuple):
    """How a state matches, by name, the checkpoint of a run that may have trained other variables by another optimizer.

    Attributes:
      moved: where the checkpoint has a variable's values, by the prefix of the keys here.
      may_differ: prefixes of keys that either side may lack, such as an optimizer's.
      together: prefixes of keys that are read all or not at all, such as those of a variable's slots.
      fixed_shape_keys: keys whose values have one shape on both sides, such as the update counts that slots need.
      initialize_new: called after the rest was read, with a function that returns whether a key's value was not read.
      reset_rows: called where ids got other rows, with a table's shard, rows without an id, and that function.
    """

    moved: Mapping[str, Moved] = types.MappingProxyType({})
    may_differ: tuple[str, ...] = ()
    together: Sequence[str] = ()
    fixed_shape_keys: Sequence[str] = ()
    initialize_new: Callable[[Callable[[str], bool]], None] = lambda is_new: None
    reset_rows: Callable[[tf.Variable, tf.Tensor, Callable[[str], bool]], None] = lambda shard, rows, is_new: None


class _Entry(NamedTuple):
    """A variable here with its values in a checkpoint, or an entry that only the checkpoint has.

    Attributes:
      key: the variable's key here, else the entry's there.
      text: the variable's name, or the difference, for people.
      stored: the checkpoint's keys that have the variable's values.
      difference: _MISSING, _EXTRA or _RESHAPED; "" for a variable that can be read.
    """

    key: str
    text: str
    variable: Any = None
    stored: Sequence[str] = ()
    source: Key = ""
    difference: str = ""


class _Checkpoint:
    """A checkpoint's entries and its graph of objects, without values.

    Attributes:
      specs: (shape, dtype) of each entry, by its key.
    """

    def __init__(self, prefix: str):
        self.reader = tf.train.load_checkpoint(prefix)
        dtypes = self.reader.get_variable_to_dtype_map()
        self.specs = {key: (shape, dtypes[key]) for key, shape in self.reader.get_variable_to_shape_map().items()}
        self._nodes = TrackableObjectGraph.FromString(self.reader.get_tensor(KEY)).nodes

    def object_at(self, path: Sequence[str]) -> int | None:
        """Returns the number of the object at a path of attributes from the root; None if there is none."""
        number: int | None = 0
        for name in path:
            number = None if number is None else self.child(number, name)
        return number

    def child(self, number: int, name: str) -> int | None:
        """Returns the number of an object's child; None if it has none of this name."""
        return next((child.node_id for child in self._nodes[number].children if child.local_name == name), None)

    def variable_key(self, number: int | None) -> str | None:
        """Returns the key of an object's value; None if it has none."""
        attributes = () if number is None else self._nodes[number].attributes
        return next((attribute.checkpoint_key for attribute in attributes if attribute.name == _VALUE), None)


def restore(
    prefix: str,
    root,
    why_not: str,
    at: tuple[str, ...] = (),
    matching: Matching | None = None,
    allow_changed: bool = False,
    may_grow: bool = False,
    averages: Mapping[Key, str] = types.MappingProxyType({}),
) -> tuple[list[str], str]:
    """Restores the variables under `root` from the path `at` of a checkpoint: all, or none.

    Args:
      why_not: the beginning of the error if the checkpoint is of something else.
      at: the attributes from the checkpoint's root to `root`.
      allow_changed: whether the entries in `matching.may_differ` may differ; those that the checkpoint lacks stay.
      may_grow: whether tables may have more rows than in the checkpoint, if ids are their rows.
      averages: the keys of values to read in place of others, by the keys of these.

    Returns:
      The names of the variables that were read, with the rows of grown tables; and the allowed differences, or "".

    Raises:
      CheckpointError: before any variable is changed, if the checkpoint can't be read, or variables are missing in it,
        extra, or of another shape or type.
    """
    matching = matching or Matching()
    try:
        entries, tables = _compare(prefix, root, at, matching.moved, may_grow)
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{prefix} can't be read as a checkpoint: {reason(error)}") from error
    fitting = [entry for entry in entries if not entry.difference]
    differences = [entry for entry in entries if entry.difference]
    others = [
        entry
        for entry in differences
        if not entry.key.startswith(matching.may_differ)
        or (entry.difference == _RESHAPED and entry.key in matching.fixed_shape_keys)
    ]
    # An optimizer's counts alone may fit by chance: a checkpoint of which nothing else fits is another model's.
    if others or all(entry.key.startswith(matching.may_differ) for entry in fitting):
        raise CheckpointError(f"{why_not}: {_message(others)}")
    if differences and not allow_changed:
        raise CheckpointError(
            f"{prefix} has the variables of this model, and other averages or another optimizer state "
            f"({_message(differences)}); use the former variables, averages and optimizer, or set allow_changed_config "
            "to restore only what matches"
        )
    # Of a variable's slots all are read or none: an optimizer that went on with one of two would take wrong steps.
    lacking = [entry.key for entry in differences if entry.difference != _EXTRA]
    new = (*lacking, *(prefix for prefix in matching.together if any(key.startswith(prefix) for key in lacking)))

    def is_new(key: str) -> bool:
        return key.startswith(new)

    restored = [entry for entry in fitting if not is_new(entry.key)]
    slices.read(prefix, [(entry.variable, averages.get(entry.source, entry.source)) for entry in restored])
    for table in tables:
        for shard, rows in table.initialize_free_rows():
            matching.reset_rows(shard, rows, is_new)
    matching.initialize_new(is_new)
    return [entry.text for entry in restored], _message(differences)


def _compare(
    prefix: str, root, at: tuple[str, ...], moved: Mapping[str, Moved], may_grow: bool
) -> tuple[list[_Entry], list[Any]]:
    """Matches the variables under `root` with those of the checkpoint under the path `at`. Reads no value.

    Matches as TensorFlow will: the two graphs are walked together, by the names of children; variables in `moved` match
    by key. A table's shards fit those of another number, and with `admit_after` those of another size. Variables under
    the attributes that an object lists as `optional_in_checkpoint` ("" for all) may be missing and extra, and are not
    listed.

    Returns:
      The variables here and the entries that only the checkpoint has; and where it has the tables.
    """
    checkpoint, walked, found = _Checkpoint(prefix), [*walk(root)], dict[int, tuple]()
    # Not by keys: these are shortest paths, and another attribute, of a second reference to a layer, changes them.
    if (start := checkpoint.object_at(at)) is not None:  # by the ids of objects that both have: path, and number there
        found = {id(node): (path, number) for path, node, number in _breadth_first(root, start, checkpoint.child)}

    def key_of(variable: tf.Variable) -> str:
        return checkpoint.variable_key(found.get(id(variable), (None, None))[1]) or ""

    # A table says by itself where its rows are, and what else of it is not simply read.
    built = [node for _, node in walked if isinstance(node, RowTable) and node.shards]
    tables = {id(table): saved for table in built if (saved := table.saved_in(checkpoint, key_of, may_grow))}
    admitted = {key: value for saved in tables.values() for key, value in saved.values().items()}
    shards = {
        id(shard): Moved(saved.prefixes, number, len(saved.shards), table=identity)
        for identity, saved in tables.items()
        for number, shard in enumerate(saved.shards)
    }
    entries = []
    for path, node in walked:
        if not is_variable(node):
            continue
        path, number = found.get(id(node), (path, None))
        name = node.path if isinstance(node, tf.keras.Variable) else _readable(at + path)
        key = checkpoint_key(at + path)
        if id(node) in admitted:
            entries.append(_Entry(key, name, node, source=admitted[id(node)]))
            continue
        if place := shards.get(id(node)):
            stored = [prefix + ATTRIBUTE for prefix in place.prefixes]
        elif beginning := next((prefix for prefix in moved if key.startswith(prefix)), None):
            place = moved[beginning]
            stored = [prefix + key.removeprefix(beginning) for prefix in place.prefixes]
        else:
            place, stored = Moved(()), [checkpoint.variable_key(number) or ""]
        entry = _Entry(key, name, node, [key for key in stored if key in checkpoint.specs])
        table = None if place.table is None else tables.get(place.table)
        entries.append(_fit(entry, place, table, checkpoint))
    # What nothing here reads is listed too: otherwise a model that has lost a layer would silently train on.
    read = {key for entry in entries for key in entry.stored} | {KEY, COUNTER_KEY}
    placed = tuple(prefix for saved in tables.values() for prefix in saved.admissions)
    for key in sorted(checkpoint.specs.keys() - read):
        if key.startswith(key_prefix(at)) and not key.startswith(placed):
            names = key.removesuffix("/" + ATTRIBUTE).split("/")
            name = _readable(tuple(name.replace(".S", "/").replace("..", ".") for name in names))
            text = f"{name} {_shape_and_dtype(*checkpoint.specs[key])}"
            entries.append(_Entry(key, text, difference=_EXTRA))
    optional = tuple(key_prefix((*at, *path)) + name for path, node in walked for name in _optional(node))
    return [e for e in entries if e.difference not in (_MISSING, _EXTRA) or not e.key.startswith(optional)], [
        *tables.values()
    ]


def _fit(entry: _Entry, place: Moved, table: Any, checkpoint: _Checkpoint) -> _Entry:
    """Returns a variable's entry with its source, or its difference; `table` is the one whose shard or slot it is."""
    variable, stored = entry.variable, entry.stored
    # Local SGD's replicas have values of their own, and a checkpoint has a row for each that the run had then.
    has_rows = per_replica.differs(variable)
    wanted = _any_rows(variable.shape) if has_rows else whole_shape(variable)
    here = _shape_and_dtype(wanted, variable.dtype)
    if not stored:
        return entry._replace(text=f"{entry.text} {here}", difference=_MISSING)
    shape, dtype = checkpoint.specs[stored[0]]
    moves_rows, name = table is not None and table.moves_rows, entry.text
    if place.positions is not None:
        source: Key = functools.partial(_picked, checkpoint.reader, stored[0], place.positions)
        shape = [len(place.positions)]
    elif len(stored) == place.number and not moves_rows:
        source = stored[place.shard]
        shape, dtype = checkpoint.specs[source]
    else:
        sizes = tuple(checkpoint.specs[part][0][0] for part in stored)
        source = ShardRows(tuple(stored), sizes, place.shard, place.number)
        num_rows, note = source.num_rows, ""
        if table is not None:
            source, num_rows, note = table.fit(source, variable.shape[0])
        shape, name = [num_rows, *shape[1:]], f"{name}{note}"
    if has_rows:  # a row per replica, or none for one replica
        shape = _any_rows(shape[1:] if len(shape) > len(variable.shape) else shape)
    # Only an embedding's table is written in parts that another number of shards can read.
    is_in_parts = isinstance(source, ShardRows) and (variable_sharding(variable) or has_rows)
    fits = tf.TensorShape(wanted).is_compatible_with(shape) and tf.as_dtype(variable.dtype) == dtype
    if fits and not is_in_parts:
        return entry._replace(text=name, source=source)
    there = _shape_and_dtype(shape, dtype) + (f" in {len(stored)} shards" if is_in_parts else "")
    lost = " (a table can't lose rows)" if is_shard(variable) and variable.shape[0] < shape[0] else ""
    return entry._replace(text=f"{name}: {here} here, {there} in the checkpoint{lost}", difference=_RESHAPED)


def _optional(node) -> Sequence[str]:
    """The attributes of an object that either side may lack; all of a metric: a run may get metrics, or lose them."""
    return ("",) if isinstance(node, tf.keras.metrics.Metric) else getattr(node, "optional_in_checkpoint", ())


def _message(entries: Sequence[_Entry]) -> str:
    """Formats how a state and a checkpoint differ, on one line."""
    parts = []
    for difference in (_MISSING, _EXTRA, _RESHAPED):
        if texts := [entry.text for entry in entries if entry.difference == difference]:
            more = f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
            parts.append(f"{difference} ({len(texts)}): {'; '.join(texts[:_LISTED])}{more}")
    return "; ".join(parts)


def _picked(reader, key: str, positions: Sequence[int | None]) -> np.ndarray:
    there = reader.get_tensor(key)
    return np.array([0 if at is None else there[at] for at in positions], there.dtype)


def has(prefix: str, at: Sequence[str]) -> bool:
    """Returns whether a checkpoint has an object at a path of attributes from its root."""
    return _Checkpoint(prefix).object_at(at) is not None


def serialized(nodes: Sequence[tuple[tuple[str, ...], Any]]) -> bytes:
    """Returns the graph under a state, which `walk` has listed, in the form that TensorFlow keeps in its checkpoints.

    Raises:
      CheckpointError: an object has state that is not in variables and would be left out.
    """
    graph = TrackableObjectGraph()
    numbers = {id(node): number for number, (_, node) in enumerate(nodes)}
    for path, node in nodes:
        stored = graph.nodes.add()
        if is_variable(node):
            stored.attributes.add(name=_VALUE, full_name=_readable(path), checkpoint_key=checkpoint_key(path))
            continue
        # Keras's lookup layers count words in a table while they adapt, and empty it.
        is_empty_table = isinstance(node, tf.lookup.experimental.MutableHashTable) and not node.size()
        if has_state_beside_variables(node) and not is_empty_table:
            raise CheckpointError(
                f"{_readable(path)} is a {type(node).__name__}, and only variables are saved; "
                "keep its state in a tf.Variable, or in the host's state"
            )
        for name, child in tracked_children(node, is_root=not path):
            stored.children.add(node_id=numbers[id(child)], local_name=name)
    graph.nodes[0].children.add(node_id=len(nodes), local_name=_COUNTER)
    graph.nodes.add().attributes.add(name=_VALUE, full_name=_COUNTER, checkpoint_key=COUNTER_KEY)
    return graph.SerializeToString()


def walk(root) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields (path, object) for all that is tracked under `root`, each once, breadth first, as keys are named."""
    return ((path, node) for path, node, _ in _breadth_first(root, 0, lambda number, name: number))


def _breadth_first(root, start: int, find_child: Callable[[int, str], int | None]) -> Iterator[tuple]:
    """Yields (path, object, number) for all under `root` that `find_child(its parent's number, name)` finds.

    The variables that a Keras optimizer updates come last: they are a model's, and named by their position there.
    """
    queue: collections.deque[tuple] = collections.deque([((), root, start)])
    links: collections.deque[tuple] = collections.deque()
    seen = set()
    while queue or links:
        path, node, number = (queue or links).popleft()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield path, node, number
        try:
            children = tracked_children(node, is_root=not path)
        except ValueError as error:
            if not (where := _keys_that_are_not_text(node, ".".join(path), set())):
                raise
            raise UsageError(
                f"{where}: checkpoints keep no dictionary whose keys are not text; use text, as "
                "{'0': ...}; if a library's object has it, make a list of the object's variables an attribute, and a "
                "function that returns the object, self.get = lambda: object, instead of the object"
            ) from error
        for name, child in children:
            # Else a model that is tracked after its optimizer would get its keys from there.
            is_link = name == UPDATED and isinstance(node, tf.keras.optimizers.Optimizer)
            if (inside := find_child(number, name)) is not None:
                (links if is_link else queue).append(((*path, name), child, inside))


def _keys_that_are_not_text(value: Any, path: str, seen: set[int]) -> str:
    """Returns the path of the first dictionary with such keys in an object, and these; "" if it has none."""
    seen.add(id(value))
    if isinstance(value, dict) and (keys := [key for key in value if not isinstance(key, str)]):
        return f"{path} (keys {', '.join(map(repr, keys[:3]))})"
    parts = vars(value).items() if isinstance(value, tf.Module) else items(value)
    parts = [(name, x) for name, x in parts if not str(name).startswith("_self_")]  # TensorFlow's own
    inside = (_keys_that_are_not_text(x, f"{path}.{name}", seen) for name, x in parts if id(x) not in seen)
    return next(filter(None, inside), "")


def is_variable(node) -> bool:
    """Returns whether a trackable has a value that a checkpoint keeps."""
    return isinstance(node, VARIABLES)


def tracked_children(node, is_root: bool) -> list[tuple[str, object]]:
    """Returns (attribute's name, object) for the objects that are tracked directly under an object.

    TensorFlow tracks none of Keras's metrics.
    """
    if is_variable(node):
        return []
    if isinstance(node, tf.keras.metrics.Metric):
        return [(state_key(variable, n), variable) for n, variable in enumerate(node.variables)]
    children = tf.train.TrackableView.children(node)
    tracked = [(name, child) for name, child in children.items() if not (is_root and name == _COUNTER)]
    if isinstance(node, tf.Module):
        tracked += tracked_by_path(node, tf.keras.metrics.Metric).items()
    return tracked + (_unseen(node, children.values()) if isinstance(node, (tf.Module, tf.keras.layers.Layer)) else [])


def _unseen(owner: Any, children: Iterable) -> list[tuple[str, object]]:
    """Returns a layer's or a module's children that TensorFlow does not see.

    Keras 3 hides the layers and variables in a layer's list or dictionary, and TensorFlow's checkpoints would silently
    leave out their weights. No one tracks the variables of its losses, constraints and regularizers.
    """
    stores = KEPT_IN_LISTS if isinstance(owner, tf.keras.layers.Layer) else ()
    held = [(f"{store}_{n}", child) for store in stores for n, child in enumerate(getattr(owner, store, ()))]
    listed = {id(child) for _, child in held}
    found = tracked_variables(owner).items()
    held += [(path.replace(".", "/"), variable) for path, variable in found if id(variable) not in listed]
    # What TensorFlow reaches by another path keeps that key: two would be two entries of one variable. Most owners have
    # nothing else, and are done before the walk.
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


def checkpoint_key(path: tuple[str, ...]) -> str:
    """Returns a variable's key in a checkpoint, by its path."""
    return key_prefix(path) + ATTRIBUTE


def key_prefix(path: tuple[str, ...]) -> str:
    """Returns the prefix of the keys of all that is under a path."""
    return "".join(name.replace(".", "..").replace("/", ".S") + "/" for name in path)


def _readable(path: tuple[str, ...]) -> str:
    return "".join(f"[{name}]" if name.isdigit() else f".{name}" for name in path).lstrip(".")


def whole_shape(node) -> list[int]:
    """Returns the shape of a variable; of one sharded over a mesh, the shape of the whole."""
    sharding = variable_sharding(node)
    return list(sharding.shape) if sharding else tf.TensorShape(node.shape).as_list()


def _any_rows(shape) -> list[int | None]:
    """Returns [None, *shape], as a message shows it: for any number of replicas."""
    return [None, *tf.TensorShape(shape).as_list()]


def _shape_and_dtype(shape, dtype) -> str:
    return f"{tf.TensorShape(shape).as_list()} {tf.as_dtype(dtype).name}"
