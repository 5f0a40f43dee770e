"""Trains the demo's draft: writes conversations with the target, teaches the draft on them, measures it.

python -m deploy.demo.train --output DIR             on one GPU, everything, in about 13 minutes
python -m deploy.demo.train --output DIR --tiny      on a CPU, to see that it works
"""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import smollm2
from .conversations import Conversations, load_data
from .draft import Draft, draft_for
from .evaluate import Acceptance, chain_acceptance, walk
from .generate import HERE, Chat, write_data
from .packing import NOBODY, Packs, pack
from .target import Target, fused

TEST_LENGTH = 512  # tokens of a test row
WARM_STEPS = 3
IGNORED = -1  # label of a token outside the draft's vocabulary

Save = Callable[[Draft], None]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a draft is trained."""

    draft_vocab_size: int = 8192
    intermediate_size: int = 1536
    fc_norm: bool = True
    norm_output: bool = True
    norm_before_residual: bool = False
    seconds: float = 510.0
    rows: int = 40
    length: int = 640  # tokens of a row; longer conversations are cut
    chain: int = 5  # training-time-test steps
    optimizer: str = "muon"
    learning_rate: float = 2e-3
    weight_decay: float = 0.0
    floor: float = 0.2  # weight of a step whose chain has already gone wrong
    hard: float = 0.0  # share of the one-hot label in the target distribution
    warmup: float = 0.03
    mixed: float = 0.5  # part of the time that goes over sampled answers too


@fused
def soft_cross_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of each row's logits against a distribution [..., vocab], and the likeliest token."""
    values = logits.float()
    return values.logsumexp(-1) - (values * target.float()).sum(-1), values.argmax(-1)


