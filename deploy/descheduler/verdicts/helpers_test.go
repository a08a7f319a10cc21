package verdicts

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
)

var errDown = errors.New("down")

// makeArgs returns the default arguments with some changes.
func makeArgs(change func(*Args)) *Args {
	args := &Args{URLPrefix: "http://127.0.0.1:9810"}
	if change != nil {
		change(args)
	}
	SetDefaults(args)
	return args
}

// launcher returns the pod of the VMI shop/NAME with the UID uid-NAME.
func launcher(name string) *v1.Pod {
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:   "shop",
			Name:        "virt-launcher-" + name + "-x",
			UID:         "the-pods-own",
			Labels:      map[string]string{appLabel: launcherApp, createdByLabel: "uid-" + name},
			Annotations: map[string]string{domainAnnotation: name},
		},
		Spec: v1.PodSpec{NodeName: "n1"},
	}
}

// logged contains what a plugin logged at -v=2.
type logged struct {
	mu    sync.Mutex
	lines bytes.Buffer
}

func (l *logged) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lines.Write(line)
}

func (l *logged) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.lines.String(), text)
}

// logTo returns a context whose logger writes to logged.
func logTo(ctx context.Context, to *logged) context.Context {
	config := textlogger.NewConfig(textlogger.Verbosity(2), textlogger.Output(to))
	return klog.NewContext(ctx, textlogger.NewLogger(config))
}

// expect fails the test unless both values are equal.
func expect[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

// eventually waits until a condition is true.
func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	for range 500 {
		if done() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("%s: not within 5 s", what)
}

// fakeAPI answers from memory. A poll with a wait takes as long as the wait.
type fakeAPI struct {
	mu       sync.Mutex
	asked    []candidate
	polls    []time.Duration
	snapshot *snapshot
	ended    outcome
	why      block
	askErr   error
	pollErr  error
	hang     time.Duration
	closed   bool
}

func (f *fakeAPI) ask(_ context.Context, _ checkpoint, asked candidate) (outcome, block, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = append(f.asked, asked)
	return f.ended, f.why, f.askErr
}

func (f *fakeAPI) poll(ctx context.Context, last *snapshot, wait time.Duration) (*snapshot, error) {
	f.mu.Lock()
	f.polls = append(f.polls, wait)
	hang := f.hang + wait
	f.mu.Unlock()
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(hang):
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.pollErr != nil {
		return nil, f.pollErr
	}
	return f.snapshot.renewed(time.Now()), nil
}

func (f *fakeAPI) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
}

func (f *fakeAPI) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// blockedAt returns a new snapshot that blocks shop/NAME for each name.
func blockedAt(at checkpoint, names ...string) *snapshot {
	made := &snapshot{etag: strings.Join(names, ","), maxAge: 90 * time.Second, answeredAt: time.Now()}
	for one := range made.blocks {
		made.blocks[one] = map[vmiKey]block{}
	}
	for _, name := range names {
		made.blocks[at][vmiKey{"shop", name}] = block{vmiUID: "uid-" + name, reason: "cooldown", notBefore: "2026-01-01T00:00:00Z"}
	}
	return made
}
