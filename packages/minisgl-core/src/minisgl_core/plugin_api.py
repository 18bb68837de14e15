"""The version of the contracts between minisgl and its plugins.

The major number grows when a plugin written for the old contracts may stop working: a method removed, a new abstract
method, an argument or a promise changed. The minor number grows when something is added that a plugin may use or not: an
optional method, a new hook, a new field with a default. A provider declares the versions it works with as a class
attribute, ``plugin_api = ">=2,<3"`` (a hook module as a module attribute), and is refused by name elsewhere; the base
classes of the contracts carry a default for authors who do not think of it. The packages' own versions move on their own.

Nothing is released yet: 2.0 will be the contracts of the first release, and they may change until then.
"""

from __future__ import annotations

VERSION = "2.0"

CHANGES = {
    "attention": "a backend declares `capabilities` in place of kv_layout, reads_page_table and the optional protocols",
    "communicator": "ranks have global and local numbers, and a communicator can send and receive",
    "grammar": "the base classes declare version 2, and nothing else changed",
    "hooks": "plans and records have new fields, and there are hooks for pages that a prefix cache takes and evicts",
    "models": "models are plain layers loaded by attribute, and forward() is told which tokens logits are computed of",
    "moe": "a kernel declares `capabilities`, and forward() takes `ExpertWeights`, which replaces forward_fp8()",
    "ops": "Ops is split into roles: subclass LinearOps, NormOps, RotaryOps, SamplingOps, StepOps or RoutingOps, each of"
    " which may be served alone; take_rows() and put() are gather_rows() and scatter()",
    "platform": "the base class declares version 2, and nothing else changed",
    "policy": "order() is told which requests run, and requests show their lengths, user and arrival time",
    "prefix_cache": "match() and insert() take a namespace",
    "quantization": "the base class declares version 2, and nothing else changed",
    "weights": "tokenizer() raises TokenizerNotFoundError where the checkpoint holds none",
}
"""What version 2 changed for each kind of plugin since version 1, as the end of a sentence."""
REMOVED: dict[str, tuple[str, ...]] = {
    "attention": ("kv_layout", "reads_page_table"),
    "models": ("forward_rows", "finalize", "compute_own_logits"),
    "moe": ("forward_fp8",),
    "ops": ("take_rows", "put"),
}
"""Attributes that providers of version 1 have and that nothing reads any more."""
