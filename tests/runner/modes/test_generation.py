"""`--mode=generate`: the text of a model on standard output; mistakes in a line.

A run of the language model that comes with Crankshaft: it generates, also on a mesh, and is served without us.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import tokenizers

import crankshaft
from crankshaft import Trainer, mean
from tests.logical_cpus import make_four
from tests.waiting import PATIENCE

CONTEXT, SEPARATOR = 32, 256
LINES = ("one two three four", "six seven eight", "naïve ten")  # each by its first letter


class Window(tf.keras.Model):
    """Tells the next token by the last four: Bengio et al. 2003. Its cache is three of them."""

    context = CONTEXT

    def __init__(self, vocabulary: int):
        super().__init__()
        self.embedding = tf.keras.layers.Embedding(vocabulary, 16)
        self.hidden = tf.keras.layers.Dense(64, activation="relu")
        self.logits = tf.keras.layers.Dense(vocabulary)

    def call(self, tokens, training=None):
        return self._after(self.empty_cache(tf.shape(tokens)[0])[0], tokens)

    def empty_cache(self, batch):
        return [tf.fill([batch, 3], SEPARATOR)]

    def next_logits(self, tokens, cache, position):
        before = tf.where(position > 0, cache[0], SEPARATOR)
        return self._after(before, tokens)[:, -1], [tf.concat([before, tokens], 1)[:, -3:]]

    def _after(self, before, tokens):
        row, count = tf.concat([before, tokens], 1), tf.shape(tokens)[1]
        four = tf.stack([row[:, i : i + count] for i in range(4)], 2)
        known = tf.reshape(self.embedding(four), [-1, count, 64])
        return self.logits(self.hidden(known))


class Lines(Trainer):
    def build_model(self):
        return Window(self.run_context.num_classes)

    def loss(self, outputs, batch):
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(batch[1], 0), outputs)
        return mean(losses, weights=batch[1] >= 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on lines, which are its documents: what `crankshaft.run` returned. The lines themselves are gone."""
    folder = tmp_path_factory.mktemp("generation")
    (folder / "text").mkdir()
    (folder / "text" / "lines.txt").write_text("\n".join(40 * LINES))
    done = crankshaft.run(
        Lines,
        input="text",
        data_dir=folder / "text",
        input_arg={"context": CONTEXT, "documents": "line"},
        run_dir=folder / "run",
        mode="train",
        train_steps=150,
        global_batch_size=16,
        learning_rate=0.01,
        jit="off",
        progress="off",
        seed=3,
    )
    shutil.rmtree(folder / "text")
    return done


@pytest.fixture
def generate(inside, trained):
    """`generate(*flags)`: the program's outcome."""

    def run(*flags, run_dir=trained.run_dir, trainer=Lines):
        return inside("--mode=generate", f"--run_dir={run_dir}", *flags, trainer=trainer)

    return run


@pytest.fixture
def copied(trained, tmp_path):
    """A copy of the run's folder, to do harm to."""
    return shutil.copytree(trained.run_dir, tmp_path / "copied")


@pytest.mark.thorough
def test_only_the_text_is_on_standard_output(generate):
    outcome = generate("--prompt=six", "--sampling=temperature=0").ok()
    assert outcome.out == "six seven eight\n"
    assert generate("--prompt=naï", "--sampling=temperature=0").ok().out == "naïve ten\n"
    said = [line for line in outcome.err.splitlines() if not line.startswith("I0000")]
    assert said[0] == "Lines: step 150, checkpoints/ckpt-150; 1 replica"
    assert said[1] == "whenever 32 tokens are read, the older half is forgotten: the model looks at no more"
    assert said[-1].startswith("12 tokens, ")
    assert said[-1].endswith("; the document ends here")
    outcome = generate(f"--prompt={'six seven ' * 4}", "--sampling=tokens=1").ok()
    assert "the prompt's last 32 tokens of 41 are read: the model looks at no more" in outcome.err


@pytest.mark.thorough
def test_what_is_sampled_depends_on_the_seed(generate, tmp_path):
    def sample(*flags, tokens=12):
        path = tmp_path / "result.json"
        asked = ("--prompt=one ", "--sampling=temperature=9", f"--sampling=tokens={tokens}", f"--result_json={path}")
        outcome = generate(*asked, *flags).ok()
        result = json.loads(path.read_text())
        assert outcome.out == result["generated"]["text"] + "\n"
        assert (result["mode"], result["step"], result["checkpoint"]) == ("generate", 150, "checkpoints/ckpt-150")
        return result["generated"]

    first = sample()
    assert (first["seed"], first["tokens"]) == (3, 12)  # the run's
    assert sample("--seed=3")["text"] == first["text"]
    assert sample("--seed=4")["text"] != first["text"]
    assert sample("--sampling=top_k=1", tokens=99)["text"] == "one two three four"
    assert sample("--sampling=top_k=0")["text"] != first["text"]


