from __future__ import annotations

from typing import Any

import pytest

from minisgl_core.errors import InvalidValueError
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.text.prompt import bad_word_tokens, encode_chat, encode_prompt
from minisgl_core.text.tokens import TokenBytes, max_token_bytes

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def bos_tokenizer() -> Any:
    """Tokenizer that adds a BOS to every text, and whose template writes one too, as Llama's do."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(WordLevel({"[s]": 0, "Hi": 1, "user": 2, "[u]": 3}, "[u]"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(single="[s] $A", special_tokens=[("[s]", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="[s]", unk_token="[u]")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.content == 'boom' %}{{ raise_exception('no booms') }}{% endif %}"
        "{{ m.role }} {{ m.content }}{% endfor %}{% if loud %} Hi{% endif %}"
    )
    return tokenizer


def test_a_templated_prompt_has_one_bos(bos_tokenizer: Any) -> None:
    assert encode_chat(bos_tokenizer, CHAT) == [0, 2, 1]
    assert encode_prompt(bos_tokenizer, "Hi") == [0, 1]
    assert encode_prompt(bos_tokenizer, "Hi", add_special_tokens=False) == [1]


def test_encoded_chats_equal_transformers(engine_tokenizer: Any) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye 👋"}]
    expected = engine_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    expected = expected["input_ids"] if hasattr(expected, "keys") else expected
    assert encode_chat(engine_tokenizer, messages) == list(expected)


def test_text_parts_and_developer_messages(engine_tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert encode_chat(engine_tokenizer, [{"role": "user", "content": parts}]) == encode_chat(engine_tokenizer, CHAT)
    system = encode_chat(engine_tokenizer, [{"role": "system", "content": "Be kind."}, *CHAT])
    assert encode_chat(engine_tokenizer, [{"role": "developer", "content": "Be kind."}, *CHAT]) == system


def test_template_variables(bos_tokenizer: Any) -> None:
    assert encode_chat(bos_tokenizer, CHAT, {"loud": True}) == [0, 2, 1, 1]
    for name in ("unknown", "chat_template", "tokenize"):
        with pytest.raises(InvalidValueError, match="chat_template_kwargs"):
            encode_chat(bos_tokenizer, CHAT, {name: "x"})


@pytest.mark.parametrize(
    ("messages", "name"),
    [
        ([], "messages"),
        ([{"role": "alien", "content": "Hi"}], "messages[0].role"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([*CHAT, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "Hi", "audio": {"id": "a"}}], "messages[0].audio"),
        ([{"role": "user", "content": "boom"}], "messages"),
    ],
)
def test_invalid_conversations_are_refused(bos_tokenizer: Any, messages: list[dict[str, Any]], name: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        encode_chat(bos_tokenizer, messages)
    assert caught.value.name == name


def test_errors_raised_by_templates_reach_the_user(bos_tokenizer: Any) -> None:
    with pytest.raises(InvalidValueError, match="no booms"):
        encode_chat(bos_tokenizer, [{"role": "user", "content": "boom"}])


def test_a_model_without_a_template_is_refused(bos_tokenizer: Any) -> None:
    bos_tokenizer.chat_template = None
    with pytest.raises(InvalidValueError, match="chat template"):
        encode_chat(bos_tokenizer, CHAT)


def test_bytes_of_tokens(engine_tokenizer: Any) -> None:
    text = "naïve 👩‍👩‍👧 漢 <|im_end|>\n"
    token_bytes = TokenBytes(engine_tokenizer)
    assert b"".join(token_bytes[token] for token in engine_tokenizer(text)["input_ids"]) == text.encode()
    assert token_bytes[10**6] == b""


def test_a_lone_surrogate_is_refused(bos_tokenizer: Any) -> None:
    with pytest.raises(InvalidValueError, match="lone surrogates"):
        encode_prompt(bos_tokenizer, "Hi \udce9 Hi")
    with pytest.raises(InvalidValueError, match="lone surrogates"):
        encode_chat(bos_tokenizer, [{"role": "user", "content": "\ud800"}])


def test_a_panic_of_the_tokenizer_is_an_error(bos_tokenizer: Any) -> None:
    """Its regex exceeds the backtracking limit, as Qwen's does for ten million spaces."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    bos_tokenizer.backend_tokenizer.pre_tokenizer = Split(Regex("(a+)+b"), "isolated")
    with pytest.raises(InvalidValueError, match="retry-limit-in-match"):
        encode_prompt(bos_tokenizer, "a" * 30)


def test_an_unknown_word_without_an_unknown_token_is_an_error() -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="b")))
    assert encode_prompt(tokenizer, "a") == [0]
    with pytest.raises(InvalidValueError, match=r"'c' is not valid: .* It says: .*Missing \[UNK\] token"):
        encode_prompt(tokenizer, "c")


def test_bad_words_are_tokenized_as_in_vllm(smollm2_tokenizer: Any) -> None:
    """Tokens equal those of vLLM's `SamplingParams.update_from_tokenizer`, with and without a space before the word."""
    words = ("Paris", " London", "unbelievable", "!", "a b")
    for word in words:
        expected: list[list[int]] = []
        for prefix in ("", " "):
            ids = smollm2_tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)
            if not prefix or (ids[0] != expected[-1][0] and len(ids) == len(expected[-1])):
                expected.append(ids)
        assert bad_word_tokens(smollm2_tokenizer, SamplingParams(bad_words=(word,))) == expected


def test_texts_are_tokenized_only_up_to_the_limit(engine_tokenizer: Any) -> None:
    words = "once upon a time " * 20_000
    whole = encode_prompt(engine_tokenizer, words)
    assert encode_prompt(engine_tokenizer, words, max_tokens=len(whole)) == whole
    assert encode_prompt(engine_tokenizer, words, max_tokens=len(whole) - 1) == whole
    part = encode_prompt(engine_tokenizer, words, max_tokens=1000)
    assert 1000 < len(part) < len(whole) // 2
    assert part[:1000] == whole[:1000]


def test_left_truncation_tokenizes_only_the_end_of_a_text(engine_tokenizer: Any) -> None:
    words = "once upon a time " * 20_000
    whole = encode_prompt(engine_tokenizer, words)
    part = encode_prompt(engine_tokenizer, words, max_tokens=1000, truncation_side="left")
    assert 1000 < len(part) < len(whole) // 2
    assert part[-1000:] == whole[-1000:]


@pytest.mark.parametrize("text", ["a" * 40_000, " " * 40_000, "\N{GRINNING FACE}" * 10_000, "a b" * 20_000])
def test_texts_within_the_limit_are_not_truncated(engine_tokenizer: Any, text: str) -> None:
    whole = encode_prompt(engine_tokenizer, text)
    assert encode_prompt(engine_tokenizer, text, max_tokens=len(whole)) == whole


def test_the_longest_token_bounds_the_bytes_per_token(engine_tokenizer: Any, bos_tokenizer: Any) -> None:
    tokens = TokenBytes(engine_tokenizer)
    assert max(len(tokens[each]) for each in range(len(engine_tokenizer))) <= max_token_bytes(engine_tokenizer) < 200
    assert max_token_bytes(bos_tokenizer) == 0  # an unknown word is one token, however long it is
