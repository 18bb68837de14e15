"""Checks that quantization providers share."""

from minisgl_core.contracts.checkpoint_quantization import CheckpointQuantization
from minisgl_core.contracts.layer_methods import ExpertsSpec
from minisgl_core.contracts.quantization import QuantizationSpec
from minisgl_core.errors import ProviderUnsupportedError


def stored_quantization(spec: QuantizationSpec) -> CheckpointQuantization | None:
    """Return the quantization of the weights that layers load; None if they load weights in the model's dtype.

    The weights of a GGUF file are dequantized while loading, so providers other than ``gguf`` quantize them like 16-bit ones.
    """
    return None if spec.checkpoint is None or spec.checkpoint.is_gguf else spec.checkpoint


def refuse_stacked_experts(spec: ExpertsSpec, provider: str) -> None:
    """Refuse experts that the checkpoint stores in one tensor.

    Raises:
        ProviderUnsupportedError: it does.
    """
    if spec.is_stacked:
        reason = "it does not support checkpoints that store all experts in one tensor, as gpt-oss's do"
        raise ProviderUnsupportedError("quantization", provider, [reason])


def wrong_weights_message(checkpoint: CheckpointQuantization | None, weights: str, supported: str) -> str:
    """Return the message that a checkpoint has other weights than a quantization provider loads, with the remedy.

    Args:
        checkpoint: quantization of the checkpoint; None for 16-bit weights.
        weights: weights that the provider loads, such as ``float8``.
        supported: values in ``quantization_config`` that stand for them.
    """
    kinds = "" if checkpoint is None else f"quant_method {checkpoint.method!r}"
    if checkpoint is not None and checkpoint.method == "compressed-tensors":
        kinds += "".join(f", type {each.get('type')!r}, num_bits {each.get('num_bits')}" for each in checkpoint.groups)
    found = f"({kinds})" if kinds else "(no quantization_config)"
    return (
        f"the checkpoint's weights {found} are not {weights}; this provider loads {supported}; use --quantization auto, "
        "which chooses by the checkpoint"
    )
