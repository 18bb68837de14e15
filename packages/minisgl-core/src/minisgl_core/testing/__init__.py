"""The conformance kit: what a provider must pass, as classes of tests to subclass.

A plugin author subclasses the kit of the contract, sets `provider`, and runs pytest::

    from minisgl_core.testing.prefix_cache_kit import PrefixCacheTests

    class TestMyCache(PrefixCacheTests):
        provider = MyCache

The kits: `attention_kit.AttentionBackendTests`, `communicator_kit.CommunicatorTests`, `grammar_kit.GrammarTests`,
`model_kit.ModelTests`, `moe_kit.MoeKernelTests`, `ops_kit.OpsTests`, `platform_kit.PlatformTests`,
`policy_kit.PolicyTests`, `prefix_cache_kit.PrefixCacheTests`, `quantization_kit.QuantizationTests`,
`weights_kit.WeightSourceTests`.
`kit_runner.failures` runs one without pytest, for tests of the kits themselves. They need
``pip install 'minisgl-core[testing]'``; nothing is re-exported here, so that each costs only what it imports.
"""
