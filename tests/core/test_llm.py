"""`LLM` on a tiny random Llama, compared with transformers."""

from __future__ import annotations

import copy
import dis
import gc
import itertools
import json
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_folder
import torch

from minisgl_core import LLM, SamplingParams
from minisgl_core.contracts.grammar import GrammarBackend, GrammarKind, GrammarState, Masks
from minisgl_core.contracts.structured_outputs import StructuredOutputs
from minisgl_core.errors import (
    InvalidValueError,
    MinisglError,
    ModelFormatError,
    ModelNotFoundError,
    TokenizerNotFoundError,
)
from minisgl_core.runtime import worker
from minisgl_core.runtime.engine_loop import EngineLoop
from minisgl_core.scheduler.page_manager import PageManager
from minisgl_core.scheduler.scheduler import Scheduler
from minisgl_core.text.detokenizer import OutputText

PROMPTS = [[5, 9, 3, 7, 11], [30], list(range(3, 23)), [5, 9, 3, 7, 12], [44, 44, 44], [5, 9, 3]]


def new_llm(**options: Any) -> LLM:
    fixed: dict[str, Any] = {"dtype": "float32", "platform": "cpu", "ops": "torch", "num_pages": 200, "page_size": 4}
    fixed["max_seq_len_override"] = 256
    return LLM(tiny_folder.llama(), **fixed | options)


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **{"ignore_eos": True} | more)


def assert_nothing_in_use(llm: LLM) -> None:
    assert not llm._loop.has_work
    assert not llm._running
    tiny.assert_nothing_in_use(llm._loop)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with new_llm() as made:
        yield made
        assert_nothing_in_use(made)


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    lengths = [12, 1, 7, 3, 20, 5]
    outputs = llm.generate(PROMPTS, [greedy(length) for length in lengths])
    for prompt, length, output in zip(PROMPTS, lengths, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert tuple(output.token_ids) == tiny.greedy(tuple(prompt), length)
        assert output.text == tiny_folder.words(output.token_ids)
        assert (output.finish_reason, output.stop_reason) == ("length", None)


def test_a_prompt_is_a_text_or_token_ids(llm: LLM) -> None:
    [by_text] = llm.generate("w5 w9 w3", greedy(4))
    [by_tokens] = llm.generate([5, 9, 3], greedy(4))
    [by_numpy] = llm.generate([np.int64(5), np.int64(9), np.int64(3)], greedy(4))
    [by_tensor] = llm.generate([torch.tensor([5, 9, 3])], greedy(4))
    assert by_text == by_tokens == by_numpy == by_tensor
    assert by_text.prompt_token_ids == [5, 9, 3]
    assert llm.generate([]) == []


def test_token_ids_without_a_tokenizer() -> None:
    with LLM(str(tiny.checkpoint()), dtype="float32", platform="cpu", num_pages=200, page_size=4) as llm:
        outputs = llm.generate(PROMPTS, greedy(6, logprobs=1))
        assert [tuple(output.token_ids) for output in outputs] == [tiny.greedy(tuple(each), 6) for each in PROMPTS]
        assert [(output.text, output.finish_reason) for output in outputs] == [("", "length")] * len(PROMPTS)
        stop = outputs[2].token_ids[3]
        [stopped] = llm.generate(PROMPTS[2], greedy(6, stop_token_ids=[stop]))
        assert (stopped.finish_reason, stopped.stop_reason, stopped.text) == ("stop", stop, "")
        assert_nothing_in_use(llm)


def test_texts_without_a_tokenizer_are_refused() -> None:
    chat = [{"role": "user", "content": "w5 w7"}]
    with LLM(str(tiny.checkpoint()), dtype="float32", platform="cpu", num_pages=200, page_size=4) as llm:
        with pytest.raises(InvalidValueError, match=r"a list of token ids.*has no tokenizer"):
            llm.generate("w5 w7", greedy(2))
        with pytest.raises(InvalidValueError, match=r"stop=.*stop_token_ids.*has no tokenizer"):
            llm.generate([5, 7], greedy(2, stop="w3"))
        with pytest.raises(InvalidValueError, match=r"structured_outputs=.*has no tokenizer"):
            llm.generate([5, 7], greedy(2, structured_outputs=StructuredOutputs(regex="a")))
        for call in (lambda: llm.chat(chat), lambda: llm.stream_chat(chat), lambda: llm.stream([5, 7], greedy(2))):
            with pytest.raises(TokenizerNotFoundError, match="has no tokenizer"):
                call()
        assert llm.stats.num_steps == 0
    with pytest.raises(TokenizerNotFoundError, match="holds no tokenizer"):
        LLM(str(tiny.checkpoint()), platform="cpu", num_pages=20, chat_template="{{ messages }}")


def test_chats_are_rendered_by_the_template(llm: LLM) -> None:
    chat = [{"role": "user", "content": "w5 w7"}]
    [one] = llm.chat(chat, greedy(3))
    assert one.prompt_token_ids == [5, 7, 9]
    assert [each.prompt_token_ids for each in llm.chat([chat, chat[:1]], greedy(1))] == [[5, 7, 9]] * 2
    assert "".join(llm.stream_chat(chat, greedy(3))) == one.text


@pytest.mark.parametrize("messages", ["w5", {"role": "user", "content": "w5"}, [["w5"]]])
def test_invalid_conversations_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"^messages"):
        llm.chat(messages, greedy(1))


