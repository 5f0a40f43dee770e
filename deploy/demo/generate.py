"""Conversations written by the target itself: questions from lists of openers and topics, then its answers to them."""

import re
import time
from collections.abc import Sequence
from pathlib import Path

import jinja2
import numpy as np
import torch
from tokenizers import Tokenizer

from .conversations import Conversations
from .target import Target
from .writer import END_TOKENS, PROMPT_TOKENS, Writer

HERE = Path(__file__).parent
QUESTION_TOKENS = 34
SAMPLED = 0.3  # share of the questions that are answered a second time, not greedily
STOPWORDS = frozenset(
    re.findall(
        r"\w+",
        """what when where which who why how that this these those the and for you can are was did any its his her our
        with from they them their there about into have does should would could make much many some your mine best good
        short give tell write explain describe take name list way""",
    )
)


class Openers:
    """Beginnings of questions: the lines of openers.txt, with a topic of topics.txt in place of {}."""

    def __init__(self) -> None:
        self.frames = (HERE / "openers.txt").read_text().splitlines()
        lines = (HERE / "topics.txt").read_text().splitlines()
        self.topics = [topic.strip() for line in lines for topic in line.split(",")]

    def draw(self, count: int, random: np.random.Generator) -> list[str]:
        """`count` random beginnings."""
        frames, topics = random.integers(len(self.frames), size=count), random.integers(len(self.topics), size=count)
        return [self.frames[i].format(self.topics[j]) for i, j in zip(frames, topics, strict=True)]


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
    writer: Writer, chat: Chat, openers: Openers, held_out: list[str], count: int, random: np.random.Generator
) -> list[str]:
    """Questions that the target writes after `count` random openers, those that are new and end in time."""
    begun = openers.draw(count, random)
    temperatures = random.uniform(0.5, 1.0, count)
    endings = writer.write(chat.beginnings(begun), temperatures, QUESTION_TOKENS)
    whole = [
        (start, ending)
        for start, ending in zip(begun, endings, strict=True)
        if len(ending) and ending[-1] == END_TOKENS[1]
    ]
    texts = chat.tokenizer.decode_batch([ending[:-1].tolist() for _, ending in whole])
    return new_questions([start + text for (start, _), text in zip(whole, texts, strict=True)], held_out)


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


def write_data(target: Target, chat: Chat, output: Path, seconds: float, tiny: bool, held_out: list[str]) -> None:
    """Saves conversations for training and for tests: rounds of questions and answers until the time is over."""
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    openers = Openers()
    writer = Writer(target, 4 if tiny else 3072, 104 if tiny else 320)
    max_new, count = (40, 12) if tiny else (256, 30_000)
    start, parts = time.perf_counter(), []
    prompts = chat.prompts(held_out[:4] if tiny else held_out)
    zeros = np.zeros(len(prompts))
    Conversations.join(prompts, writer.write(prompts, zeros, min(160, max_new)), zeros).save(output / "held_out.npz")
    seen: dict[str, None] = {}
    while not parts or time.perf_counter() - start < seconds:
        questions = write_questions(writer, chat, openers, held_out, count, random)
        questions = [question for question in questions if question not in seen]
        if not questions:
            continue
        seen.update(dict.fromkeys(questions))
        again = [question for question in questions if random.random() < SAMPLED]
        temperatures = np.concatenate((np.zeros(len(questions)), random.uniform(0.3, 1.0, len(again))))
        parts.append(write_conversations(writer, chat, questions + again, temperatures, max_new))
        parts[-1].save(output / f"conversations-{len(parts)}.npz")
        print(f"  {len(seen)} questions, {time.perf_counter() - start:.0f} s; e.g. {questions[:3]}", flush=True)
