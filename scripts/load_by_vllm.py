"""TTFT and TPOT of a running server under load, measured by vLLM's client (`vllm bench serve`).

    python scripts/load_by_vllm.py FOLDER --port 8001 --rate 8 --rate 16 [--requests 667 --seed 1 --seed 2 --seed 3]

FOLDER has the tokenizer. The server has the model under the name `m`, and any engine may run it. For each rate, the percentiles
are those of the requests of all seeds. Prompts have 256 to 768 random tokens, outputs 128 to 384; arrivals are Poisson. This
process makes all runs, so that it imports vLLM once. It runs in the environment that has vLLM.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.option("--port", type=int, default=8001)
@click.option("--rate", "rates", type=float, multiple=True, required=True)
@click.option("--seed", "seeds", type=int, multiple=True, default=(1, 2, 3))
@click.option("--requests", type=int, default=667, help="Requests per rate and seed.")
def main(folder: Path, port: int, rates: tuple[float, ...], seeds: tuple[int, ...], requests: int) -> None:
    """See the module's text."""
    from vllm.benchmarks import serve  # type: ignore[import-not-found]
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    common = f"""--backend openai --base-url http://127.0.0.1:{port} --model m --tokenizer {folder} --endpoint /v1/completions
        --dataset-name random --random-input-len 512 --random-output-len 256 --random-range-ratio 0.5 --ignore-eos
        --disable-tqdm --ready-check-timeout-sec 600 --save-result --save-detailed --num-prompts {requests}"""
    with tempfile.TemporaryDirectory() as results:
        for rate in rates:
            runs: list[dict[str, Any]] = []
            for seed in seeds:
                options = (
                    f"{common} --request-rate {rate} --seed {seed} --result-dir {results} --result-filename {seed}.json"
                )
                with contextlib.redirect_stdout(io.StringIO()):
                    serve.main(parser.parse_args(options.split()))
                runs.append(json.loads((Path(results) / f"{seed}.json").read_text()))
                if runs[-1]["failed"]:
                    raise click.ClickException(f"{runs[-1]['failed']} requests of seed {seed} failed")
            ttft = 1000 * np.concatenate([run["ttfts"] for run in runs])
            tpot = np.array(
                [
                    1000 * sum(itls) / (length - 1)
                    for run in runs
                    for itls, length in zip(run["itls"], run["output_lens"], strict=True)
                ]
            )
            itl = 1000 * np.concatenate([itls for run in runs for itls in run["itls"]])
            within = np.mean((ttft <= 250) & (tpot <= 25))
            percentiles = ", ".join(
                f"{name} {' / '.join(f'{value:.1f}' for value in np.percentile(values, (50, 90, 99)))}"
                for name, values in (("TTFT", ttft), ("TPOT", tpot), ("ITL", itl))
            )
            click.echo(
                f"{rate:g} requests/s, {sum(run['completed'] for run in runs)} completed: {percentiles} ms (p50 / p90 / p99);"
                f" TTFT by seed {[round(float(np.percentile(run['ttfts'], 99)) * 1000, 1) for run in runs]} (p99);"
                f" {within:.1%} within 250 and 25 ms"
            )


if __name__ == "__main__":
    main()
