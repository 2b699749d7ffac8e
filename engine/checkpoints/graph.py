"""The graph of objects that a checkpoint has besides the values: walked, written, compared, restored.

TensorFlow names a checkpoint's entries by the shortest path of attributes from the root to each variable, and matches
by that graph when it reads. Both are followed here, for variables of any strategy and for Keras's.
"""

from __future__ import annotations

import collections
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

from .. import logging
from ..errors import CheckpointError, reason
from ..internals.keras import KEPT_IN_LISTS, UPDATED
from ..internals.tensorflow import has_state_beside_variables
from ..internals.variables import state_key
from ..internals.variables import tracked as tracked_by_path
from ..layers.embeddings import Embedding
from ..layers.embeddings.rehash import FREE, MOVED, Placement, rehash
from ..mesh.shards import variable_sharding
from ..reduction import per_replica
from . import slices
from .slices import ShardRows

KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"  # of the graph's own entry
_LISTED = 8
_MISSING, _EXTRA, _RESHAPED = "missing in the checkpoint", "only in the checkpoint", "of another shape or type"
_VALUE = "VARIABLE_VALUE"
_ATTRIBUTE = f".ATTRIBUTES/{_VALUE}"
_COUNTER = "save_counter"  # a variable that TensorFlow adds at the first save; no part of the state
COUNTER_KEY = f"{_COUNTER}/{_ATTRIBUTE}"
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
      of_one_form: keys whose values have one shape on both sides, such as the counts of updates that slots depend on.
      initialize_new: called after the rest was read, with a function that returns whether a key's value was not read.
      reset_rows: called where ids got other rows, with a table's shard, rows without an id, and that function.
    """

    moved: Mapping[str, Moved] = types.MappingProxyType({})
    may_differ: tuple[str, ...] = ()
    together: Sequence[str] = ()
    of_one_form: Sequence[str] = ()
    initialize_new: Callable[[Callable[[str], bool]], None] = lambda is_new: None
    reset_rows: Callable[[tf.Variable, tf.Tensor, Callable[[str], bool]], None] = lambda shard, rows, is_new: None


class _Table(NamedTuple):
    """A table here, and where a checkpoint has it.

    Attributes:
      table: the table here.
      prefixes: the prefix of the checkpoint's keys for each shard.
      admissions: the prefix of the checkpoint's keys for each shard's admission, if ids get other rows here.
      place: returns where, computed at the first call.
      may_grow: whether it may have more rows here; those that the checkpoint lacks stay as they are.
    """

    table: Embedding
    prefixes: tuple[str, ...]
    admissions: tuple[str, ...]
    place: Callable[[], Placement]
    may_grow: bool


class _Difference(NamedTuple):
    """An entry that only one side has, or of another shape or type: its key here, else there, and a line for people."""

    kind: str
    key: str
    line: str


def restore(
    prefix: str,
    root,
    why_not: str,
    at: tuple[str, ...] = (),
    matching: Matching | None = None,
    allow_changed: bool = False,
    may_grow: bool = False,
) -> tuple[list[str], str]:
    """Restores the variables under `root` from the path `at` of a checkpoint: all, or none.

    Args:
      prefix: the checkpoint's path.
      root: the object that is tracked there.
      why_not: the beginning of the error if the checkpoint is of something else.
      at: the attributes from the checkpoint's root to `root`.
      matching: how variables match by name.
      allow_changed: whether the entries in `matching.may_differ` may differ; variables that the checkpoint lacks keep
        their values.
      may_grow: whether tables may have more rows than in the checkpoint, if ids are their rows.

    Returns:
      The names of the variables that were read, with the number of rows for tables that have grown; and the allowed
      differences, for people, or "".

    Raises:
      CheckpointError: before any variable is changed, if the checkpoint can't be read, or variables are missing in it,
        extra, or of another shape or type.
    """
    matching = matching or Matching()
    try:
        fitting, differences, moving = _compare(prefix, root, at, matching.moved, may_grow)
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{prefix} can't be read as a checkpoint: {reason(error)}") from error
    others = [
        difference
        for difference in differences
        if not difference.key.startswith(matching.may_differ)
        or (difference.kind == _RESHAPED and difference.key in matching.of_one_form)
    ]
    if others or all(key.startswith(matching.may_differ) for key in fitting):
        raise CheckpointError(f"{why_not}: {_message(others)}")
    if differences and not allow_changed:
        raise CheckpointError(
            f"{prefix} has the variables of this model, and other averages or another optimizer state "
            f"({_message(differences)}); use the former variables, averages and optimizer, or set allow_changed_config "
            "to restore only what matches"
        )
    lacking = [difference.key for difference in differences if difference.kind != _EXTRA]
    new = (*lacking, *(prefix for prefix in matching.together if any(key.startswith(prefix) for key in lacking)))

    def is_new(key: str) -> bool:
        return key.startswith(new)

    entries = [value for key, value in fitting.items() if not is_new(key)]
    slices.read(prefix, [(variable, key) for _, variable, key in entries])
    for there in moving:
        for number, (shard, values) in enumerate(zip(there.table.shards, there.place().values, strict=True)):
            for rows in there.table.initialize_rows(number, tf.constant(np.flatnonzero(values["keys"] == FREE))):
                matching.reset_rows(shard, rows, is_new)
    matching.initialize_new(is_new)
    return [name for name, _, _ in entries], _message(differences)


def _compare(
    prefix: str, root, at: tuple[str, ...], moved: Mapping[str, Moved], may_grow: bool
) -> tuple[dict[str, tuple[str, Any, Key]], list[_Difference], list[_Table]]:
    """Matches the variables under `root` with those of the checkpoint under the path `at`. Reads no value.

    Matches as TensorFlow will: the two graphs are walked together, by the names of children; variables in `moved` match
    by key. A table's shards fit those of another number, and with `admit_after` those of another size. Variables under
    the attributes that an object lists as `optional_in_checkpoint` ("" for all) may be missing and extra, and are not
    listed.

    Returns:
      The matching variables by their key here: (name, variable, its key in the checkpoint); the differences; and the
      tables whose ids get other rows here.
    """
    reader = tf.train.load_checkpoint(prefix)
    dtypes = reader.get_variable_to_dtype_map()
    forms = {key: (shape, dtypes[key]) for key, shape in reader.get_variable_to_shape_map().items()}
    stored = TrackableObjectGraph.FromString(reader.get_tensor(KEY)).nodes
    walked, start = [*walk(root)], _stored_at(stored, at)
    together = {}  # by the id of each object that both graphs have, the path by which it was found, and its stored node
    if start is not None:
        reached = _breadth_first(root, start, lambda number, name: _stored_children(stored, number).get(name))
        together = {id(node): (path, number) for path, node, number in reached}
    tables = _tables(reader, walked, together, stored, forms, may_grow)
    moving = [there for there in tables.values() if there.admissions]
    shards = {
        id(shard): Moved(there.prefixes, number, len(there.table.shards), table=identity)
        for identity, there in tables.items()
        for number, shard in enumerate(there.table.shards)
    }
    placed = {
        id(variable): functools.partial(_placed_value, there, shard, name, variable)
        for there in moving
        for shard, admission in enumerate(there.table.admissions)
        for name, variable in tracked_children(admission, is_root=False)
    }
    beside = tuple(prefix for there in moving for prefix in there.admissions)
    matched = {key for key in forms if key.startswith(beside)}
    fitting: dict[str, tuple[str, Any, Key]] = {}
    missing, reshaped = [], []
    for path, node in walked:
        if not is_variable(node):
            continue
        path, stored_id = together.get(id(node), (path, None))
        name, own_key = _readable(at + path), checkpoint_key(at + path)
        if id(node) in placed:
            fitting[own_key] = name, node, placed[id(node)]
            continue
        keys, source = _keys_in(own_key, stored_id, stored, shards.get(id(node)), moved)
        keys = [key for key in keys if key in forms]
        if not keys:
            missing.append(_Difference(_MISSING, own_key, f"{name} {_form_here(node)}"))
            continue
        matched.update(keys)
        table = tables.get(source.table)
        grows, moves = (table.may_grow, bool(table.admissions)) if table else (False, False)
        if source.positions is not None:
            key: Key = functools.partial(_picked, reader, keys[0], source.positions)
            shape, dtype = [len(source.positions)], forms[keys[0]][1]
        elif len(keys) == source.number and not (grows or moves):
            key = keys[source.shard]
            shape, dtype = forms[key]
        else:
            sizes = tuple(forms[part][0][0] for part in keys)
            key = ShardRows(tuple(keys), sizes, source.shard, source.number, table.place if moves else None)
            shape, dtype = [node.shape[0] if moves else key.size_here, *forms[keys[0]][0][1:]], forms[keys[0]][1]
        if per_replica.differs(node):  # a row per replica, or none for one replica
            shape = _any_rows(shape[1:] if len(shape) > len(node.shape) else shape)
        here, there = _form_here(node), _form(shape, dtype)
        if grows and isinstance(key, ShardRows) and node.shape[0] > key.size_here:
            name, there = f"{name} ({shape[0]:,} of {node.shape[0]:,} rows)", _form([node.shape[0], *shape[1:]], dtype)
        is_shared = variable_sharding(node) or per_replica.differs(node)
        if here == there and not (isinstance(key, ShardRows) and is_shared):
            fitting[own_key] = name, node, key
        else:
            lost = " (a table can't lose rows)" if id(node) in shards and node.shape[0] < shape[0] else ""
            line = f"{name}: {here} here, {there} in the checkpoint{lost}"
            reshaped.append(_Difference(_RESHAPED, own_key, line))
    left = sorted(key for key in forms.keys() - matched - {KEY, COUNTER_KEY} if key.startswith(key_prefix(at)))
    extra = [_Difference(_EXTRA, key, f"{_readable_key(key)} {_form(*forms[key])}") for key in left]
    optional = tuple(key_prefix((*at, *path)) + name for path, node in walked for name in _optional(node))
    differences = [difference for difference in (*missing, *extra) if not difference.key.startswith(optional)]
    return fitting, differences + reshaped, moving


def _optional(node) -> Sequence[str]:
    """Returns the attributes of an object that may be missing and extra; a run may get metrics, or lose them."""
    return ("",) if isinstance(node, tf.keras.metrics.Metric) else getattr(node, "optional_in_checkpoint", ())


def _message(differences: Sequence[_Difference]) -> str:
    """Formats how a state and a checkpoint differ, on one line."""
    entries = []
    for kind in (_MISSING, _EXTRA, _RESHAPED):
        if lines := [difference.line for difference in differences if difference.kind == kind]:
            more = f" and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
            entries.append(f"{kind} ({len(lines)}): {'; '.join(lines[:_LISTED])}{more}")
    return "; ".join(entries)


def _picked(reader, key: str, positions: Sequence[int | None]) -> np.ndarray:
    """Returns elements of a vector, or 0."""
    there = reader.get_tensor(key)
    return np.array([0 if at is None else there[at] for at in positions], there.dtype)


def _tables(reader, walked, together, stored, forms, may_grow: bool) -> dict[int, _Table]:
    """Returns where a checkpoint has the tables, by the ids of those here; not those that it lacks."""

    def numbered(variable: tf.Variable, ending: str = "") -> tuple[str, ...]:
        """Returns the keys' prefixes of all parts of a list, by a variable under its first one."""
        _, first = together.get(id(variable), (None, None))
        key = "" if first is None else _stored_key(stored[first]) or ""
        if not key.endswith(end := f"/0/{ending}{_ATTRIBUTE}"):
            return ()  # absent, or under another attribute than the table's
        prefixes = (f"{key.removesuffix(end)}/{number}/" for number in itertools.count())
        return tuple(itertools.takewhile(lambda prefix: prefix + ending + _ATTRIBUTE in forms, prefixes))

    tables: dict[int, _Table] = {}
    for table in [node for _, node in walked if isinstance(node, Embedding) and node.shards]:
        if not (prefixes := numbered(table.shards[0])):
            continue
        sizes = [forms[prefix + _ATTRIBUTE][0][0] for prefix in prefixes]
        admissions = numbered(table.admissions[0].keys, "keys/") if table.admissions else ()
        if sizes == [shard.shape[0] for shard in table.shards] or len(admissions) != len(prefixes):
            admissions = ()
        place = functools.cache(functools.partial(_place, reader, table, admissions))
        tables[id(table)] = _Table(table, prefixes, admissions, place, may_grow and table.ids_are_rows)
    return tables