class Teacher:
    """What the target says about a batch, restricted to the draft's vocabulary."""

    def __init__(self, target: Target, vocabulary: Tensor) -> None:
        self.target = target
        self.head = target.embedding[vocabulary]
        self.labels = torch.full((target.vocab_size,), IGNORED, device=target.device)
        self.labels[vocabulary] = torch.arange(len(vocabulary), device=target.device)

    @torch.no_grad()
    def __call__(self, batch: Packs, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Captured states [rows, length, 3 * hidden] and the next token's distribution [rows, length, vocab]."""
        states, final = self.target.states(batch.tokens, batch.positions, mask)
        return states, F.linear(final, self.head).softmax(-1)


def chain_steps(
    draft: Draft, teacher: Teacher, batch: Packs, steps: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Each step's logits, the target's distribution, the labels and which rows count; all over the rows whose chain
    stays within the batch's length. Step s of row i predicts token i + 2 + s."""
    mask = batch.mask()
    states, distribution = teacher(batch, mask)
    embeds = F.embedding(batch.tokens, teacher.target.embedding)
    width = batch.tokens.shape[1] - steps - 1
    for step, output in enumerate(draft.unroll(states, embeds, batch.positions, mask, steps)):
        predicted = slice(2 + step, 2 + step + width)
        counts = batch.answers[:, predicted] & (batch.owners[:, predicted] == batch.owners[:, :width])
        labels = teacher.labels[batch.tokens[:, predicted]]
        yield draft.lm_head(output[:, :width]), distribution[:, 1 + step : 1 + step + width], labels, counts


def chain_loss(draft: Draft, teacher: Teacher, batch: Packs, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """The loss, and how many chains were right up to each step as a share of all, [chain].

    A step matters only where the chain was right before it: elsewhere it weighs `floor`.
    """
    loss, total, right, shares = 0.0, 0.0, None, []
    for logits, distribution, labels, counts in chain_steps(draft, teacher, batch, recipe.chain):
        if recipe.hard:
            distribution = distribution * (1 - recipe.hard)
            distribution.scatter_add_(
                -1, labels.clamp(min=0)[..., None], torch.full_like(distribution[..., :1], recipe.hard)
            )
        entropy, best = soft_cross_entropy(logits, distribution)
        if right is None:
            right, everything = counts, counts.sum()
        weight = torch.where(right, 1.0, recipe.floor) * (counts & (labels != IGNORED))
        loss = loss + (entropy * weight).sum()
        total = total + weight.sum()
        right = right & counts & (best == labels)
        shares.append(right.sum() / everything)
    return loss / total, torch.stack(shares)


def optimizers(draft: Draft, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW for head and norms, and for the other matrices what the recipe says."""
    matrices = [p for name, p in draft.named_parameters() if p.ndim == 2 and name != "lm_head.weight"]
    others = [p for p in draft.parameters() if all(p is not matrix for matrix in matrices)]
    rate, decay = recipe.learning_rate, recipe.weight_decay
    if recipe.optimizer == "adamw":
        return [torch.optim.AdamW([*matrices, *others], rate, (0.9, 0.95), weight_decay=decay, foreach=True)]
    muon = torch.optim.Muon(matrices, rate, weight_decay=decay, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, rate, (0.9, 0.95), weight_decay=decay, foreach=True)]


def mixed_precision(device: torch.device) -> torch.autocast:
    """bfloat16 products on a GPU, float32 elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def schedule(progress: float, warmup: float) -> float:
    """Learning-rate factor: linear warm-up, then a cosine to zero."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def vocabulary_of(conversations: Conversations, size: int, vocab_size: int) -> tuple[Tensor, float]:
    """Ascending ids of the most frequent answer tokens, and the share of answer tokens they cover."""
    answers = np.concatenate([conversations[i][n:] for i, n in enumerate(conversations.prompts)])
    counts = np.bincount(answers, minlength=vocab_size)
    kept = np.sort(np.argsort(-counts, kind="stable")[:size])
    return torch.from_numpy(kept), float(counts[kept].sum() / counts.sum())


def measure(draft: Draft, teacher: Teacher, packs: Packs, batch: int, chain: int) -> Acceptance:
    """Acceptance over conversations that stand alone in their rows, from one pass over the true tokens."""
    rights = []
    for first in range(0, len(packs), batch):
        index = torch.arange(first, first + batch, device=packs.tokens.device) % len(packs)  # one shape
        right, steps = None, []
        with torch.no_grad(), mixed_precision(packs.tokens.device):
            for logits, _, labels, counts in chain_steps(draft, teacher, packs.rows(index), chain):
                hit = counts & (logits.float().argmax(-1) == labels)
                right = hit if right is None else right & hit
                steps.append(right)
        rights.append(torch.stack(steps).sum(0)[: len(packs) - first])
    return walk(torch.cat(rights).cpu().numpy(), packs.answers.cpu().numpy(), chain)


def train(
    draft: Draft, teacher: Teacher, packs: dict[str, Packs], recipe: Recipe, tests: dict[str, Packs], save: Save
) -> None:
    """Trains for the recipe's seconds; now and then, and at the end, saves and prints the acceptance on the tests.

    The first part of the time goes over all conversations, the rest over the greedy ones.
    """
    device = draft.d2t.device
    chosen = optimizers(draft, recipe)
    parameters = list(draft.parameters())
    start, step, reported = time.perf_counter(), 0, 0.0
    pool, order = packs["all"], list[Tensor]()
    while (progress := (time.perf_counter() - start) / recipe.seconds) < 1 or step <= WARM_STEPS:
        if step == WARM_STEPS:
            start = time.perf_counter()  # compiling does not count
        due = packs["all" if progress <= recipe.mixed else "greedy"]
        if not order or pool is not due:
            pool = due
            rows = min(recipe.rows, len(pool))
            order = [index for index in torch.randperm(len(pool), device=device).split(rows) if len(index) == rows]
        with mixed_precision(device):
            loss, right = chain_loss(draft, teacher, pool.rows(order.pop()), recipe)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        for optimizer in chosen:
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * schedule(progress, recipe.warmup)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 20 == 0:
            loss.item()  # stay close to the clock
        if step > WARM_STEPS and progress - reported > 0.15:
            reported = progress
            figures = " ".join(
                f"{name} {measure(draft, teacher, test, recipe.rows, 4).mean:.3f}" for name, test in tests.items()
            )
            shares = " ".join(f"{share:.3f}" for share in right.tolist())
            seconds = time.perf_counter() - start
            print(f"{seconds:6.1f} s  step {step}  loss {loss.item():.4f}  right {shares}  {figures}", flush=True)
            save(draft)
    print(f"{step} steps of {recipe.rows} x {recipe.length} tokens in {recipe.seconds:.0f} s", flush=True)
    save(draft)


def fit(target: Target, chat: Chat, recipe: Recipe, output: Path, options: argparse.Namespace) -> None:
    """Trains one draft on the conversations of options.output and measures what was saved."""
    print(recipe, flush=True)
    torch.manual_seed(0)
    held, validation, rest = load_data(options.output)
    greedy = rest.select(np.flatnonzero(rest.temperatures == 0))
    packs = {"greedy": pack(greedy, recipe.length, target.device), "all": pack(rest, recipe.length, target.device)}
    for name, rows in packs.items():
        used = float((rows.owners != NOBODY).float().mean())
        print(f"{name}: {len(rows)} rows, {used:.3f} of them used", flush=True)
    if options.start:
        draft = Draft.load(options.start, target.device)
    else:
        vocabulary, covered = vocabulary_of(greedy, recipe.draft_vocab_size, target.vocab_size)
        print(f"the vocabulary covers {covered:.4f} of greedy answers", flush=True)
        flags = {name: getattr(recipe, name) for name in ("fc_norm", "norm_output", "norm_before_residual")}
        draft = draft_for(target, vocabulary, recipe.intermediate_size, **flags)
    teacher = Teacher(target, draft.vocabulary)
    tests = {
        "validation": pack(validation, TEST_LENGTH, target.device, alone=True),
        "held-out": pack(held, TEST_LENGTH, target.device, alone=True),
    }
    train(draft, teacher, packs, recipe, tests, lambda draft: draft.save(output, options.part_bytes))
    draft = Draft.load(output, target.device)
    for name, test in tests.items():
        print(f"{name}: {measure(draft, teacher, test, recipe.rows, 4)}", flush=True)
    prompts = chat.prompts(held_out_questions()[: 4 if options.tiny else None])
    acceptance, _ = chain_acceptance(target, draft, prompts, 4, 12 if options.tiny else 160)
    print(f"held-out, round by round: {acceptance}", flush=True)


def held_out_questions() -> list[str]:
    """The questions that no training sees."""
    return (HERE / "questions.txt").read_text().splitlines()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for conversations and drafts")
    parser.add_argument("--target", type=Path, help="the target's checkpoint directory; fetched when absent")
    parser.add_argument("--write", type=float, default=150.0, help="seconds to write conversations; 0 reuses them")
    parser.add_argument("--recipe", type=json.loads, action="append", help="changes to the recipe; one draft for each")
    parser.add_argument("--start", type=Path, help="a draft to go on with, instead of the target's last layer")
    parser.add_argument("--part-bytes", type=int, default=0, help="save the weights also in parts of this size")
    parser.add_argument("--tiny", action="store_true", help="almost nothing of everything")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    directory = options.target or smollm2.checkpoint()
    target, chat = Target(directory, device), Chat(directory)
    options.output.mkdir(parents=True, exist_ok=True)
    if options.write:
        write_data(target, chat, options.output, options.write, options.tiny, held_out_questions())
    for number, changes in enumerate(options.recipe or [{}]):
        recipe = dataclasses.replace(Recipe(), **changes)
        fit(target, chat, recipe, options.output / f"draft-{number}", options)


if __name__ == "__main__":
    main()
