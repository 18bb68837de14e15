"""Reasons why fields of OpenAI's, vLLM's and SGLang's requests, some of their values, or endpoints are not supported."""

_TEXT_ONLY = "The served models read and write text only."
_NO_BEAM_SEARCH = "Beam search is not supported; use n for several outputs."
_NO_FLUSH = "The prefix cache cannot be emptied; requests with a cache_salt of their own share no prefixes with others."
_NO_INFO = "The server prints its configuration when it is ready; GET /metrics has its load."
_NO_CODE = "Requests cannot carry code; use logit_bias, allowed_token_ids, bad_words or structured_outputs."

UNSUPPORTED_REASONS = {
    "audio": _TEXT_ONLY,
    "best_of": "All outputs are returned; use n for several.",
    "chat_template": "Launch the server with --trust-request-chat-template to render chat templates of requests.",
    "custom_logit_processor": _NO_CODE,
    "detokenize": "Outputs are always detokenized; return_token_ids also returns their token ids.",
    "early_stopping": _NO_BEAM_SEARCH,
    "function_call": "It is deprecated; send tool_choice.",
    "functions": "It is deprecated; send tools.",
    "image_data": _TEXT_ONLY,
    "input_embeds": "Prompts are texts or token ids.",
    "kv_transfer_params": "KV cache transfer between servers is not supported.",
    "length_penalty": _NO_BEAM_SEARCH,
    "logits_processors": _NO_CODE,
    "logprob_start_len": "Tokens of the output alone have log-probabilities; /v1/completions has prompt_logprobs.",
    "lora_path": "No LoRA adapters are served.",
    "mm_processor_kwargs": _TEXT_ONLY,
    "modalities": _TEXT_ONLY,
    "moderation": "Requests are not moderated.",
    "prediction": "Speculative decoding is not supported, so predicted outputs have no use.",
    "prompt_cache_options": "The prefix cache has no options per request.",
    "prompt_cache_retention": "The prefix cache is in memory and keeps entries as long as there is room.",
    "request_id": "Send it as the header X-Request-Id.",
    "return_hidden_states": "Hidden states are not returned.",
    "rid": "Send it as the header X-Request-Id.",
    "service_tier": "There is one tier; priority orders the queue.",
    "session_params": "There are no sessions; the prefix cache finds the start of a conversation by itself.",
    "stop_regex": "Only strings (stop) and tokens (stop_token_ids) end an output.",
    "store": "Only POST /v1/responses stores responses.",
    "stream_reasoning": "Reasoning content is always streamed; include_reasoning=false leaves it out.",
    "suffix": "Insertion is not supported; put the suffix into the prompt in the model's fill-in-the-middle format.",
    "thread": "No threads are stored; send the whole conversation (thread=False in Anthropic's tool_runner).",
    "token_ids_logprob": "The most likely tokens have log-probabilities, not chosen ones.",
    "use_beam_search": _NO_BEAM_SEARCH,
    "verbosity": "Chat templates have no such variable; ask for the length in a message.",
    "web_search_options": "This server does not search the web; give the model a tool for that.",
}
"""Sentence that follows the error message, by field."""

UNSUPPORTED_PARTS = dict.fromkeys(
    ("audio_url", "file", "image_embeds", "image_url", "input_audio", "source", "video_url"), _TEXT_ONLY
)
"""The same for parts of messages that are not text, by their field or type."""

UNSUPPORTED_PATHS = {
    "/abort_request": "Close the connection of a request to abort it.",
    "/flush_cache": _NO_FLUSH,
    "/get_server_info": _NO_INFO,
    "/reset_prefix_cache": _NO_FLUSH,
    "/server_info": _NO_INFO,
}
"""The same for endpoints, by path."""
