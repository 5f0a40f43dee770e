"""Questions that a target is asked so that it writes some text: a draft is then tried on it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tokenizers import Tokenizer

from outrider.chat_template import ChatTemplate

QUESTIONS = (
    "Why is the sky blue?",
    "How do I boil an egg?",
    "Write a short story about a lighthouse keeper and a lost letter.",
    "What is the difference between a list and a tuple in Python?",
    "Explain to a child how a bicycle stays upright.",
    "A train leaves at 9:40 and arrives at 12:05. How long does it take?",
    "Name three rivers of Europe and the seas that they flow into.",
    "Translate into French: the library closes at six in the evening.",
)
_ARBITRARY_LENGTH = 12


def encode_prompts(files: Mapping[str, bytes], vocab_size: int) -> list[list[int]]:
    """Tokens of QUESTIONS, as conversations where the target's tokenizer files hold a template.

    A target without a tokenizer is given arbitrary tokens.
    """
    if "tokenizer.json" not in files:
        places = range(_ARBITRARY_LENGTH)
        return [[(7 * index + i * i) % vocab_size for i in places] for index in range(len(QUESTIONS))]
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    template = ChatTemplate.of_files(files, json.loads(files.get("tokenizer_config.json", b"{}")))
    if template is None:
        return [list(tokenizer.encode(question).ids) for question in QUESTIONS]
    rendered = [template.render([{"role": "user", "content": question}]) for question in QUESTIONS]
    return [list(tokenizer.encode(text, add_special_tokens=False).ids) for text in rendered]
