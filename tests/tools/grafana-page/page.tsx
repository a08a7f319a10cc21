// Shows one dashboard with Grafana's libraries. The Prometheus that serves the page has the data.
// Before this script, the page sets `grafanaBootData` and `shown`: the dashboard's JSON, the time range,
// the values of variables, and the seconds between two scrapes. tests/support/grafana.py bundles this
// file with esbuild.
import { ThemeContext } from '@grafana/data';
import { config } from '@grafana/runtime';
import {
  DataSourceVariable,
  EmbeddedScene,
  LocalValueVariable,
  QueryVariable,
  SceneDataTransformer,
  SceneGridItem,
  SceneGridLayout,
  SceneGridRow,
  SceneQueryRunner,
  SceneTimeRange,
  SceneVariableSet,
  VariableValueSelectors,
  VizPanel,
  behaviors,
} from '@grafana/scenes';
import type { Dashboard, Panel, RowPanel, VariableModel } from '@grafana/schema';
import { GlobalStyles } from '@grafana/ui';
import { createRoot } from 'react-dom/client';
import { BrowserRouter } from 'react-router-dom';

import { startBackend } from './backend';
import { registerPanels } from './panels';

interface Shown {
  dashboard: Dashboard;
  from: string;
  to: string;
  scrapeInterval: number;
  values: Record<string, string | string[]>;
}

const { dashboard, from, to, scrapeInterval, values } = (window as unknown as { shown: Shown }).shown;

function buildVariable(one: VariableModel) {
  const given = values[one.name] ?? one.current?.value;
  const state = { ...one, value: given, text: given, defaultToAll: one.includeAll && !values[one.name] } as any;
  if (one.type === 'datasource') {
    return new DataSourceVariable({ ...state, value: 'prometheus', text: 'Prometheus', pluginId: one.query });
  }
  return new QueryVariable(state);
}

function buildPanel(panel: Panel, y: number, repeated: { name: string; value: string; column: number }[]) {
  const { title, description, options, fieldConfig, transformations = [], interval } = panel;
  const runner = new SceneQueryRunner({
    datasource: panel.datasource as any,
    queries: panel.targets as any,
    minInterval: interval,
  });
  const { h, w, x } = panel.gridPos!;
  const copies = repeated.length ? repeated : [undefined];
  return copies.map(
    (copy) =>
      new SceneGridItem({
        x: copy ? copy.column * 12 : x,
        y,
        width: copy ? 12 : w,
        height: h,
        body: new VizPanel({
          key: `panel-${panel.id}`,
          pluginId: panel.type,
          title,
          description,
          options,
          fieldConfig: fieldConfig as any,
          $data: new SceneDataTransformer({ $data: runner.clone(), transformations: transformations as any }),
          $variables:
            copy && new SceneVariableSet({ variables: [new LocalValueVariable({ ...copy, text: copy.value })] }),
        }),
      }),
  );
}

/** The rows with their panels. A panel that is repeated fills the width, as in Grafana. */
function buildRows(panels: (Panel | RowPanel)[]) {
  const rows: SceneGridRow[] = [];
  let moved = 0;
  for (const one of panels) {
    const y = one.gridPos!.y + moved;
    if (one.type === 'row') {
      rows.push(new SceneGridRow({ title: one.title, y, isCollapsible: true, children: [] }));
      continue;
    }
    const { repeat, gridPos } = one as Panel;
    const chosen = repeat ? [values[repeat]].flat() : [];
    const copies = chosen.map((value, column) => ({ name: repeat!, value, column }));
    const row = rows[rows.length - 1];
    row.setState({ children: [...row.state.children, ...buildPanel(one as Panel, y, copies)] });
    moved += repeat ? gridPos!.h : 0;
  }
  return rows;
}

startBackend(() => scene, scrapeInterval);
registerPanels();
const scene = new EmbeddedScene({
  $timeRange: new SceneTimeRange({ from, to, timeZone: dashboard.timezone }),
  $variables: new SceneVariableSet({ variables: dashboard.templating!.list!.map(buildVariable) }),
  $behaviors: [new behaviors.CursorSync({ sync: dashboard.graphTooltip as any })],
  controls: [new VariableValueSelectors({})],
  body: new SceneGridLayout({ children: buildRows(dashboard.panels!), isDraggable: false, isResizable: false }),
});
createRoot(document.getElementById('root')!).render(
  <BrowserRouter>
    <ThemeContext.Provider value={config.theme2}>
      <GlobalStyles />
      <main style={{ padding: 16 }}>
        <h1>{dashboard.title}</h1>
        <scene.Component model={scene} />
      </main>
    </ThemeContext.Provider>
  </BrowserRouter>,
);