def _place(reader, table: Embedding, admissions: Sequence[str]) -> Placement:
    """Reads which ids have rows in a checkpoint, and gives them rows here."""
    former = {
        name: [reader.get_tensor(prefix + name + "/" + _ATTRIBUTE) for prefix in admissions]
        for name in MOVED
        if reader.has_tensor(f"{admissions[0]}{name}/{_ATTRIBUTE}")
    }
    placement = rehash(former, table.rows, len(table.shards))
    logging.warning(
        "embedding %s: %s ids move to a table of %s rows (shards: %d); %s get no row and share row 0; the counts of "
        "ids without a row start again from 0",
        *(table.name, f"{placement.num_placed:,}", f"{table.rows:,}", len(table.shards), f"{placement.num_dropped:,}"),
    )
    return placement


def _placed_value(there: _Table, shard: int, name: str, variable: tf.Variable) -> np.ndarray:
    """Returns the value of an admission's variable; 0 if it begins again."""
    return there.place().values[shard].get(name, np.zeros(variable.shape, variable.dtype.as_numpy_dtype))


def _keys_in(
    own_key: str, stored_id, stored, source: Moved | None, moved: Mapping[str, Moved]
) -> tuple[list[str], Moved]:
    """Returns the keys of a checkpoint that a variable reads from, and which of their values."""
    if source is not None:
        return [prefix + _ATTRIBUTE for prefix in source.prefixes], source
    for beginning, source in moved.items():
        if own_key.startswith(beginning):
            return [prefix + own_key.removeprefix(beginning) for prefix in source.prefixes], source
    key = None if stored_id is None else _stored_key(stored[stored_id])
    return [] if key is None else [key], Moved(())


