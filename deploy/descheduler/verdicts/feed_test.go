package verdicts

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"
)

func startFeed(t *testing.T, api *fakeAPI, recovered func()) *feed {
	made := newFeed(api, &counters{}, klog.FromContext(logTo(t.Context(), &logged{})), recovered)
	go made.run(t.Context())
	return made
}

// While polls succeed, the snapshot is renewed before its maximum age.
func TestFeedRenews(t *testing.T) {
	for _, maxAge := range []time.Duration{3 * time.Second, 90 * time.Second, time.Hour} {
		t.Run(maxAge.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api := &fakeAPI{snapshot: blockedAt(atFilter)}
				api.snapshot.maxAge = maxAge
				feed := startFeed(t, api, nil)
				synctest.Wait()
				for range 100 {
					time.Sleep(time.Second)
					if age := time.Since(feed.latest.Load().answeredAt); age > maxAge/2 {
						t.Fatalf("%s old, of %s", age, maxAge)
					}
				}
				api.mu.Lock()
				defer api.mu.Unlock()
				if polls := len(api.polls); polls > 110 {
					t.Errorf("%d polls in 100 s", polls)
				}
			})
		})
	}
}

// A server that always answers at once gets at most five polls per second.
func TestFeedIsNoBusyLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := &fakeAPI{snapshot: blockedAt(atFilter)}
		api.snapshot.maxAge = time.Nanosecond
		startFeed(t, api, nil)
		time.Sleep(10*time.Second + time.Millisecond)
		api.mu.Lock()
		defer api.mu.Unlock()
		expect(t, "polls in 10 s", len(api.polls), 51)
	})
}

// After failures the pauses between polls grow, and the snapshot stays in use until its maximum
// age.
func TestFeedBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := &fakeAPI{snapshot: blockedAt(atFilter, "db1")}
		var recoveries atomic.Int32
		feed := startFeed(t, api, func() { recoveries.Add(1) })
		synctest.Wait()
		api.set(func() { api.pollErr = errDown; api.polls = nil })
		time.Sleep(longestWait + 89*time.Second)
		expect(t, "fresh", feed.latest.Load().isFresh(time.Now()), false)
		api.set(func() {
			if polls := len(api.polls); polls < 5 || polls > 12 {
				t.Errorf("%d polls in the first 90 s of an outage", polls)
			}
			for _, wait := range api.polls[1:] {
				expect(t, "wait after a failure", wait, 0)
			}
			api.pollErr = nil
		})
		time.Sleep(longestPollPause)
		expect(t, "fresh", feed.latest.Load().isFresh(time.Now()), true)
		expect(t, "recoveries", recoveries.Load(), 1)
		expect(t, "failed polls are counted", feed.counters.polls[pollFailed].Load() > 0, true)
	})
}

// An answer that is too large removes the snapshot, and is counted as too_large.
func TestFeedTooLarge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := &fakeAPI{snapshot: blockedAt(atFilter, "db1")}
		feed := startFeed(t, api, nil)
		synctest.Wait()
		expect(t, "fresh", feed.latest.Load().isFresh(time.Now()), true)
		api.set(func() { api.pollErr = fmt.Errorf("%w: 5 GB", errTooLarge) })
		time.Sleep(longestWait + time.Millisecond + pollSpacing)
		expect(t, "fresh", feed.latest.Load().isFresh(time.Now()), false)
		expect(t, "too large", feed.counters.polls[pollTooLarge].Load(), 1)
	})
}

// Only the first reader waits for the first poll. It waits for at most the timeout.
func TestFeedFirstRead(t *testing.T) {
	for name, test := range map[string]struct {
		api    *fakeAPI
		waited time.Duration
	}{
		"answered": {&fakeAPI{snapshot: blockedAt(atFilter), hang: 300 * time.Millisecond}, 300 * time.Millisecond},
		"failed":   {&fakeAPI{pollErr: errDown, hang: 200 * time.Millisecond}, 200 * time.Millisecond},
		"hanging":  {&fakeAPI{pollErr: errDown, hang: time.Hour}, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				feed := startFeed(t, test.api, nil)
				began := time.Now()
				for range 100 {
					feed.read(t.Context(), time.Second)
				}
				expect(t, "waited", time.Since(began), test.waited)
			})
		})
	}
}

// When the context ends, polling stops at once, during a poll or in a pause, and the connections
// are closed. (synctest checks that no goroutine is left.)
func TestFeedEnds(t *testing.T) {
	for name, pollErr := range map[string]error{"waiting": nil, "pausing": errDown} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api := &fakeAPI{snapshot: blockedAt(atFilter), pollErr: pollErr}
				feed := newFeed(api, &counters{}, klog.FromContext(logTo(t.Context(), &logged{})), nil)
				ctx, cancel := context.WithCancel(t.Context())
				go feed.run(ctx)
				time.Sleep(2 * time.Second)
				cancel()
				synctest.Wait()
				expect(t, "closed", api.closed, true)
				expect(t, "no failure is counted for it", feed.counters.polls[pollFailed].Load() > 0, errors.Is(pollErr, errDown))
			})
		})
	}
}
