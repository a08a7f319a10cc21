package verdicts

import (
	"testing"
	"time"
)

// After a failure no request is sent for 5 s. Then one request is sent as a trial. Each further
// failure doubles the pause, up to 60 s. A success closes the breaker.
func TestBreaker(t *testing.T) {
	b := &breaker{}
	now := time.Now()
	expect(t, "closed admits", b.admit(now), true)
	expect(t, "the first failure opens", b.fail(now), true)
	for _, pause := range []time.Duration{5, 10, 20, 40, 60, 60} {
		expect(t, "open admits", b.admit(now.Add(pause*time.Second-1)), false)
		now = now.Add(pause * time.Second)
		expect(t, "the trial is admitted", b.admit(now), true)
		expect(t, "a second trial is admitted", b.admit(now), false)
		expect(t, "a failed trial opens", b.fail(now), false)
	}
	now = now.Add(time.Minute)
	expect(t, "the trial is admitted", b.admit(now), true)
	expect(t, "it was open", b.succeed(), true)
	expect(t, "closed admits", b.admit(now), true)
	expect(t, "closed admits again", b.admit(now), true)
	expect(t, "it was open", b.succeed(), false)
	b.fail(now)
	expect(t, "the pause starts anew", b.admit(now.Add(firstBreak)), true)
}

// If several requests are sent before the breaker opens, their failures count as one.
func TestBreakerCountsOneOutageOnce(t *testing.T) {
	b := &breaker{}
	now := time.Now()
	for range 3 {
		b.admit(now)
	}
	for range 3 {
		b.fail(now)
	}
	expect(t, "admitted after the first pause", b.admit(now.Add(firstBreak)), true)
}

// When polls succeed again, exactly one request is sent as a trial.
func TestBreakerHastens(t *testing.T) {
	b := &breaker{}
	now := time.Now()
	b.retryNow()
	expect(t, "closed admits", b.admit(now), true)
	b.fail(now)
	b.retryNow()
	expect(t, "the trial", b.admit(now), true)
	expect(t, "a second", b.admit(now), false)
	b.fail(now)
	expect(t, "the doubled pause", b.admit(now.Add(2*firstBreak-1)), false)
}
