"""Runs ``minisgl bench accuracy``: evaluates a text with a model in several precisions, and compares their logits."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.nn.functional as F

from minisgl_core.config.options import AUTO, EngineConfig
from minisgl_core.engine.build import BuiltModelRunner, build_model_runner
from minisgl_core.errors import InvalidValueError, ProviderUnsupportedError
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.batch_plan import BatchPlan, SamplePlan
from minisgl_core.utils.progress import progress_bar
from minisgl_server.bench.environment import print_results, write_json

COLUMNS = (
    ("KV", "{kv}"),
    ("weights", "{weights}"),
    ("perplexity", "{perplexity:.3f}"),
    ("Δ log-likelihood", "{log_likelihood:+.4f}"),
    ("mean |Δ logit|", "{mean_logit:.4f}"),
    ("max |Δ logit|", "{max_logit:.2f}"),
    ("KL, nats", "{kl:.5f}"),
    ("same top token", "{top1:.2%}"),
)
VARIANTS = ((AUTO, "none"), ("fp8", "none"), (AUTO, "fp8"), ("fp8", "fp8"), (AUTO, "int8"), (AUTO, "int4"))
"""Values of --kv-dtype and --quantization; the first variant is the baseline. Those that do not fit the model are left out."""
_CHUNK_TOKENS = 128
"""Tokens whose logits are compared at a time: [128, V] in float32 is 75 MB for a vocabulary of 150,000."""
_NO_TARGET = -100
"""Target of the last token of a window. It has no next token, so it has no loss."""


def run_accuracy(
    config: EngineConfig, texts: Sequence[str], window: int, max_tokens: int, json_file: str | None
) -> None:
    """Measure, print a table, and write the JSON file if one is given."""
    _check(config)
    registry, hooks = Registry.from_environment(), Hooks(Registry([]))
    text = "\n".join(map(_read, texts))
    windows: list[torch.Tensor] = []
    baseline: list[torch.Tensor] = []
    rows: list[dict[str, Any]] = []
    with progress_bar() as bar:
        task = bar.add_task("", total=len(VARIANTS))
        for kv_dtype, quantization in bar.track(VARIANTS, task_id=task):
            bar.update(task, description=f"KV {kv_dtype}, weights {quantization}")
            num_pages = config.cache.num_pages or window + 1  # holds a window for any page size
            fixed = {"kv_dtype": kv_dtype, "quantization": quantization, "max_running_requests": 1}
            variant = config.with_flat(**fixed, num_pages=num_pages)
            try:
                built = build_model_runner(variant, registry, hooks, progress=False)
            except ProviderUnsupportedError as error:
                if error.kind != "quantization" or quantization == "none":
                    raise
                click.echo(f"left out: {error}\n")
                continue
            info, windows = built.info, windows or _windows(built, text, window, max_tokens)
            hidden = [hidden_states(built, ids) for ids in windows]
            baseline = baseline or hidden
            with torch.inference_mode():
                difference = compare(baseline, hidden, windows, built.model_runner.model.compute_logits)
            kv, weights = (info.dtype if each in (AUTO, "none") else each for each in (kv_dtype, quantization))
            rows.append({"kv": kv, "weights": weights, **difference})
            built.model_runner.close()
    num_tokens = sum(map(len, windows))
    click.echo(f"{info.model} on {info.device}: {num_tokens:,} tokens in windows of {window}\n")
    print_results(COLUMNS, rows)
    about = {"model": info.model, "device": info.device, "window": window, "num_tokens": num_tokens}
    write_json(json_file, **about, texts=list(texts), results=rows)


def _check(config: EngineConfig) -> None:
    for name, value in (("--kv-dtype", config.cache.kv_dtype), ("--quantization", config.backends.quantization)):
        if value != AUTO:
            raise InvalidValueError(name, value, "left out: each is measured in several precisions")
    for name, size in (("--pp", config.parallel.pp), ("--tp", config.parallel.tp)):
        if size != 1:
            raise InvalidValueError(name, size, "1, as the hidden states of one rank are compared")


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidValueError("--text", file, "a file with UTF-8 text", f"It cannot be read: {error}.") from None


def _windows(built: BuiltModelRunner, text: str, window: int, max_tokens: int) -> list[torch.Tensor]:
    """Return consecutive windows of the text's token ids, int64."""
    if window > built.info.max_seq_len:
        raise InvalidValueError("--window", window, f"at most {built.info.max_seq_len}, the longest sequence here")
    ids = built.checkpoint.source.tokenizer()(text, add_special_tokens=False, verbose=False)["input_ids"][:max_tokens]
    if len(ids) < 2:
        raise InvalidValueError("--text", "(its text)", "at least two tokens long")
    parts = torch.split(torch.tensor(ids, dtype=torch.int64), window)
    return [part for part in parts if len(part) > 1]


