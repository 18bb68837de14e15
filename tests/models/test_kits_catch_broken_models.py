"""Each class breaks one thing; the kits for models and for checkpoints must notice every one of them."""

from __future__ import annotations
