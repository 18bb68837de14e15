"""Reasons why fields of OpenAI's, vLLM's and SGLang's requests, or most of their values, are refused."""

from __future__ import annotations

_TEXT_ONLY = "Models that are served here read and write text only."
_SAMPLES = "Outputs are sampled, not searched for; use n for several."
_STORES_NOTHING = "Only POST /v1/responses stores answers."

REASONS = {
    "audio": _TEXT_ONLY,
    "best_of": "No output is left out; use n for several.",
    "chat_template": "Launch the server with --trust-request-chat-template to render templates of requests.",
    "detokenize": "Outputs are always turned into text; return_token_ids returns their tokens too.",
    "early_stopping": _SAMPLES,
    "function_call": "It is deprecated; send tool_choice.",
    "functions": "It is deprecated; send tools.",
    "kv_transfer_params": "KV is not transferred between servers.",
    "length_penalty": _SAMPLES,
    "logits_processors": "Requests bring no code; use logit_bias, allowed_token_ids, bad_words or structured_outputs.",
    "lora_path": "No LoRA adapters are served.",
    "mm_processor_kwargs": _TEXT_ONLY,
    "modalities": _TEXT_ONLY,
    "moderation": "Requests are not moderated.",
    "prediction": "Predicted outputs are not used; speculative decoding is not supported.",
    "prompt_cache_options": "The prefix cache keeps what it has room for, whatever requests say.",
    "prompt_cache_retention": "The prefix cache is in memory and keeps what it has room for.",
    "request_id": "Send it as the header X-Request-Id.",
    "return_hidden_states": "Hidden states are not returned.",
    "rid": "Send it as the header X-Request-Id.",
    "service_tier": "There is one tier; priority orders the queue.",
    "session_params": "There are no sessions; the prefix cache finds the beginning of a conversation by itself.",
    "store": _STORES_NOTHING,
    "stream_reasoning": "Reasoning content is streamed as it comes; include_reasoning=false leaves it out.",
    "suffix": "Text is not inserted; put the suffix into the prompt as the model was taught.",
    "use_beam_search": _SAMPLES,
    "verbosity": "No chat template takes it; say in a message how long answers should be.",
    "web_search_options": "This server does not search the web; give the model a tool for that.",
}
"""By the name of the field; the sentence follows the error."""
