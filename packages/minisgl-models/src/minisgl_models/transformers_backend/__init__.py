"""Any causal LM of transformers whose attention goes through its AttentionInterface (``--model-impl transformers``)."""
