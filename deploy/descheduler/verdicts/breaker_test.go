package verdicts

import (
	"testing"
	"time"
)

// admits reports whether a request may be sent, without a generation.
func admits(b *breaker, now time.Time) bool {
	_, admitted := b.admit(now)
	return admitted
}

// After a failure no request is sent for 5 s. Then one request is sent as a trial. Each further
// failure doubles the pause, up to 60 s. A success closes the breaker.
func TestBreaker(t *testing.T) {
	b := &breaker{}
	now := time.Now()
	sent, admitted := b.admit(now)
	expect(t, "closed admits", admitted, true)
	expect(t, "the first failure opens", b.fail(sent, now), true)
	for _, pause := range []time.Duration{5, 10, 20, 40, 60, 60} {
		expect(t, "open admits", admits(b, now.Add(pause*time.Second-1)), false)
		now = now.Add(pause * time.Second)
		sent, admitted = b.admit(now)
		expect(t, "the trial is admitted", admitted, true)
		expect(t, "a second trial is admitted", admits(b, now), false)
		expect(t, "a failed trial opens", b.fail(sent, now), false)
	}
	now = now.Add(time.Minute)
	expect(t, "the trial is admitted", admits(b, now), true)
	expect(t, "it was open", b.succeed(), true)
	expect(t, "closed admits", admits(b, now), true)
	sent, admitted = b.admit(now)
	expect(t, "closed admits again", admitted, true)
	expect(t, "it was open", b.succeed(), false)
	b.fail(sent, now)
	expect(t, "the pause starts anew", admits(b, now.Add(firstBreak)), true)
}

// If several requests are sent before the breaker opens, their failures count as one.
func TestBreakerCountsOneOutageOnce(t *testing.T) {
	b := &breaker{}
	now := time.Now()
	sent := [3]int{}
	for i := range sent {
		sent[i], _ = b.admit(now)
	}
	for _, one := range sent {
		b.fail(one, now)
	}
	expect(t, "admitted after the first pause", admits(b, now.Add(firstBreak)), true)
}

// A request that was sent before the breaker opened fails while the trial is under way: the trial
// goes on, no second trial is sent, and the pause does not grow. After the trial's success it does
// not open the breaker.
func TestBreakerIgnoresOldRequests(t *testing.T) {
	b := &breaker{}
	now := time.Now()
	old, _ := b.admit(now)
	older, _ := b.admit(now)
	first, _ := b.admit(now)
	b.fail(first, now)
	now = now.Add(firstBreak)
	trial, _ := b.admit(now)
	expect(t, "an old failure opens", b.fail(old, now), false)
	expect(t, "a second trial", admits(b, now.Add(2*firstBreak)), false)
	b.fail(trial, now)
	expect(t, "admitted after the doubled pause", admits(b, now.Add(2*firstBreak)), true)
	b.succeed()
	expect(t, "an old failure opens", b.fail(older, now), false)
	expect(t, "closed admits", admits(b, now), true)
}

// When polls succeed again, exactly one request is sent as a trial.
func TestBreakerHastens(t *testing.T) {
	b := &breaker{}
	now := time.Now()
	b.retryNow()
	sent, admitted := b.admit(now)
	expect(t, "closed admits", admitted, true)
	b.fail(sent, now)
	b.retryNow()
	trial, admitted := b.admit(now)
	expect(t, "the trial", admitted, true)
	expect(t, "a second", admits(b, now), false)
	b.fail(trial, now)
	expect(t, "the doubled pause", admits(b, now.Add(2*firstBreak-1)), false)
}
