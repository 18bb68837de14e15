"""Command ``minisgl bench accuracy``: the effect of quantization on the logits."""
