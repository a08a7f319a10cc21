#!/usr/bin/env bash
# vmalert-tool 1.148.9: if rules are evaluated every five minutes, no alert sees a recorded series.
#
# `vmalert-tool unittest` takes promtool's files of rules and tests. In promtool, as in Prometheus, an
# alert sees what a recording rule above it in the group has written in the same evaluation. In
# vmalert-tool, as in vmalert, it sees what was written one evaluation earlier, and a sample counts for
# less than five minutes. So with `evaluation_interval: 5m` the alert never fires, with 4m it does, one
# evaluation later than in promtool. Nothing tells the author of the test: the alert is just absent.
#
# Seen: "every 4m: SUCCESS" and "every 5m: FAILED"
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export GOFLAGS=-mod=mod GOWORK=off
go mod init finding 2>/dev/null
go get -tool github.com/VictoriaMetrics/VictoriaMetrics/app/vmalert-tool@v1.148.9 2>/dev/null
go build -o vmalert-tool github.com/VictoriaMetrics/VictoriaMetrics/app/vmalert-tool
cat >rules.yaml <<'YAML'
groups:
  - name: group
    rules:
      - record: node:down:max
        expr: max by (node) (down)
      - alert: Down
        expr: node:down:max == 1
YAML
for interval in 4m 5m; do
    cat >"$interval.yaml" <<YAML
rule_files: [rules.yaml]
evaluation_interval: $interval
tests:
  - interval: 1m
    input_series: [{series: 'down{node="n1"}', values: 1x120}]
    alert_rule_test:
      - {alertname: Down, eval_time: 1h, exp_alerts: [{exp_labels: {node: n1}}]}
YAML
    ./vmalert-tool unittest --disableAlertgroupLabel --files "$interval.yaml" >output 2>&1 || true
    echo "every $interval: $(grep -o -m 1 -E 'SUCCESS|FAILED' output)"
done >seen
cat seen
[ "$(cat seen)" = 'every 4m: SUCCESS
every 5m: FAILED' ]
