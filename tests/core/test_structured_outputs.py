"""Outputs match their grammars in any batch, and do not change unconstrained requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from time import sleep
from typing import Any

import jsonschema
import pytest
import torch
from random_schemas import random_schema

from minisgl_backends.grammar.llguidance_grammar import LlguidanceGrammar, LlguidanceState
from minisgl_core import LLM, SamplingParams
from minisgl_core.contracts.grammar import GrammarKind
from minisgl_core.contracts.structured_outputs import StructuredOutputs
from minisgl_core.errors import InvalidValueError
from minisgl_core.scheduler import constraints
from minisgl_core.testing.grammar_kit import EOS, VOCAB_SIZE, byte_tokenizer

PATTERN = "(ab|é)+[0-9]{2}(;[a-d]*)?"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yä"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PROMPTS = [f"prompt {number} " * 3 for number in range(4)]


@lru_cache
def checkpoint(vocab_size: int = VOCAB_SIZE, eos: tuple[int, ...] = EOS) -> Path:
    """Write a tiny random model with the kit's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        initializer_range=0.3,
        bos_token_id=eos[0],
        eos_token_id=list(eos),
    )
    folder = Path(mkdtemp(prefix="tiny-bytes-"))
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@lru_cache
def trained_tokenizer() -> Any:
    """Train byte-pair encoding on sources and JSON, so that tokens mix letters, brackets, quotes and spaces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    texts = [
        json.dumps([random_schema(seed), seed / 7], indent=seed % 3, ensure_ascii=seed % 2 == 0) for seed in range(300)
    ]
    texts += [file.read_text() for file in sorted(Path(__file__).parent.glob("*.py"))]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=3000, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def new_llm(model: Path | None = None, **options: Any) -> LLM:
    fixed: dict[str, Any] = {"dtype": "float32", "platform": "cpu", "ops": "torch", "num_pages": 200}
    return LLM(str(model or checkpoint()), **(fixed | options))


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with new_llm(disable_overlap=not request.param) as made:
        yield made


def params(form: dict[str, Any] | None = None, **options: Any) -> SamplingParams:
    structured = None if form is None else StructuredOutputs(**form)
    defaults: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 60, "structured_outputs": structured}
    return SamplingParams(**(defaults | options))


FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"json": SCHEMA}, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
    ({"json": json.dumps(SCHEMA)}, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
    ({"regex": "(ab|é){1,3}[0-9]{2}"}, lambda text: re.fullmatch("(ab|é){1,3}[0-9]{2}", text)),
    ({"choice": ["yes", "no", "maybe \n"]}, lambda text: text in ("yes", "no", "maybe \n")),
    ({"grammar": 'start: "(" start ")" | "ab" | "1"'}, lambda text: re.fullmatch(r"\(*(ab|1)\)*", text)),
]


def test_outputs_match_every_kind_of_grammar(llm: LLM) -> None:
    work = [(form, fits) for form, fits in FORMS for _ in range(6)]
    outputs = llm.generate(["x"] * len(work), [params(form, seed=seed) for seed, (form, _) in enumerate(work)])
    for output, (form, fits) in zip(outputs, work, strict=True):
        if output.finish_reason == "stop":
            assert fits(output.text), (form, output.text)
    assert sum(output.finish_reason == "stop" for output in outputs) > 0.8 * len(outputs)
    for seed in range(3):
        [output] = llm.generate("x", params({"json_object": True}, seed=seed, max_tokens=200))
        assert output.finish_reason == "length" or isinstance(json.loads(output.text), dict)


def test_200_random_schemas_in_one_batch() -> None:
    model = checkpoint(vocab_size=len(trained_tokenizer()), eos=(0,))
    trained_tokenizer().save_pretrained(model)
    schemas = [random_schema(seed) for seed in range(200)]
    sampling = [params({"json": schema}, seed=seed, max_tokens=500) for seed, schema in enumerate(schemas)]
    with new_llm(model, num_pages=8000) as llm:
        outputs = llm.generate(["JSON:"] * len(schemas), sampling)
    num_ended = 0
    for output, schema in zip(outputs, schemas, strict=True):
        if output.finish_reason == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(output.text))
            num_ended += 1
        else:  # numbers are the only unbounded values in these schemas, and this model repeats digits
            assert re.search("[0-9]{100}", output.text), output.text
    assert num_ended >= 180


def test_constrained_requests_do_not_change_unconstrained_ones(llm: LLM) -> None:
    plain = [params(None, seed=7), params(None, temperature=0.0), params(None, presence_penalty=1.0, logprobs=3)]
    alone = llm.generate(PROMPTS[:3], plain)
    mixed = llm.generate([*PROMPTS[:3], *PROMPTS], [*plain, *(params(form) for form, _ in FORMS[:4])])
    assert [output.token_ids for output in mixed[:3]] == [output.token_ids for output in alone]
    for found, expected in zip(mixed[2].logprobs or [], alone[2].logprobs or [], strict=True):
        assert found.token.logprob == pytest.approx(expected.token.logprob, abs=1e-4)


def test_outputs_do_not_depend_on_batch_overlap_and_ranks() -> None:
    sampling = [params(form, seed=seed) for seed, (form, _) in enumerate(FORMS[:4])]
    with new_llm(disable_overlap=True) as llm:
        expected = [llm.generate(prompt, one)[0].token_ids for prompt, one in zip(PROMPTS, sampling, strict=True)]
        assert [output.token_ids for output in llm.generate(PROMPTS, sampling)] == expected
    for options in ({"disable_overlap": False}, {"disable_overlap": False, "tp": 2}):
        with new_llm(**options) as llm:
            assert [output.token_ids for output in llm.generate(PROMPTS, sampling)] == expected, options


def test_preempted_requests_keep_their_grammar_state() -> None:
    """The pool holds less than half of the running requests' tokens."""
    sampling = [params({"regex": "(ab|é|[0-9]){45}"}, seed=seed, max_tokens=100) for seed in range(6)]
    with new_llm(disable_overlap=True) as llm:
        expected = [output.text for output in llm.generate(["x" * 10] * 6, sampling)]
    assert all(re.fullmatch("(ab|é|[0-9]){45}", text) for text in expected)
    for overlap in (False, True):
        with new_llm(disable_overlap=not overlap, num_pages=25, page_size=8, max_seq_len_override=120) as llm:
            assert [output.text for output in llm.generate(["x" * 10] * 6, sampling)] == expected
            assert llm.stats.num_preemptions > 0


