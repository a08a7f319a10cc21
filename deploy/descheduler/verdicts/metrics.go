package verdicts

import (
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// pollResult is the result of a poll of the snapshot.
type pollResult int

const (
	pollChanged pollResult = iota
	pollUnchanged
	pollFailed
	pollTooLarge
)

// pollResults are the label values in the metrics.
var pollResults = [...]string{
	pollChanged:   "changed",
	pollUnchanged: "unchanged",
	pollFailed:    "failed",
	pollTooLarge:  "too_large",
}

var (
	verdictsDesc = metrics.NewDesc(
		"descheduler_kubevirt_verdicts_total",
		"Decisions about virt-launcher pods, by the descheduler's checkpoint and outcome.",
		[]string{"checkpoint", "outcome"}, nil, metrics.ALPHA, "")
	pollsDesc = metrics.NewDesc(
		"descheduler_kubevirt_snapshot_polls_total",
		"Finished polls of the set of blocked VMIs, by result.",
		[]string{"result"}, nil, metrics.ALPHA, "")
	snapshotDesc = metrics.NewDesc(
		"descheduler_kubevirt_snapshot_timestamp_seconds",
		"Time of the last successful poll of the set of blocked VMIs; 0 if none.",
		nil, nil, metrics.ALPHA, "")
)

// counters collects the plugin's metrics from arrays of fixed size, so counting allocates no
// memory, and every series exists from the start. The descheduler's DELETE /metrics resets only
// metric vectors, so it does not remove these series.
type counters struct {
	metrics.BaseStableCollector

	verdicts   [len(checkpoints)][len(outcomes)]atomic.Uint64
	polls      [len(pollResults)]atomic.Uint64
	snapshotAt atomic.Int64 // milliseconds since the epoch
}

var _ metrics.StableCollector = &counters{}

// processCounters returns the counters that all instances of the plugin share. A dry run of the
// descheduler makes two instances.
var processCounters = sync.OnceValue(func() *counters {
	made := &counters{}
	legacyregistry.CustomMustRegister(made)
	return made
})

func (c *counters) count(at checkpoint, ended outcome) {
	c.verdicts[at][ended].Add(1)
}

func (c *counters) countPoll(result pollResult) {
	c.polls[result].Add(1)
}

func (c *counters) noteSnapshot(at time.Time) {
	c.snapshotAt.Store(at.UnixMilli())
}

// DescribeWithStability implements metrics.StableCollector.
func (c *counters) DescribeWithStability(ch chan<- *metrics.Desc) {
	ch <- verdictsDesc
	ch <- pollsDesc
	ch <- snapshotDesc
}

// CollectWithStability implements metrics.StableCollector.
func (c *counters) CollectWithStability(ch chan<- metrics.Metric) {
	for at := range c.verdicts {
		for ended := range c.verdicts[at] {
			ch <- metrics.NewLazyConstMetric(verdictsDesc, metrics.CounterValue,
				float64(c.verdicts[at][ended].Load()), checkpoints[at], outcomes[ended])
		}
	}
	for result := range c.polls {
		ch <- metrics.NewLazyConstMetric(pollsDesc, metrics.CounterValue,
			float64(c.polls[result].Load()), pollResults[result])
	}
	ch <- metrics.NewLazyConstMetric(snapshotDesc, metrics.GaugeValue, float64(c.snapshotAt.Load())/1000)
}
