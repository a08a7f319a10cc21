package verdicts

// checkpoint is an extension point at which the descheduler calls its filters.
type checkpoint int

const (
	atFilter checkpoint = iota
	atPreEviction
)

// checkpoints are the names in requests and in the metrics.
var checkpoints = [...]string{atFilter: "filter", atPreEviction: "preEviction"}

// outcome is the result of the decision about one launcher pod.
type outcome int

const (
	// allowed by a verdict or by the snapshot.
	allowed outcome = iota
	// blocked by a verdict. The exporter has counted this block.
	blocked
	// unknown to the exporter, which allows the eviction.
	unknown
	// stale: nothing blocks the VMI, but the exporter says that its data are stale.
	stale
	// unavailable: there is no verdict, and no fresh snapshot blocks the VMI.
	unavailable
	// blockedBySnapshot: there is no verdict, but a fresh snapshot blocks the VMI.
	blockedBySnapshot
	// unnamed: the launcher pod has no valid VMI name.
	unnamed
)

// outcomes are the label values in the metrics.
var outcomes = [...]string{
	allowed:           "allowed",
	blocked:           "blocked",
	unknown:           "unknown",
	stale:             "stale",
	unavailable:       "unavailable",
	blockedBySnapshot: "blocked_by_snapshot",
	unnamed:           "unnamed",
}

// permits reports whether the eviction may continue.
func (o outcome) permits(ignorable bool) bool {
	switch o {
	case blocked, blockedBySnapshot:
		return false
	case stale, unavailable:
		return ignorable
	default:
		return true
	}
}
