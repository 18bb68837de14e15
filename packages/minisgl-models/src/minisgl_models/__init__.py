"""Model architectures for minisgl, and the GGUF checkpoint format.

An architecture is one file that can be read, copied and changed alone. So it has an attention, an MLP and a decoder layer of its
own, even if another architecture has the same. Exceptions extend another model and import its parts: glm4_moe, gpt_oss, mistral,
mixtral, olmo3, qwen2, qwen2_moe and qwen3_moe. The LM head and the methods that the engine calls are those of
`minisgl_core.layers.CausalLM`.
"""
