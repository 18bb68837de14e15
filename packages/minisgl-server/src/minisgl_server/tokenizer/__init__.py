"""Tokenizer worker process: tokenizes prompts and detokenizes outputs."""

RUN_TOKENIZER = "minisgl_server.tokenizer.process:run_tokenizer_worker"
"""Main function of the process, for `minisgl_core.runtime.supervisor.Supervisor.start`."""
