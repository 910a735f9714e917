"""The kinds of panels that the dashboards are made of, each in one style. Knows no metrics.

Widths are columns of a grid of 24.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders.dashboard import ThresholdsConfig
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
PanelBuilder = Builder[dashboard.Panel]
Steps = Mapping[float, str]  # from this value on, this colour

_WIDE = 12
_HEIGHT = 8
_STAT_HEIGHT = 4


@dataclass(frozen=True)
class Query:
    """A line, or a group of lines, of a panel; the legend may hold {{label}}."""

    expression: str
    legend: str = ""


def graph(
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    width: int = 12,
    stacked: bool = False,
    is_share: bool = False,
    thresholds: Steps | None = None,
) -> PanelBuilder:
    """Lines over time; `stacked` areas; `is_share` fixes the axis to 0..1; thresholds are drawn as lines."""
    tooltip = common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI)
    panel = timeseries.Panel().title(title).description(description).unit(unit).datasource(DATASOURCE)
    panel.height(_HEIGHT).span(width).legend(_legend(width)).tooltip(
        tooltip.sort(common.SortOrder.DESCENDING)
    )
    panel.line_width(1).show_points(common.VisibilityMode.NEVER).min(0)
    if stacked:
        panel.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL)).fill_opacity(40)
    if is_share:
        panel.max(1)
    if thresholds is not None:
        style = common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.LINE)
        panel.thresholds(_thresholds(thresholds)).thresholds_style(style)
    for ref_id, query in _numbered(queries):
        panel.with_target(_target(query, ref_id).range())
    return panel


def number(
    title: str,
    description: str,
    unit: str,
    expression: str,
    *,
    width: int = 4,
    decimals: int | None = None,
    thresholds: Steps | None = None,
) -> PanelBuilder:
    """The latest value, with its course behind it."""
    panel = stat.Panel().title(title).description(description).unit(unit).datasource(DATASOURCE)
    panel.height(_STAT_HEIGHT).span(width).graph_mode(common.BigValueGraphMode.AREA).no_value("no traffic")
    panel.reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
    panel.color_mode(common.BigValueColorMode.VALUE).thresholds(_thresholds(thresholds or {}))
    if decimals is not None:
        panel.decimals(decimals)
    return panel.with_target(_target(Query(expression), "A").range())


def distribution(
    title: str, description: str, unit: str, expression: str, *, width: int = 12
) -> PanelBuilder:
    """Heatmap of a histogram's buckets over time."""
    color = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
    panel = heatmap.Panel().title(title).description(description).datasource(DATASOURCE)
    panel.height(_HEIGHT).span(width).calculate(False).color(color.exponent(0.5))
    panel.y_axis(heatmap.YAxisConfig().unit(unit)).unit(unit).cell_gap(1)
    target = _target(Query(expression, "{{le}}"), "A").format(PromQueryFormat.HEATMAP)
    return panel.with_target(target.range())


def comparison(
    title: str, description: str, key: str, columns: Mapping[str, tuple[str, str]], *, width: int = 24
) -> PanelBuilder:
    """Table with one line per value of the label `key`; columns are title -> (expression, unit)."""
    panel = table.Panel().title(title).description(description).datasource(DATASOURCE)
    panel.height(_HEIGHT).span(width).filterable(True)
    names = {}
    for (ref_id, query), (column, (_, unit)) in zip(
        _numbered([Query(expression) for expression, _ in columns.values()]), columns.items(), strict=True
    ):
        panel.with_target(_target(query, ref_id).instant().format(PromQueryFormat.TABLE))
        names[f"Value #{ref_id}"] = column
        panel.override_by_name(column, [dashboard.DynamicConfigValue("unit", unit)])
    panel.with_transformation(dashboard.DataTransformerConfig("joinByField", options={"byField": key}))
    hide_time = {"exclude": {"pattern": "^Time.*"}}
    panel.with_transformation(dashboard.DataTransformerConfig("filterFieldsByName", options=hide_time))
    return panel.with_transformation(
        dashboard.DataTransformerConfig("organize", options={"renameByName": names})
    )


def _legend(width: int) -> common_builders.VizLegendOptions:
    """A table of means and latest values where there is room for one."""
    legend = common_builders.VizLegendOptions().show_legend(True)
    if width < _WIDE:
        return legend.placement(common.LegendPlacement.BOTTOM).display_mode(common.LegendDisplayMode.LIST)
    legend.placement(common.LegendPlacement.RIGHT).display_mode(common.LegendDisplayMode.TABLE)
    return legend.calcs(["mean", "lastNotNull"])


def _numbered(queries: Sequence[Query]) -> list[tuple[str, Query]]:
    return [(chr(ord("A") + index), query) for index, query in enumerate(queries)]


def _target(query: Query, ref_id: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expression).ref_id(ref_id).datasource(DATASOURCE)
    return target.legend_format(query.legend) if query.legend else target


def _thresholds(steps: Steps) -> ThresholdsConfig:
    values = [dashboard.Threshold(value=None, color="green")]
    values += [dashboard.Threshold(value=value, color=color) for value, color in steps.items()]
    return ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(values)
