"""The operators' dashboard: health, load, latency, errors."""

from __future__ import annotations

from deploy.grafana.panels import DRAFT, HERE, MODEL, OF_GATEWAY, Dashboard, Panel, Row, mean, quantiles, rate, ratio

GENERATE = f'grpc_service="outrider.v1.GatewayService", grpc_method="Generate", {HERE}'
NOT_THE_CALLERS = 'grpc_code=~"Internal|Unknown|Unavailable|ResourceExhausted|FailedPrecondition"'
OURS = "and on (instance) outrider_build_info"  # these processes, whatever their job is called


def usable(kind: str) -> str:
    """Share of the services behind the gateways that can be used."""
    available = f'outrider_peer_available{{kind="{kind}", {HERE}}}'
    return f"sum({available}) / count({available})"


def of_gateway(counter: str, legend: str) -> tuple[str, str]:
    """The rate of a counter that targets have, too."""
    return f"sum(rate({counter}{{{MODEL}}}[$__rate_interval]) {OF_GATEWAY})", legend


HEALTH = Row(
    "Health",
    [
        Panel(
            "Alerts that fire",
            "none",
            [('count(ALERTS{alertname=~"Outrider.+", alertstate="firing"}) or vector(0)', "")],
            "Of deploy/prometheus/rules.yaml; each has a runbook.",
            kind="stat",
            width=4,
            height=4,
            bad_above=1,
        ),
        Panel(
            "Targets usable",
            "percentunit",
            [(usable("target"), "")],
            kind="stat",
            width=5,
            height=4,
            bad_below=1,
            no_value="none known",
        ),
        Panel(
            "Drafts usable",
            "percentunit",
            [(usable("draft"), "")],
            "Answers are the same without a draft, and slower.",
            kind="stat",
            width=5,
            height=4,
            bad_below=1,
            no_value="none known",
        ),
        Panel(
            "Requests that fail",
            "percentunit",
            [
                (
                    ratio(
                        rate("grpc_server_handled_total", f"{GENERATE}, {NOT_THE_CALLERS}"),
                        rate("grpc_server_handled_total", GENERATE),
                    ),
                    "",
                )
            ],
            "Calls that ended with a code that is not the caller's fault.",
            kind="stat",
            width=5,
            height=4,
            bad_above=0.05,
        ),
        Panel(
            "Longest wait for the first token",
            "s",
            quantiles("outrider_time_to_first_token_seconds", MODEL, 0.99),
            "99 % of the requests waited less.",
            kind="stat",
            width=5,
            height=4,
        ),
        Panel(
            "Processes",
            "none",
            [(f'up{{job=~".*outrider.*", {HERE}}}', "{{instance}}")],
            "Whether Prometheus could scrape them.",
            kind="state-timeline",
        ),
        Panel(
            "Services behind the gateways",
            "none",
            [(f"min by (kind, address) (outrider_peer_available{{{HERE}}})", "{{kind}} {{address}}")],
            "Whether every gateway can use them.",
            kind="state-timeline",
            no_value="none known",
        ),
        Panel("Versions", "none", [(f"outrider_build_info{{{HERE}}}", "")], kind="table", no_value="none known"),
    ],
)

LOAD = Row(
    "Load",
    [
        Panel(
            "Requests",
            "none",
            [
                (f"sum(outrider_num_requests_running{{{MODEL}}} {OF_GATEWAY})", "running"),
                (f"sum(outrider_num_requests_waiting{{{MODEL}}} {OF_GATEWAY})", "waiting for a target"),
            ],
        ),
        Panel(
            "Requests ended",
            "reqps",
            [(rate("outrider_request_success_total", MODEL, "finished_reason"), "{{finished_reason}}")],
            "stop and length are answers; abort: the client went away.",
            stack=True,
        ),
        Panel(
            "Tokens",
            "suffix: tok/s",
            [
                of_gateway("outrider_prompt_tokens_total", "prompt"),
                of_gateway("outrider_generation_tokens_total", "generated"),
            ],
        ),
        Panel(
            "Key-value cache in use",
            "percentunit",
            [
                (
                    f"outrider_kv_cache_usage_perc{{{MODEL}}} unless on (instance) outrider_peer_available",
                    "{{instance}} {{draft_model}}",
                )
            ],
            most=1,
        ),
        Panel(
            "A target's step",
            "short",
            [
                (mean("outrider_step_batch_size", MODEL), "sequences"),
                (mean("outrider_step_num_tokens", MODEL), "tokens"),
            ],
            "Means: how many sequences share a step, and how many tokens run through the model in it.",
        ),
        Panel(
            "Size of requests",
            "suffix: tok",
            [
                (query, f"prompt {legend}")
                for query, legend in quantiles("outrider_request_prompt_tokens", MODEL, 0.5, 0.95)
            ]
            + [
                (query, f"generated {legend}")
                for query, legend in quantiles("outrider_request_generation_tokens", MODEL, 0.5, 0.95)
            ],
        ),
    ],
)

LATENCY = Row(
    "Latency",
    [
        Panel(
            "Time to the first token", "s", quantiles("outrider_time_to_first_token_seconds", MODEL, 0.5, 0.95, 0.99)
        ),
        Panel(
            "Between two messages",
            "s",
            quantiles("outrider_inter_token_latency_seconds", MODEL, 0.5, 0.95, 0.99),
            "With speculation a message holds several tokens: this is not the time of a token.",
        ),
        Panel("Whole request", "s", quantiles("outrider_e2e_request_latency_seconds", MODEL, 0.5, 0.95, 0.99)),
        Panel("Waiting in a target's queue", "s", quantiles("outrider_request_queue_time_seconds", MODEL, 0.5, 0.95)),
        Panel("Step of the target", "s", quantiles("outrider_step_duration_seconds", MODEL, 0.5, 0.99)),
        Panel("Step of the draft", "s", quantiles("outrider_draft_step_seconds", DRAFT, 0.5, 0.99)),
    ],
)

ERRORS = Row(
    "Errors",
    [
        Panel(
            "Calls that ended otherwise than OK",
            "reqps",
            [(rate("grpc_server_handled_total", f'{GENERATE}, grpc_code!="OK"', "grpc_code"), "{{grpc_code}}")],
        ),
        Panel(
            "Sequences that a target lost",
            "suffix: /s",
            [(rate("outrider_request_recoveries_total", MODEL, "reason"), "{{reason}}")],
            "Each was opened again; its client saw a pause.",
        ),
        Panel(
            "Sequences that ended with an error on a target",
            "suffix: /s",
            [(rate("outrider_sequence_errors_total", MODEL, "reason"), "{{reason}}")],
            "PREEMPTED, QUEUE_FULL and DRAINING are opened again by the gateway.",
        ),
        Panel(
            "Services that do not fit",
            "none",
            [(f"max by (kind, address, reason) (outrider_peer_refused{{{HERE}}})", "{{kind}} {{address}} {{reason}}")],
            "1: refused, for this reason.",
            no_value="none known",
        ),
        Panel("Memory", "bytes", [(f"process_resident_memory_bytes{{{HERE}}} {OURS}", "{{instance}}")]),
        Panel(
            "Processors in use",
            "none",
            [(f"rate(process_cpu_seconds_total{{{HERE}}}[$__rate_interval]) {OURS}", "{{instance}}")],
        ),
    ],
)

DASHBOARD = Dashboard(
    "outrider-operations",
    "Outrider: operations",
    "Health, load, latency and errors of gateways, targets and drafts.",
    [HEALTH, LOAD, LATENCY, ERRORS],
)
