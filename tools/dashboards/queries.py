"""PromQL of the dashboards, put together from metric names without their prefix. Knows no panels.

Every query is filtered by the variables of the dashboards, every rate has Grafana's own window, and every
ratio leaves out the moments when there was nothing to divide by: an empty panel says more than NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

PREFIX = "slipstream_"
SERVER = 'namespace=~"$namespace", model=~"$model", instance=~"$instance"'
METHOD = 'method=~"$method"'
GRPC = 'namespace=~"$namespace", instance=~"$instance", grpc_service=~"slipstream.+"'
QUANTILES = (0.5, 0.95, 0.99)


def gauge(name: str, *matchers: str) -> str:
    """The series themselves, one per server."""
    return f"{PREFIX}{name}{{{', '.join((SERVER, *matchers))}}}"


def rate(name: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """Per second, summed over servers."""
    return total(f"rate({gauge(name, *matchers)}[$__rate_interval])", by)


def total(expression: str, by: Sequence[str] = ()) -> str:
    """Sum that keeps the labels `by`."""
    return f"sum by ({', '.join(by)}) ({expression})" if by else f"sum({expression})"


def ratio(numerator: str, denominator: str) -> str:
    """Nothing where the denominator is 0."""
    return f"{numerator} / ({denominator} > 0)"


def mean(histogram: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """Mean observation within the window."""
    return ratio(rate(f"{histogram}_sum", *matchers, by=by), rate(f"{histogram}_count", *matchers, by=by))


def quantile(share: float, histogram: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """Quantile of the observations within the window, NaN (drawn as a gap) where there were none."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', *matchers, by=('le', *by))})"


def buckets(histogram: str, *matchers: str) -> str:
    """Observations per bucket, for a heatmap."""
    return total(f"increase({gauge(f'{histogram}_bucket', *matchers)}[$__rate_interval])", ("le",))


def grpc_rate(name: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """Calls per second. These metrics know no model."""
    return total(f"rate(grpc_server_{name}{{{', '.join((GRPC, *matchers))}}}[$__rate_interval])", by)
