"""Conversations written by the target itself: questions from a list of openers, then its answers to them."""

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from .target import Target, fused

END_TOKENS = (0, 2)  # <|endoftext|>, <|im_end|>
QUESTION_TOKENS = 34
PROMPT_TOKENS = 64  # prompts are padded to this
PREFILL_ROWS = 256  # and enter the cache in blocks of this many
STOPWORDS = frozenset(
    re.findall(
        r"\w+",
        """what when where which who why how that this these those the and for you can are was did any its his her our
        with from they them their there about into have does should would could make much many some your mine best good
        short give tell write explain describe take name list way""",
    )
)


class Chat:
    """Turns questions into prompts with the target's tokenizer and chat template."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        template = jinja2.Template((directory / "chat_template.jinja").read_text())
        rendered = template.render(messages=[{"role": "user", "content": "\0"}], add_generation_prompt=True)
        self.before, self.after = rendered.split("\0")

    def prompts(self, questions: Sequence[str]) -> list[list[int]]:
        """Token ids of each question as the first message of a conversation."""
        texts = [f"{self.before}{question}{self.after}" for question in questions]
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def beginnings(self, openers: Sequence[str]) -> list[list[int]]:
        """Token ids of each opener as the start of a first message."""
        texts = [f"{self.before}{opener}" for opener in openers]
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]


@dataclasses.dataclass
class Conversations:
    """Prompts and answers one after the other in `tokens`; conversation i is tokens[starts[i]:starts[i + 1]]."""

    tokens: np.ndarray  # uint16
    starts: np.ndarray  # int64, one more than there are conversations
    prompts: np.ndarray  # int64: tokens of each prompt
    temperatures: np.ndarray  # float32: what each answer was sampled at; 0 is greedy

    @classmethod
    def join(cls, prompts: list[list[int]], answers: list[np.ndarray], temperatures: np.ndarray) -> "Conversations":
        """One conversation from each prompt and its answer."""
        parts = [np.asarray(part, np.uint16) for pair in zip(prompts, answers, strict=True) for part in pair]
        sizes = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
        lengths = np.array([len(prompt) for prompt in prompts])
        return cls(np.concatenate(parts), np.cumsum([0, *sizes]), lengths, temperatures.astype(np.float32))

    def select(self, chosen: np.ndarray) -> "Conversations":
        """Those whose numbers are given."""
        sizes = np.diff(self.starts)[chosen]
        tokens = np.concatenate([self[i] for i in chosen])
        return Conversations(tokens, np.cumsum([0, *sizes]), self.prompts[chosen], self.temperatures[chosen])

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def prompt(self, index: int) -> bytes:
        """A conversation's prompt, to compare."""
        return self[index][: self.prompts[index]].tobytes()

    def save(self, path: Path) -> None:
        """Writes a .npz file."""
        np.savez(path, **vars(self))

    @classmethod
    def load(cls, path: Path) -> "Conversations":
        """Reads a .npz file."""
        return cls(**np.load(path))


class Slots(NamedTuple):
    """The rows being decoded: last token, its position, tokens written so far, and whether the row has ended."""

    token: Tensor
    position: Tensor
    count: Tensor
    ended: Tensor
    temperature: Tensor
    written: Tensor  # [batch, max_new]


@fused
def choose(logits: Tensor, temperature: Tensor) -> Tensor:
    """Samples each row at its temperature by the Gumbel-max rule; at 0 this is the argmax. Returns [batch]."""
    uniform = torch.rand(logits.shape, device=logits.device).clamp(1e-10, 1 - 1e-7)
    return (logits.float() - temperature[:, None] * torch.log(-torch.log(uniform))).argmax(-1)