@pytest.mark.thorough
def test_a_run_in_python_generates(trained, generate):
    said = trained.generate("one two", temperature=2.0, seed=7)
    assert generate("--prompt=one two", "--sampling=temperature=2", "--seed=7").ok().out == f"one two{said}\n"
    assert trained.generate("si", temperature=0) == "x seven eight"
    assert trained.generate([SEPARATOR, *b"si"], temperature=0) == [*b"x seven eight"]
    for wrong in ([], [300]):
        with pytest.raises(
            crankshaft.UsageError, match=r"is not a list of tokens; give one or more, each from 0 to 256"
        ):
            trained.generate(wrong)
    for wrong in ({"tokens": 0}, {"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": -1}):
        ((name, value),) = wrong.items()
        with pytest.raises(crankshaft.UsageError, match=f"{name}={value} is out of range; use [01] or more"):
            trained.generate("si", **wrong)


@pytest.mark.thorough
def test_text_goes_on_as_all_tokens_read_at_once(tmp_path):
    """A vocabulary that marks spaces: a word in the middle has one, which the text's first word has not."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "▁one": 1, "▁two": 2}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    words.decoder = tokenizers.decoders.Metaspace()
    words.save(str(tmp_path / "words.json"))
    (tmp_path / "text.txt").write_text("one two " * 60)
    done = crankshaft.run(
        model="transformer_lm",
        model_arg={"layers": 1, "width": 8, "heads": 1},
        input="text",
        data_dir=tmp_path / "text.txt",
        input_arg={"context": 8, "tokenizer": tmp_path / "words.json"},
        run_dir=tmp_path / "run",
        mode="train",
        train_steps=60,
        learning_rate=0.03,
        jit="off",
        progress="off",
    )
    assert done.generate([3, 1, 2], tokens=3, temperature=0) == [1, 2, 1]
    assert done.generate("one two", tokens=3, temperature=0) == " one two one"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--sampling=tokens=0",), "sampling tokens=0 is not an integer from 1 to"),
        (("--sampling=temperature=-1",), "sampling temperature=-1.0 is not a number from 0 to 1000"),
        (("--sampling=temperature=warm",), "sampling temperature=warm is not a number"),
        (("--sampling=top_k=-1",), "sampling top_k=-1 is not an integer from 0 to"),
        (("--mode=eval", "--prompt=a"), "prompt=a has no use with mode=eval; use mode=generate, or leave"),
        (("--eval_checkpoint=77",), "eval_checkpoint=77 is none of latest, best, all, 150"),
        (("--learning_rate=1",), "is a run of another configuration (learning_rate: 0.01 -> 1.0)"),
        (("--strategy=tpu",), "strategy=tpu; generate with mode=generate strategy=one_device"),
    ],
)
def test_mistakes_are_one_line(generate, flags, line):
    assert line in generate(*flags).mistake


class Plain(Lines):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Embedding(257, 4)])


def test_a_model_that_tells_no_next_token_is_one_line(generate, copied):
    config = json.loads((copied / "config.json").read_text())
    config["deciding"]["model"] = "Plain"
    (copied / "config.json").write_text(json.dumps(config))
    outcome = generate("--prompt=a", run_dir=copied, trainer=Plain)
    assert outcome.mistake.startswith("Plain does not predict the next token; generate with a language model")


def keep_tokens(run_dir, kept):
    path = run_dir / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokens": kept}))


@pytest.mark.parametrize(
    ("kept", "line"),
    [
        (None, "this run's model.json does not name a tokenizer"),
        ({"kind": "vocabulary"}, "model.json does not describe the model ('tokenizer')"),
        ({"kind": "vocabulary", "tokenizer": "{}", "separator": ""}, "model.json is not a vocabulary ("),
    ],
)
def test_a_run_that_does_not_say_what_text_is_cut_into_is_one_line(generate, copied, kept, line):
    keep_tokens(copied, kept)
    assert line in generate("--prompt=a", run_dir=copied).mistake


def test_another_vocabulary_than_the_checkpoints_is_refused(generate, copied):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).to_str()
    keep_tokens(copied, {"kind": "vocabulary", "tokenizer": made, "separator": ""})
    outcome = generate("--prompt=a", run_dir=copied)
    assert outcome.mistake.startswith("ckpt-150 was trained on other tokens than model.json in run_dir=")


PROMPT = "The Congress shall"
# Prints what a SavedModel says, in a process that has TensorFlow alone.
SERVE = """
import json, sys
import tensorflow as tf
served = tf.saved_model.load(sys.argv[1]).signatures
row = json.load(sys.stdin)
logits = served["next_token_logits"](tokens=tf.constant([row, row]))["logits"]
def follow(temperature, seed):
    how = {"num_tokens": 50, "temperature": temperature, "top_k": 9, "seed": tf.constant(seed, tf.int64)}
    return served["generate"](tokens=tf.constant([row]), **{k: tf.constant(v) for k, v in how.items()})["tokens"]
