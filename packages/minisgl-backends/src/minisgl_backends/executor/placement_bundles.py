"""Bundles of a Ray placement group: the resources that are reserved together, for the ranks of one engine."""

from typing import Any

from minisgl_core.contracts.executor import ExecutorSpec


def ranks_per_bundle(spec: ExecutorSpec) -> int:
    """Return the ranks of a bundle: a pipeline stage with ``pack``, otherwise one."""
    return spec.tp if spec.placement == "pack" else 1


def make_bundles(spec: ExecutorSpec, resources: dict[str, float]) -> tuple[list[dict[str, float]], str]:
    """Return the bundles of a placement group for these ranks, and its strategy.

    Args:
        spec: the ranks.
        resources: resources of the cluster; with platform ``auto``, ranks need GPUs if it has enough.
    """
    if spec.platform == "auto":
        needs_gpus = resources.get("GPU", 0) >= spec.size
    else:
        needs_gpus = spec.platform != "cpu"
    per_bundle = ranks_per_bundle(spec)
    bundle: dict[str, float] = {"CPU": per_bundle, "GPU": per_bundle} if needs_gpus else {"CPU": per_bundle}
    return [dict(bundle) for _ in range(spec.size // per_bundle)], spec.placement.upper().replace("-", "_")


def bundles_fit(bundles: list[dict[str, float]], nodes: list[dict[str, Any]], strategy: str) -> bool:
    """Return True if each bundle would fit on some node without other jobs, and STRICT_SPREAD has a node per bundle."""

    def holds(resources: dict[str, float], bundle: dict[str, float]) -> bool:
        return all(resources.get(kind, 0) >= amount for kind, amount in bundle.items())

    are_large_enough = all(any(holds(node["Resources"], bundle) for node in nodes) for bundle in bundles)
    return are_large_enough and (strategy != "STRICT_SPREAD" or len(nodes) >= len(bundles))


def describe_shortage(bundles: list[dict[str, float]], spec: ExecutorSpec, nodes: list[dict[str, Any]]) -> str:
    """Return the error message for bundles that could not be reserved."""

    def amounts(resources: dict[str, float]) -> str:
        return ", ".join(f"{resources[kind]:g} {kind}" for kind in ("CPU", "GPU") if kind in resources) or "nothing"

    wanted = "; ".join(amounts(bundle) for bundle in bundles)
    alive = [f"{node['NodeManagerAddress']} ({amounts(node['Resources'])})" for node in nodes]
    remedy = " --placement spread lets a stage span nodes." if spec.placement == "pack" and spec.tp > 1 else ""
    return (
        f"Ray cannot place {spec.size} ranks: --placement {spec.placement} needs bundles of {wanted}, the first on this"
        f" node. The nodes are {', '.join(alive)}; other jobs may use part of them.{remedy}"
    )
