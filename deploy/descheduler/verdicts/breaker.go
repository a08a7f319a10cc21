package verdicts

import (
	"sync"
	"time"
)

const (
	firstBreak   = 5 * time.Second
	longestBreak = 60 * time.Second
)

// breaker is a circuit breaker: it stops requests to an exporter that does not answer.
//
// Only requests for verdicts open and close it. Polls of the snapshot do not, because a poll can
// succeed while requests for verdicts fail, and vice versa. But when a poll succeeds after a failed
// poll, the exporter probably works again. Then the next request for a verdict is sent as a trial
// (see retryNow).
type breaker struct {
	mu         sync.Mutex
	pause      time.Duration // 0: closed
	until      time.Time
	trying     bool
	generation int // of the requests whose failure counts
}

// admit reports whether a request may be sent now. If so, the caller must later call succeed, or
// fail with the request's generation.
func (b *breaker) admit(now time.Time) (generation int, admitted bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pause == 0 {
		return b.generation, true
	}
	if b.trying || now.Before(b.until) {
		return 0, false
	}
	b.trying = true
	b.generation++
	return b.generation, true
}

// succeed closes the breaker and reports whether it was open.
func (b *breaker) succeed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	wasOpen := b.pause != 0
	b.pause, b.trying = 0, false
	return wasOpen
}

// fail opens the breaker or, after a trial, keeps it open for longer. It reports whether the breaker
// was closed before. The failure of a request that was sent before the breaker opened or before the
// trial has no effect.
func (b *breaker) fail(generation int, now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if generation != b.generation {
		return false
	}
	wasClosed := b.pause == 0
	b.generation++
	b.pause = min(max(2*b.pause, firstBreak), longestBreak)
	b.until = now.Add(b.pause)
	b.trying = false
	return wasClosed
}

// retryNow lets the next request through as a trial.
func (b *breaker) retryNow() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.until = time.Time{}
}
