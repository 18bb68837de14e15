"""Command ``minisgl bench accuracy``: the effect of FP8 on the logits."""
