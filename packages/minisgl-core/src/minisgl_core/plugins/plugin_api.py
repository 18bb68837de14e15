"""The version of the contracts between minisgl and its plugins.

The major number grows when a plugin for the old contracts may stop working. Examples are a removed method, a new abstract method
and a changed argument. The minor number grows with additions that a plugin may ignore, such as an optional method, a new hook or
a field with a default.

A provider declares its versions as a class attribute, ``plugin_api = ">=2,<3"``, and a hook module as a module attribute. Other
versions of minisgl refuse the provider with an error that names it. The base classes of the contracts have a default for
providers without a declaration. The versions of the packages are independent of this one.

Version 1 was never released. The first release will have version 2.0, which may change until then.
"""

VERSION = "2.0"

CHANGES = {
    "attention": "a backend declares `capabilities` in place of kv_layout, reads_page_table and the optional protocols",
    "communicator": "`CommunicatorSpec.rank` is the rank in the group, not the local rank, and a communicator has send() and"
    " recv()",
    "grammar": "the base class Grammar is GrammarBackend, and nothing else changed",
    "hooks": "plans and records have new fields, and the hooks pages_cached and pages_evicted are new",
    "models": "models are plain layers loaded by attribute, and forward() has the argument logits_index",
    "moe": "a kernel declares `capabilities`, and forward() takes `ExpertWeights`, which replaces forward_fp8()",
    "ops": "Ops is split into roles: subclass one or more of LinearOps, NormOps, RotaryOps, SamplingOps, StepOps and"
    " RoutingOps; take_rows() and put() are gather_rows() and scatter(), and rotary() and rotate() are apply_rope() and"
    " qk_norm_rope()",
    "platform": "capture_pieces() is capture_piecewise(), borrow() is weak_ref(), and share_memory() is"
    " allocate_mapped_memory()",
    "policy": "order() has the argument running, and requests have their lengths, user and arrival time",
    "prefix_cache": "match() and insert() take a namespace, and runs() is nodes()",
    "quantization": "a provider makes a method object per layer, which loads the checkpoint's tensors for it",
    "weights": "tokenizer() raises TokenizerNotFoundError without a tokenizer, and stored_tensors() gives packed weights",
}
"""Changes of version 2 for each kind of plugin, as the end of a sentence."""
REMOVED: dict[str, tuple[str, ...]] = {
    "attention": ("kv_layout", "reads_page_table", "rotates", "attend_rotating"),
    "models": ("forward_rows", "finalize", "compute_own_logits"),
    "moe": ("forward_fp8",),
    "ops": ("take_rows", "put", "rotary", "rotate", "rotate_and_store"),
    "platform": ("capture_pieces", "borrow", "share_memory"),
    "prefix_cache": ("runs",),
    "quantization": ("prepare_linear", "prepare_gated", "prepare_experts"),
}
"""Attributes of version 1 that nothing reads any more."""
