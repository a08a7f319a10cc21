"""The Grafana dashboards, as code. Grafana loads the JSON files in this folder.

`python -m dashboards.build` generates these files.
"""

import warnings


# The SDK warns that we should use its second dashboard model. That model needs the API of Grafana
# 12. Every Grafana can load files of the first model.
warnings.filterwarnings("ignore", "Prefer using dashboardv2", DeprecationWarning)