def has(prefix: str, at: Sequence[str]) -> bool:
    """Returns whether a checkpoint has an object at a path of attributes from its root."""
    graph = tf.train.load_checkpoint(prefix).get_tensor(KEY)
    return _stored_at(TrackableObjectGraph.FromString(graph).nodes, at) is not None


def _stored_at(stored, at: Sequence[str]) -> int | None:
    number: int | None = 0
    for name in at:
        number = _stored_children(stored, number).get(name) if number is not None else None
    return number


def _stored_children(stored, number: int) -> dict[str, int]:
    return {child.local_name: child.node_id for child in stored[number].children}


def _stored_key(node) -> str | None:
    return next((attribute.checkpoint_key for attribute in node.attributes if attribute.name == _VALUE), None)


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
        _refuse_other_state(path, node)
        for name, child in tracked_children(node, is_root=not path):
            stored.children.add(node_id=numbers[id(child)], local_name=name)
    graph.nodes[0].children.add(node_id=len(nodes), local_name=_COUNTER)
    graph.nodes.add().attributes.add(name=_VALUE, full_name=_COUNTER, checkpoint_key=COUNTER_KEY)
    return graph.SerializeToString()


def walk(root) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields (path, object) for all that is tracked under `root`, each once, breadth first, as keys are named."""
    return ((path, node) for path, node, _ in _breadth_first(root, 0, lambda number, name: number))


def _breadth_first(root, start: int, child_of: Callable[[int, str], int | None]) -> Iterator[tuple]:
    """Yields (path, object, number) for all under `root` to which `child_of(its parent's number, name)` gives a number.

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
        for name, child in tracked_children(node, is_root=not path):
            is_link = name == UPDATED and isinstance(node, tf.keras.optimizers.Optimizer)
            if (inside := child_of(number, name)) is not None:
                (links if is_link else queue).append(((*path, name), child, inside))


