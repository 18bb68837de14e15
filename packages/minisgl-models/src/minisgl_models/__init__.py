"""Model architectures for minisgl, and the GGUF checkpoint format.

Each architecture is one file. It has only what differs from the architecture that it extends, most often Llama. Granite extends
none: its file can be read, copied and changed alone, and docs/plugins/model.md walks through it. The LM head and the methods
that the engine calls are those of `minisgl_core.layers.CausalLM`.
"""
