from __future__ import annotations

import copy
import json
import logging
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl_core.config.options import EngineConfig
from minisgl_core.contracts.structured_outputs import GrammarSource, StructuredOutputs
from minisgl_core.protocol import messages
from minisgl_core.protocol.messages import (
    Abort,
    ApiRestarted,
    Detokenize,
    Ended,
    EngineInfo,
    Logprob,
    LogprobArrays,
    Rejected,
    ReplicaLost,
    RequestCounts,
    Stop,
    Submit,
    Text,
    TextBatch,
    TokenBatch,
    Tokenize,
    TokenLogprobs,
    TokenOut,
    ToolUse,
    decoder,
    encode,
    prompt_entries,
)
from minisgl_core.runtime.ipc import IpcAddresses, Receiver, Sender
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.api.openai.logprobs import CompletionLogprobs
from minisgl_server.api.openai.segments import Segments
from minisgl_server.options import ServerOptions
from minisgl_server.parsing.chat_format import ChatFormat, ParsedText
from minisgl_server.tokenizer import request_output, tokenizer_queue
from minisgl_server.tokenizer.process import run_tokenizer_worker
from minisgl_server.tokenizer.prompt_encoder import PromptEncoder
from minisgl_server.tokenizer.tokenizer_queue import TokenizerQueue
from minisgl_server.tokenizer.worker import MAX_ATTEMPTS, TokenizerWorker

MAX_SEQ_LEN = 64


class Rig:
    """Worker whose two neighbours are lists."""

    def __init__(
        self,
        tokenizer: Any,
        tool_parser: str = "auto",
        reasoning_parser: str | None = None,
        *,
        num_replicas: int = 1,
    ) -> None:
        """Create a worker, with a short context unless a tool parser is given."""
        info = EngineInfo(
            model="m",
            architecture="a",
            dtype="float32",
            device="cpu",
            max_seq_len=MAX_SEQ_LEN if tool_parser == "auto" else 256,
            vocab_size=len(tokenizer),
            num_pages=4,
            page_size=16,
            eos_token_ids=[2],
            bos_token_id=1,
            default_sampling={},
            choices=[],
            max_requests=8,
        )
        self.tokenizer = tokenizer
        self.scheduler: list[Any] = []
        self.api: list[Any] = []
        chats = ChatFormat(tokenizer, tool_parser, reasoning_parser)
        self.worker = TokenizerWorker(
            tokenizer, info, 3, self.scheduler.append, self.send, chats, num_replicas=num_replicas
        )

    def send(self, message: Any) -> None:
        encode(message)  # as the socket does
        self.api.append(message)

    def submit(self, name: str = "a", text: str | None = "Hello", **options: Any) -> None:
        sampling = options.pop("sampling", SamplingParams(max_tokens=8))
        self.worker.handle(Tokenize(request_id=name, text=text, sampling=sampling, **options))

    def output(self, text: str | list[int], name: str = "a", **options: Any) -> None:
        ids = self.tokenizer(text)["input_ids"] if isinstance(text, str) else text
        self.worker.handle(TokenBatch([TokenOut(request_id=name, token_ids=ids, **options)]))

    @property
    def num_requests(self) -> int:
        """Number of requests that the worker reports to the API server."""
        self.worker.handle(count := RequestCounts(worker=3))
        assert self.scheduler.pop() is count
        return count.counts["tokenizer 3"]

    def take(self) -> list[Text | Rejected]:
        taken = [text for m in self.api for text in (m.outputs if isinstance(m, TextBatch) else [m])]
        self.api.clear()
        return taken


@pytest.fixture
def rig(engine_tokenizer: Any) -> Rig:
    return Rig(engine_tokenizer)


def test_errors_of_templates_may_not_be_encodable(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.tokenizer, "chat_template", r"{{ raise_exception('\ud800') }}")
    rig.submit(text=None, messages=[{"role": "user", "content": "x"}])
    [rejected] = rig.take()
    assert isinstance(rejected, Rejected)
    assert rejected.message.endswith(r"It says: \ud800")


def test_requests_of_a_lost_api_worker_are_aborted(engine_tokenizer: Any) -> None:
    """Requests that arrive after its end are aborted, too. Its successor gets only its own output."""
    rig, connected = Rig(engine_tokenizer), list[int]()
    rig.worker._api_worker_id, rig.worker._connect_api = 1, connected.append
    rig.submit("a", api_worker_id=1)
    rig.submit("b", api_worker_id=1, sampling=SamplingParams(max_tokens=8, n=2), sibling_ids=["c"])
    rig.scheduler.clear()
    rig.submit("new", api_worker_id=3)
    rig.worker.handle(ApiRestarted(3))  # the successor's first request may arrive earlier
    rig.submit("late", api_worker_id=1)
    rig.worker.handle(ApiRestarted(5))
    rig.submit("newest", api_worker_id=5)
    sent = [(type(each), each.request_id) for each in rig.scheduler]
    aborted = [(Abort, "a"), (Abort, "b"), (Abort, "c")]
    assert sent == [*aborted, (Submit, "new"), (Abort, "new"), (Submit, "newest")]
    assert (connected, rig.num_requests) == ([3, 5], 1)
    rig.output(" world", name="a", finish_reason="length")
    rig.output(" world", name="newest", finish_reason="length")
    assert [each.request_id for each in rig.take()] == ["newest"]


