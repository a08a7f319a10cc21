"""The Grafana dashboards, as code; the JSON beside it is what Grafana loads.

`python -m dashboards.build` writes the JSON anew.
"""

import warnings


# The SDK prefers its second model, whose dashboards go through the API of Grafana 12 and newer;
# files, which every Grafana provisions, are of the first.
warnings.filterwarnings("ignore", "Prefer using dashboardv2", DeprecationWarning)
