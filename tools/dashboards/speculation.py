"""The dashboard Speculation: does drafting pay, where are drafts lost, what do they cost."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.models.dashboard import Dashboard

from tools.dashboards.frame import assemble
from tools.dashboards.panels import PanelBuilder, Query, distribution, graph, number
from tools.dashboards.queries import METHOD, buckets, mean, quantile, rate, ratio, total

_EMITTED = "spec_decode_emitted_tokens_total"
_VERIFICATIONS = "spec_decode_verifications_total"
_DRAFTED = "spec_decode_draft_tokens_total"
_ACCEPTED = "spec_decode_accepted_tokens_total"
_DISCARDED = "spec_decode_discarded_tokens_total"
_LENGTH = "spec_decode_acceptance_length"
_REQUEST_LENGTH = "spec_decode_request_acceptance_length"
_REQUEST_METHOD = 'method=~"$method|mixed"'  # a request that used several methods belongs to each

_DRAFT_SHARE = ratio(rate("step_time_sum", 'phase="draft"'), rate("step_time_sum", 'phase!="wait"'))
_SPEED_UP_TEXT = (
    "Tokens gained for the cost of a verification. At most: it costs as much as a plain step (bound by memory: a GPU "
    "with few requests). At least: each draft costs as much as a token (bound by compute: a CPU, or many requests). "
    "The host's time for drafting is taken off both; steps that are one CUDA graph have none of their own."
)


def _speed_up(is_upper: bool, by: Sequence[str] = ()) -> str:
    """Tokens emitted per verification, or per token verified, times the share of time that is not drafting."""
    verified = rate(f"{_LENGTH}_count", METHOD, by=by)
    cost = verified if is_upper else f"({verified} + {rate(_DRAFTED, METHOD, by=by)})"
    share = f"(1 - {_DRAFT_SHARE})"
    gain = ratio(rate(f"{_LENGTH}_sum", METHOD, by=by), cost)
    return f"{gain} * on () group_left () {share}" if by else f"{gain} * {share}"


def speculation() -> Dashboard:
    """Filtered by draft method besides the usual variables."""
    rows = {
        "Does it pay": _summary(),
        "Acceptance": _acceptance(),
        "Where drafts go": _drafts(),
        "What it costs": _cost(),
    }
    description = (
        "Speculative decoding: acceptance by draft method and position, discarded drafts, cost, gain."
    )
    return assemble("Speculation", description, rows, has_methods=True)


def _summary() -> list[PanelBuilder]:
    return [
        number(
            "Acceptance length",
            "Tokens emitted per verification that had drafts; 1 is no gain (spec_decode_acceptance_length).",
            "none",
            mean(_LENGTH, METHOD),
            decimals=2,
            thresholds={0: "red", 1.2: "yellow", 1.5: "green"},
        ),
        number(
            "Acceptance rate",
            "Accepted of all verified drafts (spec_decode_accepted_tokens_total / spec_decode_draft_tokens_total).",
            "percentunit",
            ratio(rate(_ACCEPTED, METHOD), rate(_DRAFTED, METHOD)),
            thresholds={0: "red", 0.2: "yellow", 0.4: "green"},
        ),
        number(
            "Estimated speed-up, at most",
            _SPEED_UP_TEXT,
            "none",
            _speed_up(is_upper=True),
            decimals=2,
            thresholds={0: "red", 1: "yellow", 1.2: "green"},
        ),
        number(
            "Output from verifications",
            "Share of all output tokens that verifications with drafts emitted; the rest was decoded plainly.",
            "percentunit",
            ratio(rate(_EMITTED, METHOD), rate("generation_tokens_total")),
        ),
        number(
            "Mean k",
            "Drafts per verification (spec_decode_draft_tokens_total).",
            "none",
            ratio(rate(_DRAFTED, METHOD), rate(f"{_LENGTH}_count", METHOD)),
            decimals=2,
        ),
        number(
            "Drafts discarded",
            "Share of verified drafts that were not emitted (spec_decode_discarded_tokens_total).",
            "percentunit",
            ratio(rate(_DISCARDED, METHOD), rate(_DRAFTED, METHOD)),
        ),
    ]


def _acceptance() -> list[PanelBuilder]:
    by_position = ratio(
        rate(_ACCEPTED, METHOD, by=("method", "position")), rate(_DRAFTED, METHOD, by=("method", "position"))
    )
    return [
        graph(
            "Acceptance length by method",
            "Mean tokens emitted per verification that had drafts; 1 is no gain.",
            "none",
            [Query(mean(_LENGTH, METHOD, by=("method",)), "{{method}}")],
            thresholds={1: "orange"},
        ),
        distribution(
            "Acceptance length",
            "How many verifications emitted how many tokens (spec_decode_acceptance_length).",
            "none",
            buckets(_LENGTH, METHOD),
        ),
        graph(
            "Acceptance rate by position",
            "Accepted / verified drafts at each position, counted from 0: where it falls towards 0, a smaller k "
            "loses nothing.",
            "percentunit",
            [Query(by_position, "{{method}} {{position}}")],
            is_share=True,
        ),
        graph(
            "Acceptance length of requests",
            "Quantiles over finished requests of their mean: the lower tenth are those that gain least "
            "(spec_decode_request_acceptance_length; requests with several methods included).",
            "none",
            [
                Query(quantile(share, _REQUEST_LENGTH, _REQUEST_METHOD), f"p{share * 100:.0f}")
                for share in (0.1, 0.5, 0.9)
            ],
        ),
    ]


def _drafts() -> list[PanelBuilder]:
    verifications = rate(f"{_LENGTH}_count", METHOD)
    return [
        graph(
            "Per verification",
            "Drafts verified, drafts accepted, tokens emitted: emitted is 1 + accepted where nothing was cut.",
            "none",
            [
                Query(ratio(rate(name, METHOD), verifications), label)
                for name, label in ((_DRAFTED, "drafted"), (_ACCEPTED, "accepted"), (_EMITTED, "emitted"))
            ],
        ),
        graph(
            "Chosen k",
            "Verifications per second by their number of drafts (spec_decode_verifications_total).",
            "ops",
            [Query(rate(_VERIFICATIONS, METHOD, by=("k",)), "k = {{k}}")],
            stacked=True,
        ),
        graph(
            "Discarded by reason",
            "Drafts per second that were computed in vain: rejected, behind a stop, or beyond the length limit.",
            "ops",
            [Query(rate(_DISCARDED, METHOD, by=("reason",)), "{{reason}}")],
            stacked=True,
        ),
        graph(
            "Not drafted by reason",
            "Times per second that a decoding request had no drafts, and why: disabled, k_zero (auto finds that they "
            "do not pay), limit, drafter_limit, catching_up, no_match, drafter_error.",
            "ops",
            [Query(rate("spec_decode_not_drafted_total", by=("reason",)), "{{reason}}")],
            stacked=True,
        ),
    ]


def _cost() -> list[PanelBuilder]:
    speculative = 'phase=~"target|verify|draft"'
    return [
        graph(
            "Draft and verify time of a step",
            "Mean per step: target (the model over the last token and the drafts), verify (sampling and the rule of "
            "acceptance), draft (step_time).",
            "s",
            [Query(mean("step_time", speculative, by=("phase",)), "{{phase}}")],
            stacked=True,
        ),
        graph(
            "Share of step time",
            "Where steps spend their time, by phase (step_time).",
            "percentunit",
            [
                Query(
                    f"{rate('step_time_sum', by=('phase',))} / ignoring (phase) group_left () "
                    f"({total(rate('step_time_sum'))} > 0)",
                    "{{phase}}",
                )
            ],
            stacked=True,
            is_share=True,
        ),
        graph(
            "Estimated speed-up by method",
            f"{_SPEED_UP_TEXT} Below 1, speculation loses. Drafting time is that of all methods together.",
            "none",
            [
                Query(_speed_up(is_upper=is_upper, by=("method",)), f"{{{{method}}}} {bound}")
                for is_upper, bound in ((True, "at most"), (False, "at least"))
            ],
            thresholds={1: "orange"},
        ),
        graph(
            "Waits for host drafts",
            "Times per second that a request waited for the step before it, because its drafts are made on the host; "
            "always 0 with one step in flight (spec_decode_not_overlapped_total).",
            "ops",
            [Query(rate("spec_decode_not_overlapped_total"), "waits")],
        ),
    ]
