"""What a run has only if it asks for it, a folder each: only `launch` imports them, within the `if` that says so."""

if __name__ == "parts":
    raise ImportError("parts is a part of crankshaft; write `import crankshaft.parts` instead of `import parts`")

from importlib.util import find_spec


def has(name: str) -> bool:
    """Returns whether a part's folder is there; a run does without one that it would have by default."""
    try:
        return find_spec(f"{__name__}.{name}") is not None
    except ModuleNotFoundError:
        return False