def test_prompts_wait_while_too_much_text_is_compiled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "MAX_PENDING_CHARS", 1)
    monkeypatch.setattr(constraints, "MAX_CACHED", 1)
    finish = constraints.GrammarManager._finish
    monkeypatch.setattr(constraints.GrammarManager, "_finish", lambda *args: (sleep(0.01), finish(*args)))
    texts = [str(number) for number in range(10, 22)]
    outputs = llm.generate(["x"] * len(texts), [params({"choice": [text]}) for text in texts])
    assert [output.text for output in outputs] == texts


def test_ends_of_structured_outputs(llm: LLM) -> None:
    [only] = llm.generate("x", params({"choice": ["ab"]}, min_tokens=20, ignore_eos=True))
    assert (only.text, only.finish_reason, only.stop_reason) == ("ab", "stop", None)
    pattern = {"regex": "[a-d]*"}
    assert len(llm.generate("x", params(pattern, min_tokens=20, max_tokens=30))[0].token_ids) >= 20
    [endless] = llm.generate("x", params(pattern, ignore_eos=True, max_tokens=30))
    assert endless.finish_reason == "length"
    assert re.fullmatch("[a-d]{30,}", endless.text)
    [cut] = llm.generate("x", params({"regex": "a{50}b"}, max_tokens=9))
    assert cut.finish_reason == "length"
    [stopped] = llm.generate("x", params({"regex": "a{5}b{5}"}, stop=("b",)))
    assert (stopped.text, stopped.stop_reason) == ("aaaaa", "b")
    [empty] = llm.generate("x", params({"choice": [""]}))
    assert (empty.text, empty.finish_reason) == ("", "stop")


def test_grammars_combine_with_other_sampling_options(llm: LLM) -> None:
    """They combine with penalties, biases, filters and several outputs. Log-probabilities are the model's own."""
    likely = byte_tokenizer().convert_tokens_to_ids("d")
    form = {"regex": "[a-d]{12}"}
    biased = llm.generate("x", params(form, logit_bias={likely: 100.0, EOS[0]: 100.0}))[0]
    assert biased.text == "d" * 12
    varied = llm.generate("x", params(form, temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0))[0]
    assert len(set(varied.text)) > 1
    outputs = llm.generate("x", params(form, n=3, logprobs=2, top_k=5, top_p=0.9, min_p=0.01))
    assert len({output.text for output in outputs}) > 1
    for output in outputs:
        assert re.fullmatch("[a-d]{12}", output.text)
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids)
        assert all(place.token.logprob <= place.top[0].logprob for place in output.logprobs)
    assert "".join(llm.stream("x", params(form))) == llm.generate("x", params(form))[0].text


