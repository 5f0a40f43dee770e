"""The dashboard of speculation: is the draft right, is it worth it, and where does a round's time go."""

from __future__ import annotations

from deploy.grafana.panels import DRAFT, MODEL, Dashboard, Panel, Row, mean, quantiles, rate, ratio

ROUNDS = "outrider_spec_decode_num_drafts_total"
DRAFTED = "outrider_spec_decode_num_draft_tokens_total"
ACCEPTED = "outrider_spec_decode_num_accepted_tokens_total"
DISCARDED = "outrider_spec_decode_num_discarded_tokens_total"
FALLBACKS = "outrider_spec_decode_fallback_total"
STEP = "outrider_decode_step_seconds"
WITH_CHAIN = f'{DRAFT}, draft_model!="none"'
AND_NONE = f'{MODEL}, draft_model=~"$draft|none"'


def acceptance_rate(by: str = "") -> str:
    """Accepted over drafted."""
    return ratio(rate(ACCEPTED, DRAFT, by), rate(DRAFTED, DRAFT, by))


def acceptance_length(by: str = "") -> str:
    """Tokens a round, the target's own included."""
    return f"1 + {ratio(rate(ACCEPTED, DRAFT, by), rate(ROUNDS, DRAFT, by))}"


def wasted(by: str = "") -> str:
    """Draft tokens a second that came to nothing."""
    return f"{rate(DRAFTED, DRAFT, by)} - {rate(ACCEPTED, DRAFT, by)} + {rate(DISCARDED, DRAFT, by)}"


def speed_with() -> str:
    """Tokens a second of one stream, by draft: those of a round over its time."""
    by = "draft_model"
    tokens = f"({rate(ROUNDS, DRAFT, by)} + {rate(ACCEPTED, DRAFT, by)})"
    return ratio(tokens, rate(f"{STEP}_sum", WITH_CHAIN, by))


def speed_without() -> str:
    """Tokens a second of one stream without a chain: one a step."""
    plain = f'{MODEL}, draft_model="none"'
    return ratio(rate(f"{STEP}_count", plain), rate(f"{STEP}_sum", plain))


def stat(title: str, unit: str, query: str, text: str, bad_below: float | None = None) -> Panel:
    """One number of the top line."""
    return Panel(title, unit, [(query, "")], text, kind="stat", width=4, height=4, bad_below=bad_below)


GLANCE = Row(
    "At a glance",
    [
        stat(
            "Tokens a round",
            "short",
            acceptance_length(),
            "Mean acceptance length: the target's own token and the accepted ones.",
        ),
        stat("Acceptance rate", "percentunit", acceptance_rate(), "Draft tokens accepted, of those verified."),
        stat(
            "Speed with speculation",
            "suffix: x",
            'outrider:speculation_speedup:ratio_rate5m{model_name=~"$model", draft_model=~"$draft"}',
            "Tokens a second of a stream over those without a draft; a rule of deploy/prometheus/rules.yaml.",
            bad_below=1,
        ),
        stat(
            "Steps without a chain",
            "percentunit",
            ratio(rate(FALLBACKS, MODEL), f"({rate(FALLBACKS, MODEL)} + {rate(ROUNDS, MODEL)})"),
            "Of the steps that wanted one.",
        ),
        stat(
            "Chain length in use",
            "suffix: tok",
            ratio(rate(DRAFTED, DRAFT), rate(ROUNDS, DRAFT)),
            "K, as it was verified.",
        ),
        stat("Rounds", "suffix: /s", rate(ROUNDS, DRAFT), "Verifications that carried a chain."),
    ],
)

ACCEPTANCE = Row(
    "Acceptance",
    [
        Panel(
            "Acceptance rate",
            "percentunit",
            [(acceptance_rate("draft_model"), "{{draft_model}}")],
            "Depends on the chain's length: later tokens are right less often.",
            most=1,
        ),
        Panel(
            "Tokens a round",
            "short",
            [(acceptance_length("draft_model"), "{{draft_model}}")],
            "Mean acceptance length, the target's own token included.",
        ),
        Panel(
            "Acceptance by position",
            "percentunit",
            [
                (
                    ratio(
                        rate("outrider_spec_decode_num_accepted_tokens_per_pos_total", DRAFT, "draft_model, position"),
                        rate("outrider_spec_decode_num_draft_tokens_per_pos_total", DRAFT, "draft_model, position"),
                    ),
                    "{{draft_model}} {{position}}",
                )
            ],
            "Of the chains that were so long, the share that was right up to here. It falls with the position; a cliff "
            "after 0 is a draft whose own state is fed back wrongly.",
            most=1,
        ),
        Panel(
            "Requests by draft",
            "reqps",
            [(rate("outrider_draft_requests_total", DRAFT, "draft_model"), "{{draft_model}}")],
            "Requests that each draft began to propose for; compare with its share.",
            stack=True,
        ),
        Panel(
            "Share by configuration",
            "percentunit",
            [(f"max by (draft_model, target) (outrider_draft_share{{{DRAFT}}})", "{{draft_model}} at {{target}}")],
            "What share of a target's requests begins with each draft.",
            most=1,
            no_value="no draft known",
        ),
        Panel(
            "Speed of one stream",
            "suffix: tok/s",
            [(speed_with(), "{{draft_model}}"), (speed_without(), "without a chain")],
            "Tokens of a step over its time, while others run beside it. The better draft is the higher line.",
        ),
    ],
)