def hidden_states(built: BuiltModelRunner, ids: torch.Tensor) -> torch.Tensor:
    """Return the hidden states of a prompt, [n, H], computed with an empty KV pool."""
    size, num = int(built.config.cache.page_size), len(ids)
    pages = np.arange(1, -(-num // size) + 1, dtype=np.int32)
    ints, floats = np.empty(0, np.int32), np.empty(0, np.float32)
    no_sampling = SamplePlan(
        index=ints, temperature=floats, top_k=ints, top_p=floats, min_p=floats, uniform=floats, num_logprobs=ints,
        penalties=floats, penalty_states=[], bias_states=[], biased=ints, banned_index=ints, banned_token=ints, masked=ints,
    )  # fmt: skip
    plan = BatchPlan(
        num_decodes=0,
        rows=np.array([1], np.int32),
        starts=np.zeros(1, np.int32),
        num_new=np.array([num], np.int32),
        token_ids=ids.numpy().astype(np.int32),
        page_table_writes=np.concatenate((np.ones_like(pages), np.arange(len(pages), dtype=np.int32), pages)),
        sample=no_sampling,
        prompt_logprobs=np.zeros(1, np.int32),  # makes the model runner return the hidden states of all tokens
        num_prompt_logprobs=ints,
        prompt_targets=ints,
    )
    hidden = built.model_runner.execute_model(plan).hidden
    built.model_runner.platform.synchronize()
    return hidden


def compare(
    baseline: Sequence[torch.Tensor],
    variant: Sequence[torch.Tensor],
    windows: Sequence[torch.Tensor],
    logits_of: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, float]:
    """Compare the hidden states of a variant with those of the baseline: float [n, H] per window of int64 [n] token ids.

    `logits_of` is the LM head, which both share: [m, H] to [m, V], for H hidden size and V vocabulary.

    Returns:
        perplexity: perplexity of the variant on the text.
        log_likelihood: mean log-likelihood of a token of the text, less the baseline's, in nats.
        mean_logit, max_logit: mean and maximum absolute difference of the logits, over tokens and vocabulary.
        kl: mean KL(baseline || variant) of the next-token distributions, in nats.
        top1: fraction of positions at which both have the same most likely token.
    """
    per_token = []
    for variant_hidden, baseline_hidden, ids in zip(variant, baseline, windows, strict=True):
        next_ids = F.pad(ids[1:], (0, 1), value=_NO_TARGET)
        chunks = (torch.split(each, _CHUNK_TOKENS) for each in (variant_hidden, baseline_hidden, next_ids))
        for *hidden, targets in zip(*chunks, strict=True):
            logits, baseline_logits = (logits_of(each).float() for each in hidden)
            difference = (logits - baseline_logits).abs()
            log_p, baseline_log_p = logits.log_softmax(-1), baseline_logits.log_softmax(-1)
            kl = F.kl_div(log_p, baseline_log_p, reduction="none", log_target=True).sum(-1)
            same = (logits.argmax(-1) == baseline_logits.argmax(-1)).float()
            losses = [
                F.nll_loss(each, targets.to(each.device), reduction="none", ignore_index=_NO_TARGET)
                for each in (log_p, baseline_log_p)
            ]
            per_token.append(torch.stack([difference.mean(-1), difference.amax(-1), kl, same, *losses]).double().cpu())
    mean_logit, max_logit, kl, same, loss, baseline_loss = torch.cat(per_token, dim=1)
    num_targets = sum(len(ids) - 1 for ids in windows)
    return {
        "perplexity": math.exp(float(loss.sum()) / num_targets),
        "log_likelihood": float((baseline_loss - loss).sum()) / num_targets,
        "mean_logit": float(mean_logit.mean()),
        "max_logit": float(max_logit.max()),
        "kl": float(kl.mean()),
        "top1": float(same.mean()),
    }