def test_a_closed_stream_frees_its_request(llm: LLM) -> None:
    stream = llm.stream("x", params({"regex": "[a-d]*"}, ignore_eos=True, max_tokens=200))
    next(stream)
    stream.close()
    assert llm._loop.scheduler.num_running == 0
    assert llm.generate("x", params({"choice": ["no"]}))[0].text == "no"


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "json_object": True}, "structured_outputs"),
        ({"regex": "("}, "structured_outputs.regex"),
        ({"regex": 3}, "structured_outputs.regex"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": {"type": "alien"}}, "structured_outputs.json"),
        ({"json": {"not": {}}}, "structured_outputs.json"),
        ({"json": 3}, "structured_outputs.json"),
        ({"json": 0}, "structured_outputs.json"),
        ({"json": False}, "structured_outputs.json"),
        ({"json_object": "yes"}, "structured_outputs.json_object"),
        ({"regex": "a", "json_object": 0}, "structured_outputs.json_object"),
        ({"choice": False}, "structured_outputs.choice"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": "ab"}, "structured_outputs.choice"),
        ({"choice": [str(place) for place in range(10_001)]}, "structured_outputs.choice"),
        ({"grammar": "start: ("}, "structured_outputs.grammar"),
    ],
)
def test_invalid_structured_outputs_are_refused_by_name(form: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidValueError) as raised:
        shared().generate("x", params(form))
    assert raised.value.name == name


class _FailsAtTheFourthToken(LlguidanceGrammar):
    """Grammar whose states exceed a limit at the fourth token."""

    class state(LlguidanceState):
        num_tokens = 0

        def accept(self, token_id: int) -> bool:
            self.num_tokens += 1
            return super().accept(token_id)

        def copy(self) -> LlguidanceState:
            return type(self)(self._grammar, self.matcher.deep_copy(), self._shared)

        @property
        def error(self) -> str:
            return "Too complex." if self.num_tokens == 4 else ""

    def compile(self, kind: GrammarKind, text: str, name: str) -> LlguidanceState:
        compiled = super().compile(kind, text, name)
        return self.state(self, compiled.matcher, compiled._shared)


def test_a_too_complex_grammar_ends_only_its_request(llm: LLM) -> None:
    assert llm._loop.scheduler.grammars is not None
    llm._loop.scheduler.grammars._backend = _FailsAtTheFourthToken(byte_tokenizer(), VOCAB_SIZE, EOS)
    wild, tame = llm.generate(["x", "x"], [params({"regex": "[ab]{9}"}), params({"choice": ["no"]})])
    assert wild.finish_reason == "abort"
    assert re.fullmatch("[ab]{4,}", wild.text)
    assert (tame.text, tame.finish_reason) == ("no", "stop")
    assert llm.stats.num_aborted == 1


def test_a_missing_grammar_provider_is_reported() -> None:
    with pytest.raises(Exception, match="no_such"):
        new_llm(grammar="no_such")


@lru_cache
def shared() -> LLM:
    return new_llm()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, '{"a": true, "b": true}'),
        ({"disable_any_whitespace": True}, '{"a":true,"b":true}'),
        ({"whitespace_pattern": "_"}, '{_"a"_:_true_,_"b"_:_true_}'),
    ],
)
def test_whitespace_fields_limit_the_whitespace_of_json(fields: dict[str, Any], text: str) -> None:
    """Write byte by byte, with whitespace wherever the grammar allows it."""
    const = {"const": True}
    schema = {"properties": {"a": const, "b": const}, "required": ["a", "b"], "additionalProperties": False}
    source = StructuredOutputs(json={"type": "object", **schema}, **fields).source()
    state = LlguidanceGrammar(byte_tokenizer(), VOCAB_SIZE, EOS).compile(source.kind, source.text, "it")
    written, space = "", fields.get("whitespace_pattern", " ")
    while not state.is_finished:
        for letter in (space, *'{}:,"truabe'):
            if state.accept(byte_tokenizer().convert_tokens_to_ids("Ġ" if letter == " " else letter)):
                written += letter
                break
        else:
            break
    assert written == text


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "a", "whitespace_pattern": " "},
        {"choice": ["a"], "disable_any_whitespace": True},
        {"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True},
        {"json_object": True, "whitespace_pattern": 3},
        {"json_object": True, "disable_any_whitespace": "yes"},
        {"regex": "a" * 70_000},
        {"grammar": "a" * 70_000},
        {"json": {"enum": ["a" * 300_000]}},
        {"regex": "\ud800"},
    ],
)
def test_invalid_whitespace_and_sizes_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match="structured_outputs"):
        StructuredOutputs(**fields)