@pytest.mark.parametrize("options", [{}, {"max_step_ms": "auto"}])
def test_max_step_ms_auto_sets_no_limit_for_llm(options: dict[str, str]) -> None:
    with new_llm(**options) as llm:
        assert llm._loop.scheduler.limits.max_step_s == 0


def test_more_prompts_than_max_queued_requests() -> None:
    with new_llm(max_queued_requests=2, max_running_requests=3) as llm:
        outputs = llm.generate([[3 + i] for i in range(15)], greedy(3))
        assert [tuple(output.token_ids) for output in outputs] == [tiny.greedy((3 + i,), 3) for i in range(15)]
        assert_nothing_in_use(llm)


def test_prompts_stay_cached_with_one_running_request() -> None:
    prompts = [list(range(first, first + 24)) for first in (3, 30)]
    with new_llm(num_pages=None, max_running_requests=1, max_seq_len_override=32) as llm:
        cached = [llm.generate(prompt, greedy(2))[0].cached_tokens for prompt in prompts * 2]
        assert cached == [0, 0, 20, 20]


def test_outputs_of_one_prompt_are_adjacent(llm: LLM) -> None:
    sampling = SamplingParams(n=3, seed=11, max_tokens=8, ignore_eos=True)
    outputs = llm.generate(PROMPTS[:2], [sampling, greedy(8, n=2)])
    assert [output.prompt_token_ids for output in outputs] == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 2
    assert len({tuple(output.token_ids) for output in outputs[:3]}) == 3
    assert outputs[3].token_ids == outputs[4].token_ids == list(tiny.greedy(tuple(PROMPTS[1]), 8))
    again = llm.generate(PROMPTS[0], sampling_params=sampling)
    assert [output.token_ids for output in again] == [output.token_ids for output in outputs[:3]]


def test_a_prompt_is_tokenized_once_for_all_of_its_outputs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, texts = type(llm.tokenizer), []
    tokenize = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda self, text, **more: texts.append(text) or tokenize(self, text, **more))
    sampling = SamplingParams(n=3, max_tokens=2, logit_bias={7: 100.0}, allowed_token_ids=[7, 8], ignore_eos=True)
    assert [output.token_ids for output in llm.generate("w5 w6", sampling)] == [[7, 7]] * 3
    assert texts == ["w5 w6"]


@pytest.mark.parametrize("options", [{}, {"max_prefill_length": 3}, {"cache": "naive", "disable_overlap": False}])
def test_logprobs_equal_transformers(options: dict[str, Any]) -> None:
    sampling = greedy(6, logprobs=5, prompt_logprobs=3)
    with new_llm(**options) as llm:
        llm.generate(PROMPTS, greedy(6))  # fills the prefix cache
        cached = llm.generate(PROMPTS, greedy(6, logprobs=5))
        outputs = llm.generate(PROMPTS, sampling)
        assert (sum(output.cached_tokens for output in cached) > 0) == (options.get("cache") != "naive")
        assert_nothing_in_use(llm)
    for prompt, output, after_hit in zip(PROMPTS, outputs, cached, strict=True):
        with torch.inference_mode():
            logits = tiny.reference_model()(torch.tensor([prompt + output.token_ids])).logits[0]
        expected = logits.double().log_softmax(-1)
        assert output.prompt_logprobs is not None
        assert output.logprobs is not None
        assert output.prompt_logprobs[0] is None
        places = [*output.prompt_logprobs[1:], *output.logprobs]
        assert after_hit.prompt_logprobs is None
        assert after_hit.logprobs is not None
        assert len(places) == len(prompt) + 5
        check_logprobs(places, expected, prompt[1:] + output.token_ids, [3] * (len(prompt) - 1) + [5] * 6)
        check_logprobs(after_hit.logprobs, expected[len(prompt) - 1 :], output.token_ids, [5] * 6)


