"""Output side of a tokenizer worker: turns a request's tokens into text, reasoning content and tool calls."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from minisgl_core.protocol.messages import Text, TokenLogprobs, TokenOut, prompt_entries
from minisgl_core.text.detokenizer import OutputText, Piece
from minisgl_core.text.tokens import TokenBytes
from minisgl_server.parsing.chat_format import ChatOutputParser

MAX_TEXT_SIZE = 1024
"""Size from which on buffered output goes to the next `Text`: encoding a `Text` blocks the event loop of the API server."""


@dataclass(slots=True)
class RequestOutput:
    """Output of one running request.

    Attributes:
        pending: the next `Text`; it also holds tokens whose characters are not complete yet.
        only_prompt: True if the generated tokens are not returned.
        is_buffered: True if nothing is returned before the output is complete.
        prompt_parts: the prompt with its log-probabilities, to return before the first tokens. Several outputs of a prompt share
            the list, and only the first of them gets the log-probabilities from the engine.
        parser: separates reasoning content and tool calls from text; None if all output is text.
        buffered: `Text` messages before `pending` that are not returned yet. Reasoning content, text and tool calls are in
            separate messages, each with the log-probabilities of its tokens. Those of a long prompt are in messages before these.
        num_shown: number of tokens of `pending` up to the last one that added output. The text of later tokens is incomplete.
    """

    detokenizer: OutputText
    token_bytes: TokenBytes
    pending: Text
    is_chat: bool = False
    only_prompt: bool = False
    is_buffered: bool = False
    prompt_parts: list[Text] = field(default_factory=list)
    parser: ChatOutputParser | None = None
    buffered: list[Text] = field(default_factory=list)
    num_shown: int = 0

    def push(self, out: TokenOut) -> Piece:
        """Add new tokens to `pending`. Return their text, and the finish reason if the output ends with them."""
        if self.only_prompt:
            # The generated token is not returned, so the output does not end because of it.
            end = "length" if out.finish_reason == "stop" else out.finish_reason
            out = msgspec.structs.replace(out, token_ids=[], logprobs=None, stop_token_id=None, finish_reason=end)
        if out.prompt_logprobs is not None or self.prompt_parts:
            self._push_prompt(out)
        piece = self.push_tokens(out.token_ids, out.finish_reason, out.stop_token_id)
        if out.logprobs is not None:
            self._push_logprobs(out, out.logprobs)
        pending = self.pending
        pending.num_prompt_tokens, pending.num_cached_tokens = out.num_prompt_tokens, out.num_cached_tokens
        return piece

    def take(self) -> list[Text]:
        """Return the new output, and begin the next. Empty if there is no new text and the output continues."""
        pending = self.pending
        has_new = bool(pending.text or pending.reasoning or pending.tool_calls) and not self.is_buffered
        if pending.finish_reason is None and not has_new:
            return []
        taken, self.buffered = [*self.buffered, pending], []
        self._begin_part()
        return taken

    def _begin_part(self) -> None:
        pending = self.pending
        self.pending = Text(
            request_id=pending.request_id,
            text="",
            token_ids=[],
            num_prompt_tokens=pending.num_prompt_tokens,
            num_cached_tokens=pending.num_cached_tokens,
        )
        self.num_shown = 0

    def _buffer_shown(self) -> None:
        """Buffer `pending` up to the last token that added output, and begin the next part with the other tokens."""
        shown, num_shown = self.pending, self.num_shown
        self.buffered.append(shown)
        self._begin_part()
        shown.token_ids, self.pending.token_ids = shown.token_ids[:num_shown], shown.token_ids[num_shown:]
        if shown.logprobs is not None:
            shown.logprobs, self.pending.logprobs = shown.logprobs[:num_shown], shown.logprobs[num_shown:]
            self._add_token_bytes(self.pending, self.pending.logprobs)

    def push_tokens(
        self, token_ids: list[int], finish_reason: str | None = None, stop_token_id: int | None = None
    ) -> Piece:
        """Add tokens without log-probabilities, like `push`."""
        if self.pending.size >= MAX_TEXT_SIZE:
            self.buffered.append(self.pending)
            self._begin_part()
        parser, pending = self.parser, self.pending
        piece = self.detokenizer.push(token_ids, finish_reason, stop_token_id)
        if parser is None:
            pending.text += piece.text
        else:
            parsed = parser.push(piece.text, piece.finish_reason is not None, len(token_ids))
            kinds = bool(parsed.reasoning), bool(parsed.content), bool(parsed.tool_calls)
            kinds_before = bool(pending.reasoning), bool(pending.text), bool(pending.tool_calls)
            if any(kinds) and any(kinds_before) and kinds != kinds_before:
                self._buffer_shown()
                pending = self.pending
            pending.num_reasoning_tokens = parser.num_reasoning_tokens
            pending.text += parsed.content
            pending.reasoning += parsed.reasoning
            pending.tool_calls += parsed.tool_calls
            if any(kinds):
                self.num_shown = len(pending.token_ids) + len(token_ids)
            if parser.is_done and piece.finish_reason is None:
                piece = piece._replace(finish_reason="stop", needs_abort=True)
            if parser.has_calls and piece.finish_reason == "stop":
                piece = piece._replace(finish_reason="tool_calls")
        pending.token_ids += token_ids
        pending.finish_reason, pending.stop_reason = piece.finish_reason, piece.stop_reason
        return piece

    def _push_logprobs(self, out: TokenOut, logprobs: list[TokenLogprobs]) -> None:
        # OpenAI's chats have entries for the tokens of the text only; completions have one per output token, which
        # evaluation harnesses rely on.
        shown = logprobs[:-1] if self.is_chat and out.stop_token_id is not None else logprobs
        self.pending.logprobs = (self.pending.logprobs or []) + shown
        self._add_token_bytes(self.pending, shown)

    def _push_prompt(self, out: TokenOut) -> None:
        """Put the prompt with its log-probabilities before the output."""
        pending, parts = self.pending, self.prompt_parts
        if not parts:
            parts += self._split_prompt(prompt_entries(out.prompt_logprobs or ()))
        own = {"num_prompt_tokens": out.num_prompt_tokens, "num_cached_tokens": out.num_cached_tokens}
        self.buffered += [msgspec.structs.replace(part, request_id=pending.request_id, **own) for part in parts]
        pending.prompt_text = pending.prompt_token_ids = None
        self.prompt_parts = []

    def _split_prompt(self, logprobs: list[TokenLogprobs | None]) -> list[Text]:
        """Return the log-probabilities of the prompt in parts. The first has the prompt's text and tokens."""
        last = logprobs[-1]
        size = max(1, MAX_TEXT_SIZE // (1 if last is None else 1 + len(last.top)))
        split = (logprobs[start : start + size] for start in range(0, len(logprobs), size))
        parts = [Text(request_id="", text="", token_ids=[], prompt_logprobs=each) for each in split]
        parts[0].prompt_text, parts[0].prompt_token_ids = self.pending.prompt_text, self.pending.prompt_token_ids
        for part in parts:
            for token in (part.prompt_token_ids or ())[:1]:  # the first token has no log-probability
                part.token_bytes[token] = self.token_bytes[token]
            self._add_token_bytes(part, part.prompt_logprobs or ())
        return parts

    def _add_token_bytes(self, text: Text, logprobs: Iterable[TokenLogprobs | None]) -> None:
        for position in logprobs:
            if position is not None:
                for entry in (position.token, *position.top):
                    text.token_bytes[entry.token_id] = self.token_bytes[entry.token_id]
        text.special_ids = text.token_bytes.keys() & self.token_bytes.special_ids
