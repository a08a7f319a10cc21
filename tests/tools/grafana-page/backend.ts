// What Grafana's server does for its page, as far as our dashboards need it: it gives the data source
// `prometheus`, and turns answers of Prometheus into data frames. The data source itself, with its
// variables and its heatmaps, is Grafana's own.
import {
  type DataFrameJSON,
  type DataQueryRequest,
  type DataSourceInstanceSettings,
  FieldType,
  LoadingState,
  standardTransformers,
  standardTransformersRegistry,
  toDataFrame,
} from '@grafana/data';
import { PrometheusDatasource } from '@grafana/prometheus';
import * as runtime from '@grafana/runtime';
import { type SceneObject, sceneGraph } from '@grafana/scenes';
import { from, map } from 'rxjs';

interface Series {
  metric: Record<string, string>;
  value?: [number, string];
  values?: [number, string][];
}

async function ask(path: string, params: object) {
  const body = new URLSearchParams(Object.entries(params).map(([key, value]) => [key, `${value}`]));
  const answer = await (await fetch(`/${path}?${body}`)).json();
  if (answer.status !== 'success') {
    throw new Error(`${answer.error}`);
  }
  return answer;
}

function nameSeries(metric: Record<string, string>, legend: string, expression: string) {
  const { __name__: name = '', ...labels } = metric;
  const pairs = Object.entries(labels).map(([label, value]) => `${label}="${value}"`);
  const filled = legend.replace(/\{\{\s*(.+?)\s*\}\}/g, (_, label) => metric[label] ?? '');
  return filled || (name || pairs.length ? `${name}{${pairs.join(', ')}}` : expression);
}

async function runQuery(
  query: any,
  start: number,
  end: number,
  scrapeInterval: number,
): Promise<DataFrameJSON[]> {
  const step = query.intervalMs / 1000;
  const rateInterval = Math.max(step + scrapeInterval, 4 * scrapeInterval);
  const expression = query.expr
    .replace(/\$__rate_interval|\$\{__rate_interval\}/g, `${rateInterval}s`)
    .replace(/\$__range|\$\{__range\}/g, `${Math.round(end - start)}s`)
    .replace(/\$__interval|\$\{__interval\}/g, `${step}s`);
  const { data } = query.instant
    ? await ask('api/v1/query', { query: expression, time: end })
    : await ask('api/v1/query_range', {
        query: expression,
        start: Math.floor(start / step) * step,
        end: Math.floor(end / step) * step,
        step,
      });
  return data.result.map((series: Series) => {
    const points = series.values ?? [series.value!];
    const name = nameSeries(series.metric, query.legendFormat ?? '', expression);
    const interval = query.instant ? {} : { interval: step * 1000 };
    return {
      schema: {
        refId: query.refId,
        name,
        meta: { custom: { resultType: data.resultType }, type: 'timeseries-multi' },
        fields: [
          { name: 'Time', type: FieldType.time, config: interval },
          {
            name: 'Value',
            type: FieldType.number,
            labels: series.metric,
            config: { displayNameFromDS: name },
          },
        ],
      },
      data: {
        values: [points.map(([at]) => at * 1000), points.map(([, value]) => Number(value.replace('Inf', 'Infinity')))],
      },
    };
  });
}

async function answer({ url, data, params }: any, scrapeInterval: number) {
  const resource = url.match(/resources\/(.*)/)?.[1];
  if (resource) {
    return { data: await ask(resource, params ?? data) };
  }
  const results: Record<string, object> = {};
  for (const query of data.queries) {
    try {
      const frames = await runQuery(query, data.from / 1000, data.to / 1000, scrapeInterval);
      results[query.refId] = { frames };
    } catch (error) {
      results[query.refId] = { error: String(error), status: 400 };
    }
  }
  return { data: { results } };
}

/** Lets Grafana's libraries find our data source, its server and the variables of `scene`. */
export function startBackend(scene: () => SceneObject, scrapeInterval: number) {
  const settings = {
    id: 1,
    uid: 'prometheus',
    name: 'Prometheus',
    type: 'prometheus',
    access: 'proxy',
    jsonData: { timeInterval: `${scrapeInterval}s`, httpMethod: 'GET', disableRecordingRules: true },
    meta: { id: 'prometheus', name: 'Prometheus', info: { logos: {} } },
  } as unknown as DataSourceInstanceSettings<any>;
  standardTransformersRegistry.setInit(() =>
    [standardTransformers.mergeTransformer, standardTransformers.organizeFieldsTransformer].map(
      (one) => ({ id: one.id, name: one.name, transformation: async () => one }) as any,
    ),
  );
  runtime.setBackendSrv({ fetch: (options: object) => from(answer(options, scrapeInterval)) } as any);
  runtime.setTemplateSrv({
    replace: (text: string, scoped: any, format: any) =>
      sceneGraph.interpolate(scoped?.__sceneObject?.value.valueOf() ?? scene(), text, scoped, format),
    getVariables: () => [],
    containsTemplate: () => true,
    updateTimeRange: () => {},
  });
  const source = new PrometheusDatasource(settings);
  runtime.setDataSourceSrv({
    get: async () => source,
    getList: () => [settings],
    getInstanceSettings: () => settings,
    reload: () => {},
  } as any);
  runtime.setRunRequest((one, request, run = one.query.bind(one) as any) =>
    from(run(request as DataQueryRequest) as any).pipe(
      map(({ data, error, errors }: any) => ({
        state: error ?? errors ? LoadingState.Error : LoadingState.Done,
        series: data.map((frame: any) => ('text' in frame ? frame : toDataFrame(frame))),
        error: error ?? errors?.[0],
        timeRange: request.range,
        request,
      })),
    ),
  );
  runtime.setPluginImportUtils({
    importPanelPlugin: async (id) => {
      throw new Error(`no panel ${id}`);
    },
    getPanelPluginFromCache: () => undefined,
  });
}