def test_all_outputs_of_a_prompt_have_its_logprobs(llm: LLM) -> None:
    outputs = llm.generate(
        PROMPTS[:3], [greedy(2, n=2, prompt_logprobs=0), greedy(2, n=2), greedy(2, prompt_logprobs=0)]
    )
    tokens = [[each.token.token_id for each in (output.prompt_logprobs or [])[1:] if each] for output in outputs]
    assert tokens == [PROMPTS[0][1:]] * 2 + [[]] * 2 + [PROMPTS[2][1:]]


def check_logprobs(places: list[Any], expected: torch.Tensor, token_ids: list[int], num_top: list[int]) -> None:
    for place, row, token, count in zip(places, expected, token_ids, num_top, strict=False):
        assert place.token.token_id == token
        assert place.token.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert place.token.rank == 1 + int((row > row[token]).sum())
        best = row.topk(count)
        assert [entry.token_id for entry in place.top] == best.indices.tolist()
        assert [entry.logprob for entry in place.top] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert [entry.rank for entry in place.top] == list(range(1, count + 1))


def test_stop_strings_are_cut_off_the_output(llm: LLM) -> None:
    tokens = list(tiny.greedy(tuple(PROMPTS[2]), 20))
    text = tiny_folder.words(tokens)
    across = text[len(tiny_folder.words(tokens[:4])) - 1 :][:4]  # begins inside one word and ends inside the next
    first = text.index(across)
    [stopped, other] = llm.generate(PROMPTS[2:4], greedy(20, stop=("never", across)))
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (text[:first], "stop", across)
    assert stopped.token_ids == tokens[: len(stopped.token_ids)]
    assert across in tiny_folder.words(stopped.token_ids)
    assert across not in tiny_folder.words(stopped.token_ids[:-1])
    assert tuple(other.token_ids) == tiny.greedy(tuple(PROMPTS[3]), 20)[: len(other.token_ids)]
    assert llm.stats.num_output_tokens == len(stopped.token_ids) + len(other.token_ids), (
        "it went on after the stop string"
    )
    assert "".join(llm.stream(PROMPTS[2], greedy(20, stop=across))) == text[:first]
    including = greedy(20, stop=across, include_stop_str_in_output=True)
    assert llm.generate(PROMPTS[2], including)[0].text == text[:first] + across
    assert "".join(llm.stream(PROMPTS[2], including)) == text[:first] + across


def test_bad_words_and_allowed_tokens(llm: LLM) -> None:
    tokens = list(tiny.greedy(tuple(PROMPTS[2]), 8))
    [without] = llm.generate(PROMPTS[2], greedy(8, bad_words=[tiny_folder.words(tokens[3:5])]))
    assert without.token_ids[:4] == tokens[:4]
    assert without.token_ids[4] != tokens[4]
    [allowed] = llm.generate(PROMPTS[2], greedy(8, allowed_token_ids=[tokens[0], 5]))
    assert allowed.token_ids[0] == tokens[0]
    assert set(allowed.token_ids) <= {tokens[0], 5}
    with pytest.raises(InvalidValueError, match="bad_words"):
        llm.generate(PROMPTS[2], greedy(8, bad_words="w7", allowed_token_ids=[7]))


