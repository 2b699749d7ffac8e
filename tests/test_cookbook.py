"""Each recipe of docs/cookbook.md runs, in a folder of its own, on what its first block makes."""

import pathlib
import re

import pytest

PATH = pathlib.Path(__file__).resolve().parent.parent / "docs" / "cookbook.md"


def recipes() -> dict[str, str]:
    """The Python of each section, by its title; of the text before the first section, by ""."""
    found, title = {}, ""
    for line, block in re.findall(
        r"^## ([^\n]*)$|^```python\n(.*?)^```", PATH.read_text(encoding="utf-8"), re.M | re.S
    ):
        title = line or title
        if block:
            found[title] = found.get(title, "") + block
    return found


RECIPES = recipes()
FIRST = RECIPES.pop("")
# What has to hold of a recipe's names once it has run, beyond that it ran; a model that learns nothing fails it.
HOLDS = {
    "From Keras `fit`": "done.history[-1]['eval_accuracy'] > 0.85",
    "Pretrained weights": "again.history[0]['eval_loss'] < 1.1 * first.result['eval']['loss']",
    "A hook that stops": "stopped.result['stop'] == 'good enough' and stopped.result['step'] < 400",
    "The model afterwards": "np.allclose(tf.keras.models.load_model(served)(points), kept.predict(points), atol=1e-5)",
}


@pytest.mark.parametrize("title", RECIPES)
def test_recipe_runs(title, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "recipe"}
    needed = [FIRST]
    if "KerasMetric" in RECIPES[title] and "import KerasMetric" not in RECIPES[title]:
        needed.append("from crankshaft import KerasMetric\n")
    exec(compile("".join(needed) + RECIPES[title], f"{PATH.name}: {title}", "exec"), names)
    assert eval(HOLDS.get(title, "True"), names)
    assert "evaluation at step" in capsys.readouterr().out


def test_every_check_is_of_a_recipe():
    assert set(HOLDS) <= set(RECIPES)
