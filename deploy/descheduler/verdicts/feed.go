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
	// A poll waits at most this long for a change, and at most a third of the snapshot's maximum
	// age.
	longestWait = 30 * time.Second

	// The shortest time between two polls: it limits the load when changes are frequent, or when the
	// server answers at once.
	pollSpacing = 200 * time.Millisecond

	firstPollPause   = time.Second
	longestPollPause = 30 * time.Second
)

// api is the part of the client that the plugin uses.
type api interface {
	ask(ctx context.Context, at checkpoint, asked candidate) (outcome, block, error)
	poll(ctx context.Context, last *snapshot, wait time.Duration) (*snapshot, error)
	close()
}

// feed polls the exporter and stores the latest snapshot.
type feed struct {
	api      api
	counters *counters
	log      klog.Logger
	// recovered is called when a poll succeeds after a failed poll.
	recovered func()

	latest    atomic.Pointer[snapshot]
	polled    chan struct{} // closed when the first poll has ended, with or without an error
	firstWait sync.Once
}

func newFeed(api api, counters *counters, log klog.Logger, recovered func()) *feed {
	return &feed{api: api, counters: counters, log: log, recovered: recovered, polled: make(chan struct{})}
}

// read returns the latest snapshot, which may be nil or too old. The first call waits for the first
// poll, for at most timeout; later calls do not wait.
func (f *feed) read(ctx context.Context, timeout time.Duration) *snapshot {
	if latest := f.latest.Load(); latest != nil {
		return latest
	}
	f.firstWait.Do(func() {
		ctx, cancel := context.WithTimeout(ctx, timeout)
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
	var pause time.Duration // 0: the last poll succeeded
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
			f.store(latest, last, pause != 0)
			pause = 0
		} else {
			f.handleError(err, pause != 0)
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

// store stores the snapshot of a successful poll.
func (f *feed) store(latest, last *snapshot, wasFailing bool) {
	f.latest.Store(latest)
	f.counters.noteSnapshot(time.Now())
	if last != nil && latest.etag == last.etag {
		f.counters.countPoll(pollUnchanged)
	} else {
		f.counters.countPoll(pollChanged)
	}
	if wasFailing {
		f.log.Info("The snapshot of blocked VMIs is up to date again")
		f.recovered()
	}
}

// handleError handles a failed poll. The last snapshot stays in use until it is too old. But if the
// new set is too large to read, the last snapshot is out of date, and is dropped at once.
func (f *feed) handleError(err error, wasFailing bool) {
	if errors.Is(err, errTooLarge) {
		f.latest.Store(nil)
		f.counters.countPoll(pollTooLarge)
	} else {
		f.counters.countPoll(pollFailed)
	}
	if !wasFailing {
		f.log.Error(err, "Cannot update the snapshot of blocked VMIs")
	}
}

// waitFor returns how long the exporter may wait before it answers the next poll. After a failure
// the exporter should answer at once, even if nothing has changed.
func waitFor(last *snapshot, wasFailing bool) time.Duration {
	if last == nil || wasFailing {
		return 0
	}
	return min(longestWait, last.maxAge/3)
}

// jitter returns a random time between half of the pause and the whole pause, so that many
// deschedulers do not poll at the same moment.
func jitter(pause time.Duration) time.Duration {
	return pause/2 + rand.N(pause/2+1)
}