def test_stop_token_ids_and_eos_end_the_output(llm: LLM) -> None:
    tokens = list(tiny.greedy(tuple(PROMPTS[2]), 20))
    stop = tokens[5]
    end = tokens.index(stop)
    [output] = llm.generate(PROMPTS[2], greedy(20, stop_token_ids=(stop,)))
    assert output.token_ids == tokens[: end + 1]
    assert output.text == tiny_folder.words(tokens[:end])
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    [biased] = llm.generate(PROMPTS[2], greedy(20, ignore_eos=False, logit_bias={tiny.EOS: 100}))
    assert (biased.token_ids, biased.text) == ([tiny.EOS], "")
    assert (biased.finish_reason, biased.stop_reason) == ("stop", None)


def test_seeded_outputs_do_not_depend_on_the_batch(llm: LLM) -> None:
    seeded = SamplingParams(temperature=0.9, seed=4, top_p=0.9, max_tokens=12, ignore_eos=True)
    unseeded = SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True)
    [alone] = llm.generate(PROMPTS[0], seeded)
    others = llm.generate(PROMPTS, [seeded, unseeded, unseeded, seeded, greedy(3), unseeded])
    assert others[0].token_ids == alone.token_ids
    assert others[3].token_ids != alone.token_ids, "another prompt"
    with new_llm(page_size=1, max_prefill_length=2, cache="naive") as other:
        assert other.generate(PROMPTS, [seeded] + [unseeded] * 5)[0].token_ids == alone.token_ids
    drawn = {tuple(output.token_ids) for output in llm.generate([PROMPTS[0]] * 3, unseeded)}
    assert len(drawn) == 3, "outputs without a seed differ"


def test_streams_and_generate_calls_interleave(llm: LLM) -> None:
    expected = [tiny_folder.words(list(tiny.greedy(tuple(prompt), 9))) for prompt in PROMPTS]
    one, two = llm.stream(PROMPTS[0], greedy(9)), llm.stream(PROMPTS[1], greedy(9))
    pieces = [next(one), next(two)]
    pieces[0] += next(one)
    assert [output.text for output in llm.generate(PROMPTS[2:], greedy(9))] == expected[2:]
    assert pieces[0] + "".join(one) == expected[0]
    assert pieces[1] + "".join(two) == expected[1]


def test_closing_a_stream_frees_its_request(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[2], greedy(30))
    next(stream)
    assert llm._loop.scheduler.num_running == 1
    stream.close()  # type: ignore[attr-defined]
    assert_nothing_in_use(llm)
    assert (llm.stats.num_aborted, llm.stats.num_output_tokens) == (1, 1)
    never_started = llm.stream(PROMPTS[2], greedy(30))
    del never_started
    assert_nothing_in_use(llm)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupted_step_aborts_only_running_requests(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_llm(disable_overlap=not overlap) as llm:
        stream = llm.stream(PROMPTS[1], greedy(30))
        next(stream)
        execute_model, calls = llm._loop.model_runner.execute_model, 0

        def interrupted(plan: Any, *rest: None) -> Any:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise KeyboardInterrupt
            return execute_model(plan)

        monkeypatch.setattr(llm._loop.model_runner, "execute_model", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, greedy(30))
        assert_nothing_in_use(llm)
        with pytest.raises(MinisglError, match="cannot continue"):
            list(stream)
        outputs = llm.generate(PROMPTS, greedy(5))
        assert [tuple(output.token_ids) for output in outputs] == [tiny.greedy(tuple(p), 5) for p in PROMPTS]


def submit_interrupted(llm: LLM, target: int) -> bool:
    """Raise KeyboardInterrupt at point `target` of `LLM._submit` and its callees. Return False if there are fewer points.

    CPython handles a Ctrl-C after calls, at the beginning of functions and at the end of loops.
    """
    num_places, last = 0, dict[FrameType, str]()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_places
        frame.f_trace_opcodes = "minisgl_core" in frame.f_code.co_filename
        if event == "opcode":
            before, last[frame] = last.get(frame, ""), dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if before in ("", "CALL", "RESUME", "JUMP_BACKWARD"):
                num_places += 1
                if num_places > target:
                    raise KeyboardInterrupt
        return trace

    submit = llm._checked(PROMPTS[0], greedy(1))
    try:
        with llm._requests() as request_ids:
            sys.settrace(trace)
            try:
                llm._submit(submit, request_ids, is_incremental=False)
            finally:
                sys.settrace(None)
    except KeyboardInterrupt:
        return True
    finally:
        assert not llm._lock.locked()
        assert_nothing_in_use(llm)
    return False


def test_an_interrupted_submit_leaves_nothing_in_use(llm: LLM) -> None:
    num_places = next(target for target in itertools.count() if not submit_interrupted(llm, target))
    assert num_places > 20
    assert tuple(llm.generate([PROMPTS[0]], greedy(5))[0].token_ids) == tiny.greedy(tuple(PROMPTS[0]), 5)


class FailsAtTheThirdToken(GrammarState):
    """Grammar state that allows every token and fails at the third."""

    num_accepted = 0

    def fill_mask(self, mask: Masks) -> None:
        mask[:] = -1

    def accept(self, token_id: int) -> bool:
        self.num_accepted += 1
        return True

    def copy(self) -> FailsAtTheThirdToken:
        return copy.copy(self)

    @property
    def is_complete(self) -> bool:
        return bool(self.error)

    @property
    def is_finished(self) -> bool:
        return bool(self.error)

    @property
    def error(self) -> str:
        return "the grammar is too complex" if self.num_accepted >= 3 else ""


class FailingGrammar(GrammarBackend):
    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Any) -> None:
        pass

    @staticmethod
    def check(kind: GrammarKind, text: str, name: str) -> None:
        pass

    def compile(self, kind: GrammarKind, text: str, name: str) -> GrammarState:
        return FailsAtTheThirdToken()


