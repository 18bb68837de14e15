"""Outputs of one prompt: makes the state of each."""

from dataclasses import dataclass, field, replace

from minisgl_core.contracts.structured_outputs import GrammarSource
from minisgl_core.protocol.messages import Text, Tokenize
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.text.detokenizer import OutputText
from minisgl_core.text.tokens import TokenBytes
from minisgl_server.parsing.chat_format import ChatFormat
from minisgl_server.tokenizer.request_output import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOutputs:
    """Outputs of one prompt.

    Attributes:
        prompt: rendered prompt; empty if the request has token ids.
        echo: text that is returned before the output, if the request asks for that.
        is_buffered: True if outputs are returned whole, so that a request can be submitted again if its engine is lost.
        prompt_parts: see `RequestOutput`.
    """

    message: Tokenize
    prompt: str
    token_ids: list[int]
    sampling: SamplingParams
    grammar: GrammarSource | None
    chat_format: ChatFormat
    token_bytes: TokenBytes
    echo: str | None
    is_buffered: bool
    prompt_parts: list[Text] = field(default_factory=list)

    def make(self, request_id: str) -> RequestOutput:
        """Return the state of an output without tokens."""
        message, sampling, parser = self.message, self.sampling, None
        pending = Text(request_id=request_id, text="", token_ids=[])
        is_chat = message.messages is not None
        if is_chat:
            chat_format = self.chat_format.using(message.chat_template)
            if chat_format.needs_special_tokens(message):
                sampling = replace(sampling, skip_special_tokens=False)
            parser = chat_format.parser(message, self.prompt, self.grammar)
        output = RequestOutput(
            OutputText(self.token_bytes, sampling),
            self.token_bytes,
            pending,
            is_chat=is_chat,
            only_prompt=message.only_prompt,
            is_buffered=self.is_buffered,
            parser=parser,
        )
        returns_prompt = message.echo or message.return_prompt_ids or sampling.prompt_logprobs is not None
        if returns_prompt and (not is_chat or request_id == message.request_id):  # a chat returns it once
            pending.prompt_text, pending.prompt_token_ids = self.echo, self.token_ids
            output.prompt_parts = self.prompt_parts
        return output