class Writer:
    """Continues many prompts at once with a static cache; a row that ends is given the next prompt."""

    def __init__(self, target: Target, batch: int, cache_length: int, stride: int = 16) -> None:
        self.target, self.batch, self.cache_length, self.stride = target, batch, cache_length, stride
        _, kv_heads, dim = target.sizes
        shape = (target.num_layers, batch, kv_heads, cache_length, dim)
        self.keys, self.values = (torch.zeros(shape, dtype=target.dtype, device=target.device) for _ in range(2))

    @torch.inference_mode()
    def write(self, prompts: list[list[int]], temperatures: np.ndarray, max_new: int) -> list[np.ndarray]:
        """The continuation of each prompt, up to and with its end token, at most max_new tokens."""
        device, count = self.target.device, len(prompts)
        lengths = np.array([len(prompt) for prompt in prompts])
        if lengths.max() > PROMPT_TOKENS or PROMPT_TOKENS + max_new > self.cache_length:
            raise ValueError(f"prompts of {lengths.max()} and {max_new} new tokens exceed {self.cache_length}")
        padded = np.zeros((count, PROMPT_TOKENS), np.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        written, counts = np.zeros((count, max_new), np.uint16), np.zeros(count, np.int64)
        slots = Slots(
            *(torch.zeros(self.batch, dtype=torch.int64, device=device) for _ in range(3)),
            torch.ones(self.batch, dtype=torch.bool, device=device),
            torch.zeros(self.batch, device=device),
            torch.zeros(self.batch, max_new, dtype=torch.int64, device=device),
        )
        owner = np.full(self.batch, -1)
        step = self._captured(slots)
        taken = 0
        while True:
            free = np.flatnonzero(slots.ended.cpu().numpy())
            full = free[owner[free] >= 0]
            where = torch.from_numpy(full).to(device)
            written[owner[full]] = slots.written[where].cpu().numpy()
            counts[owner[full]] = slots.count[where].cpu().numpy()
            owner[free] = -1
            fresh = np.arange(taken, min(count, taken + len(free)))
            if len(fresh):
                rows = free[: len(fresh)]
                owner[rows] = fresh
                self._start(slots, rows, padded[fresh], lengths[fresh], temperatures[fresh])
                taken += len(fresh)
            elif (owner < 0).all():
                return [row[:n] for row, n in zip(written, counts, strict=True)]
            for _ in range(self.stride):
                step()

    def _start(
        self, slots: Slots, rows: np.ndarray, prompts: np.ndarray, lengths: np.ndarray, temperatures: np.ndarray
    ) -> None:
        """Puts prompts into free rows; their last token is left for the next step to take in."""
        device = self.target.device
        positions = torch.arange(prompts.shape[1], device=device)
        causal = (positions[:, None] >= positions)[None, None]
        block = min(PREFILL_ROWS, self.batch)
        for first in range(0, len(rows), block):
            part = np.resize(np.arange(first, min(first + block, len(rows))), block)  # always one shape
            chosen, tokens = (torch.from_numpy(a[part]).to(device) for a in (rows, prompts))
            self.target.states(tokens, positions.expand(tokens.shape), causal, (chosen, self.keys, self.values))
        index = torch.from_numpy(rows).to(device)
        slots.token[index] = torch.from_numpy(prompts[np.arange(len(rows)), lengths - 1]).to(device)
        slots.position[index] = torch.from_numpy(lengths - 1).to(device)
        slots.temperature[index] = torch.from_numpy(temperatures).float().to(device)
        slots.count[index] = 0
        slots.ended[index] = False

    def _step(self, slots: Slots) -> None:
        """One token more in every row that has not ended."""
        logits = self.target.decode(slots.token, slots.position, self.keys, self.values)
        going = ~slots.ended
        token = torch.where(going, choose(logits, slots.temperature), slots.token)
        at = slots.count.clamp(max=slots.written.shape[1] - 1)[:, None]
        slots.written.scatter_(1, at, torch.where(going[:, None], token[:, None], slots.written.gather(1, at)))
        slots.token.copy_(token)
        slots.count.add_(going)
        finished = (slots.count >= slots.written.shape[1]) | (token == END_TOKENS[0]) | (token == END_TOKENS[1])
        slots.ended.logical_or_(finished)
        slots.position.add_(~slots.ended)

    def _captured(self, slots: Slots) -> Callable[[], None]:
        """The step, as a CUDA graph where there is a GPU."""
        if self.target.device.type != "cuda":
            return lambda: self._step(slots)
        for _ in range(3):
            self._step(slots)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(slots)
        return graph.replay


def normalised(text: str) -> str:
    """Lower-case words only, to compare questions."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def content_words(text: str) -> frozenset[str]:
    """The words that say what a question is about."""
    return frozenset(word for word in normalised(text).split() if len(word) > 2 and word not in STOPWORDS)


def new_questions(texts: list[str], held_out: list[str]) -> list[str]:
    """Distinct one-line questions of which none has all content words of a held-out one."""
    topics = [content_words(question) for question in held_out]
    forbidden = {normalised(question) for question in held_out}
    seen, kept = set(forbidden), []
    for text in texts:
        text, key = text.strip(), normalised(text)
        words = content_words(text)
        if "\n" in text or key.count(" ") < 2 or key in seen or any(topic and topic <= words for topic in topics):
            continue
        seen.add(key)
        kept.append(text)
    return kept


def write_questions(
    writer: Writer, chat: Chat, openers: list[str], held_out: list[str], count: int, random: np.random.Generator
) -> list[str]:
    """Questions that the target writes after `count` random openers, those that are new and end in time."""
    beginnings = chat.beginnings(openers)
    picks = random.integers(len(openers), size=count)
    temperatures = random.uniform(0.5, 1.0, count)
    endings = writer.write([beginnings[i] for i in picks], temperatures, QUESTION_TOKENS)
    whole = [(i, ending) for i, ending in zip(picks, endings, strict=True) if len(ending) and ending[-1] == 2]
    texts = chat.tokenizer.decode_batch([ending[:-1].tolist() for _, ending in whole])
    return new_questions([openers[i] + text for (i, _), text in zip(whole, texts, strict=True)], held_out)


def write_conversations(
    writer: Writer, chat: Chat, questions: list[str], temperatures: np.ndarray, max_new: int
) -> Conversations:
    """The target's answers to the questions whose prompts are not too long."""
    start = time.perf_counter()
    prompts = chat.prompts(questions)
    fits = [i for i, prompt in enumerate(prompts) if len(prompt) <= PROMPT_TOKENS]
    prompts = [prompts[i] for i in fits]
    result = Conversations.join(prompts, writer.write(prompts, temperatures[fits], max_new), temperatures[fits])
    seconds, answers = time.perf_counter() - start, len(result.tokens) - result.prompts.sum()
    print(f"{len(result)} conversations, {answers} answer tokens, {seconds:.1f} s, {answers / seconds:.0f} tok/s")
    return result
