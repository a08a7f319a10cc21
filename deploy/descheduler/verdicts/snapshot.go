package verdicts

import (
	"time"
)

// vmiKey is the namespace and name of a VMI, as its launcher pod has them.
type vmiKey struct {
	namespace, name string
}

// block says why a VMI is blocked.
type block struct {
	vmiUID    string
	reason    string
	notBefore string
}

// snapshot is one answer of GET /v1/blocked. It is never changed, only replaced.
type snapshot struct {
	etag       string
	blocks     [len(checkpoints)]map[vmiKey]block
	stale      bool
	maxAge     time.Duration
	answeredAt time.Time
}

// isFresh reports whether the snapshot may still be used. The snapshot may be nil.
func (s *snapshot) isFresh(now time.Time) bool {
	return s != nil && now.Sub(s.answeredAt) <= s.maxAge
}

// contains reports whether a VMI with this name is blocked, whatever its UID is. Requests with a
// wrong UID must reach the exporter, because it counts them.
func (s *snapshot) contains(at checkpoint, key vmiKey) bool {
	_, found := s.blocks[at][key]
	return found
}

// find returns why the VMI with this UID is blocked. At preEviction, the blocks of both
// checkpoints apply. An empty UID matches any UID.
func (s *snapshot) find(at checkpoint, key vmiKey, uid string) (block, bool) {
	for one := range at + 1 {
		if found, ok := s.blocks[one][key]; ok && (uid == "" || uid == found.vmiUID) {
			return found, true
		}
	}
	return block{}, false
}

// renewed returns the same set with a new time, after an answer 304.
func (s *snapshot) renewed(answeredAt time.Time) *snapshot {
	again := *s
	again.answeredAt = answeredAt
	return &again
}
