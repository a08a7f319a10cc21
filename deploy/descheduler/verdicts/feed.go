package verdicts

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"
)

const (
	// A snapshot is renewed three times within its age, and at least this often.
	longestWait = 30 * time.Second

	// The least time from one poll to the next: a storm of changes is a few answers, and a server
	// that does not wait is no busy loop.
	pollSpacing = 200 * time.Millisecond

	firstPollPause   = time.Second
	longestPollPause = 30 * time.Second
)

// api is what the plugin asks of the exporter.
type api interface {
	ask(ctx context.Context, at checkpoint, asked candidate) (outcome, block, error)
	poll(ctx context.Context, last *snapshot, wait time.Duration) (*snapshot, error)
	close()
}

// feed keeps the latest snapshot.
type feed struct {
	api      api
	counters *counters
	log      klog.Logger
	// recovered is called when a poll succeeds after one that failed.
	recovered func()

	latest   atomic.Pointer[snapshot]
	polled   chan struct{} // closed when the first poll has ended, whichever way
	patience sync.Once
}

func newFeed(api api, counters *counters, log klog.Logger, recovered func()) *feed {
	return &feed{api: api, counters: counters, log: log, recovered: recovered, polled: make(chan struct{})}
}

// read answers the latest snapshot, which may be none or too old. The first caller waits for the
// first poll, for so long at most; nobody waits again.
func (f *feed) read(ctx context.Context, most time.Duration) *snapshot {
	if latest := f.latest.Load(); latest != nil {
		return latest
	}
	f.patience.Do(func() {
		ctx, cancel := context.WithTimeout(ctx, most)
		defer cancel()
		select {
		case <-f.polled:
		case <-ctx.Done():
		}
	})
	return f.latest.Load()
}

// run polls until its context ends.
func (f *feed) run(ctx context.Context) {
	defer f.api.close()
	var pause time.Duration // 0: the last poll was answered
	var first sync.Once
	for {
		began := time.Now()
		last := f.latest.Load()
		latest, err := f.api.poll(ctx, last, waitFor(last, pause != 0))
		if ctx.Err() != nil {
			return
		}
		rest := pollSpacing - time.Since(began)
		if err == nil {
			f.keep(latest, last, pause != 0)
			pause = 0
		} else {
			f.suffer(err, pause != 0)
			pause = min(max(2*pause, firstPollPause), longestPollPause)
			rest = jitter(pause)
		}
		first.Do(func() { close(f.polled) })
		select {
		case <-ctx.Done():
			return
		case <-time.After(rest):
		}
	}
}

// keep takes what a poll has answered.
func (f *feed) keep(latest, last *snapshot, wasFailing bool) {
	f.latest.Store(latest)
	f.counters.noteSnapshot(time.Now())
	if last != nil && latest.etag == last.etag {
		f.counters.countPoll(pollUnchanged)
	} else {
		f.counters.countPoll(pollChanged)
	}
	if wasFailing {
		f.log.Info("The snapshot of blocked VMIs is renewed again")
		f.recovered()
	}
}

// suffer takes the failure of a poll. The snapshot stays until its age ends it, except where there
// is a newer one that is too large: then it is known to be wrong.
func (f *feed) suffer(err error, wasFailing bool) {
	if errors.Is(err, errTooLarge) {
		f.latest.Store(nil)
		f.counters.countPoll(pollTooLarge)
	} else {
		f.counters.countPoll(pollFailed)
	}
	if !wasFailing {
		f.log.Error(err, "The snapshot of blocked VMIs is not renewed")
	}
}

// waitFor is how long the next poll lets the exporter hold it. After a failure an answer is wanted
// at once, be it the old one.
func waitFor(last *snapshot, wasFailing bool) time.Duration {
	if last == nil || wasFailing {
		return 0
	}
	return min(longestWait, last.maxAge/3)
}

// jitter is from half of the pause to all of it: many deschedulers do not come back at once.
func jitter(pause time.Duration) time.Duration {
	return pause/2 + rand.N(pause/2+1)
}