def test_the_tokenizer_is_loaded_while_the_engine_starts(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = EngineConfig.from_flat(model=str(tiny_checkpoint))
    with IpcAddresses.create() as endpoints:
        arguments = (config, ServerOptions(), 0, endpoints, lambda ready: None)
        worker = threading.Thread(target=run_tokenizer_worker, args=arguments, daemon=True)
        worker.start()
        latest_s = time.monotonic() + 120
        while worker.is_alive() and "loaded the tokenizer" not in caplog.text and time.monotonic() < latest_s:
            time.sleep(0.02)  # no `EngineInfo` is sent
        with Sender(endpoints.tokenizer_in[0]) as sender:
            sender.send(Stop())
        worker.join(60)
    assert not worker.is_alive()
    assert "loaded the tokenizer" in caplog.text


def test_a_request_is_submitted_and_its_text_returned(rig: Rig) -> None:
    rig.submit(priority=2)
    [submit] = rig.scheduler
    assert isinstance(submit, Submit)
    assert (submit.request_id, submit.worker, submit.priority) == ("a", 3, 2)
    assert submit.token_ids.tolist() == rig.tokenizer("Hello")["input_ids"]
    rig.output(" world", num_prompt_tokens=1, num_cached_tokens=0)
    rig.output("!", num_prompt_tokens=1, finish_reason="length")
    first, last = rig.take()
    assert (first.text, last.text, last.finish_reason, last.num_prompt_tokens) == (" world", "!", "length", 1)
    assert rig.num_requests == 0
    rig.output("late")
    assert rig.take() == []


def test_tokens_wait_for_a_complete_character(rig: Rig) -> None:
    rig.submit()
    ids = rig.tokenizer("👩")["input_ids"]
    for token in ids[:-1]:
        rig.output([token])
    assert rig.take() == []
    rig.output(ids[-1:])
    [text] = rig.take()
    assert (text.text, text.token_ids) == ("👩", ids)


def test_stop_strings_end_the_output_and_abort_the_request(rig: Rig) -> None:
    rig.submit(sampling=SamplingParams(max_tokens=8, stop=("END",)))
    rig.output("one END two")
    [text] = rig.take()
    assert (text.text, text.finish_reason, text.stop_reason) == ("one ", "stop", "END")
    assert rig.scheduler[1:] == [Abort("a", "stop")]
    assert rig.num_requests == 0


def test_batched_tokens_give_the_texts_of_single_outputs(engine_tokenizer: Any) -> None:
    """The requests have a stop string, reasoning content and an id that has already ended."""
    tokens = engine_tokenizer("<think>\nwhy not\n</think>\n\nsun 👩 END moon")["input_ids"]
    options = {"num_prompt_tokens": 3, "num_cached_tokens": 2}
    taken = []
    for is_batch in (False, True):
        rig = Rig(engine_tokenizer, "hermes", "qwen3")
        rig.submit("stops", sampling=SamplingParams(max_tokens=99, stop=("END",)))
        rig.submit("chat", text=None, messages=QUESTION)
        rig.scheduler.clear()
        texts = []
        for place, token in enumerate(tokens):
            if is_batch and place > 0:
                batch = TokenBatch([], request_ids=["stops", "gone", "chat"], token_ids=np.array([token] * 3, np.int32))
                rig.worker.handle(decoder(TokenBatch)(encode(batch)))
            else:
                outs = [TokenOut(request_id=name, token_ids=[token], **options) for name in ("stops", "chat")]
                rig.worker.handle(TokenBatch(outs))
            texts.append(rig.take())
        taken.append((texts, rig.scheduler, rig.num_requests))
    assert taken[0] == taken[1]
    assert [text.finish_reason for texts in taken[0][0] for text in texts].count("stop") == 1


def test_a_prompt_is_tokenized_once_for_all_its_outputs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []
    monkeypatch.setattr(
        "minisgl_server.tokenizer.prompt_encoder.encode_prompt", lambda _, text, *__: encoded.append(text) or [5, 6]
    )
    sampling = SamplingParams(max_tokens=8, n=3, seed=7, stop="!")
    rig.submit("a", sibling_ids=["b", "c"], sampling=sampling, echo=True)
    assert encoded == ["Hello"]
    assert [each.request_id for each in rig.scheduler] == ["a", "b", "c"]
    assert [each.sampling for each in rig.scheduler] == sampling.split()
    assert all(each.token_ids.tolist() == [5, 6] for each in rig.scheduler)
    for name, text in (("b", "one!"), ("c", "two"), ("a", "three")):
        rig.output(text, name, finish_reason="length")
    texts = rig.take()
    assert [(text.request_id, text.text) for text in texts] == [("b", "one"), ("c", "two"), ("a", "three")]
    assert all(text.prompt_text == "Hello" for text in texts)
    rig.submit("d", sibling_ids=["e"], sampling=SamplingParams(max_tokens=100, n=2))
    assert [(each.request_id, each.param) for each in rig.take()] == [("d", "max_tokens")]
    assert rig.num_requests == 0


class RecordingTokenizer:
    """Tokenizer that records how many characters it tokenizes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.num_chars = tokenizer, 0

    def __call__(self, text: str, **options: Any) -> Any:
        self.num_chars += len(text)
        return self.tokenizer(text, **options)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def test_only_the_end_of_a_truncated_text_is_tokenized(engine_tokenizer: Any) -> None:
    rig = Rig(RecordingTokenizer(engine_tokenizer))
    text = "once upon a time " * 20_000 + "the end"
    rig.submit(text=text, truncate_prompt_tokens=4)
    [submit] = rig.scheduler
    assert submit.token_ids.tolist() == engine_tokenizer(text)["input_ids"][-4:]
    assert rig.tokenizer.num_chars < len(text) // 10


def test_waiting_prompts_are_dropped_once_aborted(rig: Rig) -> None:
    sampling = SamplingParams(max_tokens=8)
    queue = TokenizerQueue(rig.worker)
    rig.submit("runs")
    del rig.scheduler[:]
    queue.add(Tokenize(request_id="query", text="gone", sampling=sampling, only_tokens=True))
    queue.add(Abort("query"))
    queue.run_next()
    assert rig.take() == []
    for name in ("gone", "half", "stays"):
        siblings = ["half's"] if name == "half" else []
        several = SamplingParams(max_tokens=8, n=1 + len(siblings))
        queue.add(Tokenize(request_id=name, text=name, sampling=several, sibling_ids=siblings))
    queue.add(RequestCounts(worker=3))
    queue.add(TokenBatch([TokenOut(request_id="runs", token_ids=[5], finish_reason="length")]))
    assert [text.request_id for text in rig.take()] == ["runs"]
    for name in ("gone", "half", "unknown"):
        queue.add(Abort(name))
    assert rig.scheduler == []
    for _ in range(5):
        queue.run_next()
    half, halfs, abort, stays, count = rig.scheduler
    assert [each.request_id for each in (half, halfs, abort, stays)] == ["half", "half's", "half", "stays"]
    assert isinstance(abort, Abort)
    assert count.counts == {"tokenizer 3": 2}
    queue.add(Abort("stays"))
    assert rig.scheduler[5:] == [Abort("stays")]
    queue.add(Tokenize(request_id="gone", text="again", sampling=sampling))
    queue.run_next()
    assert rig.scheduler[-1].request_id == "gone"


def test_waiting_prompts_are_not_starved(rig: Rig) -> None:
    with (
        IpcAddresses.create() as endpoints,
        Sender(endpoints.tokenizer_in[0]) as sender,
        Receiver[Any](endpoints.tokenizer_in[0], Tokenize | TokenBatch | Stop) as receiver,
    ):
        sender.send(Tokenize(request_id="a", text="Hello", sampling=SamplingParams(max_tokens=8)))
        for _ in range(100):
            sender.send(TokenBatch([TokenOut(request_id="other", token_ids=[5])]))
        sender.send(Stop())
        TokenizerQueue(rig.worker).run(receiver)
    assert [each.request_id for each in rig.scheduler] == ["a"]


def test_a_long_prompt_does_not_delay_other_messages(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.submit("runs")
    del rig.scheduler[:]
    may_end, encode = threading.Event(), PromptEncoder.encode

    def slow(encoder: PromptEncoder, message: Tokenize) -> Any:
        assert may_end.wait(20)
        return encode(encoder, message)

    monkeypatch.setattr(PromptEncoder, "encode", slow)
    queue, long = TokenizerQueue(rig.worker), "x " * 30_000
    sampling = SamplingParams(max_tokens=8)
    for name in ("long", "gone"):
        queue.add(Tokenize(request_id=name, text=long, sampling=sampling))
    queue.add(Tokenize(request_id="tokens", text=long, sampling=sampling, only_tokens=True))
    queue.run_next()
    queue.add(Abort("gone"))
    queue.add(TokenBatch([TokenOut(request_id="runs", token_ids=[5], finish_reason="length")]))
    queue.run_next()
    assert [text.request_id for text in rig.take()] == ["runs"]
    queue.add(RequestCounts(worker=3))
    queue.add(Detokenize(request_id="text", token_ids=[5]))
    for _ in range(3):
        queue.run_next()
    assert [each.request_id for each in rig.take()] == ["text"], "short messages overtake the long prompt"
    may_end.set()
    while len(rig.api) < 2:
        queue.run_next()
    refused, tokens = rig.api
    assert (refused.request_id, refused.kind) == ("long", "too_long")
    assert (tokens.request_id, len(tokens.token_ids)) == ("tokens", len(rig.tokenizer(long)["input_ids"]))
    assert rig.scheduler == []
    queue.run_next()
    [count] = rig.scheduler
    assert isinstance(count, RequestCounts), "it follows all earlier messages"


def test_shorter_prompts_overtake_a_long_one_but_not_forever(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    order, may_end, now = list[str](), threading.Event(), 0.0
    monkeypatch.setattr(PromptEncoder, "encode", lambda self, m: order.append(m.request_id) or may_end.wait(20))
    monkeypatch.setattr(TokenizerWorker, "handle", lambda *_: None)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    queue = TokenizerQueue(rig.worker)
    for name, num_chars, arrival in (
        ("runs", 60_000, 0),
        ("long", 4_000_000, 0),
        ("short", 60_000, 1),
        ("late", 60_000, 100),
    ):
        now = arrival
        queue.add(Tokenize(request_id=name, text="x" * num_chars, sampling=SamplingParams()))
        queue.run_next()
    may_end.set()
    for _ in range(20_000):
        queue.run_next()
        time.sleep(0.001)
        if len(order) == 4:
            break
    assert order == ["runs", "short", "long", "late"]


@pytest.mark.parametrize(
    "parameters",
    [{"enum": list(range(20_000))}, {"enum": [None] * 20_000}, {f"name {number}": 1 for number in range(8_000)}],
)
def test_tools_count_as_prompt_text(rig: Rig, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any]) -> None:
    """Templates render tools as JSON, which takes as long to tokenize as other text."""
    threads = list[str]()
    monkeypatch.setattr(PromptEncoder, "encode", lambda *_: threads.append(threading.current_thread().name))
    tools = ToolUse(tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    queue = TokenizerQueue(rig.worker)
    queue.add(Tokenize(request_id="a", sampling=SamplingParams(), messages=QUESTION, tools=tools))
    queue.run_next()
    deadline = time.monotonic() + 20
    while not threads and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threads == ["tokenize"]


def test_chats_run_on_a_thread_after_a_slow_one(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, encode = list[str](), PromptEncoder.encode

    def record(encoder: PromptEncoder, message: Tokenize) -> Any:
        threads.append(threading.current_thread().name)
        return encode(encoder, message)

    monkeypatch.setattr(PromptEncoder, "encode", record)
    queue, here = TokenizerQueue(rig.worker), threading.current_thread().name
    deadline = time.monotonic() + 20
    for number, (slow_s, expected) in enumerate(
        [(100.0, here), (0.0, here), (0.0, "tokenize"), (100.0, "tokenize")], 1
    ):
        monkeypatch.setattr(tokenizer_queue, "_SLOW_S", slow_s)
        queue.add(Tokenize(request_id=f"{number}", sampling=SamplingParams(), messages=QUESTION))
        while len(rig.scheduler + rig.api) < number and time.monotonic() < deadline:
            queue.run_next()
        assert threads.pop() == expected
    queue.add(Tokenize(request_id="text", sampling=SamplingParams(), text="Hi"))
    queue.run_next()
    assert threads == [here]


def test_a_stalled_cpu_does_not_make_a_template_slow(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[str]()

    def stall(encoder: PromptEncoder, message: Tokenize) -> Any:
        threads.append(threading.current_thread().name)
        time.sleep(0.3)
        return [5], "x"

    monkeypatch.setattr(PromptEncoder, "encode", stall)
    monkeypatch.setattr(tokenizer_queue, "_SLOW_S", 0.2)
    queue = TokenizerQueue(rig.worker)
    for name in "ab":
        queue.add(Tokenize(request_id=name, sampling=SamplingParams(), messages=QUESTION))
        queue.run_next()
    assert threads == 2 * [threading.current_thread().name]


def test_waiting_prompts_are_measured_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring a chat of thousands of messages takes milliseconds, and the queue is searched for each new message."""
    measured, num_chars = list[str](), Tokenize.num_chars
    monkeypatch.setattr(
        Tokenize, "num_chars", property(lambda self: measured.append(self.request_id) or num_chars.fget(self))
    )
    may_end = threading.Event()
    monkeypatch.setattr(PromptEncoder, "encode", lambda self, message: may_end.wait(20))
    queue, names = TokenizerQueue(rig.worker), [f"long {number}" for number in range(5)]
    for name in names:
        queue.add(Tokenize(request_id=name, text="x " * 30_000, sampling=SamplingParams()))
    for number in range(5):
        queue.run_next()
        queue.add(Detokenize(request_id=f"text {number}", token_ids=[5]))
        queue.run_next()
    assert measured == names
    may_end.set()


def test_aborted_prompts_hold_no_memory_while_they_wait(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, size = threading.Event(), 4_000_000
    monkeypatch.setattr(PromptEncoder, "encode", lambda self, message: may_end.wait(20))
    queue, sampling = TokenizerQueue(rig.worker), SamplingParams(n=2)
    queue.add(Tokenize(request_id="runs", text="x " * 30_000, sampling=SamplingParams()))
    queue.run_next()
    tracemalloc.start()
    for number in range(5):
        queue.add(Tokenize(request_id=f"{number}", text="x" * size, sampling=sampling, sibling_ids=[f"{number}'s"]))
        queue.add(Abort(f"{number}"))
    assert tracemalloc.get_traced_memory()[0] > 5 * size, "the siblings still wait"
    for number in range(5):
        queue.add(Abort(f"{number}'s"))
    assert tracemalloc.get_traced_memory()[0] < size
    tracemalloc.stop()
    may_end.set()


def test_abort_and_rejection_free_the_request(rig: Rig) -> None:
    rig.submit("a")
    rig.submit("b")
    rig.worker.handle(Abort("a"))
    rig.worker.handle(Abort("a"))
    rig.worker.handle(Abort("unknown"))
    assert rig.scheduler[2:] == [Abort("a")]
    rig.worker.handle(Rejected(request_id="b", kind="queue_full", message="full"))
    rig.worker.handle(Rejected(request_id="a", kind="queue_full", message="late"))
    assert [message.request_id for message in rig.take()] == ["b"]
    assert rig.num_requests == 0


def test_the_default_limit_is_the_remaining_context(rig: Rig) -> None:
    for most, wanted in ((1000, MAX_SEQ_LEN - 1), (16, 16)):
        rig.submit(max_tokens_is_default=True, sampling=SamplingParams(max_tokens=most))
        assert rig.scheduler.pop().sampling.max_tokens == wanted


def test_error_messages_quote_the_request(rig: Rig) -> None:
    names = {
        "prompt": "text[2]",
        "max_tokens": "max_completion_tokens",
        "stop_token_ids": "sampling_params.stop_token_ids",
    }
    for options, param in (
        ({"text": ""}, "text[2]"),
        ({"sampling": SamplingParams(max_tokens=MAX_SEQ_LEN)}, "max_completion_tokens"),
        ({"sampling": SamplingParams(stop_token_ids=(49152,), max_tokens=1)}, "sampling_params.stop_token_ids"),
        ({"sampling": SamplingParams(logit_bias={49152: 1.0}, max_tokens=1)}, "logit_bias"),
    ):
        rig.submit(field_names=names, **options)
        [refusal] = rig.take()
        assert refusal.param == param
        assert refusal.message.startswith("This model's maximum context" if refusal.kind == "too_long" else f"{param}=")


LONG = SamplingParams(max_tokens=MAX_SEQ_LEN, min_tokens=MAX_SEQ_LEN)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"text": "word " * MAX_SEQ_LEN}, "prompt"),
        ({"text": None, "messages": [{"role": "user", "content": "word " * MAX_SEQ_LEN}]}, "messages"),
        ({"sampling": LONG}, "max_tokens"),
        ({"sampling": LONG, "max_tokens_is_default": True}, "min_tokens"),
    ],
)
def test_prompts_beyond_the_context_have_their_own_code(rig: Rig, options: dict[str, Any], param: str) -> None:
    rig.submit(**options)
    [refusal] = rig.take()
    assert (refusal.kind, refusal.param) == ("too_long", param)
    assert (rig.scheduler, rig.num_requests) == ([], 0)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"text": ""}, "prompt"),
        ({"text": None, "messages": []}, "messages"),
        ({"text": None, "token_ids": []}, "prompt"),
        ({"text": None, "token_ids": [1, 49152]}, "prompt"),
        ({"text": None, "token_ids": [-1]}, "prompt"),
        ({"sampling": SamplingParams(stop_token_ids=(49152,), max_tokens=1)}, "stop_token_ids"),
        ({"sampling": SamplingParams(logit_bias={49152: 1.0}, max_tokens=1)}, "logit_bias"),
    ],
)
def test_invalid_values_are_rejected_by_field_name(rig: Rig, options: dict[str, Any], param: str) -> None:
    rig.submit(**options)
    [refusal] = rig.take()
    assert (refusal.kind, refusal.param) == ("invalid", param)
    assert rig.scheduler == []
    assert rig.num_requests == 0