def is_variable(node) -> bool:
    """Returns whether a trackable has a value that a checkpoint keeps."""
    return isinstance(node, (tf.Variable, tf.keras.Variable))


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
    return tracked + (_keras_children(node, children.values()) if isinstance(node, tf.keras.layers.Layer) else [])


def _keras_children(layer: tf.keras.layers.Layer, children: Iterable) -> list[tuple[str, object]]:
    """Returns a layer's children that TensorFlow does not see.

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


def _refuse_other_state(path, node) -> None:
    """Raises CheckpointError for tables, iterators and other state that is not a variable and would be left out.

    Empty tables are accepted: Keras's lookup layers count words in one while they adapt, and empty it.
    """
    if isinstance(node, tf.lookup.experimental.MutableHashTable) and not node.size():
        return
    if has_state_beside_variables(node):
        raise CheckpointError(
            f"{_readable(path)} is a {type(node).__name__}, and only variables are saved; "
            "keep its state in a tf.Variable, or in the host's state"
        )


def checkpoint_key(path: tuple[str, ...]) -> str:
    """Returns a variable's key in a checkpoint, by its path."""
    return key_prefix(path) + _ATTRIBUTE


def key_prefix(path: tuple[str, ...]) -> str:
    """Returns the prefix of the keys of all that is under a path."""
    return "".join(name.replace(".", "..").replace("/", ".S") + "/" for name in path)


def _readable(path: tuple[str, ...]) -> str:
    parts = [f"[{name}]" if name.isdigit() else f".{name}" for name in path]
    return "".join(parts).lstrip(".")


def _readable_key(key: str) -> str:
    names = key.removesuffix("/" + _ATTRIBUTE).split("/")
    return _readable(tuple(name.replace(".S", "/").replace("..", ".") for name in names))


def whole_shape(node) -> list[int]:
    """Returns the shape of a variable; of one sharded over a mesh, the shape of the whole."""
    sharding = variable_sharding(node)
    return list(sharding.shape) if sharding else tf.TensorShape(node.shape).as_list()


def _form_here(node) -> str:
    return _form(_any_rows(node.shape) if per_replica.differs(node) else whole_shape(node), node.dtype)


def _any_rows(shape) -> list[int | None]:
    """Returns [None, *shape], as a message shows it: for any number of replicas."""
    return [None, *tf.TensorShape(shape).as_list()]


def _form(shape, dtype) -> str:
    return f"{tf.TensorShape(shape).as_list()} {tf.as_dtype(dtype).name}"