TOKENS = Row(
    "Draft tokens",
    [
        Panel(
            "Drafted, accepted, wasted",
            "suffix: tok/s",
            [(rate(DRAFTED, DRAFT), "drafted"), (rate(ACCEPTED, DRAFT), "accepted"), (wasted(), "wasted")],
            "Drafted: verified. Wasted: not accepted, or never verified.",
        ),
        Panel("Wasted by draft", "suffix: tok/s", [(wasted("draft_model"), "{{draft_model}}")]),
        Panel(
            "Never verified",
            "suffix: tok/s",
            [(rate(DISCARDED, DRAFT, "reason"), "{{reason}}")],
            "late, stale: the round went on without them; cut, invalid: the draft may not propose them; lost: the "
            "sequence or the draft was gone.",
        ),
        Panel(
            "Chain length in use",
            "suffix: tok",
            [(ratio(rate(DRAFTED, DRAFT, "draft_model"), rate(ROUNDS, DRAFT, "draft_model")), "{{draft_model}}")],
            "K as it was verified, on average.",
        ),
        Panel(
            "Rounds by chain length",
            "suffix: /s",
            [(rate("outrider_spec_decode_num_draft_tokens_per_pos_total", DRAFT, "position"), "beyond {{position}}")],
            "Rounds whose chain had more tokens than this.",
        ),
        Panel(
            "Steps without a chain",
            "suffix: /s",
            [(rate(FALLBACKS, MODEL, "reason"), "{{reason}}")],
            "Although one was wanted. Answers are the same.",
        ),
    ],
)

TIME = Row(
    "Where the time goes",
    [
        Panel(
            "A round by stage",
            "s",
            [(mean("outrider_round_duration_seconds", WITH_CHAIN, "stage"), "{{stage}}")],
            "Mean. verify and draft: the two models; queue: waiting for them; transport: the way there and back.",
            stack=True,
        ),
        Panel(
            "A step by draft",
            "s",
            [(mean(STEP, AND_NONE, "draft_model"), "{{draft_model}}")],
            "As the gateway sees it; none: a step without a chain, which yields one token.",
        ),
        Panel(
            "Rounds by the pair itself",
            "percentunit",
            [
                (
                    ratio(
                        rate("outrider_spec_decode_num_pair_rounds_total", DRAFT, "draft_model"),
                        rate(ROUNDS, DRAFT, "draft_model"),
                    ),
                    "{{draft_model}}",
                )
            ],
            "Of all rounds; the gateway drives the others, at the cost of a trip more.",
            most=1,
        ),
        Panel(
            "Verification",
            "s",
            quantiles("outrider_step_duration_seconds", MODEL, 0.5, 0.9, 0.99),
            "A step of the target.",
        ),
        Panel(
            "Proposal",
            "s",
            quantiles("outrider_draft_step_seconds", DRAFT, 0.5, 0.9, 0.99, by="draft_model"),
            "A step of the draft service, by what it serves.",
        ),
        Panel(
            "Hidden states sent",
            "Bps",
            [(rate("outrider_hidden_state_bytes_total", f'{MODEL}, draft_model=""', "transport"), "{{transport}}")],
            "By targets. inline goes through the gateway.",
        ),
        Panel(
            "Hidden states read",
            "Bps",
            [
                (
                    rate("outrider_hidden_state_bytes_total", f'{DRAFT}, draft_model!=""', "draft_model, transport"),
                    "{{draft_model}} {{transport}}",
                )
            ],
            "By drafts.",
        ),
    ],
)

SERVICE = Row(
    "The draft service",
    [
        Panel(
            "Sequences",
            "none",
            [
                (f'outrider_num_requests_running{{{DRAFT}, draft_model!=""}}', "{{draft_model}} open"),
                (f'outrider_num_requests_waiting{{{DRAFT}, draft_model!=""}}', "{{draft_model}} waiting"),
            ],
        ),
        Panel(
            "Began anew",
            "suffix: /s",
            [
                (rate("outrider_draft_gaps_total", DRAFT, "draft_model"), "{{draft_model}} gaps"),
                (rate("outrider_draft_cache_losses_total", DRAFT, "draft_model"), "{{draft_model}} cache lost"),
            ],
            "Sequences that the draft follows from the middle on: its guesses are worse for a while.",
        ),
        Panel(
            "Its own test at start",
            "percentunit",
            [(f"outrider_draft_self_test_agreement{{{DRAFT}}}", "{{draft_model}} {{instance}}")],
            "Share of first tokens that were the target's; 0 where no test was made.",
            most=1,
            no_value="no draft known",
        ),
    ],
)

DASHBOARD = Dashboard(
    "outrider-speculation",
    "Outrider: speculation",
    "Whether the draft is right, whether it is worth its time, and where a round's time goes.",
    [GLANCE, ACCEPTANCE, TOKENS, TIME, SERVICE],
)
