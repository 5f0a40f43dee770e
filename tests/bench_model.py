"""Times steps of a model on this machine, beside transformers: `python -m tests.bench_model [DIRECTORY]`.

Without a directory it writes a checkpoint with random weights and the shapes of SmolLM2-135M, in bfloat16.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from target_service.models import ForwardBatch, Model, load_model
from tests.models import write_tiny_llama

SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}

clock = time.perf_counter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", help="a checkpoint; default: random weights, SmolLM2-135M's shapes")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 3, 4, 5, 8])
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="one thread's processor time: steady on a busy machine")
    parser.add_argument("--no-reference", action="store_true", help="leave out transformers")
    options = parser.parse_args()
    if options.cpu_time:
        global clock
        options.threads, clock = 1, time.thread_time
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or write_tiny_llama(
            Path(temporary), dtype=torch.bfloat16, tokenizer=False, **SMOLLM2
        )
        model = load_model(directory)
        print(f"{options.threads} threads, context {options.context}, {model.config.dtype}")
        print_steps(model, options.context, options.rows, options.repeat)
        print_prefill(model, 512)
        if not options.no_reference:
            print_reference(str(directory), model.config.dtype, options.context)


def print_steps(model: Model, context: int, rows: list[int], repeat: int) -> None:
    """The time of a step, logits included, of so many rows of one sequence behind `context` others."""
    page_size = (cache := model.new_kv_cache(2 + (context + 64) // 64)).page_size
    pages = torch.arange(cache.num_pages, dtype=torch.int32)[None]
    run_rows(model, cache, pages, 0, context)
    for count in rows:
        seconds = sorted(timed(lambda n=count: run_rows(model, cache, pages, context, n)) for _ in range(repeat))
        print(f"rows {count:2d}: median {seconds[repeat // 2] * 1e3:6.2f} ms, best {seconds[0] * 1e3:6.2f} ms")
    assert page_size == 64


def print_prefill(model: Model, length: int) -> None:
    cache = model.new_kv_cache(length // 64 + 1)
    pages = torch.arange(cache.num_pages, dtype=torch.int32)[None]
    seconds = min(timed(lambda: run_rows(model, cache, pages, 0, length, head_rows=1)) for _ in range(3))
    config = model.config
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    weights = config.num_layers * config.hidden_size * (attention + 3 * config.intermediate_size)
    print(f"prefill {length}: {seconds * 1e3:.0f} ms, {2e-9 * weights * length / seconds:.0f} GFLOP/s in linears")


def run_rows(model: Model, cache, pages: torch.Tensor, start: int, count: int, head_rows: int | None = None) -> None:
    positions = torch.arange(start, start + count, dtype=torch.int32)
    batch = ForwardBatch(positions.long() % 97, positions, torch.zeros(count, dtype=torch.int32), pages)
    hidden = model.forward(batch, cache, ()).hidden
    model.logits(hidden if head_rows is None else hidden[-head_rows:])


def print_reference(directory: str, dtype: torch.dtype, context: int) -> None:
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    prompt = (torch.arange(context) % 97)[None]

    def generate(count: int) -> float:
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        return timed(lambda: reference.generate(prompt, attention_mask=torch.ones_like(prompt), **options))

    generate(2)
    seconds = min((generate(34) - generate(2)) / 32 for _ in range(2))
    print(f"transformers generate: {seconds * 1e3:.2f} ms a token, {1 / seconds:.1f} tok/s")


def timed(function: Callable[[], object]) -> float:
    start = clock()
    function()
    return clock() - start


if __name__ == "__main__":
    main()
