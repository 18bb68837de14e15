"""Conformance kits: test classes that a provider must pass.

A plugin author subclasses the kit of the contract, sets `provider`, and runs pytest::

    from minisgl_core.testing.prefix_cache_kit import PrefixCacheTests

    class TestMyCache(PrefixCacheTests):
        provider = MyCache

The kits: `attention_kit.AttentionBackendTests`, `communicator_kit.CommunicatorTests`, `executor_kit.ExecutorTests`,
`grammar_kit.GrammarTests`, `model_kit.ModelTests`, `moe_kit.MoeKernelTests`, `ops_kit.OpsTests`,
`platform_kit.PlatformTests`, `policy_kit.PolicyTests`, `prefix_cache_kit.PrefixCacheTests`,
`quantization_kit.QuantizationTests`, `router_kit.RouterTests`, `weights_kit.WeightSourceTests`.

The kits need ``pip install 'minisgl-core[testing]'``. This package re-exports nothing, so that each kit imports only what it
needs.
"""
