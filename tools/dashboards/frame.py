"""What all dashboards share: variables, links, refresh, and numbered panels. Knows no metrics but the ones that
list the values of variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    Row,
)
from grafana_foundation_sdk.models import dashboard

from tools.dashboards.panels import DATASOURCE, PanelBuilder
from tools.dashboards.queries import PREFIX

TAG = "slipstream"
ANYTHING = ".*"  # also matches a label that is absent: outside Kubernetes there is no namespace

_ENGINES = f'{PREFIX}engine_up{{namespace=~"$namespace"'
_NAMESPACE = ("namespace", f"label_values({PREFIX}engine_up, namespace)", ANYTHING)
_MODEL = ("model", f"label_values({_ENGINES}}}, model)", ANYTHING)
# "All" is the list of the values: the gRPC metrics have no label model, so instances choose for them.
_INSTANCE = ("instance", f'label_values({_ENGINES}, model=~"$model"}}, instance)', None)
_METHOD = (
    "method",
    f'label_values({PREFIX}spec_decode_verifications_total{{namespace=~"$namespace", model=~"$model"}}, method)',
    ANYTHING,
)


def assemble(
    name: str,
    description: str,
    rows: Mapping[str, Sequence[PanelBuilder]],
    *,
    has_methods: bool = False,
) -> dashboard.Dashboard:
    """The dashboard `Slipstream / {name}`, uid slipstream-{name}: its rows, top to bottom, with their panels."""
    frame = Dashboard(f"Slipstream / {name}").uid(f"slipstream-{name.lower()}").description(description)
    frame.tags([TAG]).refresh("10s").time("now-30m", "now").tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
    frame.timezone("browser").readonly()
    frame.with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
    for variable in (_NAMESPACE, _MODEL, *([_METHOD] if has_methods else []), _INSTANCE):
        frame.with_variable(_variable(*variable))
    link = DashboardLink("Slipstream").type(dashboard.DashboardLinkType.DASHBOARDS).tags([TAG])
    frame.link(link.include_vars(True).keep_time(True).tooltip("The other dashboards, with this choice"))
    for title, panels in rows.items():
        frame.with_row(Row(title))
        for panel in panels:
            frame.with_panel(panel)
    built = frame.build()
    for number, panel_or_row in enumerate(built.panels or [], start=1):
        panel_or_row.id_val = number
    return built


def _variable(name: str, query: str, all_value: str | None) -> QueryVariable:
    variable = QueryVariable(name).label(name.capitalize()).datasource(DATASOURCE).query(query)
    variable.multi(True).include_all(True).refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
    variable.sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    variable.current(dashboard.VariableOption(selected=True, text=["All"], value=["$__all"]))
    return variable.all_value(all_value) if all_value else variable
