"""Write tests/data/greedy/smollm2_mt_bench.json: greedy answers of transformers in float32, the reference for our own.

Usage: python scripts/make_greedy_reference.py

The first turns of 24 MT-bench questions (Apache-2.0), with the model's chat template, 64 tokens each,
one prompt at a time through ``generate``. Weights and tokenizer are those of the packaged model.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncsched import EngineConfig
from asyncsched.gpu.loading import Checkpoint, open_checkpoint

ROOT = Path(__file__).parent.parent
PROMPTS = 24
TOKENS = 64


def reference_model(checkpoint: Checkpoint) -> LlamaForCausalLM:
    """The checkpoint as transformers' own Llama."""
    keys = {key: value for key, value in checkpoint.config.items() if key not in ("architectures", "model_type")}
    model: LlamaForCausalLM = LlamaForCausalLM(LlamaConfig(**keys)).train(False)  # float32 unless told otherwise
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint.tensor(name, tuple(parameter.shape)))
    return model


def questions() -> list[str]:
    """First turns, spread over the categories."""
    lines = (ROOT / "tests/data/prompts/mt_bench_question.jsonl").read_text().splitlines()
    turns = [json.loads(line)["turns"][0] for line in lines]
    return turns[:: len(turns) // PROMPTS][:PROMPTS]


def main() -> None:
    """Generate and write."""
    checkpoint = open_checkpoint(EngineConfig(dtype="float32"))
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None
    model = reference_model(checkpoint)
    records = []
    for question in questions():
        text = tokenizer.render_chat([{"role": "user", "content": question}], add_generation_prompt=True)
        (prompt,) = tokenizer.encode([text], add_special_tokens=False, limit=4096)
        assert isinstance(prompt, list)
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=list(tokenizer.eos_ids), pad_token_id=0
        )
        records.append({"prompt": prompt, "output": output[0, len(prompt) :].tolist()})
        print(len(prompt), len(records[-1]["output"]), question[:60], flush=True)
    target = ROOT / "tests/data/greedy/smollm2_mt_bench.json"
    target.write_text(json.dumps(records, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
