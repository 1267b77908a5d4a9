"""Write a GGUF file again with bf16 weights, so that llama.cpp computes with the same weights as the other engines.

Usage: PEERS/llama-cpp/bin/python -m benchmarks.peers.llama_cpp_convert SOURCE TARGET
"""

from __future__ import annotations

import argparse
import ctypes


def convert(source: str, target: str) -> None:
    """Convert with llama.cpp's own quantiser."""
    import llama_cpp  # type: ignore[import-not-found]  # another environment's

    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_BF16
    params.allow_requantize = True
    if status := llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp could not convert {source} (status {status})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target")
    options = parser.parse_args()
    convert(options.source, options.target)
