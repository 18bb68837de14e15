"""Plugin kinds, each with an entry-point group. This module imports nothing heavy."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """One plugin kind.

    Attributes:
        name: name for users and messages.
        contract: ``module:attribute`` of the base class of providers; empty if any object is allowed.
        flag: the command-line flag that selects a provider; empty if there is none.
        summary: one line for listings.
    """

    name: str
    contract: str
    flag: str
    summary: str

    @property
    def label(self) -> str:
        """Phrase for one provider of the kind in messages."""
        nouns = {"commands": "command", "hooks": "hook module", "models": "model"}
        return nouns.get(self.name, f"{self.name} provider")

    @property
    def group(self) -> str:
        """Entry-point group."""
        return f"minisgl.{self.name}"


def _kind(name: str, contract: str, flag: str, summary: str) -> Kind:
    return Kind(name, f"minisgl_core.contracts.{contract}" if contract else "", flag, summary)


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        _kind("attention", "attention:AttentionBackend", "--attn", "attention over the paged KV pool"),
        _kind("models", "model:Model", "", "model architectures, by Hugging Face name"),
        _kind("prefix_cache", "prefix_cache:PrefixCache", "--cache", "reuse of KV between prompts"),
        _kind("moe", "moe:MoeKernel", "--moe", "mixture-of-experts kernels"),
        _kind("ops", "ops:OpsProvider", "--ops", "GEMMs, norms, rotary embedding, sampling, step inputs, MoE routing"),
        _kind("quantization", "quantization:Quantization", "--quantization", "quantized weights of the layers"),
        _kind("communicator", "communicator:Communicator", "--communicator", "collectives between ranks"),
        _kind("executor", "executor:Executor", "--executor", "where the ranks of an engine run"),
        _kind("router", "router:Router", "--router", "which replica runs a request"),
        _kind("platform", "platform:Platform", "--platform", "devices"),
        _kind("weights", "weights:WeightSource", "", "checkpoint formats"),
        _kind("policy", "policy:Policy", "--policy", "order of the waiting requests"),
        _kind("commands", "", "", "commands under `minisgl`"),
        _kind("grammar", "grammar:GrammarBackend", "--grammar", "structured output"),
        _kind("hooks", "", "", "hook modules"),
    )
}
"""All kinds by name, in the order of listings."""
