"""The options of ``minisgl bench attention``."""

from __future__ import annotations

from typing import Any

import click

from minisgl_core.errors import InvalidValueError
from minisgl_server.bench.attention.options import AttentionOptions, ShapeType
from minisgl_server.bench.flags import OutputFile


@click.command()
@click.argument("providers", metavar="[PROVIDER]...", nargs=-1)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="The GPU where there is one, if missing.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="bfloat16 on a GPU, float32 on a CPU if missing.",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(["auto", "fp8"]),
    default="auto",
    show_default=True,
    help="Of the pool; auto is that of --dtype.",
)
@click.option(
    "--page-size",
    "page_sizes",
    type=click.IntRange(1),
    multiple=True,
    help="May be given several times. 1, 16, 64 and 128 on a GPU, 1 and 16 on a CPU if missing.",
)
@click.option(
    "--decode",
    "decodes",
    type=ShapeType(),
    multiple=True,
    metavar="BxL",
    help="B requests of L tokens on average, one new token each; may be given several times. 256x1064 or 8x256 if missing.",
)
@click.option(
    "--prefill",
    "prefills",
    type=ShapeType(),
    multiple=True,
    metavar="BxL",
    help="B prompts of L tokens; may be given several times. 16x1024 or 1x256 if missing.",
)
@click.option(
    "--spread",
    type=click.FloatRange(0, 0.99),
    default=0.9,
    show_default=True,
    help="Decodes' lengths are up to such a share from their mean, as in serving; 0 for equal ones.",
)
@click.option("--num-q-heads", type=click.IntRange(1), default=16, show_default=True)
@click.option("--num-kv-heads", type=click.IntRange(1), default=8, show_default=True)
@click.option("--head-dim", type=click.IntRange(1), default=128, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=20, show_default=True, help="Timed calls of each.")
@click.option("--json", "json_file", type=OutputFile(), help="Write the results to this file, too.")
def attention(**values: Any) -> None:
    """Check attention providers against a reference in float64, and time them side by side.

    Without names, all that are installed. Decodes are bound by the memory that holds K and V, so they are rated in GB/s;
    prefills by arithmetic, in TFLOP/s.
    """
    from minisgl_server.bench.attention.run import run_attention

    options = AttentionOptions(**values)
    if options.num_q_heads % options.num_kv_heads:
        raise InvalidValueError(
            "--num-q-heads", options.num_q_heads, f"a multiple of --num-kv-heads={options.num_kv_heads}"
        )
    run_attention(options)
