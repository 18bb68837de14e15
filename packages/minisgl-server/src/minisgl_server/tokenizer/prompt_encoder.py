"""Input side of a tokenizer worker: turns a request into token ids, and checks it against the engine's limits."""

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from minisgl_core.contracts.structured_outputs import GrammarSource
from minisgl_core.errors import ContextLengthError, InvalidValueError, PluginError, Summary
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.messages import Detokenize, EngineInfo, Tokenize, TokenizerReply
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.scheduler.limits import longer_context_remedy
from minisgl_core.text.prompt import encode_prompt
from minisgl_server.parsing.chat_format import ChatFormat

EncodedPrompt = tuple[list[int], str]
"""Token ids of a prompt, and its text; the text is empty if the request has token ids."""
_MIN_TOKEN_LIMIT = 2**15
"""Texts of up to this many tokens are tokenized completely, even if the context is shorter."""


class PromptEncoder:
    """Encodes and checks the prompts of one worker."""

    def __init__(self, tokenizer: Any, info: EngineInfo, chat_format: ChatFormat, registry: Registry) -> None:
        self._tokenizer, self._info, self._chat_format, self._registry = tokenizer, info, chat_format, registry
        self._max_tokens = max(_MIN_TOKEN_LIMIT, info.max_seq_len)

    def encode(self, message: Tokenize) -> EncodedPrompt:
        """Return the token ids of the prompt, and its text. Changes no state, so that another thread may call it."""
        if message.messages is not None:
            prompt = self._chat_format.using(message.chat_template).render(message)
            return self._encode_text(message, prompt, bool(message.add_special_tokens)), prompt
        if message.text is not None:
            if not message.text and not message.only_tokens:
                raise InvalidValueError("prompt", "", "a string that is not empty")
            return self._encode_text(message, message.text, message.add_special_tokens is not False), message.text
        assert message.token_ids is not None
        self.check_token_ids("prompt", message.token_ids)
        return message.token_ids, ""

    def _encode_text(self, message: Tokenize, text: str, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text: of one beyond the limit, enough to refuse it; of one to be truncated, only the end."""
        name = _prompt_field(message)
        if (num_kept := self._num_kept(message)) is None:
            return encode_prompt(self._tokenizer, text, add_special_tokens, self._max_tokens, name)
        return encode_prompt(self._tokenizer, text, add_special_tokens, num_kept, name, truncation_side="left")

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def prompt_text(self, message: Tokenize, token_ids: list[int]) -> str:
        """Return the text of a prompt, for echo."""
        if message.text is not None and message.truncate_prompt_tokens is None:
            return message.text
        return self.decode(token_ids, message.sampling.skip_special_tokens)

    def truncate(self, message: Tokenize, token_ids: list[int]) -> list[int]:
        """Return the last tokens of a prompt, as many as ``truncate_prompt_tokens`` keeps."""
        num_kept = self._num_kept(message)
        return token_ids if num_kept is None else token_ids[-num_kept:]

    def _num_kept(self, message: Tokenize) -> int | None:
        """Return the number of tokens that ``truncate_prompt_tokens`` keeps; None if it is not given."""
        if (num_kept := message.truncate_prompt_tokens) is None:
            return None
        room = self._info.max_seq_len - 1
        if num_kept == -1:
            sampling = message.sampling
            num_output = sampling.min_tokens if message.max_tokens_is_default else sampling.max_tokens
            num_kept = self._info.max_seq_len - max(num_output, 1)
        if not 1 <= num_kept <= room:
            value = message.truncate_prompt_tokens
            raise InvalidValueError(
                "truncate_prompt_tokens", value, f"-1 or from 1 to {room}, with room for the output"
            )
        return num_kept

    def check_limits(self, message: Tokenize, token_ids: list[int]) -> SamplingParams:
        """Check a request against the engine's limits; return its sampling parameters as the scheduler needs them.

        Their max_tokens is at most the room after the prompt. They have no structured outputs: `grammar` returns the grammar, so
        that it is sent once.
        """
        name, limit, sampling = _prompt_field(message), self._info.max_seq_len, message.sampling
        if not token_ids:
            raise InvalidValueError(name, [], "at least one token")
        room = limit - len(token_ids)
        limit_name = "min_tokens" if message.max_tokens_is_default else "max_tokens"
        num_output = max(getattr(sampling, limit_name), 1)
        if room < 1:
            remedy = longer_context_remedy(self._info.num_pages, self._info.page_size, limit)
            raise self._too_long(message, token_ids, num_output, name, remedy)
        self._check_prompt_logprobs(message, len(token_ids))
        self.check_token_ids("stop_token_ids", sampling.stop_token_ids)
        self.check_token_ids("logit_bias", sampling.logit_bias)
        self.check_token_ids("allowed_token_ids", sampling.allowed_token_ids or ())
        if num_output > room:
            raise self._too_long(message, token_ids, num_output, limit_name)
        return replace(sampling, max_tokens=min(sampling.max_tokens, room), structured_outputs=None)

    def _check_prompt_logprobs(self, message: Tokenize, num_tokens: int) -> None:
        """Refuse too many log-probabilities of the prompt. Each output of a completion repeats them."""
        num_top, n = message.sampling.prompt_logprobs, message.sampling.n if message.messages is None else 1
        if num_top is not None and n * num_tokens * (1 + num_top) > (limit := self._info.max_response_logprobs):
            allowed = f"lower or left out with {n} outputs of a prompt of {num_tokens} tokens"
            remedy = f"A response may have {limit} log-probabilities."
            raise InvalidValueError("prompt_logprobs", num_top, allowed, remedy)

    def reply(self, message: Tokenize | Detokenize, encoded: Future[EncodedPrompt] | None) -> TokenizerReply:
        """Return the tokens of a text, or the text of tokens. `encoded` is the result of `encode`, if that was called before."""
        if isinstance(message, Detokenize):
            self.check_token_ids("tokens", message.token_ids)
            text = self.decode(message.token_ids, skip_special_tokens=False)
            return TokenizerReply(request_id=message.request_id, token_ids=message.token_ids, token_names=[], text=text)
        token_ids, _ = encoded.result() if encoded else self.encode(message)
        if len(token_ids) > self._max_tokens:  # `encode` may have stopped before the end of the text
            raise self._too_long(message, token_ids, 0, _prompt_field(message), "Ask for its parts one by one.")
        names = [name or "" for name in self._tokenizer.convert_ids_to_tokens(token_ids)]
        return TokenizerReply(request_id=message.request_id, token_ids=token_ids, token_names=names)

    def check_token_ids(self, name: str, token_ids: Collection[int]) -> None:
        """Check that token ids are below the vocabulary size."""
        for token in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token < self._info.vocab_size:
                allowed = f"made of token ids from 0 to {self._info.vocab_size - 1}"
                raise InvalidValueError(name, token, allowed)

    def grammar(self, message: Tokenize, prompt: str) -> GrammarSource | None:
        """Return the grammar of the output, or None. Only its size is checked here: the scheduler's process compiles it."""
        structured = message.sampling.structured_outputs
        if message.messages is not None:
            source = self._chat_format.using(message.chat_template).grammar(message, prompt)
        else:
            source = structured.source(message.grammar_name) if structured is not None else None
        if source is not None:
            if (allowed_ids := message.sampling.allowed_token_ids) is not None:
                allowed = f"left out if {source.name} constrains the output"
                raise InvalidValueError("allowed_token_ids", Summary(f"{len(allowed_ids)} tokens"), allowed)
            try:
                self._registry.load("grammar", self._info.grammar)
            except PluginError as error:
                raise InvalidValueError(source.name, source.text, "left out by this server", str(error)) from None
            source.check_size()
        return source

    def _too_long(
        self, message: Tokenize, token_ids: list[int], num_output: int, name: str, remedy: str = ""
    ) -> ContextLengthError:
        """Return the error of a prompt; `token_ids` may be only its beginning, see `_encode_text`."""
        is_partial = message.token_ids is None and len(token_ids) > self._max_tokens
        num_prompt = self._max_tokens + 1 if is_partial else len(token_ids)
        kind = _prompt_field(message)
        return ContextLengthError(name, num_prompt, num_output, self._info.max_seq_len, kind, remedy, is_partial)


def _prompt_field(message: Tokenize) -> str:
    return "prompt" if message.messages is None else "messages"
