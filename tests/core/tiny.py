"""A tiny random Llama, its outputs by transformers, and an engine loop around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch

from minisgl_backends.prefix_cache.radix import RadixPrefixCache
from minisgl_core.config.options import EngineConfig
from minisgl_core.contracts.prefix_cache import CacheNamespace, PageIds, PrefixInsert, TokenIds
from minisgl_core.engine.build import BuiltModelRunner, build_model_runner
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.messages import Submit, TokenOut
from minisgl_core.runtime.engine_loop import EngineLoop, Outputs
from minisgl_core.runtime.worker import make_loop
from minisgl_core.sampling_params import SamplingParams

# The model is so small that a second thread only adds waiting.
torch.set_num_threads(1)

VOCAB_SIZE = 61
MAX_SEQ_LEN = 48
EOS = 2


@lru_cache
def registry() -> Registry:
    return Registry.from_environment()


@lru_cache
def reference_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=8192,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@lru_cache
def checkpoint() -> Path:
    folder = Path(mkdtemp(prefix="tiny-llama-"))
    reference_model().save_pretrained(folder)
    return folder


@lru_cache
def greedy(prompt: tuple[int, ...], num_tokens: int, near_ties: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the greedy tokens of transformers, without stopping at EOS.

    `near_ties` has the tokens that are chosen if their logits are at most 1e-5 below the largest.
    """
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for i in range(num_tokens):
            logits = reference_model()(ids).logits[0, -1]
            token = logits.argmax()
            if i < len(near_ties) and logits[token] - logits[near_ties[i]] <= 1e-5:
                token = torch.tensor(near_ties[i])
            ids = torch.cat((ids, token.view(1, 1)), dim=1)
    return tuple(ids[0, len(prompt) :].tolist())


@lru_cache
def built(**options: Any) -> BuiltModelRunner:
    fixed = {"model": str(checkpoint()), "max_seq_len_override": MAX_SEQ_LEN, "platform": "cpu", "ops": "torch"}
    config = EngineConfig.from_flat(dtype="float32", **(fixed | options))
    return build_model_runner(config, registry(), Hooks(), progress=False)


def new_loop(**options: Any) -> EngineLoop:
    """Return a new scheduler around a cached engine, whose pool keeps data of earlier loops.

    `num_rows` sets the engine's number of concurrent requests.
    """
    engine_options = {
        name: options.pop(name)
        for name in ("page_size", "num_pages", "attn", "max_seq_len_override")
        if name in options
    }
    if (num_rows := options.pop("num_rows", None)) is not None:
        options["max_running_requests"] = engine_options["max_running_requests"] = num_rows
    engine = built(**engine_options)
    return make_loop(
        replace(engine, config=engine.config.with_flat(**{"max_step_ms": 0.0} | options)), registry(), Hooks(), []
    )


class InsertsOnePage(RadixPrefixCache):
    """Inserts at most one new page per call, which the contract allows."""

    def insert(self, token_ids: TokenIds, pages: PageIds, *namespace: CacheNamespace) -> PrefixInsert:
        num_present = len(self.match(token_ids, *namespace).pages)
        return super().insert(token_ids[: (num_present + 1) * self.page_size], pages, *namespace)


@dataclass
class Collected:
    """Outputs of one request."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    outputs: list[TokenOut] = field(default_factory=list)


def submit(loop: EngineLoop, name: str, prompt: Sequence[int], sampling: SamplingParams, priority: int = 0) -> None:
    token_ids = np.array(prompt, np.int32)
    loop.scheduler.submit(Submit(request_id=name, token_ids=token_ids, sampling=sampling, priority=priority))


def outputs_of(loop: EngineLoop) -> Iterator[TokenOut]:
    """Yield the outputs of a step, including those that are only a token."""
    for _, batch in loop.step():
        yield from batch.outputs
        for name, token in zip(batch.request_ids, batch.token_ids.tolist(), strict=True):
            yield TokenOut(request_id=name, token_ids=[token])


def deliver_early(loop: EngineLoop) -> list[int]:
    """Have the loop deliver outputs between the launches of layers. `step` returns these, too.

    Returns:
        The number of early outputs of each step, filled in later.
    """
    delivered: Outputs = []
    num_delivered: list[int] = []
    run_step = loop.step

    def step_and_delivered() -> Outputs:
        outputs = run_step()
        num_delivered.append(len(delivered))
        outputs[:0], delivered[:] = delivered, []
        return outputs

    loop._deliver, loop.step = delivered.extend, step_and_delivered  # type: ignore[method-assign]
    return num_delivered


def step(loop: EngineLoop, collected: dict[str, Collected]) -> None:
    for output in outputs_of(loop):
        each = collected.setdefault(output.request_id, Collected())
        assert each.finish_reason is None, "an output came after the last one"
        each.tokens += output.token_ids
        each.finish_reason = output.finish_reason
        each.outputs.append(output)


def run(loop: EngineLoop, collected: dict[str, Collected] | None = None) -> dict[str, Collected]:
    """Run steps until no work is left."""
    collected = {} if collected is None else collected
    for _ in range(10_000):
        if not loop.has_work:
            return collected
        step(loop, collected)
    raise AssertionError("the loop does not end")


def assert_nothing_in_use(loop: EngineLoop) -> None:
    scheduler = loop.scheduler
    scheduler.check()
    pages = scheduler.pages
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert not scheduler._by_id
    assert scheduler._running.num_free_rows == scheduler.limits.max_running
    assert pages.cache.num_locked == 0
    assert pages.allocator.num_free + pages.cache.num_pages == pages.allocator.capacity
