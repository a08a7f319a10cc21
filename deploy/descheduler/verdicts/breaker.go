package verdicts

import (
	"sync"
	"time"
)

const (
	firstBreak   = 5 * time.Second
	longestBreak = 60 * time.Second
)

// breaker keeps requests from an exporter that does not answer.
//
// The poll of the snapshot neither opens nor closes it. The two requests can fail apart: an answer
// too large for the poll says nothing of verdicts, and polls that succeed while verdicts hang would
// close it again and again, at one timeout each. But when polls succeed after failures, the
// exporter is probably back, and the next call is let through as the trial (see hasten).
type breaker struct {
	mu     sync.Mutex
	pause  time.Duration // 0: closed
	until  time.Time
	trying bool
}

// admit tells whether a request may be sent now. Its end must be told to succeed or fail.
func (b *breaker) admit(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pause == 0 {
		return true
	}
	if b.trying || now.Before(b.until) {
		return false
	}
	b.trying = true
	return true
}

// succeed closes the breaker, and tells whether it was open.
func (b *breaker) succeed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	wasOpen := b.pause != 0
	b.pause, b.trying = 0, false
	return wasOpen
}

// fail opens the breaker or, after a trial, keeps it open for longer. It tells whether it was
// closed. What was sent before it opened and fails after does not count again.
func (b *breaker) fail(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	wasClosed := b.pause == 0
	if !wasClosed && !b.trying {
		return false
	}
	b.pause = min(max(2*b.pause, firstBreak), longestBreak)
	b.until = now.Add(b.pause)
	b.trying = false
	return wasClosed
}

// hasten lets the next call be the trial.
func (b *breaker) hasten() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.until = time.Time{}
}
