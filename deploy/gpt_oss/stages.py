"""What is measured, in the order of its worth: each stage is a command with a time limit and a file of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.synthetic_models import synthetic_model

SERVICES = ("target", "draft")
RESULT = "{result}"
"""Stands for the file that a stage writes, again and again, so that an interrupted one leaves what it has."""


@dataclass(frozen=True)
class Stage:
    """A command, without the interpreter before it. `cards`: how many CUDA devices it needs."""

    name: str
    about: str
    limit: float
    command: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    cards: int = 0


@dataclass(frozen=True)
class Sizes:
    """Loads, as deploy/gpt_oss/pair.py takes them, and how much of the rest.

    `shown`: streams and tokens of a prompt of the three loads that the table shows.
    """

    tests: Sequence[str]
    kernels: Sequence[str]
    sweeps: Mapping[str, Sequence[str]]
    context: int
    steps: int
    pair: Sequence[str]
    pair_longer: Sequence[str]
    two_cards: Sequence[str]
    exactness: Sequence[str]
    shown: tuple[tuple[int, int], ...]


FULL = Sizes(
    tests=("-n", "8", "--dist", "loadfile", "tests/device", "tests/kernels/triton_forms"),
    kernels=(),
    sweeps={
        "experts": ("experts", "experts.UNROLLED=3,5", "experts.SMALL_OUTPUTS=16,32"),
        "experts-tiles": ("experts_prefill", "experts.LARGE_TILE=64,128", "experts.LARGE_OUTPUTS=128,256"),
        "linear": ("linear", "linear.PROGRAMS=352,704", "linear.UNROLLED=8,16", "linear.LARGE_STAGES=4,5"),
        "attention": (
            *("attention_decode", "attention_decode.PAGES_PER_SPLIT=3,4,6,8", "attention_decode.STAGES=3,4"),
        ),
    },
    context=9592,
    steps=20,
    # The figures of the table first, then the other K.
    pair=(
        "9592:1500:1:2:0,3",
        "1024:512:64:64:0,3",
        "1024:512:8:8:0,3,1",
        "1024:512:64:64:2",
        "1024:512:8:8:2",
        "1024:512:64:64:1",
        "9592:1500:1:2:2,1",
    ),
    pair_longer=("9592:1500:1:3:5", "1024:512:64:64:5", "1024:512:8:8:5"),
    two_cards=("9592:1500:1:2:3", "1024:512:64:64:3", "1024:512:8:8:3"),
    exactness=("--prompts", "200", "--tokens", "256", "--new-tokens", "256"),
    shown=((1, 9592), (8, 1024), (64, 1024)),
)
# What the table cannot do without, in a few minutes: one long request of each K, and no batch of 64.
QUICK = replace(
    FULL,
    tests=(
        "-n",
        "8",
        "--dist",
        "loadfile",
        "tests/device/test_graphs.py",
        "tests/device/test_products.py",
        "tests/kernels/triton_forms",
    ),
    pair=("9592:1500:1:1:0,3", "1024:512:8:8:0,3"),
    pair_longer=("9592:1500:1:1:5",),
    two_cards=("9592:1500:1:1:3",),
    exactness=("--prompts", "32", "--tokens", "256", "--new-tokens", "256"),
)
# A rehearsal at the real widths: everything runs once.
SHORT = replace(
    QUICK,
    kernels=("--only", "layer"),
    sweeps={"linear": ("linear_router", "linear.UNROLLED=1,16")},
    steps=5,
    pair=("9592:64:1:1:0,3", "1024:64:8:8:0,3", "1024:64:64:64:0,3"),
    pair_longer=("9592:64:1:1:5",),
    two_cards=("9592:64:1:1:3",),
    exactness=("--prompts", "16", "--tokens", "64", "--new-tokens", "64"),
)
TINY = Sizes(
    tests=("tests/device", "tests/kernels/triton_forms/test_norm_and_rope.py"),
    kernels=("--only", "add_rms_norm", "router"),
    sweeps={"linear": ("linear_router", "linear.UNROLLED=1,16")},
    context=96,
    steps=3,
    pair=("96:24:1:2:0,3", "32:24:4:4:0,2"),
    pair_longer=("96:24:1:2:5",),
    two_cards=("96:24:1:2:3",),
    exactness=("--prompts", "6", "--tokens", "24", "--new-tokens", "24"),
    shown=((1, 96), (4, 32), (4, 32)),
)


def sizes_of(model: str, quick: bool = False) -> Sizes:
    """How much is measured of this model."""
    return {"tiny-gpt-oss": TINY, "gpt-oss-4-layers": SHORT}.get(model, QUICK if quick else FULL)


def stages(model: str, device: str, flags: Mapping[str, str] | None = None, quick: bool = False) -> list[Stage]:
    """All of them for a synthetic model. The tiny one runs anywhere: a rehearsal, whose times mean nothing.

    `flags`: further ones of the services of SERVICES where they serve. `quick`: fewer loads and texts.
    """
    sizes = sizes_of(model, quick)
    # Without a device kernels are interpreted, and the models take their other forms.
    interpreted = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    on_device = ("--device", device)
    synthetic = ("--synthetic", model, *on_device)
    further = {service: f"--{service}-flags={text}" for service, text in (flags or {}).items() if text}
    serving = (*synthetic, *further.values())
    on_two = ("--synthetic", model, "--device", "cuda:0", "--draft-device", "cuda:1", *further.values())
    bench = ("-m", "kernels.bench", "--json", RESULT)
    return [
        Stage("machine", "what is here, and the bandwidth", 120, ("-m", "deploy.gpt_oss.machine", device, RESULT)),
        Stage(
            "tests",
            "tests/device and tests/kernels/triton_forms",
            240,
            ("-m", "pytest", "-p", "deploy.gpt_oss.outcomes", "--tb=short", "-v", "-rP", *sizes.tests),
            {**interpreted, "OUTRIDER_TEST_OUTCOMES": RESULT},
        ),
        Stage("kernels", "every kernel, and whole layers", 240, (*bench, *sizes.kernels), interpreted),
        Stage(
            "target-steps",
            "steps of the target alone",
            240,
            (
                *("-m", "target_service.step_profile", *synthetic, "--json", RESULT, "--chains", "0,3,1,5,7"),
                *("--context", str(sizes.context), "--steps", str(sizes.steps), "--boundaries", _boundaries(model)),
            ),
        ),
        Stage(
            "draft-steps",
            "chains of the draft alone",
            120,
            (
                *("-m", "draft_service.step_profile", *synthetic, "--json", RESULT, "--chains", "3,1,2,5,7"),
                *("--context", str(sizes.context), "--steps", str(sizes.steps)),
            ),
        ),
        Stage("pair", "served, acceptance 2.5", 420, _pair(serving, 2.5, sizes.pair)),
        Stage("pair-3.0", "served, acceptance 3.0", 240, _pair(serving, 3.0, sizes.pair_longer)),
        Stage(
            "exactness",
            "texts at K = 1, 3, 7 beside those at K = 0",
            420,
            (
                *("-m", "deploy.gpt_oss.exactness", *synthetic, "--json", RESULT, *sizes.exactness),
                *(flag for service, flag in further.items() if service == "target"),
            ),
        ),
        *(
            Stage(f"sweep-{name}", " ".join(settings), 150, (*bench, "--only", only, "--set", *settings), interpreted)
            for name, (only, *settings) in sizes.sweeps.items()
        ),
        Stage(
            "two-cards",
            "served, the draft on a card of its own",
            300,
            _pair(on_two, 2.5, sizes.two_cards),
            cards=2,
        ),
    ]


def _boundaries(model: str) -> str:
    """Whose hidden states the draft takes: those after the layers that its config names."""
    layers = synthetic_model(model).draft["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    return ",".join(str(layer + 1) for layer in layers)


def _pair(serving: Sequence[str], acceptance: float, loads: Sequence[str]) -> tuple[str, ...]:
    flags = ("--acceptance", str(acceptance), "--json", RESULT)
    return ("-m", "deploy.gpt_oss.pair", *serving, *flags, "--load", *loads)
