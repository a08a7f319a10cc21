// Shows one dashboard with the components of Perses, which asks the Prometheus that serves the
// page. Before this script, the page sets `shown` to the dashboard, the scrape interval and the
// theme. tests/generate/dashboards.py bundles this file with esbuild.
import { createRoot } from 'react-dom/client';
import { BrowserRouter } from 'react-router-dom';
import { CssBaseline, ThemeProvider } from '@mui/material';
import { QueryClient, QueryClientProvider } from '@tanstack/react-query';
import { QueryParamProvider } from 'use-query-params';
import { ReactRouter6Adapter } from 'use-query-params/adapters/react-router-6';
import {
  ChartsProvider,
  SnackbarProvider,
  TimeZoneProvider,
  generateChartsTheme,
  getTheme,
} from '@perses-dev/components';
import { ViewDashboard } from '@perses-dev/dashboards';
import {
  PluginRegistry,
  ReactRouterProvider,
  dynamicImportPluginLoader,
} from '@perses-dev/plugin-system';
import * as prometheus from '@perses-dev/prometheus-plugin';
import * as stat from '@perses-dev/stat-chart-plugin';
import * as table from '@perses-dev/table-plugin';
import * as timeSeries from '@perses-dev/timeseries-chart-plugin';

const { dashboard, scrapeInterval, theme: mode } = window.shown;
const theme = getTheme(mode);
const plugins = dynamicImportPluginLoader(
  [prometheus, stat, table, timeSeries].map((module) => ({
    resource: module.getPluginModule(),
    importPlugin: async () => module,
  })),
);
const datasource = {
  kind: 'GlobalDatasource',
  metadata: { name: 'prometheus' },
  spec: {
    default: true,
    plugin: {
      kind: 'PrometheusDatasource',
      spec: { directUrl: window.location.origin, scrapeInterval },
    },
  },
};
const datasources = {
  getDatasource: async () => undefined,
  getGlobalDatasource: async () => datasource,
  listDatasources: async () => [],
  listGlobalDatasources: async () => [datasource],
};
const queries = new QueryClient({ defaultOptions: { queries: { retry: false } } });

createRoot(document.getElementById('root')).render(
  <BrowserRouter>
    <QueryParamProvider adapter={ReactRouter6Adapter}>
      <ThemeProvider theme={theme}>
        <CssBaseline />
        <QueryClientProvider client={queries}>
          <ChartsProvider chartsTheme={generateChartsTheme(theme, {})}>
            <TimeZoneProvider timeZone="UTC">
              <SnackbarProvider>
                <ReactRouterProvider>
                  <PluginRegistry
                    pluginLoader={plugins}
                    defaultPluginKinds={{ TimeSeriesQuery: 'PrometheusTimeSeriesQuery' }}
                  >
                    <ViewDashboard
                      dashboardResource={dashboard}
                      datasourceApi={datasources}
                      dashboardTitleComponent={<b>{dashboard.spec.display.name}</b>}
                      isDatasourceEnabled={false}
                      isReadonly
                      isVariableEnabled
                    />
                  </PluginRegistry>
                </ReactRouterProvider>
              </SnackbarProvider>
            </TimeZoneProvider>
          </ChartsProvider>
        </QueryClientProvider>
      </ThemeProvider>
    </QueryParamProvider>
  </BrowserRouter>,
);
