#!/usr/bin/env bash
# promtool 3.16.0: a test of rules may not override a key that it merges, the rules themselves may.
#
# In YAML's merge (`<<: *labels`) a key beside it replaces the merged one: this is what people use it
# for. Prometheus' rule files can do that. In the test file of the same `promtool test rules` the
# same lines are "key already set in map", because promtool reads rules with one YAML library and
# tests with an older one in strict mode. A merge without an override works in both.
#
# Seen: "rules: SUCCESS", "merged: SUCCESS" and "overridden: key "severity" already set in map"
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export GOFLAGS=-mod=mod GOWORK=off
go mod init finding 2>/dev/null
go get -tool github.com/prometheus/prometheus/cmd/promtool@v0.316.0 2>/dev/null
go build -o promtool github.com/prometheus/prometheus/cmd/promtool
cat >rules.yaml <<'YAML'
groups:
  - name: group
    rules:
      - {alert: First, expr: down == 1, labels: &labels {team: vms, severity: warning}}
      - {alert: Second, expr: down == 1, labels: {<<: *labels, severity: critical}}
YAML
write_test() {
    cat >"$1.yaml" <<YAML
rule_files: [rules.yaml]
tests:
  - input_series: [{series: 'down{node="n1"}', values: 1x10}]
    alert_rule_test:
      - {alertname: First, eval_time: 5m, exp_alerts: [{exp_labels: $2}]}
      - {alertname: Second, eval_time: 5m, exp_alerts: [{exp_labels: {$3}}]}
YAML
    echo "$1: $(./promtool test rules "$1.yaml" 2>&1 | grep -o -m 1 -E 'SUCCESS|key .*')"
}
{
    echo "rules: $(./promtool check rules rules.yaml | grep -o SUCCESS)"
    write_test merged '{<<: &common {node: n1, team: vms}, severity: warning}' '<<: *common, severity: critical'
    write_test overridden '&labels {node: n1, team: vms, severity: warning}' '<<: *labels, severity: critical'
} >seen
cat seen
[ "$(cat seen)" = 'rules: SUCCESS
merged: SUCCESS
overridden: key "severity" already set in map' ]
