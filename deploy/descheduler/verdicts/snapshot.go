package verdicts

import (
	"time"
)

// vmiKey is what a launcher pod can tell of its VMI at no cost.
type vmiKey struct {
	namespace, name string
}

// block is why a VMI is blocked.
type block struct {
	vmiUID    string
	reason    string
	notBefore string
}

// snapshot is one answer of GET /v1/blocked. It does not change; a newer one takes its place.
type snapshot struct {
	etag       string
	blocks     [len(checkpoints)]map[vmiKey]block
	stale      bool
	maxAge     time.Duration
	answeredAt time.Time
}

// isFresh tells whether it may still be used. There may be no snapshot at all.
func (s *snapshot) isFresh(now time.Time) bool {
	return s != nil && now.Sub(s.answeredAt) <= s.maxAge
}

// names tells whether a VMI of that name is blocked, whichever its UID: the exporter counts
// callers that send a wrong one, so it must hear of them.
func (s *snapshot) names(at checkpoint, key vmiKey) bool {
	_, found := s.blocks[at][key]
	return found
}

// holds finds why this very VMI is blocked, before an eviction by the rules of either checkpoint.
// An empty UID is any.
func (s *snapshot) holds(at checkpoint, key vmiKey, uid string) (block, bool) {
	for one := range at + 1 {
		if found, ok := s.blocks[one][key]; ok && (uid == "" || uid == found.vmiUID) {
			return found, true
		}
	}
	return block{}, false
}

// renewed is the same set, answered again: 304.
func (s *snapshot) renewed(answeredAt time.Time) *snapshot {
	again := *s
	again.answeredAt = answeredAt
	return &again
}
