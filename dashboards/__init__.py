"""The Grafana dashboards, as code. Grafana loads the JSON files in this folder.

`python -m dashboards.build` writes these files again.
"""

import warnings


# The SDK warns that its second model is preferred. That model needs the API of Grafana 12, and
# every Grafana can load files of the first model.
warnings.filterwarnings("ignore", "Prefer using dashboardv2", DeprecationWarning)