def test_a_failing_grammar_ends_only_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "load_grammar_backend", lambda built, registry: FailingGrammar(None, 0, ()))
    form = greedy(9, structured_outputs=StructuredOutputs(regex=".*"))
    expected = [list(tiny.greedy(tuple(prompt), 9)) for prompt in PROMPTS[:2]]
    ended, whole = llm.generate(PROMPTS[:2], [form, greedy(9)])
    assert ended.finish_reason == "abort"
    assert "(the grammar is too complex)" in (ended.error or "")
    assert ended.token_ids == expected[0][:3]
    assert (whole.finish_reason, whole.error, whole.token_ids) == ("length", None, expected[1])
    pieces: list[str] = []
    with pytest.raises(MinisglError, match="too complex"):
        pieces.extend(llm.stream(PROMPTS[0], form))
    assert "".join(pieces) == tiny_folder.words(expected[0][:3])


@pytest.mark.parametrize(
    ("prompts", "sampling", "name"),
    [
        ("", greedy(1), "prompt"),
        ([[]], greedy(1), "prompt"),
        ([[5], [tiny.VOCAB_SIZE]], greedy(1), "prompt[0]"),
        ([[5], [5, -1]], greedy(1), "prompt[1]"),
        ([5, 2**40], greedy(1), "prompt[1]"),
        ([2**70], greedy(1), "prompt"),
        ([[1.5, 2.0]], greedy(1), "prompt"),
        ([True], greedy(1), "prompt"),
        ([["w5"]], greedy(1), "prompt"),
        ([[[5]]], greedy(1), "prompt"),
        ([None], greedy(1), "prompt"),
        (7, greedy(1), "prompts"),
        (None, greedy(1), "prompts"),
        ([[5] * 250], greedy(10), "max_tokens"),
        ([[5] * 256], greedy(1), "prompt"),
        ([[5], [6]], [greedy(1)], "sampling_params"),
        ([[5]], [], "sampling_params"),
        ([[5]], [3], "sampling_params"),
        ([[5]], 3, "sampling_params"),
        ([[5]], {"max_tokens": 3}, "sampling_params"),
        ([[5], [6]], {"max_tokens": 3, "seed": 1}, "sampling_params"),
        ([[5]], "w", "sampling_params"),
        ([[5]], greedy(1, logit_bias={tiny.VOCAB_SIZE: 1.0}), "logit_bias"),
    ],
)
def test_invalid_arguments_are_named_and_nothing_runs(llm: LLM, prompts: Any, sampling: Any, name: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        llm.generate(prompts, sampling)
    assert caught.value.name == name
    assert llm.stats.num_steps == 0


def test_invalid_token_ids_are_named_with_their_index(llm: LLM) -> None:
    for token in (-5, tiny.VOCAB_SIZE):
        with pytest.raises(InvalidValueError, match=rf"^prompt\[2\]={token} .* from 0 to {tiny.VOCAB_SIZE - 1}"):
            llm.generate([5, 6, token, -7])


def test_errors_name_the_index_of_the_prompt(llm: LLM) -> None:
    with pytest.raises(InvalidValueError, match="256 tokens") as caught:
        llm.generate([[5], [9] * 250, [3]], greedy(7))
    assert caught.value.__notes__ == ["This is about prompt 1 of 3, counted from 0."]


class Holder:
    """Holds a stream and itself, so that only the garbage collector frees them."""

    def __init__(self, stream: Iterator[str]) -> None:
        self.stream, self.me = stream, self


@pytest.mark.parametrize(
    "place",
    [OutputText.__init__, Scheduler.submit, Scheduler.schedule, PageManager.take, Scheduler.abort, EngineLoop.step],
)
@pytest.mark.parametrize("has_others", [True, False])
def test_streams_may_be_garbage_collected_at_any_time(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: Any, has_others: bool
) -> None:
    gc.collect()
    gc.freeze()  # later collections skip the million objects that exist now
    held = Holder(llm.stream(PROMPTS[2], greedy(200)))
    next(held.stream)
    other = llm.stream(PROMPTS[1], greedy(9))
    beginning = next(other) if has_others else ""
    closed = llm.stream(PROMPTS[3], greedy(9))
    next(closed)
    del held

    def collecting(*args: Any, **options: Any) -> Any:
        gc.collect()
        result = place(*args, **options)
        gc.collect()
        return result

    owners = {each.__name__: each for each in (OutputText, Scheduler, PageManager, EngineLoop)}
    gc.disable()
    try:
        monkeypatch.setattr(owners[place.__qualname__.split(".")[0]], place.__name__, collecting)
        closed.close()  # type: ignore[attr-defined]
        (output,) = llm.generate([PROMPTS[0]], greedy(6))
        rest = "".join(other)
    finally:
        gc.enable()
        gc.unfreeze()
    assert tuple(output.token_ids) == tiny.greedy(tuple(PROMPTS[0]), 6)
    assert beginning + rest == tiny_folder.words(list(tiny.greedy(tuple(PROMPTS[1]), 9)))


def test_scripts_may_end_with_an_open_stream(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from minisgl_core import LLM, SamplingParams\n"
        f"llm = LLM({tiny_folder.llama()!r}, platform='cpu', num_pages=50, max_seq_len_override=256)\n"
        "stream = llm.stream([5, 9], SamplingParams(max_tokens=200, ignore_eos=True))\n"
        "next(stream)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_calls_from_a_second_thread_are_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, over = threading.Event(), threading.Event()
    step = EngineLoop.step

    def slow(loop: EngineLoop) -> Any:
        inside.set()
        over.wait(60)
        return step(loop)

    monkeypatch.setattr(EngineLoop, "step", slow)
    outputs: list[Any] = []
    first = threading.Thread(target=lambda: outputs.extend(llm.generate([PROMPTS[0]], greedy(6))))
    first.start()
    inside.wait(60)
    with pytest.raises(MinisglError, match="in use by another thread"):
        llm.generate([PROMPTS[1]], greedy(6))
    over.set()
    first.join(60)
    assert [tuple(output.token_ids) for output in outputs] == [tiny.greedy(tuple(PROMPTS[0]), 6)]


def test_close_ends_generate_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, over = threading.Event(), threading.Event()
    step, errors = EngineLoop.step, list[str]()

    def slow(loop: EngineLoop) -> Any:
        outputs = step(loop)
        inside.set()
        over.wait(60)
        return outputs

    def generate() -> None:
        try:
            llm.generate([PROMPTS[0]], greedy(6))
        except MinisglError as error:
            errors.append(str(error))

    monkeypatch.setattr(EngineLoop, "step", slow)
    with new_llm() as llm:
        thread = threading.Thread(target=generate, daemon=True)
        thread.start()
        inside.wait(60)
    over.set()
    thread.join(10)
    assert errors == ["the outputs cannot be completed: a step failed, or the LLM was closed"]


def test_stream_refuses_invalid_arguments_immediately(llm: LLM) -> None:
    refused: list[tuple[str, Any, str]] = [("", greedy(1), "prompt"), ("w5", greedy(2, n=2), "n")]
    refused += [("w5", sampling, "sampling_params") for sampling in ([], [greedy(1)], 3, {"max_tokens": 3})]
    for prompt, sampling, name in refused:
        with pytest.raises(InvalidValueError) as caught:
            llm.stream(prompt, sampling)
        assert caught.value.name == name


def test_unknown_options_models_and_providers_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="page_size"):
        LLM(tiny_folder.llama(), pagesize=4)
    with pytest.raises(InvalidValueError, match="page_size=0"):
        new_llm(page_size=0)
    with pytest.raises(ModelNotFoundError, match="no such file"):
        LLM("./nowhere")
    with pytest.raises(MinisglError, match="--moe: no moe provider is called 'nosuch'"):
        new_llm(moe="nosuch")
    with pytest.raises(MinisglError, match=r"--communicator: .*'nosuch'"):
        new_llm(communicator="nosuch")


def test_a_model_may_be_a_path() -> None:
    with LLM(Path(tiny_folder.llama()), dtype="float32", num_pages=50) as llm:
        assert llm.info.model == tiny_folder.llama()


def test_several_instances_in_one_process() -> None:
    expected = [tiny.greedy(tuple(prompt), 8) for prompt in PROMPTS]
    with new_llm(page_size=1) as one, new_llm(page_size=16, cache="naive") as two:
        stream = one.stream(PROMPTS[2], greedy(8))
        pieces = next(stream)
        for llm in (two, one, two):
            assert [tuple(output.token_ids) for output in llm.generate(PROMPTS, greedy(8))] == expected
        two.close()
        assert pieces + "".join(stream) == tiny_folder.words(list(expected[2]))
        assert_nothing_in_use(one)


def test_close_frees_the_model_and_is_idempotent() -> None:
    llm = new_llm()
    stream = llm.stream(PROMPTS[0], greedy(20))
    unread = llm.stream(PROMPTS[1], greedy(20))
    next(stream)
    engine = llm._loop.model_runner
    freed = [weakref.ref(engine.model), weakref.ref(engine.attention.pool)]
    del engine
    llm.close()
    llm.close()
    gc.collect()
    assert [ref() for ref in freed] == [None, None]
    with pytest.raises(MinisglError, match="closed"):
        llm.generate(PROMPTS, greedy(1))
    for each in (stream, unread):
        with pytest.raises(MinisglError, match="closed"):
            list(each)


def test_the_context_manager_closes_on_errors() -> None:
    with pytest.raises(ZeroDivisionError), new_llm() as llm:
        _ = 1 / 0
    with pytest.raises(MinisglError, match="closed"):
        llm.generate("w5")


def test_defaults_and_eos_come_from_the_generation_config(tmp_path: Any) -> None:
    shutil.copytree(tiny_folder.llama(), tmp_path, dirs_exist_ok=True)
    config = {"do_sample": True, "temperature": 0.25, "top_k": 7, "eos_token_id": [16, 17]}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    model = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": 16}
    (tmp_path / "config.json").write_text(json.dumps(model))
    with LLM(str(tmp_path), dtype="float32", num_pages=50) as llm:
        assert llm.default_sampling == SamplingParams(temperature=0.25, top_k=7)
        assert llm.info.eos_token_ids == [16, 17, llm.tokenizer.eos_token_id]
        for end in llm.info.eos_token_ids:
            [output] = llm.generate([[5, 6]], greedy(9, ignore_eos=False, logit_bias={end: 100}))
            assert (output.token_ids, output.finish_reason, output.stop_reason) == ([end], "stop", None)
        assert len(llm.generate([[5, 6]])[0].token_ids) <= 128


def test_invalid_default_sampling_is_refused_before_loading(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(tiny_folder.llama(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "top_k": 20.5}')
    monkeypatch.setattr("minisgl_core.engine.build.load_weights", None)
    with pytest.raises(ModelFormatError, match=r"^generation_config\.json: top_k=20\.5 is not valid"):
        LLM(str(tmp_path), dtype="float32", num_pages=50)


def test_stats_count_requests_and_tokens(llm: LLM) -> None:
    llm.generate(PROMPTS, greedy(4))
    assert llm.stats.num_finished == len(PROMPTS)
    assert llm.stats.num_output_tokens == 4 * len(PROMPTS)
    assert llm.stats.num_prompt_tokens == sum(map(len, PROMPTS))
