"""Continues a text by a run's language model: `--mode=generate`, and `Run.generate`."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ...engine.checkpoints.run_dir import NAMES
from ...engine.errors import counted, visible
from ...engine.generation import Generates
from ...engine.generation import generate as generate_tokens
from ...engine.hooks import numerics
from ...engine.hooks.evaluation import averaged_weights
from ...input.checks import InputError
from ...input.files import tokens as kinds
from .. import terminal
from ..base import BaseRun
from ..command_line import checks
from ..failures import UsageError
from ..restored import restoring
from ..saved import fingerprints
from .outcome import Outcome, run_result


def generate(run: BaseRun) -> Outcome:
    """Prints the prompt and what follows it by the chosen checkpoint, as it comes; all else goes to standard error."""
    config, strategy = run.config, run.strategy
    context = _language_model(run).context  # first of all, since it raises unless the run's model is one
    for manifest in restoring.restored(run):
        checkpoint = f"{'best' if config.eval_checkpoint == 'best' else 'checkpoints'}/{manifest.name}"
    trained_on = manifest.about.get("data", {}).get("train", {}).get("ids")
    if run.data_info.tokens and trained_on not in (None, fingerprints.hash_ids(run.data_info.tokens.ids)):
        raise UsageError(
            f"{manifest.name} was trained on other tokens than {NAMES.model} in run_dir={run.config.run_dir} is of; "
            "restore that file from a copy, or train the run on, which writes it again"
        )
    numerics.check_weights(run.trainer, f"step {run.state.step}")
    start = prompt_tokens(run, config.prompt)
    decoder, pieces, times = None, list[str](), list[float]()
    if strategy.is_chief:
        decoder = run.data_info.tokens.decoder()
        text = f"{config.model_entry.name}: step {run.state.step}, {checkpoint}; "
        text += counted(strategy.num_replicas, "replica")
        if len(start) > context:
            text += f"\nthe prompt's last {context:,} tokens of {len(start):,} are read: the model looks at no more"
        if len(start) + config.arguments("sampling")["tokens"] - 1 > context:
            text += f"\nwhenever {context:,} tokens are read, the older half is forgotten: the model looks at no more"
        print(text, file=sys.stderr, flush=True)
    # All processes of a strategy take part in each token's step; the chief alone prints.
    for token in itertools.chain(start[1:], follow(run, start)):
        if decoder is not None:
            pieces.append(decoder.text(token))
            _print(pieces[-1])
        times.append(time.monotonic())
    if decoder is not None:
        pieces.append(decoder.rest())  # of a character whose last token did not come
        _print(pieces[-1])
        print(flush=True)
    count, text = len(times) - len(start) + 1, "".join(pieces)
    ended = "; the document ends here" if count < config.arguments("sampling")["tokens"] else ""
    # Without the first token, whose step is compiled.
    rate = (count - 1) / (times[-1] - times[len(start) - 1]) if count > 1 else None
    if strategy.is_chief:
        speed = f", {rate:,.0f} tokens/s" if rate else ""
        print(f"{counted(count, 'token')}{speed}{ended}", file=sys.stderr)
    generated = {"tokens": count, "tokens_per_sec": rate, "seed": config.seed, "text": text}
    return Outcome({**run_result(run), "checkpoint": checkpoint, "generated": generated})


def follow(run: BaseRun, start: Sequence[int], **overrides: Any) -> Iterator[int]:
    """Yields the tokens that follow others, with the weights that evaluations use, up to a document's end.

    Args:
      start: the tokens to continue, one or more.
      **overrides: values of tokens, temperature, top_k and seed that replace the configuration's.
    """
    config = run.config
    sampling = {"seed": config.seed, **config.arguments("sampling"), **overrides}
    count = sampling.pop("tokens")
    end = run.data_info.tokens.separator if run.data_info.tokens else None
    with averaged_weights(run.trainer):
        sampled = generate_tokens(run.strategy.distribution, _language_model(run), start, **sampling)
        yield from itertools.takewhile(lambda token: token != end, itertools.islice(sampled, count))


def prompt_tokens(run: BaseRun, prompt: str) -> list[int]:
    """Returns the tokens of a prompt, after the separator that precedes each document. Raises `UsageError`."""
    if run.data_info.tokens is None:
        raise UsageError(
            f"this run's {NAMES.model} does not name a tokenizer: its data was not text, or it is older; train on "
            "input=text"
        )
    text = os.fsencode(prompt)  # unchanged, even if it is not UTF-8
    try:
        (tokens,) = run.data_info.tokens.tokens([kinds.TextPiece(text, "prompt", 0, True)])
    except InputError:
        raise UsageError("prompt is not text in UTF-8, which this run's vocabulary is of; give it as such") from None
    return [run.data_info.tokens.separator, *tokens.tolist()]


def generate_after(run: BaseRun, prompt: str | Sequence[int], **overrides: Any) -> str | list[int]:
    """Generates text after text, tokens after tokens; see `follow`."""
    checks.check_generation(run.config)
    for name, least in (("tokens", 1), ("temperature", 0), ("top_k", 0)):  # as the flags'
        if name in overrides and not overrides[name] >= least:
            raise UsageError(f"{name}={overrides[name]} is out of range; use {least} or more")
    if isinstance(prompt, str):
        start = prompt_tokens(run, prompt)
        decoder = run.data_info.tokens.decoder()
        for token in start[1:]:  # a token's text may depend on those before: at the beginning a space may be left out
            decoder.text(token)
        return "".join(decoder.text(token) for token in follow(run, start, **overrides)) + decoder.rest()
    start, num_tokens = [int(token) for token in prompt], run.trainer.run_context.num_classes
    if not start or not all(0 <= token < (num_tokens or token + 1) for token in start):
        raise UsageError(
            f"prompt={start} is not a list of tokens; give one or more, each from 0 to {(num_tokens or 0) - 1}"
        )
    return list(follow(run, start, **overrides))


def _print(text: str) -> None:
    # Control characters in what a model writes would act on a terminal; a file gets the text as it is.
    print(visible(text) if terminal.is_terminal(sys.stdout) else text, end="", flush=True)


def _language_model(run: BaseRun) -> Generates:
    model = getattr(run.trainer, "model", None)
    if not isinstance(model, Generates):
        raise UsageError(
            f"{run.config.model_entry.name} does not predict the next token; generate with a language model, such as "
            "model=transformer_lm, or give self.model the methods of crankshaft.engine.generation.Generates"
        )
    return model
