from __future__ import annotations

import pytest

from minisgl_core.protocol.messages import Logprob, Text, TokenLogprobs
from minisgl_server.api.openai.logprobs import CompletionLogprobs

BOS, EOS, HI, YOU = range(4)
BYTES = {BOS: b"<s>", EOS: b"</s>", HI: b"Hi", YOU: b" you"}


def places(*token_ids: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(Logprob(each, -1.0, 1), []) for each in token_ids]


def echoed(prompt_text: str, first: int, *others: int) -> Text:
    return Text(
        request_id="a",
        text="",
        token_ids=[],
        prompt_text=prompt_text,
        prompt_token_ids=[first, *others],
        prompt_logprobs=[None, *places(*others)],
        token_bytes=BYTES,
        special_ids={BOS, EOS},
    )


@pytest.mark.parametrize("skips_special", [True, False])
@pytest.mark.parametrize(
    ("prompt_text", "offsets"), [("Hi you", [0, 0, 2]), ("<s>Hi you", [0, 3, 5])], ids=["added", "written"]
)
def test_text_offsets_count_bos_if_the_text_has_it(skips_special: bool, prompt_text: str, offsets: list[int]) -> None:
    """Special tokens that the output skips do not matter."""
    logprobs, end = CompletionLogprobs(skips_special), len(prompt_text)
    prompt = echoed(prompt_text, BOS, HI, YOU)
    assert logprobs.push(prompt)["text_offset"] == offsets  # type: ignore[index]
    output = Text(
        request_id="a",
        text="",
        token_ids=[EOS, HI, YOU],
        logprobs=places(EOS, HI, YOU),
        token_bytes=BYTES,
        special_ids={EOS},
    )
    first = 0 if skips_special else len("</s>")
    assert logprobs.push(output)["text_offset"] == [end, end + first, end + first + 2]  # type: ignore[index]


@pytest.mark.parametrize(("prompt_text", "offsets"), [("you you", [0, 0, 3]), (" you you", [0, 0, 4])])
def test_prepended_spaces_are_not_part_of_the_text(prompt_text: str, offsets: list[int]) -> None:
    """SentencePiece tokenizers prepend a space; a text may also begin with its own."""
    found = CompletionLogprobs(skips_special=True).push(echoed(prompt_text, BOS, YOU, YOU))
    assert found is not None
    assert found["text_offset"] == offsets
    assert [prompt_text[at:] for at in offsets[1:]] == [prompt_text, " you"]


def test_of_tokens_with_the_same_text_the_most_likely_one_is_returned() -> None:
    """SentencePiece vocabularies have a text twice: as a token, and as a byte."""
    top = [Logprob(HI, -1.0, 1), Logprob(YOU, -2.0, 2)]
    output = Text(
        request_id="a",
        text="",
        token_ids=[HI],
        logprobs=[TokenLogprobs(top[0], top)],
        token_bytes={HI: b"A", YOU: b"A"},
    )
    found = CompletionLogprobs(skips_special=True).push(output)
    assert found is not None
    assert found["top_logprobs"] == [{"A": -1.0}]
