// Draws a dashboard's JSON with the data of data.json ({dashboard, results, from, to}), for a picture of it.
// Graphs and numbers are Grafana's own components; heatmaps, which its library lacks, are drawn here.
import { createRoot } from 'react-dom/client';
import {
  EventBusSrv,
  FieldType,
  ThemeContext,
  createTheme,
  dateTime,
  getDisplayProcessor,
  reduceField,
  toDataFrame,
} from '@grafana/data';
import { BigValue, GlobalStyles, PanelChrome, PanelContextProvider, TimeSeries } from '@grafana/ui';

const WIDTH = 1600;
const COLUMN = WIDTH / 24;
const ROW = 38; // pixels of a grid row, as in Grafana
const GAP = 8;
const theme = createTheme({ colors: { mode: 'dark' } });

function legendOf(format, labels) {
  return (format ?? '').replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? '');
}

// One frame per series, its field configured as Grafana configures it from the panel's JSON.
function framesOf(panel, resultsOfTargets) {
  const defaults = panel.fieldConfig.defaults;
  const steps = defaults.thresholds?.steps?.map((step) => ({ ...step, value: step.value ?? -Infinity }));
  const all = panel.targets.flatMap((target, index) =>
    resultsOfTargets[index].map((series) => ({ ...series, name: legendOf(target.legendFormat, series.metric) }))
  );
  return all.map((series, index) => {
    const frame = toDataFrame({
      name: series.name,
      fields: [
        { name: 'Time', type: FieldType.time, config: {}, values: series.values.map(([time]) => time * 1000) },
        {
          name: 'Value',
          type: FieldType.number,
          values: series.values.map(([, value]) => (Number.isFinite(+value) ? +value : null)),
          config: {
            ...defaults,
            thresholds: steps && { ...defaults.thresholds, steps },
            color: { mode: panel.type === 'stat' ? 'thresholds' : 'palette-classic' },
            displayName: series.name,
            custom: { spanNulls: true, ...defaults.custom },
          },
        },
      ],
    });
    const field = frame.fields[1];
    const numbers = field.values.filter((value) => value !== null);
    const extent = { min: Math.min(...numbers), max: Math.max(...numbers) };
    field.state = { seriesIndex: index, displayName: series.name, range: extent };
    field.display = getDisplayProcessor({ field, theme, timeZone: 'utc' });
    return frame;
  });
}

function Stat({ frame, range, width, height }) {
  const [time, value] = frame.fields;
  const { lastNotNull } = reduceField({ field: value, reducers: ['lastNotNull'] });
  return (
    <BigValue
      width={width}
      height={height}
      theme={theme}
      value={value.display(lastNotNull)}
      graphMode="area"
      colorMode="value"
      justifyMode="auto"
      sparkline={{ x: time, y: value, timeRange: range }}
    />
  );
}

function Graph({ panel, frames, range, width, height }) {
  return (
    <TimeSeries
      frames={frames}
      timeRange={range}
      timeZone="utc"
      width={width}
      height={height}
      legend={{ showLegend: true, ...panel.options.legend }}
      options={{}}
    />
  );
}

// Buckets of Prometheus hold those below them: a cell is the difference of two neighbours.
function Heatmap({ frames, range, width, height }) {
  const bound = ({ name }) => (name === '+Inf' ? Infinity : +name);
  const rows = [...frames].sort((a, b) => bound(a) - bound(b));
  const at = rows.map((frame) => new Map(frame.fields[0].values.map((time, i) => [time, frame.fields[1].values[i]])));
  const times = [...new Set(at.flatMap((row) => [...row.keys()]))].sort((a, b) => a - b);
  const counts = rows.map((_, y) => times.map((time) => (at[y].get(time) ?? 0) - (y ? (at[y - 1].get(time) ?? 0) : 0)));
  const used = rows.map((_, y) => y).filter((y) => counts[y].some((count) => count > 0));
  const most = Math.max(1e-9, ...counts.flat());
  const [left, bottom] = [40, 22];
  const [from, to] = [range.from.valueOf(), range.to.valueOf()];
  const x = (time) => left + ((time - from) / (to - from)) * (width - left);
  const cellHeight = (height - bottom) / used.length;
  const cellWidth = times.length > 1 ? x(times[1]) - x(times[0]) : width - left;
  const text = { fill: theme.colors.text.secondary, fontSize: 12 };
  return (
    <svg width={width} height={height}>
      {used.map((y, line) => (
        <text key={y} x={left - 8} y={height - bottom - (line + 0.5) * cellHeight + 4} textAnchor="end" {...text}>
          {bound(rows[y])}
        </text>
      ))}
      {used.flatMap((y, line) =>
        times.map((time, i) =>
          counts[y][i] > 0 ? (
            <rect
              key={`${y} ${time}`}
              x={x(time) - cellWidth}
              y={height - bottom - (line + 1) * cellHeight + 1}
              width={cellWidth}
              height={cellHeight - 1}
              fill={`hsl(28 90% ${20 + 55 * Math.sqrt(counts[y][i] / most)}%)`}
            />
          ) : null
        )
      )}
      {[0.25, 0.5, 0.75].map((share) => (
        <text key={share} x={left + share * (width - left)} y={height - 4} textAnchor="middle" {...text}>
          {new Date(from + share * (to - from)).toISOString().slice(11, 19)}
        </text>
      ))}
    </svg>
  );
}

function Panel({ panel, results, range }) {
  const { x, y, w, h } = panel.gridPos;
  const frames = framesOf(panel, results);
  const Content = { timeseries: Graph, heatmap: Heatmap }[panel.type];
  return (
    <div style={{ position: 'absolute', left: x * COLUMN + GAP / 2, top: y * ROW + GAP / 2 }}>
      <PanelChrome title={panel.title} width={w * COLUMN - GAP} height={h * ROW - GAP}>
        {(width, height) => {
          if (!frames.length) return <div>No data</div>;
          if (panel.type === 'stat') return <Stat frame={frames[0]} range={range} width={width} height={height} />;
          return <Content panel={panel} frames={frames} range={range} width={width} height={height} />;
        }}
      </PanelChrome>
    </div>
  );
}

function Row({ panel }) {
  const style = { position: 'absolute', left: GAP, top: panel.gridPos.y * ROW + GAP, fontSize: 16, fontWeight: 500 };
  return <div style={style}>{panel.title}</div>;
}

const { dashboard, results, from, to } = await (await fetch('/data.json')).json();
const [begin, end] = [dateTime(from * 1000), dateTime(to * 1000)];
const range = { from: begin, to: end, raw: { from: begin, to: end } };
const numRows = Math.max(...dashboard.panels.map(({ gridPos }) => gridPos.y + gridPos.h));
createRoot(document.getElementById('root')).render(
  <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    <PanelContextProvider value={{ eventBus: new EventBusSrv(), eventsScope: 'page', sync: () => 0 }}>
      <div style={{ position: 'relative', width: WIDTH, height: numRows * ROW, color: theme.colors.text.primary }}>
        {dashboard.panels.map((panel) =>
          panel.type === 'row' ? (
            <Row key={panel.id} panel={panel} />
          ) : (
            <Panel key={panel.id} panel={panel} results={results[panel.id]} range={range} />
          )
        )}
      </div>
    </PanelContextProvider>
  </ThemeContext.Provider>
);
