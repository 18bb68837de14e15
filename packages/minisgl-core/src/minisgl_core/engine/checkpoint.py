"""Opening of a checkpoint: its files, the provider of its architecture, and its normalised config."""

import logging
from dataclasses import dataclass, replace
from typing import Any

from minisgl_core.config.hf import architecture_of, model_config
from minisgl_core.config.keys import check_layer_counts
from minisgl_core.config.options import AUTO, EngineConfig
from minisgl_core.contracts.model import Model
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.weights import WeightSource
from minisgl_core.errors import InvalidValueError, ModelFormatError
from minisgl_core.plugins.registry import Registry
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.weights.loader import has_other_lm_head
from minisgl_core.weights.model_source import locate_model, open_weights

logger = logging.getLogger(__name__)

TRANSFORMERS = "transformers"
"""Name of the provider that runs any architecture of transformers, and value of ``--model-impl``."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Opened checkpoint of a model, with its normalised config.

    Attributes:
        name: name of the model for clients.
        provider: name of its model provider: the architecture, or `TRANSFORMERS`.
        provider_reason: reason for another provider than the architecture's own; otherwise empty.
    """

    name: str
    source: WeightSource
    config: ModelConfig
    model_class: type[Model]
    provider: str
    provider_reason: str


def open_checkpoint(config: EngineConfig, registry: Registry) -> Checkpoint:
    """Find the model, on a hub if necessary, load its class, and read its config.

    No tensor is read, except to compare an LM head with the embedding if the config ties the two.

    Raises:
        MinisglError: the model is not found, or is not supported.
    """
    path = locate_model(config.model)
    source = open_weights(path, registry, dummy=config.model.dummy_weight)
    provider, why = model_provider(config.model.model_impl, architecture_of(source.config), registry)
    check_layer_counts(source.config)
    # Loaded first: an unknown architecture is a clearer error than a missing key of its config.
    model_class: type[Model] = registry.load("models", provider)
    try:
        standard = model_class.standard_config(source.config)
    except ModelFormatError as error:
        if why and config.model.model_impl == AUTO:
            raise ModelFormatError(f"{why.partition(';')[0]}, and {error}") from error
        raise
    normalised = model_config(standard, source.generation_config, source.eos_token_id)
    name = config.model.model or path.stem.split(".")[0]  # the default model, without its quantization, such as .Q4_1
    registry.load_supported("models", provider, normalised)
    if provider == TRANSFORMERS and config.parallel.pp > 1:
        remedy = "Use --tp, or an architecture with a model provider (minisgl plugins list)."
        raise InvalidValueError("--pp", config.parallel.pp, "1 with --model-impl transformers", remedy)
    if provider == TRANSFORMERS and config.backends.quantization not in (AUTO, "none"):
        allowed = "none with --model-impl transformers, whose weights are in --dtype"
        raise InvalidValueError("--quantization", config.backends.quantization, allowed)
    if provider != TRANSFORMERS and normalised.tie_embeddings and has_other_lm_head(source, normalised):
        logger.warning(
            "the config has tie_word_embeddings=true, but lm_head.weight differs from the embedding; the engine uses "
            "lm_head.weight, as transformers does"
        )
        normalised = replace(normalised, tie_embeddings=False)
    return Checkpoint(name, source, normalised, model_class, provider, why)


def model_provider(model_impl: str, architecture: str, registry: Registry) -> tuple[str, str]:
    """Return the name of the model provider for ``--model-impl``, and why it is not the architecture's own; empty if it is.

    ``auto`` falls back to `TRANSFORMERS` where that is installed.
    """
    if model_impl == TRANSFORMERS:
        return TRANSFORMERS, "set by the user"
    installed = registry.names("models")
    if model_impl == AUTO and architecture not in installed and TRANSFORMERS in installed:
        return TRANSFORMERS, f"no provider is installed for {architecture}; runs at the speed of transformers' modules"
    return architecture, ""


_SAMPLING_DEFAULTS = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
_IGNORED_KEYS = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": None,
    "min_length": 0,
    "min_new_tokens": None,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": None,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "typical_p": 1.0,
}
"""Keys of transformers' GenerationConfig that change the tokens and are not followed, with the value that has no effect."""


def default_sampling(generation_config: Any) -> dict[str, Any]:
    """Return the sampling parameters in a model's generation_config, by the names of `SamplingParams`.

    A warning names other keys that change the tokens, since the engine does not follow them.

    Raises:
        ModelFormatError: a value is not allowed.
    """
    ignored = [key for key, neutral in _IGNORED_KEYS.items() if generation_config.get(key) not in (None, neutral, [])]
    if ignored:
        logger.warning("generation_config.json: the engine does not follow %s", ", ".join(ignored))
    if generation_config.get("do_sample") is False:
        return {}
    found = {name: generation_config[name] for name in _SAMPLING_DEFAULTS if generation_config.get(name) is not None}
    try:
        SamplingParams(**found)
    except InvalidValueError as error:
        raise ModelFormatError(f"generation_config.json: {error}") from error
    return found
