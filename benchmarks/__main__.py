"""Lists the scripts of this folder, one line each: `python -m benchmarks`. `--help` of each says more."""

import ast
import pathlib


def lines() -> list[str]:
    """Returns each script's name, and the first line of its docstring."""
    here, found = pathlib.Path(__file__).parent, []
    for path in sorted([*here.glob("[!_]*.py"), *here.glob("*/__main__.py")]):
        text = path.read_text("utf-8")
        if '__name__ == "__main__"' in text:
            name = path.parent.name if path.stem == "__main__" else path.stem
            found.append(f"{name:<18} {ast.get_docstring(ast.parse(text)).splitlines()[0]}")
    return found


if __name__ == "__main__":
    print("\n".join(lines()))
