from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_core.sampling_params import SamplingParams
from minisgl_core.text.detokenizer import KEPT_WINDOW, MAX_WINDOW, IncrementalDetokenizer, OutputText
from minisgl_core.text.tokens import TokenBytes

EMOJI = "a👩‍👩‍👧‍👦b 🇫🇷é漢字 \ufffd naïve ☃\n\n  x"


def chunks(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Split `ids` into chunks of the given sizes, which repeat; the default is one token."""
    result, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)] if sizes else 1
        result.append(ids[at : at + size])
        at, turn = at + size, turn + 1
    return result


def decode(tokenizer: Any, ids: list[int], skip: bool) -> str:
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def incremental(tokens: TokenBytes, **sampling: Any) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(tokens, SamplingParams(**sampling))


def run(detokenizer: IncrementalDetokenizer, pieces: list[list[int]]) -> tuple[list[str], str | None]:
    texts = []
    for place, piece in enumerate(pieces):
        text, stop = detokenizer.push(piece, place == len(pieces) - 1)
        texts.append(text)
        if stop is not None:
            return texts, stop
    return texts, None


@pytest.fixture(scope="module", params=["bytes", "window"])
def tokens(request: pytest.FixtureRequest, engine_tokenizer: Any) -> TokenBytes:
    """`TokenBytes` of a byte-level tokenizer, or of the same tokenizer treated as one that decodes texts."""
    made = TokenBytes(engine_tokenizer)
    assert made.is_byte_level
    made.is_byte_level = request.param == "bytes"
    return made


@pytest.fixture(scope="module")
def byte_ids(engine_tokenizer: Any) -> list[int]:
    """Tokens of one or few bytes that are incomplete UTF-8, which naive detokenizers decode wrongly."""
    return [i for i in range(17, len(engine_tokenizer)) if "\ufffd" in decode(engine_tokenizer, [i], False)]


@given(data=st.data())
@settings(max_examples=400)
def test_joined_texts_equal_the_decoded_output(
    data: st.DataObject, engine_tokenizer: Any, byte_ids: list[int], tokens: TokenBytes
) -> None:
    anything = st.integers(0, len(engine_tokenizer) - 1)
    emoji = st.just(engine_tokenizer(EMOJI)["input_ids"])
    parts = st.one_of(
        st.lists(anything, max_size=20),
        st.lists(st.sampled_from(byte_ids), max_size=MAX_WINDOW + KEPT_WINDOW),
        st.lists(st.sampled_from([0, 2]), max_size=8),
        emoji,
    )
    ids = [token for part in data.draw(st.lists(parts, min_size=1, max_size=6)) for token in part]
    sizes = data.draw(st.lists(st.integers(1, 9), max_size=3))
    skip = data.draw(st.booleans())
    texts, _ = run(incremental(tokens, skip_special_tokens=skip), chunks(ids, sizes) or [[]])
    assert "".join(texts) == decode(engine_tokenizer, ids, skip)


@pytest.mark.parametrize("num", range(MAX_WINDOW - 4, MAX_WINDOW + KEPT_WINDOW + 4))
def test_a_character_after_many_invalid_bytes(num: int, engine_tokenizer: Any, tokens: TokenBytes) -> None:
    """The window moves on even if no token boundary is known to be a character boundary."""
    emoji = engine_tokenizer("👩")["input_ids"]
    ids = emoji[:1] * num + emoji
    texts, _ = run(incremental(tokens), chunks(ids, []))
    assert "".join(texts) == decode(engine_tokenizer, ids, True)
    assert texts[-1].endswith("👩")


def test_no_text_ends_inside_a_character(engine_tokenizer: Any, tokens: TokenBytes) -> None:
    text = "日本語 👩‍👩‍👧‍👦 ok"
    ids = engine_tokenizer(text)["input_ids"]
    assert len(ids) > len(text), "some characters must have several tokens"
    texts, _ = run(incremental(tokens), chunks(ids, []))
    assert "".join(texts) == text
    assert not any("\ufffd" in piece for piece in texts)


def test_incomplete_characters_at_the_end_are_not_lost(engine_tokenizer: Any, tokens: TokenBytes) -> None:
    ids = engine_tokenizer("x👩")["input_ids"][:-1]
    texts, _ = run(incremental(tokens), chunks(ids, []))
    assert "".join(texts) == decode(engine_tokenizer, ids, True)
    assert texts[-1].endswith("\ufffd")


def test_finish_without_tokens_returns_the_withheld_text(engine_tokenizer: Any, tokens: TokenBytes) -> None:
    detokenizer = incremental(tokens, stop=("hello world",))
    assert detokenizer.push(engine_tokenizer("hello")["input_ids"], False) == ("", None)
    assert detokenizer.push([], True) == ("hello", None)


def test_only_the_last_tokens_are_decoded_again(engine_tokenizer: Any) -> None:
    class Counting:
        added_tokens_decoder = engine_tokenizer.added_tokens_decoder
        most = total = 0

        def decode(self, ids: list[int], **kwargs: Any) -> str:
            self.most, self.total = max(self.most, len(ids)), self.total + len(ids)
            return engine_tokenizer.decode(ids, **kwargs)

    invalid = engine_tokenizer("👩")["input_ids"][:1]
    for ids in (engine_tokenizer("Many words follow one another. " * 200)["input_ids"], invalid * 2000, [0] * 2000):
        counting = Counting()
        run(incremental(TokenBytes(counting)), chunks(ids, []))
        assert counting.most <= MAX_WINDOW + 1
        assert counting.total <= (MAX_WINDOW + KEPT_WINDOW) * len(ids)


@given(data=st.data())
@settings(max_examples=300)
def test_outputs_end_before_the_first_stop_string(
    data: st.DataObject, engine_tokenizer: Any, tokens: TokenBytes
) -> None:
    ids = engine_tokenizer(data.draw(st.text("ab é漢", min_size=1, max_size=40)))["input_ids"]
    whole = decode(engine_tokenizer, ids, True)
    stops = tuple(data.draw(st.lists(st.text("ab é漢", min_size=1, max_size=6), min_size=1, max_size=3)))
    texts, stop = run(incremental(tokens, stop=stops), chunks(ids, []))
    ends = {text: whole.find(text) + len(text) for text in stops if text in whole}
    if not ends:
        assert ("".join(texts), stop) == (whole, None)
        return
    first = min(ends.values())
    expected = max((text for text in ends if ends[text] == first), key=len)
    assert stop == expected
    assert "".join(texts) == whole[: first - len(expected)]


@given(data=st.data())
def test_stop_strings_have_no_effect_before_min_tokens(
    data: st.DataObject, engine_tokenizer: Any, tokens: TokenBytes
) -> None:
    ids = engine_tokenizer("one two one two one two one")["input_ids"]
    num_free = data.draw(st.integers(0, len(ids)))
    pieces = chunks(ids, data.draw(st.lists(st.integers(1, 4), max_size=3)))
    texts, stop = run(incremental(tokens, stop=("one",), min_tokens=num_free), pieces)
    free, rest = decode(engine_tokenizer, ids[:num_free], True), decode(engine_tokenizer, ids[num_free:], True)
    assert ("".join(texts), stop) == (free + rest.partition("one")[0], "one" if "one" in rest else None)


def test_text_that_may_become_a_stop_string_is_withheld(engine_tokenizer: Any, tokens: TokenBytes) -> None:
    detokenizer = incremental(tokens, stop=("The end.",))
    shown = [detokenizer.push([token], False)[0] for token in engine_tokenizer("The endless")["input_ids"]]
    assert shown[0] == ""
    assert "".join(shown) == "The endless"


def test_the_stop_token_is_not_part_of_the_text(engine_tokenizer: Any, tokens: TokenBytes) -> None:
    word, stop = engine_tokenizer(" sun")["input_ids"], engine_tokenizer(" moon")["input_ids"]
    sampling = SamplingParams(stop_token_ids=tuple(stop), skip_special_tokens=False)
    out = ([*word, *stop], "stop", stop[0])
    assert OutputText(tokens, sampling).push(*out) == (" sun", "stop", stop[0], False)
    including = replace(sampling, include_stop_str_in_output=True)
    assert OutputText(tokens, including).push(*out) == (" sun moon", "stop", stop[0], False)
    assert OutputText(tokens, sampling).push([*word, 2], "stop", 2) == (" sun", "stop", None, False)


def test_a_stop_string_ends_an_output_that_still_runs(engine_tokenizer: Any, tokens: TokenBytes) -> None:
    output = OutputText(tokens, SamplingParams(stop=("moon",)))
    assert output.push(engine_tokenizer("sun moon sun")["input_ids"]) == ("sun ", "stop", "moon", True)


def sentencepiece_tokenizer() -> Any:
    """Tokenizer like that of Llama 2: words begin with ▁, byte fallback, and the first space of a text is dropped."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for word in ("▁hello", "▁world", "!", "▁"):
        vocab[word] = len(vocab)
    made = Tokenizer(BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@given(
    words=st.lists(st.sampled_from(["▁hello", "▁world", "!", "▁", "</s>", *"ßé漢👩"]), min_size=1, max_size=30),
    sizes=st.lists(st.integers(1, 9), max_size=3),
)
@settings(max_examples=400)
def test_sentencepiece_spaces_and_byte_fallback(words: list[str], sizes: list[int]) -> None:
    tokenizer = _sentencepiece
    ids: list[int] = []
    for word in words:
        if word in tokenizer.get_vocab():
            ids.append(tokenizer.get_vocab()[word])
        else:
            ids += [3 + byte for byte in word.encode()]
    texts, _ = run(incremental(TokenBytes(tokenizer)), chunks(ids, sizes))
    assert "".join(texts) == decode(tokenizer, ids, True)


def test_added_tokens_of_sentencepiece_are_decoded() -> None:
    """Gemma adds a token for each run of spaces."""
    tokenizer = sentencepiece_tokenizer()
    tokenizer.add_tokens(["▁▁"])
    assert TokenBytes(tokenizer)[len(tokenizer) - 1] == b"  "


def test_only_sentencepiece_replaces_underscores_and_bytes() -> None:
    tokenizer = sentencepiece_tokenizer()
    tokenizer.backend_tokenizer.decoder = None
    tokens = TokenBytes(tokenizer)
    assert [tokens[index] for index in tokenizer.convert_tokens_to_ids(["▁hello", "<0x41>"])] == [
        "▁hello".encode(),
        b"<0x41>",
    ]


def test_tokens_of_several_bytes_may_end_inside_a_character() -> None:
    ids = [3 + byte for byte in "ßé👩".encode()]
    texts, _ = run(incremental(TokenBytes(_sentencepiece)), [ids[:3], ids[3:5], ids[5:]])
    assert texts == ["ß", "é", "👩"]


_sentencepiece = sentencepiece_tokenizer()
