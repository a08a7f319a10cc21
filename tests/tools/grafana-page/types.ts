// The types that Grafana has for our dashboards. Its enums of words stand for the words themselves,
// because the dashboards are JSON.
import type { QueryVariableModel } from '@grafana/data';
import type * as common from '@grafana/schema';
import type { Options as BarGauge } from '@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen';
import type { Options as Heatmap } from '@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen';
import type { Options as Stat } from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as timeline from '@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen';
import type { FieldConfig as TableField, Options as Table } from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type { Options as TimeSeries } from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';
import type { Dashboard, FieldConfig, FieldConfigSource, Panel, VariableModel } from '@grafana/schema';

type Plain<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;

type Typed<Type extends string, Options, Custom = object> = Omit<Panel, 'type' | 'options' | 'fieldConfig'> & {
  type: Type;
  options: Partial<Options>;
  fieldConfig: Omit<FieldConfigSource, 'defaults'> & {
    defaults: Omit<FieldConfig, 'custom'> & { custom?: Partial<Custom> };
  };
};

type Panels =
  | NonNullable<Dashboard['panels']>[number] & { type: 'row' }
  | Typed<'bargauge', BarGauge>
  | Typed<'heatmap', Heatmap>
  | Typed<'stat', Stat>
  | Typed<'state-timeline', timeline.Options, timeline.FieldConfig>
  | Typed<'table', Table, TableField>
  | Typed<'timeseries', TimeSeries, common.GraphFieldConfig>;

type Variable = VariableModel & Partial<Pick<QueryVariableModel, 'definition'>>;

export type Board = Plain<
  Omit<Dashboard, 'id' | 'panels' | 'templating'> & {
    id: null;
    panels: Panels[];
    templating: { list: Variable[] };
  }
>;
