"""How much of everything is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of all parts.

    Attributes:
        copy_bytes: Of the array whose copying tells the memory's bandwidth.
        matrix: Rows and columns of the product that tells the arithmetic's rate.
        dtype: Of the models.
        max_rows: Rows of the models' executors; as many are streamed at once.
        page_size: Tokens per page.
        pages_per_row: Pages of the pool for each row.
        max_model_len: Longest sequence of the models.
        token_budget: Most tokens per step of the engines.
        kernel_widths: Rows and width of the elementwise kernels' inputs.
        kernel_shapes: How many of the shapes of attention are compared with their definition.
        kernel_contexts: Tokens per row in that comparison.
        kernel_vocabulary: Tokens of the vocabulary that is sampled from.
        decode_rows: Rows that decode, one measurement each.
        decode_context: Tokens each of them has before; a multiple of the page size.
        decode_steps: Steps of each measurement.
        attention_context: Tokens that ``max_rows`` rows attend to.
        prefill_tokens: Tokens of the prompt.
        stream_prompt, stream_output: Tokens of every streamed request, in and out.
        equality_lengths: Tokens of the prompts that are compared.
        equality_output: Tokens of every answer to them.
        overlap_rounds: Runs per model and depth; the best counts.
        serving_sequences: Sequences served.
        serving_least, serving_most: Tokens of each, in and out, drawn between these.
        peer_seconds: How long the other engine may take.
    """

    copy_bytes: int = 2 << 30
    matrix: int = 8192
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_rows: int = 256
    page_size: int = 32
    pages_per_row: int = 40
    max_model_len: int = 8448
    token_budget: int = 8192
    kernel_widths: tuple[tuple[int, int], ...] = ((0, 64), (1, 576), (3, 1000), (37, 4096), (5, 5120))
    kernel_shapes: int = 12
    kernel_contexts: tuple[int, ...] = (1, 33, 64, 17, 100, 700, 2000)
    kernel_vocabulary: int = 151_936
    decode_rows: tuple[int, ...] = (1, 64, 256)
    decode_context: int = 1024
    decode_steps: int = 40
    attention_context: int = 4096
    prefill_tokens: int = 8192
    stream_prompt: int = 128
    stream_output: int = 384
    equality_lengths: tuple[int, ...] = (1, 3, 60, 17, 16, 33, 5, 48)
    equality_output: int = 48
    overlap_rounds: int = 2
    serving_sequences: int = 256
    serving_least: int = 100
    serving_most: int = 1024
    peer_seconds: float = 60.0


FULL = Sizes()

QUICK = replace(
    FULL,
    copy_bytes=1 << 30,
    kernel_shapes=4,
    decode_steps=16,
    attention_context=2048,
    stream_output=160,
    equality_output=24,
    serving_sequences=64,
    peer_seconds=15.0,
)
"""Fewer and smaller; the rows stay as many as they are, so that the targets keep their sense."""
