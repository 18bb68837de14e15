"""Model architectures for minisgl, and the GGUF checkpoint format.

An architecture is one file, which has what differs from the architecture that it extends. Llama, Gemma 2, GLM-4, Granite and
OLMo 2 extend none, so their files can be read, copied and changed alone. The LM head and the methods that the engine calls are
those of `minisgl_core.layers.CausalLM`.
"""
