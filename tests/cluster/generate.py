"""Generates with `LLM` in a process of its own, which may be on a test host: python generate.py MODEL [OPTIONS as JSON]...

For each set of options it prints a line: the tokens of each prompt, and the placement.
"""

from __future__ import annotations

import json
import sys

from minisgl_core import LLM, SamplingParams

PROMPTS = [[5, 9, 3, 7, 11], list(range(3, 23)), [5, 9, 3, 7, 12], [44, 44, 44]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)

if __name__ == "__main__":
    for options in map(json.loads, sys.argv[2:]):
        with LLM(sys.argv[1], dtype="float32", platform="cpu", ops="torch", num_pages=100, **options) as llm:
            tokens = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
            placements = [reason for name, _, reason in llm.info.choices if name == "placement"]
        print(json.dumps([tokens, *placements]))