def test_a_tokenizer_may_have_ids_beyond_int32(tmp_path: Path) -> None:
    """The scheduler rejects such a prompt, as it rejects other unknown tokens."""
    from transformers import PreTrainedTokenizerFast

    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 2**32 - 1}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": []}))
    rig = Rig(PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json")))
    rig.submit(text="b")
    assert [submit.token_ids.tolist() for submit in rig.scheduler] == [[2**31 - 1]]


def test_logprobs_name_their_tokens(rig: Rig) -> None:
    world, sun, eos = rig.tokenizer(" world sun")["input_ids"] + [2]
    rig.submit(echo=True, sampling=SamplingParams(max_tokens=8, logprobs=1, prompt_logprobs=1))
    places = [TokenLogprobs(Logprob(t, -1.0, 1), [Logprob(sun, -1.0, 1)]) for t in (world, eos)]
    options = {"prompt_logprobs": [LogprobArrays()], "logprobs": places, "finish_reason": "stop", "stop_token_id": eos}
    rig.output([world, eos], **options)
    [prompt, text] = rig.take()
    assert prompt.prompt_text == "Hello"
    assert prompt.prompt_token_ids == rig.tokenizer("Hello")["input_ids"]
    assert prompt.token_bytes == {prompt.prompt_token_ids[0]: b"Hello"}
    assert (text.text, text.logprobs) == (" world", places), "one per token, including EOS"
    assert [text.token_bytes[token] for token in (world, sun, eos)] == [b" world", b" sun", b"<|im_end|>"]
    rig.submit(text=None, messages=QUESTION, sampling=SamplingParams(max_tokens=8, logprobs=1))
    rig.output([world, eos], **options | {"prompt_logprobs": None})
    [text] = rig.take()
    assert (text.text, text.logprobs) == (" world", places[:1]), "those of a chat are those of its text"


def test_an_internal_error_fails_its_request_only(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.submit("a")
    rig.submit("b")
    broken: Any = ["no token"]
    good = rig.tokenizer(" fine")["input_ids"]
    rig.worker.handle(
        TokenBatch([TokenOut(request_id="a", token_ids=broken), TokenOut(request_id="b", token_ids=good)])
    )
    refusal, text = rig.take()
    assert (refusal.request_id, refusal.kind) == ("a", "internal")
    assert (text.request_id, text.text) == ("b", " fine")
    assert rig.scheduler[2:] == [Abort("a")]
    assert rig.num_requests == 1
    assert [record.request_id for record in caplog.records] == ["a"]


TOOLS = ToolUse(tools=[{"type": "function", "function": {"name": "get"}}], is_required=True)
QUESTION = [{"role": "user", "content": "Hi"}]


class FailingParser:
    """Raises on every call."""

    def __init__(self, content: str | None) -> None:
        self.content = content
        self.is_done = self.has_calls = False

    def push(self, text: str, finished: bool) -> ParsedText:
        if self.content is None:
            raise KeyError("a bug")
        return ParsedText("", self.content, [])


@pytest.mark.parametrize("content", [None, "\ud83d"], ids=["none", "no text"])
def test_a_failing_parser_ends_its_request_only(
    engine_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    rig = Rig(engine_tokenizer)
    monkeypatch.setattr(ChatFormat, "parser", lambda *_: FailingParser(content))
    rig.submit("a", text=None, messages=QUESTION)
    rig.submit("b")
    ids = engine_tokenizer(" fine")["input_ids"]
    rig.worker.handle(TokenBatch([TokenOut(request_id=name, token_ids=ids) for name in "ab"]))
    refusal, text = sorted(rig.take(), key=lambda each: each.request_id)
    assert (refusal.request_id, refusal.kind) == ("a", "internal")
    assert (text.request_id, text.text) == ("b", " fine")
    assert rig.scheduler[2:] == [Abort("a")]
    assert rig.num_requests == 1


def test_reasoning_content_and_calls_are_separated(engine_tokenizer: Any) -> None:
    rig = Rig(engine_tokenizer, "hermes", "qwen3")
    rig.submit(text=None, messages=QUESTION, tools=ToolUse(tools=TOOLS.tools))
    assert rig.scheduler[0].grammar is None
    rig.output('<think>\nHm.\n</think>\n\nI do. <tool_call>{"name": "get", "arguments": {"x')
    rig.output('": 1}}</tool_call>', finish_reason="stop")
    first, last = rig.take()
    assert (first.reasoning, first.text) == ("Hm.", "I do.")
    assert [(call.index, call.name, call.arguments) for call in first.tool_calls] == [(0, "get", '{"x')]
    assert [(call.index, call.name, call.arguments) for call in last.tool_calls] == [(0, None, '": 1}')]
    assert last.finish_reason == "tool_calls"


def test_the_only_allowed_call_ends_the_output(engine_tokenizer: Any) -> None:
    rig = Rig(engine_tokenizer, "hermes")
    rig.submit(text=None, messages=QUESTION, tools=ToolUse(tools=TOOLS.tools, parallel=False))
    rig.output('<tool_call>{"name": "get", "arguments": {}} and more')
    [text] = rig.take()
    assert (text.finish_reason, text.text) == ("tool_calls", "")
    assert isinstance(rig.scheduler[-1], Abort)
    assert rig.num_requests == 0


def test_grammars_of_formats_and_tools(engine_tokenizer: Any) -> None:
    form = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputs(json={"type": "null"}))
    rig = Rig(engine_tokenizer, "hermes")
    rig.submit(sampling=form, grammar_name="guided_json")
    submit = rig.scheduler.pop()
    assert submit.grammar == GrammarSource("json_schema", '{"type": "null"}', "guided_json")
    assert submit.sampling.structured_outputs is None, "the schema is sent once"
    rig.submit("b", text=None, messages=QUESTION, tools=TOOLS)
    grammar = rig.scheduler.pop().grammar
    assert grammar.kind == "tool_calls"
    assert json.loads(grammar.text)["calls"][0][0] == "<tool_call>\n"
    rig.submit("c", text=None, messages=QUESTION, tools=ToolUse(tools=TOOLS.tools), sampling=form)
    assert json.loads(rig.scheduler.pop().grammar.text)["otherwise"] == {"type": "null"}


def test_tools_need_a_known_format(rig: Rig) -> None:
    rig.submit(text=None, messages=QUESTION, tools=TOOLS)
    [rejected] = rig.take()
    assert (rejected.kind, rejected.param) == ("invalid", "tools")
    assert "--tool-call-parser" in rejected.message


def test_structured_output_begins_after_reasoning(engine_tokenizer: Any) -> None:
    """The token that ends the reasoning starts the grammar. Without such a token, the grammar applies from the beginning."""
    form = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputs(choice=("a",)))
    rig = Rig(engine_tokenizer, "none", "deepseek_r1")
    rig.submit(text=None, messages=QUESTION, sampling=form)
    assert rig.scheduler.pop().grammar.reasoning_end_token is None
    rig.output("a", finish_reason="stop")
    [answer] = rig.take()
    assert (answer.text, answer.reasoning) == ("a", ""), "the structured output is the content"
    thinking = copy.deepcopy(engine_tokenizer)
    thinking.add_tokens(["</think>"])
    rig = Rig(thinking, "none", "deepseek_r1")
    rig.submit(text=None, messages=QUESTION, sampling=form)
    grammar = rig.scheduler.pop().grammar
    assert (grammar.reasoning_end_token, grammar.reasoning_begin_token) == (
        thinking.convert_tokens_to_ids("</think>"),
        None,
    )
    thinking.add_tokens(["<think>"])
    rig = Rig(thinking, "none", "qwen3")
    rig.submit(text=None, messages=QUESTION, sampling=form)
    grammar = rig.scheduler.pop().grammar
    tags = tuple(thinking.convert_tokens_to_ids(["</think>", "<think>"]))
    assert (grammar.reasoning_end_token, grammar.reasoning_begin_token) == tags, (
        "the model may answer without reasoning"
    )


def test_requests_of_a_lost_engine_are_retried_or_fail(engine_tokenizer: Any) -> None:
    """They fail if text was sent. Later output of the lost engine is dropped."""
    rig = Rig(engine_tokenizer, num_replicas=2)
    rig.submit("sent")
    rig.submit("waits")
    rig.submit("half a character", echo=True)
    rig.submit("whole", is_streamed=False)
    rig.submit("elsewhere")
    first = {submit.request_id: submit for submit in rig.scheduler}
    rig.output(" world", "sent")
    rig.output(engine_tokenizer("👩")["input_ids"][:1], "half a character")
    rig.output(" discarded", "whole")
    [text] = rig.take()
    assert text.request_id == "sent"
    rig.scheduler.clear()
    names = ["sent", "waits", "half a character", "whole", "ended"]
    rig.worker.handle(ReplicaLost(0, names))
    assert rig.scheduler == [Ended(["sent"]), *(first[name] for name in names[1:4]), Ended(["ended"])]
    [error] = rig.take()
    assert (error.request_id, error.kind) == ("sent", "replica_lost")
    rig.output(" late", "waits")
    rig.worker.handle(Rejected(request_id="waits", kind="queue_full", message="late", engine_id=0))
    assert rig.take() == [], "the output of the lost engine"
    for name in ("waits", "half a character", "whole", "elsewhere"):
        for piece, reason in ((" new", None), (" text", "length")):
            ids = engine_tokenizer(piece)["input_ids"]
            out = TokenOut(request_id=name, token_ids=ids, finish_reason=reason, num_prompt_tokens=1)
            rig.worker.handle(TokenBatch([out], engine_id=2))
    found: dict[str, list[Text]] = {}
    for each in rig.take():
        assert isinstance(each, Text)
        found.setdefault(each.request_id, []).append(each)
    assert {name: "".join(each.text for each in texts) for name, texts in found.items()} == dict.fromkeys(
        ("waits", "half a character", "whole", "elsewhere"), " new text"
    )
    assert found["half a character"][0].prompt_text == "Hello"
    assert [len(found[name]) for name in ("waits", "whole")] == [2, 1]
    assert found["whole"][0].token_ids == engine_tokenizer(" new text")["input_ids"]
    ended = [name for message in rig.scheduler[5:] for name in message.request_ids if isinstance(message, Ended)]
    assert ended == ["waits", "half a character", "whole", "elsewhere"]
    assert rig.num_requests == len(rig.worker._retries) == 0


def test_a_request_that_ends_its_engines_is_not_retried_forever(engine_tokenizer: Any) -> None:
    rig = Rig(engine_tokenizer, num_replicas=8)
    rig.submit("a")
    for replica in range(MAX_ATTEMPTS):
        assert rig.take() == []
        assert len(rig.scheduler) == replica + 1
        rig.worker.handle(ReplicaLost(replica, ["a"]))
    assert rig.scheduler[MAX_ATTEMPTS:] == [Ended(["a"])]
    [error] = rig.take()
    assert (error.request_id, error.kind) == ("a", "replica_lost")
    assert rig.num_requests == len(rig.worker._retries) == 0


def test_another_engine_may_reject_a_retried_request(engine_tokenizer: Any) -> None:
    rig = Rig(engine_tokenizer, num_replicas=2)
    rig.submit("a")
    rig.worker.handle(ReplicaLost(1, ["a"]))
    rig.worker.handle(Rejected(request_id="a", kind="queue_full", message="late", engine_id=1))
    assert rig.take() == []
    rejected = Rejected(request_id="a", kind="queue_full", message="full", engine_id=2)
    rig.worker.handle(rejected)
    assert rig.take() == [rejected]
    assert rig.scheduler[-1] == Ended(["a"])


def test_the_worker_keeps_few_ids_of_lost_engines(engine_tokenizer: Any) -> None:
    rig = Rig(engine_tokenizer, num_replicas=2)
    for engine in (*range(0, 40, 2), 1):
        rig.submit(str(engine))
        rig.worker.handle(ReplicaLost(engine, [str(engine)]))
    assert len(rig.worker._lost) == 2
    for engine in (0, 38, 1, 3, -1):
        rig.worker.handle(Rejected(request_id=str(engine), kind="internal", message="", engine_id=engine))
    assert rig.take() == [], "the engines 0, 38 and 1 were lost, and the others have no such requests"
    for engine, name in ((40, "0"), (3, "1"), (-1, "2")):
        rig.worker.handle(Rejected(request_id=name, kind="internal", message="", engine_id=engine))
    assert [each.request_id for each in rig.take()] == ["0", "1", "2"]


def test_whole_chats_keep_reasoning_and_tool_calls(engine_tokenizer: Any) -> None:
    """An output that is returned at once has the same parts as a stream."""
    text = 2 * 'Look. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> ' + "Yes STOP"
    tools = ToolUse(tools=[{"type": "function", "function": {"name": "f"}}])
    results = []
    for is_streamed in (True, False):
        rig = Rig(engine_tokenizer, "hermes", num_replicas=2)
        chat = [{"role": "user", "content": "Hi"}]
        sampling = SamplingParams(max_tokens=100, logprobs=0, stop="STOP")
        rig.submit(text=None, messages=chat, tools=tools, sampling=sampling, is_streamed=is_streamed)
        for token in engine_tokenizer(text)["input_ids"]:
            rig.output([token], logprobs=[TokenLogprobs(Logprob(token, -1.0, 1), [])])
        pieces = rig.take()
        assert (len(pieces) > 5) is is_streamed
        calls = [call for piece in pieces for call in piece.tool_calls]
        names = [call.name for call in calls if call.name]
        segments = Segments()
        for piece in pieces:
            segments.push(piece)
        contents = [(each.kind, each.content) for each in segments.all]
        shown = ["".join(entry["token"] for entry in each.logprobs) for each in segments.all]
        assert shown == ["Look.", "", " Look.", "", " Yes STOP"], is_streamed
        results.append((contents, names, "".join(call.arguments for call in calls)))
    assert results[0] == results[1]
    call = ("call", '{"a": 1}')
    assert results[0] == (
        [("text", "Look."), call, ("text", " Look."), call, ("text", " Yes")],
        ["f", "f"],
        2 * '{"a": 1}',
    )


@pytest.mark.parametrize("is_streamed", [False, True])
def test_log_probabilities_of_a_text_begin_after_the_reasoning(engine_tokenizer: Any, is_streamed: bool) -> None:
    rig = Rig(engine_tokenizer, "hermes", "qwen3", num_replicas=2)
    sampling = SamplingParams(max_tokens=100, logprobs=0)
    rig.submit(text=None, messages=QUESTION, sampling=sampling, is_streamed=is_streamed)
    token_ids = engine_tokenizer("<think>\nYes or no? Yes\n</think>\n\nYes or no")["input_ids"]
    for token in token_ids:
        rig.output([token], logprobs=[TokenLogprobs(Logprob(token, -1.0, 1), [])])
    rig.output([2], finish_reason="stop", stop_token_id=2)
    segments = Segments()
    for piece in rig.take():
        segments.push(piece)
    shown = [(each.content, "".join(entry["token"] for entry in each.logprobs)) for each in segments.all]
    assert shown == [("Yes or no? Yes", ""), ("Yes or no", "Yes or no")]


@pytest.mark.parametrize("text", ["Yes ", "think"])
def test_log_probabilities_begin_after_the_last_tag(engine_tokenizer: Any, text: str) -> None:
    """All tokens arrive at once, and a part of a stop string after the text is held back."""
    rig = Rig(engine_tokenizer, "hermes", "qwen3")
    rig.submit(text=None, messages=QUESTION, sampling=SamplingParams(max_tokens=100, logprobs=0, stop="STOP"))
    token_ids = engine_tokenizer(f"<think>\nYes or no? Yes\n</think>\n\n{text}ST")["input_ids"]
    rig.output(token_ids, logprobs=[TokenLogprobs(Logprob(token, -1.0, 1), []) for token in token_ids])
    segments = Segments()
    for piece in rig.take():
        segments.push(piece)
    shown = [(each.content, "".join(entry["token"] for entry in each.logprobs)) for each in segments.all]
    assert shown == [("Yes or no? Yes", ""), (text, f"{text}ST")]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_held_output_is_returned_in_parts(engine_tokenizer: Any, is_streamed: bool) -> None:
    """Text that may become a tool call is withheld, and with a router all output of requests without streaming."""
    rig = Rig(engine_tokenizer, "hermes", num_replicas=2)
    sampling = SamplingParams(max_tokens=8, logprobs=0)
    rig.submit(
        text=None, messages=QUESTION, tools=ToolUse(tools=TOOLS.tools), sampling=sampling, is_streamed=is_streamed
    )
    begin = engine_tokenizer('<tool_call>{"name": "')["input_ids"]
    [word] = engine_tokenizer(" world")["input_ids"]
    token_ids = begin + [word] * (3000 - len(begin))
    for token in token_ids:
        rig.output([token], logprobs=[TokenLogprobs(Logprob(token, -1.0, 1), [])])
    assert rig.take() == []
    rig.output([2], finish_reason="stop", stop_token_id=2)
    assert [len(message.outputs) for message in rig.api if isinstance(message, TextBatch)] == [1] * 6
    texts = rig.take()
    assert [len(text.token_ids) for text in texts] == [*[512] * 5, 441]
    assert [text.finish_reason for text in texts] == [*[None] * 5, "stop"]
    assert [token for text in texts for token in text.token_ids] == [*token_ids, 2]
    assert [each.token.token_id for text in texts for each in text.logprobs] == token_ids
    assert all(text.token_bytes.keys() == set(text.token_ids) - {2} for text in texts)
    segments = Segments()
    for text in texts:
        segments.push(text)
    [segment] = segments.all
    assert segment.content == '<tool_call>{"name": "' + " world" * (3000 - len(begin))
    assert len(segment.logprobs) == 3000


def prompt_logprobs(token_ids: list[int]) -> list[LogprobArrays]:
    """Return log-probabilities of a prompt, in two parts."""
    ids, ones = np.array(token_ids[1:], np.int32), np.ones(len(token_ids) - 1, np.int32)
    return [
        LogprobArrays(ids[part], -ones[part], ones[part], 7 * ones[part], -2 * ones[part])
        for part in (slice(9), slice(9, None))
    ]


SIBLINGS: dict[str, Any] = {
    "sibling_ids": ["b", "c", "d"],
    "sampling": SamplingParams(prompt_logprobs=1, n=4, max_tokens=4),
}


def test_log_probabilities_of_a_prompt_are_computed_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine computes the whole prompt for them. The other outputs of the prompt find it in the prefix cache."""
    monkeypatch.setattr(request_output, "MAX_TEXT_SIZE", 16)
    token_ids = rig.tokenizer("One two three four. " * 8)["input_ids"]
    logprobs = prompt_logprobs(token_ids)
    places = prompt_entries(logprobs)
    rig.submit(text=None, token_ids=token_ids, **SIBLINGS)
    [first] = rig.scheduler
    assert first.sampling.prompt_logprobs == 1
    rig.worker.handle(Abort("c"))
    rig.output(" world", prompt_logprobs=logprobs, num_prompt_tokens=len(places))
    assert [(each.request_id, each.sampling.prompt_logprobs) for each in rig.scheduler[2:]] == [
        ("b", None),
        ("d", None),
    ]
    found = {"a": rig.take()}
    for name in ("d", "b"):
        rig.output(" world", name, finish_reason="length", num_prompt_tokens=len(places), num_cached_tokens=5)
        found[name] = rig.take()
    for name, texts in found.items():
        *parts, text = texts
        assert {each.request_id for each in texts} == {name}
        assert [each for part in parts for each in part.prompt_logprobs] == places  # type: ignore[union-attr]
        assert max(each.size for each in texts) <= 16  # type: ignore[union-attr]
        assert [each.prompt_token_ids for each in texts] == [token_ids, *[None] * len(parts)]  # type: ignore[union-attr]
        assert {each.num_cached_tokens for each in texts} == {0 if name == "a" else 5}  # type: ignore[union-attr]
        assert text.text == " world"  # type: ignore[union-attr]
    rig.output(" world", finish_reason="length")
    assert rig.num_requests == len(rig.worker._siblings) == 0


def test_a_chat_returns_its_prompt_once(rig: Rig) -> None:
    rig.submit(text=None, messages=QUESTION, return_prompt_ids=True, **SIBLINGS)
    token_ids = rig.scheduler[0].token_ids.tolist()
    logprobs = prompt_logprobs(token_ids)
    for name in ("a", "b"):
        rig.output(" world", name, prompt_logprobs=logprobs if name == "a" else None)
    (prompt, *texts), num_submitted = rig.take(), len(rig.scheduler)
    assert (prompt.prompt_logprobs, prompt.prompt_token_ids) == (prompt_entries(logprobs), token_ids)  # type: ignore[union-attr]
    assert [(text.request_id, text.prompt_logprobs, text.prompt_token_ids) for text in texts] == [  # type: ignore[union-attr]
        ("a", None, None),
        ("b", None, None),
    ]
    assert num_submitted == 4


def test_outputs_that_wait_for_log_probabilities_survive_a_lost_engine(engine_tokenizer: Any) -> None:
    rig = Rig(engine_tokenizer, num_replicas=2)
    token_ids = rig.tokenizer("One two three four. " * 8)["input_ids"]
    logprobs = prompt_logprobs(token_ids)
    places = prompt_entries(logprobs)
    rig.submit(text=None, token_ids=token_ids, **SIBLINGS, is_streamed=False)
    for replica in range(2):  # the first loss is before the log-probabilities, and the second after them
        rig.worker.handle(ReplicaLost(replica, ["a"]))
        out = TokenOut(request_id="a", token_ids=[7], prompt_logprobs=logprobs)
        rig.worker.handle(TokenBatch([out], engine_id=replica + 2))
    assert [each.request_id for each in rig.scheduler] == ["a", "a", "b", "c", "d", "a"]
    rig.worker.handle(ReplicaLost(2, ["b"]))
    for name in "abcd":
        out = TokenOut(request_id=name, token_ids=[7], finish_reason="length")
        rig.worker.handle(TokenBatch([out], engine_id=5))
    found: dict[str, list[Any]] = {}
    for text in rig.take():
        found.setdefault(text.request_id, []).extend(text.prompt_logprobs or ())  # type: ignore[union-attr]
    assert found == dict.fromkeys("abcd", places)
    assert rig.num_requests == len(rig.worker._siblings) == len(rig.worker._retries) == 0


def test_too_many_log_probabilities_of_a_prompt_are_refused_before_it_runs(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one output that fills the context are allowed, and a chat has them once."""
    monkeypatch.setattr(messages, "_MIN_RESPONSE_LOGPROBS", 1000)
    chat: dict[str, Any] = {"text": None, "messages": QUESTION}
    for prompt, n, num_top, is_refused in (
        ({"text": " world" * 63}, 1, 20, False),
        ({"text": " world" * 33}, 2, 20, True),
        ({"text": " world" * 32}, 2, 20, False),
        ({"text": " world" * 33}, 2, 19, False),
        (chat, 8, 20, False),
    ):
        rig.scheduler.clear()
        rig.submit(
            **prompt,
            sibling_ids=list("bcdefgh"[: n - 1]),
            sampling=SamplingParams(prompt_logprobs=num_top, n=n, max_tokens=1),
        )
        assert [(each.kind, each.param) for each in rig.take()] == [("invalid", "prompt_logprobs")] * is_refused  # type: ignore[union-attr]
        assert len(rig.scheduler) == 1 - is_refused


def test_log_probabilities_of_a_long_prompt_are_sent_in_parts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server processes each part at once, and serves no other client meanwhile."""
    monkeypatch.setattr(request_output, "MAX_TEXT_SIZE", 16)
    prompt = "One two three four. " * 8
    token_ids = rig.tokenizer(prompt)["input_ids"]
    [word] = rig.tokenizer(" world")["input_ids"]
    found = []
    for most in (16, 1000):
        monkeypatch.setattr(request_output, "MAX_TEXT_SIZE", most)
        rig.submit(text=prompt, echo=True, sampling=SamplingParams(max_tokens=8, logprobs=1, prompt_logprobs=1))
        last = TokenLogprobs(Logprob(word, -1.0, 1), [])
        rig.output(
            [word],
            prompt_logprobs=prompt_logprobs(token_ids),
            logprobs=[last],
            finish_reason="length",
            num_prompt_tokens=33,
        )
        texts = rig.take()
        assert all(isinstance(each, Text) and len(each.prompt_logprobs or ()) <= most for each in texts)
        assert [each.prompt_token_ids for each in texts] == [token_ids, *[None] * (len(texts) - 1)]  # type: ignore[union-attr]
        joined: dict[str, list[Any]] = {}
        logprobs = CompletionLogprobs(skips_special=True)
        for each in texts:
            assert each.num_prompt_tokens == 33  # type: ignore[union-attr]
            for name, values in (logprobs.push(each) or {}).items():  # type: ignore[arg-type]
                joined.setdefault(name, []).extend(values)
        found.append((joined, "".join((each.prompt_text or "") + each.text for each in texts)))  # type: ignore[union-attr]
    assert found[0] == found[1]
    assert "".join(found[0][0]["tokens"]) == found[0][1] == f"{prompt} world"