assert "crankshaft" not in sys.modules
print(json.dumps([logits.numpy().tolist(), *(follow(*of).numpy()[0].tolist() for of in ((0.0, 0), (0.8, 5)))]))
"""


@pytest.fixture(scope="module")
def trained_on_text(tmp_path_factory):
    """A run on the bundled text: what `crankshaft.run` returned."""
    make_four()
    return crankshaft.run(
        model="transformer_lm",
        model_arg={"layers": 2, "width": 32, "heads": 4},
        input="text",
        input_arg={"context": CONTEXT},
        run_dir=tmp_path_factory.mktemp("language") / "run",
        mode="train",
        train_steps=150,
        global_batch_size=16,
        learning_rate=0.01,
        jit="off",
        progress="off",
    )


@pytest.mark.thorough
def test_a_loss_is_told_as_perplexity_and_in_bits_per_byte(trained_on_text):
    found = trained_on_text.result["train"]
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))


@pytest.mark.slow
def test_an_exported_model_is_served_by_tensorflow_alone(trained_on_text, inside):
    outcome = inside("--mode=export", f"--run_dir={trained_on_text.run_dir}").ok()
    assert "SavedModel of step 150" in outcome.out
    folder = f"{trained_on_text.run_dir}/export/150"
    row = [SEPARATOR, *PROMPT.encode()]
    done = subprocess.run(
        [sys.executable, "-c", SERVE, folder],
        input=json.dumps(row),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    logits, greedy, sampled = json.loads(done.stdout)
    expected = trained_on_text.model(np.array([row, row]))[:, -1]
    np.testing.assert_allclose(logits, expected, atol=1e-5)  # float32's rounding of logits up to 10
    assert greedy == row + trained_on_text.generate(row, tokens=50, temperature=0)
    assert sampled == row + trained_on_text.generate(row, tokens=50, temperature=0.8, top_k=9, seed=5)
    with open(f"{folder}/assets.extra/data.json", encoding="utf-8") as file:
        assert json.load(file)["tokens"] == {"kind": "bytes"}


@pytest.mark.thorough
def test_on_a_mesh_it_generates_what_one_device_does(trained_on_text, inside):
    flags = ("--mode=generate", f"--run_dir={trained_on_text.run_dir}", f"--prompt={PROMPT}", "--sampling=tokens=50")
    flags += ("--strategy=mirrored", "--num_virtual_devices=4", "--mesh=data:2,model:2", "--sampling=temperature=0.8")
    together = inside(*flags).ok()
    assert together.out == f"{PROMPT}{trained_on_text.generate(PROMPT, tokens=50, temperature=0.8)}\n"
    assert "; 4 replica" in together.err


@pytest.mark.slow
def test_workers_that_hold_a_model_together_generate_what_one_device_does(trained_on_text, inside, crank):
    run = ("--mode=generate", f"--run_dir={trained_on_text.run_dir}", f"--prompt={PROMPT}", "--sampling=tokens=50")
    alone = inside(*run).ok()
    sharded = crank("--workers=2", "--", *run, "--strategy=multi_worker", "--mesh=model:2", command="local").ok()
    lines = [line.removeprefix("[worker 0] ") for line in sharded.out.splitlines() if line.startswith("[worker 0] ")]
    assert lines == alone.out.splitlines()
    assert "transformer_lm: step 150, checkpoints/ckpt-150; 2 replicas" in sharded.err


TEXT = b"the cat sat on the mat, and the mat lay under the cat. " * 12
RUN = (
    *("--model=transformer_lm", "--input=text", "--input_arg=context=32", "--jit=off", "--progress=plain", "--seed=1"),
    *("--model_arg=layers=2", "--model_arg=width=32", "--model_arg=heads=2", "--global_batch_size=7"),
)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(TEXT)
    return f"--data_dir={tmp_path}/text", f"--eval_data_dir={tmp_path}/text"


@pytest.mark.thorough
def test_numerics_are_checked_op_by_op(inside, tmp_path, text):
    inside(*RUN, text[0], "--train_steps=2", "--check_numerics", f"--run_dir={tmp_path}/run").ok()
    inside(
        "--mode=generate", f"--run_dir={tmp_path}/run", "--prompt=to", "--sampling=tokens=3", "--check_numerics"
    ).ok()
