"""Command ``minisgl bench accuracy``."""

from typing import Any

import click

from minisgl_core.cli.options import pick, with_options
from minisgl_core.config.options import EngineConfig
from minisgl_server.bench.flags import OutputFile


@click.command()
@with_options(EngineConfig)
@click.option(
    "--text",
    "texts",
    type=click.Path(exists=True, dir_okay=False),
    multiple=True,
    required=True,
    help="File with text to evaluate; may be given several times.",
)
@click.option("--window", type=click.IntRange(2), default=512, help="Tokens per evaluated sequence.")
@click.option("--max-tokens", type=click.IntRange(2), default=8192, help="Maximum number of tokens to evaluate.")
@click.option("--json", "json_file", type=OutputFile(), help="Also write the results to this file.")
def accuracy(values: dict[str, Any], sources: dict[str, str], **options: Any) -> None:
    """Compare logits with an FP8 KV cache and with quantized weights to those with neither."""
    from minisgl_server.bench.accuracy.run import run_accuracy

    run_accuracy(EngineConfig.from_flat(**pick(values, EngineConfig)), **options)


# The command sets these options itself. Values from a config file or the environment are refused.
for _option in accuracy.params:
    if isinstance(_option, click.Option) and _option.name in ("kv_dtype", "quantization"):
        _option.hidden = True
