"""Command ``minisgl bench attention``."""

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import click

from minisgl_core.errors import InvalidValueError
from minisgl_server.bench.flags import FloatRange, json_option


def parse_shape(text: str) -> tuple[int, int]:
    """Return the batch size B and tokens L of ``BxL``."""
    with suppress(ValueError):
        batch, length = map(int, text.lower().split("x"))
        if min(batch, length) > 0:
            return batch, length
    raise click.BadParameter(f"{text!r} is not a shape BxL, such as 16x1024: batch size and tokens.")


@click.command()
@click.argument("providers", metavar="[PROVIDER]...", nargs=-1)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="By default, the GPU if there is one.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="By default, bfloat16 on a GPU and float32 on a CPU.",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(["auto", "fp8"]),
    default="auto",
    help="Dtype of the KV pool; auto is that of --dtype.",
)
@click.option(
    "--page-size",
    "page_sizes",
    type=click.IntRange(1),
    multiple=True,
    help="Tokens per page; may be given several times. By default, 1, 16, 64 and 128 on a GPU, 1 and 16 on a CPU.",
)
@click.option(
    "--decode",
    "decodes",
    type=parse_shape,
    multiple=True,
    metavar="BxL",
    help="B requests of L tokens on average, with one new token each; may be given several times. By default, 256x1064 on a"
    " GPU and 8x256 on a CPU.",
)
@click.option(
    "--prefill",
    "prefills",
    type=parse_shape,
    multiple=True,
    metavar="BxL",
    help="B prompts of L tokens; may be given several times. By default, 16x1024 on a GPU and 1x256 on a CPU.",
)
@click.option(
    "--spread",
    type=FloatRange(0, 0.99),
    default=0.9,
    help="Maximum relative deviation of decode lengths from their mean; 0 for equal lengths.",
)
@click.option("--num-q-heads", type=click.IntRange(1), default=16)
@click.option("--num-kv-heads", type=click.IntRange(1), default=8)
@click.option("--head-dim", type=click.IntRange(1), default=128)
@click.option("--repeats", type=click.IntRange(1), default=20, help="Timed calls per case.")
@json_option
def attention(**values: Any) -> None:
    """Check attention providers against a float64 reference, and time them; by default, all installed ones.

    Decodes are bound by memory bandwidth, so see their GB/s; prefills are bound by compute, so see their TFLOP/s.
    """
    from minisgl_server.bench.attention.run import run_attention

    options = SimpleNamespace(**values)
    if options.num_q_heads % options.num_kv_heads:
        raise InvalidValueError(
            "--num-q-heads", options.num_q_heads, f"a multiple of --num-kv-heads={options.num_kv_heads}"
        )
    run_attention(options)
