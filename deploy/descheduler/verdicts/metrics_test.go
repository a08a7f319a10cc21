package verdicts

import (
	"strings"
	"testing"
	"time"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/component-base/metrics/testutil"
)

const exposition = `
# HELP descheduler_kubevirt_snapshot_polls_total [ALPHA] Finished polls of the set of blocked VMIs, by result.
# TYPE descheduler_kubevirt_snapshot_polls_total counter
descheduler_kubevirt_snapshot_polls_total{result="changed"} 2
descheduler_kubevirt_snapshot_polls_total{result="failed"} 0
descheduler_kubevirt_snapshot_polls_total{result="too_large"} 1
descheduler_kubevirt_snapshot_polls_total{result="unchanged"} 0
# HELP descheduler_kubevirt_snapshot_timestamp_seconds [ALPHA] Time of the last successful poll of the set of blocked VMIs; 0 if none.
# TYPE descheduler_kubevirt_snapshot_timestamp_seconds gauge
descheduler_kubevirt_snapshot_timestamp_seconds 1.7956512e+09
# HELP descheduler_kubevirt_verdicts_total [ALPHA] Decisions about virt-launcher pods, by the descheduler's checkpoint and outcome.
# TYPE descheduler_kubevirt_verdicts_total counter
descheduler_kubevirt_verdicts_total{checkpoint="filter",outcome="allowed"} 1
descheduler_kubevirt_verdicts_total{checkpoint="filter",outcome="blocked"} 0
descheduler_kubevirt_verdicts_total{checkpoint="filter",outcome="blocked_by_snapshot"} 0
descheduler_kubevirt_verdicts_total{checkpoint="filter",outcome="stale"} 0
descheduler_kubevirt_verdicts_total{checkpoint="filter",outcome="unavailable"} 0
descheduler_kubevirt_verdicts_total{checkpoint="filter",outcome="unknown"} 0
descheduler_kubevirt_verdicts_total{checkpoint="filter",outcome="unnamed"} 0
descheduler_kubevirt_verdicts_total{checkpoint="preEviction",outcome="allowed"} 0
descheduler_kubevirt_verdicts_total{checkpoint="preEviction",outcome="blocked"} 1
descheduler_kubevirt_verdicts_total{checkpoint="preEviction",outcome="blocked_by_snapshot"} 0
descheduler_kubevirt_verdicts_total{checkpoint="preEviction",outcome="stale"} 0
descheduler_kubevirt_verdicts_total{checkpoint="preEviction",outcome="unavailable"} 0
descheduler_kubevirt_verdicts_total{checkpoint="preEviction",outcome="unknown"} 0
descheduler_kubevirt_verdicts_total{checkpoint="preEviction",outcome="unnamed"} 0
`

// Every series exists from the start, and promlint finds no problem.
func TestExposition(t *testing.T) {
	made := &counters{}
	registry := metrics.NewKubeRegistry()
	registry.CustomMustRegister(made)
	made.count(atFilter, allowed)
	made.count(atPreEviction, blocked)
	made.countPoll(pollChanged)
	made.countPoll(pollChanged)
	made.countPoll(pollTooLarge)
	made.noteSnapshot(time.Unix(1_795_651_200, 0))
	if err := testutil.GatherAndCompare(registry, strings.NewReader(exposition)); err != nil {
		t.Error(err)
	}
	problems, err := testutil.NewPromLinter(strings.NewReader(exposition)).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("promlint: %v, %v", problems, err)
	}
}

// The counters are registered once, and DELETE /metrics does not remove them.
func TestProcessCounters(t *testing.T) {
	expect(t, "the same", processCounters(), processCounters())
	processCounters().count(atFilter, unnamed)
	legacyregistry.Reset()
	families, err := legacyregistry.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() == "descheduler_kubevirt_verdicts_total" {
			expect(t, "series", len(family.GetMetric()), 14)
			return
		}
	}
	t.Error("descheduler_kubevirt_verdicts_total is not in the registry")
}
