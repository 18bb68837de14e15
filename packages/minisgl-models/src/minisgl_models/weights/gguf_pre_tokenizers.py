"""Pre-tokenizers of GGUF's byte-level vocabularies, by the value of ``tokenizer.ggml.pre``.

The expressions are those of the models' own ``tokenizer.json``; llama.cpp's vocabularies with expected tokens test them (see
docs/development.md). Each expression splits the pieces that the one before it made, its matches included. None of them takes
quadratic time in the text.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True, slots=True)
class PreTokenizerSpec:
    """Pre-tokenizer and options of a byte-level vocabulary.

    Attributes:
        patterns: regular expressions that split the text, in order; None for GPT-2's.
        ignores_merges: a piece that is in the vocabulary is one token, even if no merges lead to it.
        adds_bos: BOS is added if the metadata do not say.
        is_nfc: text is normalized to Unicode's NFC first.
    """

    patterns: tuple[str | None, ...] = (None,)
    ignores_merges: bool = False
    adds_bos: bool = False
    is_nfc: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Return the pre-tokenizer, which also maps bytes to characters."""
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in self.patterns if each is not None]
        has_gpt2 = self.patterns[-1] is None
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=has_gpt2)
        return pre_tokenizers.Sequence([*splits, byte_level])


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_SYMBOLS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = rf"{_WORDS % ('', '')}|\p{{N}}|{_SYMBOLS}"
_GPT4O = rf"{_WORDS % ((_CONTRACTIONS + '?',) * 2)}|\p{{N}}{{1,3}}|{_SYMBOLS}"
_CJK_AND_HANGUL = r"[\x{0800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"
_NEWER_LETTERS = (
    r"\x{0560}-\x{0588}\x{10C7}\x{10CD}\x{10D0}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FF}"
    r"\x{AB30}-\x{AB68}\x{10570}-\x{105BC}\x{16E40}-\x{16E7F}\x{1D400}-\x{1DF2F}"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    # Cased letters, except those of the scripts that DeepSeek's tokenizer of 2023 leaves out.
    rf"\s?[[\p{{Lu}}\p{{Ll}}\p{{Lt}}]&&[^{_NEWER_LETTERS}]]+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"(?<!\s)\s+\z",  # the lookbehind avoids quadratic backtracking over a run of spaces
    _CJK_AND_HANGUL,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_HANGUL, r"\p{N}")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_FALCON = (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}")

PRE_TOKENIZERS: Mapping[str, PreTokenizerSpec] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
        PreTokenizerSpec((_LLAMA3,), ignores_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe"), PreTokenizerSpec((_LLAMA3,))),
    "glm4": PreTokenizerSpec((_LLAMA3,), ignores_merges=True),
    "qwen2": PreTokenizerSpec((_QWEN2,), is_nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), PreTokenizerSpec((_QWEN2,))),
    "qwen35": PreTokenizerSpec((_QWEN35,)),
    "tekken": PreTokenizerSpec((_TEKKEN,), ignores_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizerSpec((_GPT4O,))),
    "deepseek-llm": PreTokenizerSpec(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizerSpec(_DEEPSEEK_CODER),
    "deepseek-v3": PreTokenizerSpec(_DEEPSEEK3),
    "falcon": PreTokenizerSpec(_FALCON),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"),
        PreTokenizerSpec((r"\p{N}", None)),
    ),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "granite-docling"), PreTokenizerSpec()),
}
"""By the value of ``tokenizer.ggml.pre``. Others are refused."""
