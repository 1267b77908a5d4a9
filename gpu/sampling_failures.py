"""Why a row has no token: the same words whatever device sampled."""

from __future__ import annotations

FAILURES = (
    "",
    "the model's logits hold NaN; check the weights and the data type",
    "the model's logits hold +inf; check the weights and the data type",
    "the model's logits hold no finite value; check the weights and the data type",
    "every token is masked: allowed_token_ids, bad_token_ids and min_tokens leave nothing to sample",
)
"""By the samplers' status codes: ``OK, HAS_NAN, HAS_INFINITY, NOTHING_FINITE, ALL_MASKED``."""
