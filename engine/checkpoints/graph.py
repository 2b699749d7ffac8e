"""The graph of objects that a checkpoint holds beside the values: walked, written, compared, restored. Host code.

TensorFlow names a checkpoint's entries by the shortest path of attributes from the root to each variable, and matches
by that graph when it reads. Both are followed here, for variables of any strategy and for Keras's.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

from ..internals.errors import CheckpointError, reason, setting
from ..internals.keras import KEPT_IN_LISTS, UPDATED
from ..internals.tensorflow import has_state_beside_variables
from ..layers.embeddings import Embedding
from ..mesh.cuts import cut_of
from ..reduction import per_replica
from . import slices
from .slices import Rows

KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"  # of the graph's own entry
T = TypeVar("T")
_LISTED = 8
_VALUE = "VARIABLE_VALUE"
_ATTRIBUTE = f".ATTRIBUTES/{_VALUE}"
_COUNTER = "save_counter"  # a variable of TensorFlow's, which it adds at the first save; it belongs to no state
COUNTER_KEY = f"{_COUNTER}/{_ATTRIBUTE}"


class Moved(NamedTuple):
    """Where a checkpoint has what is kept for a variable, or for each shard of the table that the variable is of.

    Attributes:
      prefixes: what the checkpoint's keys begin with.
      shard, number: see `slices.Rows`.
    """

    prefixes: tuple[str, ...]
    shard: int = 0
    number: int = 1

    def below(self, path: tuple[str, ...]) -> Moved:
        """Returns the same of names under a path, which are one attribute each."""
        return self._replace(prefixes=tuple(prefix_of((*path, name)) for name in self.prefixes))


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a state that can begin again where a checkpoint does not fit it, such as an optimizer's slots.

    Attributes:
      name: for people.
      path: the attributes from the state to it.
      is_other: whether it is of other variables than the checkpoint's, though all shapes may fit.
      settle: called once all else was restored, with whether it begins again.
      without: its attributes that are not part of it.
      known: what is read though it begins again: (variable, key) of values that the checkpoint has in another place.
      moved: where the checkpoint has what is kept for a variable, by the beginning of the keys here.
    """

    name: str
    path: tuple[str, ...]
    is_other: bool
    settle: Callable[[bool], None]
    without: tuple[str, ...] = ()
    known: list[tuple[Any, str]] = dataclasses.field(default_factory=list)
    moved: Mapping[str, Moved] = dataclasses.field(default_factory=dict)

    def has(self, key: str) -> bool:
        """Returns whether an entry of a checkpoint is of this part."""
        inside = prefix_of(self.path)
        return key.startswith(inside) and not key.startswith(
            tuple(inside + prefix_of((each,)) for each in self.without)
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How a state differs from a checkpoint.

    Attributes:
      fitting: what fits, by the key that it has here: (name, variable, its key or `Rows` in the checkpoint).
      missing, extra, reshaped: {key: line for people}; `extra` by the checkpoint's keys, the others by those here.
      forms: [shape, dtype] of all that the checkpoint holds, by its keys.
    """

    fitting: dict[str, tuple[str, Any, str | Rows]]
    missing: dict[str, str]
    extra: dict[str, str]
    reshaped: dict[str, str]
    forms: dict[str, tuple[list[int], tf.DType]]

    @property
    def fits(self) -> bool:
        """Whether all that either has is in the other."""
        return not (self.missing or self.extra or self.reshaped)

    def of(self, is_meant: Callable[[str], bool]) -> Comparison:
        """Returns what there is of entries whose keys are meant."""

        def meant(entries: dict[str, T]) -> dict[str, T]:
            return {key: entry for key, entry in entries.items() if is_meant(key)}

        parts = (meant(self.missing), meant(self.extra), meant(self.reshaped))
        return Comparison(meant(self.fitting), *parts, self.forms)

    def message(self) -> str:
        """Formats the differences, on one line."""
        titles = ("missing in the checkpoint", "only in the checkpoint", "of another shape or type")
        return "; ".join(
            f"{title} ({len(lines)}): {'; '.join([*lines.values()][:_LISTED])}"
            + (f" and {len(lines) - _LISTED} more" if len(lines) > _LISTED else "")
            for title, lines in zip(titles, self._differences(), strict=True)
            if lines
        )

    def _differences(self) -> tuple[dict[str, str], ...]:
        return self.missing, self.extra, self.reshaped


def restore(
    prefix: str,
    root,
    why_not: str,
    at: tuple[str, ...] = (),
    parts: Sequence[Part] = (),
    begins_again: bool = False,
    may_grow: bool = False,
) -> tuple[list[str], str]:
    """Reads what a checkpoint has under the path `at` into the variables under `root`: all, or none.

    Args:
      prefix: the checkpoint's path.
      root: what is tracked there.
      why_not: what an error begins with if the checkpoint is of something else.
      at: the attributes from the checkpoint's root to it.
      parts: of `root`, that can begin again.
      begins_again: whether they may.
      may_grow: whether tables may have more rows than in the checkpoint; those that it lacks stay as they are.

    Returns:
      The names of the variables that were read, of tables that have grown with how many rows were; and which parts
      begin again and why, for people, "" if none does.

    Raises:
      CheckpointError: before any variable is changed, if the checkpoint can't be read, or variables are missing in it,
        extra, or of another shape or type.
    """
    try:
        moved = {each: place for part in parts for each, place in part.moved.items()}
        comparison = compare(prefix, root, at, moved, may_grow)
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{prefix} can't be read as a checkpoint: {reason(error)}") from error
    theirs = {part.name: comparison.of(part.has) for part in parts}
    rest = comparison.of(lambda key: not any(part.has(key) for part in parts))
    again = [part for part in parts if part.is_other or not theirs[part.name].fits]
    if not rest.fits or not rest.fitting:
        raise CheckpointError(f"{why_not}: {comparison.message()}")
    reasons = "; ".join(f"{part.name} ({theirs[part.name].message() or 'of other variables'})" for part in again)
    if again and not begins_again:
        raise CheckpointError(
            f"{prefix} has the variables of this model and does not fit {reasons}; make what is trained, and the "
            f"optimizer, as they were, or give {setting('allow_changed_config')}, with which the run goes on and these "
            "begin again"
        )
    fitting = comparison.of(lambda key: not any(part.has(key) for part in again)).fitting.values()
    slices.read(prefix, [(variable, key) for _, variable, key in fitting])
    for part in parts:
        part.settle(part in again)
        if part in again:
            slices.read(prefix, [each for each in part.known if each[1] in comparison.forms])
    return [name for name, _, _ in fitting], reasons


def compare(
    prefix: str,
    root,
    at: tuple[str, ...] = (),
    moved: Mapping[str, Moved] | None = None,
    may_grow: bool = False,
) -> Comparison:
    """Matches the variables under `root` with those of the checkpoint under the path `at`. Reads no value.

    Matches as TensorFlow will: the two graphs are walked together, by the names of children; what is `moved`, by its
    keys. A table's shards fit those of another number. Under an object whose `optional_in_checkpoint` is true,
    variables may be missing and extra, and are not listed.
    """
    reader = tf.train.load_checkpoint(prefix)
    dtypes = reader.get_variable_to_dtype_map()
    forms = {key: (shape, dtypes[key]) for key, shape in reader.get_variable_to_shape_map().items()}
    stored = TrackableObjectGraph.FromString(reader.get_tensor(KEY)).nodes
    start: int | None = 0
    for name in at:
        start = _stored_children(stored, start).get(name) if start is not None else None
    together, walked = _walk_together(root, stored, start), [*walk(root)]
    shards = _shards(walked, together, stored, forms)
    matched: set[str] = set()
    fitting: dict[str, tuple[str, Any, str | Rows]] = {}
    missing, reshaped = {}, {}
    for path, node in walked:
        if not is_variable(node):
            continue
        path, stored_id = together.get(id(node), (path, None))
        name, own = _readable(at + path), key_of(at + path)
        keys, place = _keys_in(own, stored_id, stored, shards.get(id(node)), moved or {})
        keys = [key for key in keys if key in forms]
        if not keys:
            missing[own] = f"{name} {_form_here(node)}"
            continue
        matched.update(keys)
        if len(keys) == place.number and not (may_grow and place.prefixes):
            key: str | Rows = keys[place.shard]
            shape, dtype = forms[key]
        else:
            key = Rows(tuple(keys), tuple(forms[each][0][0] for each in keys), place.shard, place.number)
            shape, dtype = [key.size_here, *forms[keys[0]][0][1:]], forms[keys[0]][1]
        if per_replica.differs(node):  # as many rows as the run had replicas, or none where it had one
            shape = _any_rows(shape[1:] if len(shape) > len(node.shape) else shape)
        here, there = _form_here(node), _form(shape, dtype)
        if may_grow and isinstance(key, Rows) and node.shape[0] > key.size_here:
            name, there = f"{name} ({shape[0]:,} of {node.shape[0]:,} rows)", _form([node.shape[0], *shape[1:]], dtype)
        if here == there and not (isinstance(key, Rows) and cut_of(node)):
            fitting[own] = name, node, key
        else:
            lost = " (a table can't lose rows)" if id(node) in shards and node.shape[0] < shape[0] else ""
            reshaped[own] = f"{name}: {here} here, {there} in the checkpoint{lost}"
    left = sorted(key for key in forms.keys() - matched - {KEY, COUNTER_KEY} if key.startswith(prefix_of(at)))
    extra = {key: f"{_readable_key(key)} {_form(*forms[key])}" for key in left}
    comparison = Comparison(fitting, missing, extra, reshaped, forms)
    optional = tuple(prefix_of(at + path) for path, node in walked if getattr(node, "optional_in_checkpoint", False))
    needed = comparison.of(lambda key: not key.startswith(optional))
    return dataclasses.replace(comparison, missing=needed.missing, extra=needed.extra)


def _shards(walked, together, stored, forms) -> dict[int, Moved]:
    """Returns where a checkpoint has the shards of tables, by the ids of the variables that are theirs here."""
    places: dict[int, Moved] = {}
    for shards in [node.shards for _, node in walked if isinstance(node, Embedding)]:
        _, first = together.get(id(shards[0]), (None, None)) if shards else (None, None)
        key = "" if first is None else _stored_key(stored[first]) or ""
        if not key.endswith(end := f"/0/{_ATTRIBUTE}"):
            continue  # not there, or by another attribute than the table's
        table = key.removesuffix(end) + "/"
        numbered = (f"{table}{number}/" for number in itertools.count())
        prefixes = tuple(itertools.takewhile(lambda each: each + _ATTRIBUTE in forms, numbered))
        places |= {id(node): Moved(prefixes, shard, len(shards)) for shard, node in enumerate(shards)}
    return places


def _keys_in(own: str, stored_id, stored, place: Moved | None, moved: Mapping[str, Moved]) -> tuple[list[str], Moved]:
    """Returns the keys of a checkpoint that have what a variable is to read, and which part of that."""
    if place is not None:
        return [prefix + _ATTRIBUTE for prefix in place.prefixes], place
    for beginning, place in moved.items():
        if own.startswith(beginning):
            return [prefix + own.removeprefix(beginning) for prefix in place.prefixes], place
    key = None if stored_id is None else _stored_key(stored[stored_id])
    return [] if key is None else [key], Moved(())


def _walk_together(root, stored, start: int | None) -> dict[int, tuple[tuple[str, ...], int]]:
    """Returns, by the id of each object that both have, the path by which it was found, and its stored node."""
    if start is None:
        return {}
    reached = _breadth_first(root, start, lambda number, name: _stored_children(stored, number).get(name))
    return {id(node): (path, number) for path, node, number in reached}


def _stored_children(stored, number: int) -> dict[str, int]:
    return {child.local_name: child.node_id for child in stored[number].children}


def _stored_key(node) -> str | None:
    return next((each.checkpoint_key for each in node.attributes if each.name == _VALUE), None)


def serialized(root) -> bytes:
    """Returns the graph under a state in the form that TensorFlow keeps in its checkpoints.

    Raises:
      CheckpointError: something there has state that is not in variables, and would be left out.
    """
    graph = TrackableObjectGraph()
    nodes = list(walk(root))
    numbers = {id(node): number for number, (_, node) in enumerate(nodes)}
    for path, node in nodes:
        stored = graph.nodes.add()
        if is_variable(node):
            stored.attributes.add(name=_VALUE, full_name=_readable(path), checkpoint_key=key_of(path))
            continue
        _refuse_other_state(path, node)
        for name, child in children_of(node, is_root=not path):
            stored.children.add(node_id=numbers[id(child)], local_name=name)
    graph.nodes[0].children.add(node_id=len(nodes), local_name=_COUNTER)
    graph.nodes.add().attributes.add(name=_VALUE, full_name=_COUNTER, checkpoint_key=COUNTER_KEY)
    return graph.SerializeToString()


def walk(root) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields (path, object) of all that is tracked under `root`, each once, breadth first as the keys are named."""
    return ((path, node) for path, node, _ in _breadth_first(root, 0, lambda number, name: number))


def _breadth_first(root, start: int, child_of: Callable[[int, str], int | None]) -> Iterator[tuple]:
    """Yields (path, object, number) of all under `root` of which `child_of(its parent's number, name)` has a number.

    What a Keras optimizer updates comes last: it is a model's, and is named by its place there.
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
        for name, child in children_of(node, is_root=not path):
            is_link = name == UPDATED and isinstance(node, tf.keras.optimizers.Optimizer)
            if (inside := child_of(number, name)) is not None:
                (links if is_link else queue).append(((*path, name), child, inside))


def is_variable(node) -> bool:
    """Returns whether a trackable holds a value that a checkpoint keeps."""
    return isinstance(node, (tf.Variable, tf.keras.Variable))


def children_of(node, is_root: bool) -> list[tuple[str, object]]:
    """Returns (attribute's name, object) of what is tracked directly under an object."""
    if is_variable(node):
        return []
    children = tf.train.TrackableView.children(node)
    own = [(name, child) for name, child in children.items() if not (is_root and name == _COUNTER)]
    return own + (_held_by_keras(node, children.values()) if isinstance(node, tf.keras.layers.Layer) else [])


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


def _refuse_other_state(path, node) -> None:
    """Raises CheckpointError for tables, iterators and other state that is not a variable, rather than leave it out.

    An empty table keeps none: Keras's lookup layers count words in one while they adapt, and empty it.
    """
    if isinstance(node, tf.lookup.experimental.MutableHashTable) and not node.size():
        return
    if has_state_beside_variables(node):
        raise CheckpointError(
            f"{_readable(path)} is a {type(node).__name__}, and only variables are saved; "
            "keep its state in a tf.Variable, or in the host's state"
        )


def key_of(path: tuple[str, ...]) -> str:
    """Returns a variable's key in a checkpoint, by its path."""
    return prefix_of(path) + _ATTRIBUTE


def prefix_of(path: tuple[str, ...]) -> str:
    """Returns what the keys of all under a path begin with."""
    return "".join(name.replace(".", "..").replace("/", ".S") + "/" for name in path)


def _readable(path: tuple[str, ...]) -> str:
    parts = [f"[{name}]" if name.isdigit() else f".{name}" for name in path]
    return "".join(parts).lstrip(".")


def _readable_key(key: str) -> str:
    names = key.removesuffix("/" + _ATTRIBUTE).split("/")
    return _readable(tuple(name.replace(".S", "/").replace("..", ".") for name in names))


def whole_shape(node) -> list[int]:
    """Returns the shape of a variable; of one that is cut over a mesh, that of all its parts together."""
    cut = cut_of(node)
    return list(cut.shape) if cut else tf.TensorShape(node.shape).as_list()


def _form_here(node) -> str:
    return _form(_any_rows(node.shape) if per_replica.differs(node) else whole_shape(node), node.dtype)


def _any_rows(shape) -> list[int | None]:
    """Returns [None, *shape], which a message shows as it is: of any number of replicas."""
    return [None, *tf.TensorShape(shape).as_list()]


def _form(shape, dtype) -> str:
    return f"{tf.TensorShape(shape).as_list()} {tf.as_dtype(dtype).name}"
