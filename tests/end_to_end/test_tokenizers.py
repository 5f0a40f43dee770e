"""A draft with another tokenizer than its target's: refused where it starts, let go of where it runs, never a harm."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.drafts import write_tiny_draft
from tests.end_to_end.services import same, start_target
from tests.end_to_end.trio import HOT, start_draft
from tests.gateway.client import Client
from tests.models import write_tiny_llama
from tests.scripted.cluster import PATIENT, eventually, start_gateway
from tests.tokenizer_files import write_harmony_tokenizer

CASE = {"sampling": {**HOT, "seed": 1}, "max_new_tokens": 40, "ignore_eos": True}


async def test_a_draft_with_another_tokenizer(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "target", num_hidden_layers=3)
    draft_model = write_tiny_draft(tmp_path / "draft", draft_vocab_size=320)
    content = json.loads((model / "tokenizer.json").read_text())
    (draft_model / "tokenizer.json").write_text(json.dumps(content))
    with start_target(model) as first, start_draft(draft_model, first.address) as draft:
        assert "tokenizer: the target's: " in draft.text
        with start_gateway([f"{first.address}={draft.address}"], *PATIENT) as gateway:
            async with Client(gateway.address) as client:
                plain = await client.generate(k=0, **CASE)
                answer = await client.generate(k=3, **CASE)
                assert same(answer, plain) and answer.usage.accepted_tokens > 0
                # The same weights come back with another tokenizer.
                first.kill()
                write_harmony_tokenizer(model)
                with await asyncio.to_thread(first.restarted) as target:
                    eventually(lambda: "waiting for a target that fits" in draft.text, dump=[draft])
                    eventually(lambda: gateway.metric("outrider_peer_available", kind="target") == 1)
                    eventually(lambda: gateway.metric("outrider_peer_available", kind="draft") == 0)
                    answer = await client.generate(k=3, **CASE)
                    assert answer.token_ids == plain.token_ids and answer.usage.draft_tokens == 0
                    with pytest.raises(AssertionError) as refused:
                        await asyncio.to_thread(start_draft, draft_model, target.address)
    for text in (draft.text, str(refused.value)):
        assert f"{draft_model / 'tokenizer.json'}: not target's tokenizer: " in text and "tokens differ: " in text, text
        assert "Traceback" not in text
