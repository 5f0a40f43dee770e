"""Memory while a model is loaded: its weights, and one tensor more."""

import os
import subprocess
import sys

import pytest
import torch

from outrider.checkpoint import Checkpoint
from tests.models import write_tiny_gpt_oss, write_tiny_llama

SLACK = 12 << 20  # a few large pages, Python's own objects
SHAPE = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8192,
}
WRITERS = {
    "gpt-oss": lambda path: write_tiny_gpt_oss(
        path, shards=2, tokenizer=False, intermediate_size=512, num_local_experts=32, **SHAPE
    ),
    "llama": lambda path: write_tiny_llama(
        path, dtype=torch.bfloat16, tokenizer=False, intermediate_size=3072, **{**SHAPE, "vocab_size": 16384}
    ),
}


@pytest.mark.parametrize("family", WRITERS)
def test_the_peak_is_the_weights_and_one_tensor(tmp_path, family):
    checkpoint = Checkpoint(WRITERS[family](tmp_path))
    sizes = [info.num_bytes for info in checkpoint.tensors.values()]
    assert sum(sizes) - max(sizes) > 3 * SLACK, "twice the weights would go unnoticed"
    measured = subprocess.run(
        [sys.executable, "-m", "tests.target_service.models.peak_memory", str(tmp_path), "native"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        # What is freed goes back to the system, so that it is not counted.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144"},
    )
    assert measured.returncode == 0, measured.stderr
    peak, after, layers = map(int, measured.stdout.split())
    assert layers == 4
    assert peak < sum(sizes) + max(sizes) + SLACK, (peak, after, sum(sizes), max(sizes))
