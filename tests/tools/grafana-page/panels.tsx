// Our panels as Grafana's server has them, made of the components of @grafana/ui. Two panels are not
// in its libraries: the heatmap and the state timeline are drawn here as coloured cells on Grafana's
// axes.
import {
  type DataFrame,
  type Field,
  FieldColorModeId,
  FieldConfigProperty,
  FieldType,
  type GrafanaTheme2,
  PanelPlugin,
  type PanelProps,
  type TimeRange,
  VizOrientation,
  cacheFieldDisplayNames,
  dataLinksOverrideProcessor,
  formattedValueToString,
  getDisplayValueAlignmentFactors,
  getFieldDisplayName,
  getFieldDisplayValues,
  getValueFormat,
  identityOverrideProcessor,
  numberOverrideProcessor,
  outerJoinDataFrames,
  standardFieldConfigEditorRegistry,
  stringOverrideProcessor,
  thresholdsOverrideProcessor,
  unitOverrideProcessor,
  valueMappingsOverrideProcessor,
} from '@grafana/data';
import { sceneUtils } from '@grafana/scenes';
import { defaultTableFieldOptions } from '@grafana/schema';
import {
  AxisPlacement,
  BarGauge,
  BigValue,
  ScaleDirection,
  ScaleOrientation,
  TimeSeries,
  UPlotChart,
  UPlotConfigBuilder,
  VizRepeater,
  preparePlotFrame,
  useTheme2,
} from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { useMemo } from 'react';

/** The defaults of a time series, which Grafana has in its core. */
const GRAPH = {
  axisBorderShow: false,
  axisCenteredZero: false,
  axisColorMode: 'text',
  axisLabel: '',
  axisPlacement: 'auto',
  barAlignment: 0,
  barWidthFactor: 0.6,
  drawStyle: 'line',
  fillOpacity: 0,
  gradientMode: 'none',
  hideFrom: { tooltip: false, viz: false, legend: false },
  lineInterpolation: 'linear',
  lineWidth: 1,
  pointSize: 5,
  scaleDistribution: { type: 'linear' },
  showPoints: 'auto',
  spanNulls: false,
  stacking: { mode: 'none', group: 'A' },
  thresholdsStyle: { mode: 'off' },
};

const STANDARD = {
  color: identityOverrideProcessor,
  decimals: numberOverrideProcessor,
  displayName: stringOverrideProcessor,
  links: dataLinksOverrideProcessor,
  mappings: valueMappingsOverrideProcessor,
  max: numberOverrideProcessor,
  min: numberOverrideProcessor,
  noValue: stringOverrideProcessor,
  thresholds: thresholdsOverrideProcessor,
  unit: unitOverrideProcessor,
};

/** An option of a field; without its entry, Grafana drops it. */
function describeOption(path: string, process: unknown = identityOverrideProcessor, more: object = {}): any {
  return { id: path, path, name: path, process, editor: () => null, override: () => null,
    shouldApply: () => true, ...more };
}

function isEmpty({ data }: PanelProps) {
  return data.series.every((frame) => !frame.length);
}

function Empty({ fieldConfig }: PanelProps) {
  return <div className="no-data" style={{ height: '100%', placeContent: 'center', textAlign: 'center' }}>{fieldConfig.defaults.noValue ?? 'No data'}</div>;
}

/** The frames as one. The function of @grafana/ui shows the gaps of the first one only. */
function joinFrames(frames: DataFrame[], axes: any, timeRange: TimeRange) {
  const copies = frames.map((frame) => ({
    ...frame,
    fields: frame.fields.map((field) => ({ ...field, state: { ...field.state, nullThresholdApplied: false } })),
  }));
  const gaps = copies.map((frame) => preparePlotFrame([frame], axes, timeRange)!);
  return outerJoinDataFrames({ frames: gaps, joinBy: axes.x, keep: axes.y, keepOriginIndices: true }) ?? null;
}

function Lines(props: PanelProps) {
  const { data, width, height, timeRange, timeZone, options } = props;
  if (isEmpty(props)) {
    return <Empty {...props} />;
  }
  return (
    <TimeSeries
      frames={data.series}
      structureRev={data.structureRev}
      {...{ timeRange, timeZone, width, height, options }}
      legend={options.legend}
      preparePlotFrame={(frames, axes) => joinFrames(frames, axes, timeRange)}
    />
  );
}

function Values({ data, width, height, options, fieldConfig, replaceVariables, timeZone }: PanelProps, bars: boolean) {
  const theme = useTheme2();
  const getValues = () =>
    getFieldDisplayValues({
      fieldConfig,
      reduceOptions: options.reduceOptions,
      replaceVariables,
      theme,
      data: data.series,
      timeZone,
    });
  return (
    <VizRepeater
      source={data}
      {...{ width, height, getValues }}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      itemSpacing={bars ? 8 : 3}
      minVizHeight={bars ? options.minVizHeight : undefined}
      minVizWidth={bars ? options.minVizWidth : undefined}
      maxVizHeight={bars ? options.maxVizHeight : undefined}
      orientation={options.orientation}
      autoGrid
      renderCounter={0}
      renderValue={({ value, width, height, count, alignmentFactors }) =>
        bars ? (
          <BarGauge
            {...{ width, height, theme, alignmentFactors }}
            value={value.display}
            field={value.field}
            display={value.view?.getFieldDisplayProcessor(value.colIndex!)}
            orientation={VizOrientation.Horizontal}
            displayMode={options.displayMode}
            valueDisplayMode={options.valueMode}
            namePlacement={options.namePlacement}
            showUnfilled={options.showUnfilled}
            itemSpacing={8}
          />
        ) : (
          <BigValue
            {...{ width, height, theme, count, alignmentFactors }}
            value={value.display}
            colorMode={options.colorMode}
            graphMode={options.graphMode}
            justifyMode={options.justifyMode}
            textMode={options.textMode}
            disableWideLayout={!options.wideLayout}
          />
        )
      }
    />
  );
}

