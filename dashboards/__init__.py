"""The Grafana dashboards, as code; the JSON beside it is what Grafana loads.

`python -m dashboards.build` writes the JSON again.
"""

import warnings


# The SDK prefers its second model, which needs the API of Grafana 12. Every Grafana can load files
# of the first.
warnings.filterwarnings("ignore", "Prefer using dashboardv2", DeprecationWarning)
