package verdicts

// checkpoint is a point at which the descheduler asks its filters.
type checkpoint int

const (
	atFilter checkpoint = iota
	atPreEviction
)

// checkpoints are the names on the wire and in the metrics.
var checkpoints = [...]string{atFilter: "filter", atPreEviction: "preEviction"}

// outcome is how a question about a launcher pod ended.
type outcome int

const (
	// allowed by a verdict or by the snapshot.
	allowed outcome = iota
	// blocked by a verdict, which the exporter has counted.
	blocked
	// unknown to the exporter, which allows it.
	unknown
	// stale: allowed, but by evidence that the exporter itself calls stale.
	stale
	// unavailable: no verdict, and nothing that blocks in the snapshot.
	unavailable
	// held: no verdict, but a snapshot still fresh says blocked.
	held
	// unnamed: a launcher pod that names no VMI.
	unnamed
)

// outcomes are the names in the metrics.
var outcomes = [...]string{
	allowed:     "allowed",
	blocked:     "blocked",
	unknown:     "unknown",
	stale:       "stale",
	unavailable: "unavailable",
	held:        "held",
	unnamed:     "unnamed",
}

// permits tells whether the eviction may go on.
func (o outcome) permits(ignorable bool) bool {
	switch o {
	case blocked, held:
		return false
	case stale, unavailable:
		return ignorable
	default:
		return true
	}
}