function Rows(props: PanelProps) {
  const { data, width, height, options, fieldConfig } = props;
  if (isEmpty(props)) {
    return <Empty {...props} />;
  }
  cacheFieldDisplayNames(data.series);
  return (
    <TableNG
      {...{ width, height, fieldConfig }}
      data={data.series[options.frameIndex]}
      structureRev={data.structureRev}
      sortBy={options.sortBy}
      noHeader={!options.showHeader}
      cellHeight={options.cellHeight}
      noValue={fieldConfig.defaults.noValue}
      resizable
      enableVirtualization={false}
    />
  );
}

/** A row for each field with a colour for each value: the heatmap and the state timeline. */
function Cells(props: PanelProps, nameRow: (name: string) => string, colour: (value: number, most: number, theme: GrafanaTheme2) => string) {
  const { data, width, height, timeRange, timeZone } = props;
  const theme = useTheme2();
  const rows = data.series.flatMap((frame) =>
    frame.fields
      .filter((field) => field.type === FieldType.number)
      .map((field) => ({ field, name: nameRow(getFieldDisplayName(field, frame, data.series)), times: frame.fields[0] })),
  );
  const config = useMemo(() => {
    const builder = new UPlotConfigBuilder(timeZone);
    builder.addScale({ scaleKey: 'x', isTime: true, orientation: ScaleOrientation.Horizontal,
      direction: ScaleDirection.Right, range: () => [timeRange.from.valueOf(), timeRange.to.valueOf()] });
    builder.addScale({ scaleKey: 'y', orientation: ScaleOrientation.Vertical, direction: ScaleDirection.Up,
      range: () => [0, rows.length] });
    builder.addAxis({ scaleKey: 'x', isTime: true, placement: AxisPlacement.Bottom, timeZone, theme, grid: { show: false } });
    builder.addAxis({ scaleKey: 'y', placement: AxisPlacement.Left, theme, size: 140, grid: { show: false },
      splits: () => rows.map((_, row) => row + 0.5),
      values: () => rows.map(({ name }) => name) });
    builder.addSeries({ scaleKey: 'y', theme, drawStyle: 'line' as any, lineWidth: 0, show: true, pathBuilder: () => null,
      showPoints: 'never' as any });
    builder.addHook('draw', (plot: any) => {
      const values = rows.flatMap(({ field }) => field.values);
      const most = Math.max(...values.filter(Number.isFinite));
      rows.forEach(({ field, times }, row) => {
        const step = times.config.interval ?? 60_000;
        times.values.forEach((at: number, index: number) => {
          const value = field.values[index];
          if (value === null || Number.isNaN(value)) {
            return;
          }
          const left = plot.valToPos(at - step / 2, 'x', true);
          const right = plot.valToPos(at + step / 2, 'x', true);
          const [top, bottom] = [row + 0.95, row + 0.05].map((edge) => plot.valToPos(edge, 'y', true));
          plot.ctx.fillStyle = colour(value, most, theme);
          plot.ctx.fillRect(left, top, right - left + 0.5, bottom - top);
        });
      });
    });
    return builder;
  }, [data, theme, timeRange]);
  if (isEmpty(props)) {
    return <Empty {...props} />;
  }
  const range = [timeRange.from.valueOf(), timeRange.to.valueOf()];
  return <UPlotChart data={[range, [0, 0]]} {...{ width, height, config }} />;
}

function register(id: string, panel: (props: PanelProps) => any, custom: object = {}, standard: object = {}) {
  const plugin = new PanelPlugin<any, any>(panel as any).useFieldConfig({
    standardOptions: standard,
    useCustomConfig: (builder) => {
      for (const [path, defaultValue] of Object.entries(custom)) {
        const shouldApply = (field: Field) => field.type !== FieldType.time;
        builder.addCustomEditor(describeOption(path, undefined, { defaultValue, shouldApply }));
      }
    },
  });
  sceneUtils.registerRuntimePanelPlugin({ pluginId: id, plugin });
}

/** Registers a panel for each type that our dashboards have. */
export function registerPanels() {
  standardFieldConfigEditorRegistry.setInit(() =>
    Object.entries(STANDARD).map(([path, process]) => describeOption(path, process)),
  );
  const palette = { [FieldConfigProperty.Color]: { defaultValue: { mode: FieldColorModeId.PaletteClassic } } };
  const thresholds = { [FieldConfigProperty.Color]: { defaultValue: { mode: FieldColorModeId.Thresholds } } };
  register('timeseries', Lines, GRAPH, palette);
  register('stat', (props) => Values(props, false), {}, thresholds);
  register('bargauge', (props) => Values(props, true), {}, thresholds);
  register('table', Rows, { ...defaultTableFieldOptions, filterable: false, minWidth: undefined, width: undefined }, thresholds);
  register('heatmap', (props) => {
    const { yAxis, color } = props.options;
    const format = getValueFormat(yAxis.unit);
    const nameRow = (limit: string) => (limit === '+Inf' ? limit : formattedValueToString(format(Number(limit))));
    const paint = (value: number, most: number) =>
      value > 0 ? `rgba(242, 101, 34, ${(value / most) ** color.exponent})` : 'transparent';
    return Cells(props, nameRow, paint);
  });
  register('state-timeline', (props) => {
    const paint = (value: number, _most: number, theme: GrafanaTheme2) =>
      props.data.series[0].fields[1].display!(value).color ?? theme.colors.text.primary;
    return Cells(props, (name) => name, paint);
  }, { lineWidth: 0, fillOpacity: 70 }, thresholds);
}
