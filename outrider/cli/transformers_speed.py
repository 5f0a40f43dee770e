"""Times transformers' greedy generate on given prompts, as a process of its own.

Standard input: {"prompts": [[token, ...], ...], "max_new_tokens": n}. Standard output:
{"tokens": n, "seconds": s, "threads": t}.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any


def main() -> None:
    """Reads the question, generates for each prompt alone, and writes the answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Directory of the checkpoint.")
    directory = parser.parse_args().model
    question = json.load(sys.stdin)
    json.dump(measure(directory, question["prompts"], question["max_new_tokens"]), sys.stdout)


def measure(directory: str, prompts: list[list[int]], max_new_tokens: int) -> dict[str, Any]:
    """Tokens generated and seconds taken over all prompts, after one short warm-up."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto")

    def generate(prompt: list[int], limit: int) -> int:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit, pad_token_id=0
        )
        return output.shape[1] - len(prompt)

    with torch.inference_mode():
        generate(prompts[0], 16)
        began = time.perf_counter()
        tokens = sum(generate(prompt, max_new_tokens) for prompt in prompts)
    return {"tokens": tokens, "seconds": time.perf_counter() - began, "threads": torch.get_num_threads()}


if __name__ == "__main__":
    main()
