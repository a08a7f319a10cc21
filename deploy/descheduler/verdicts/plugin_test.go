package verdicts

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
)

// pluginOver returns a plugin that does not poll. It has this snapshot, which may be nil.
func pluginOver(t testing.TB, api *fakeAPI, snapshot *snapshot, ignorable bool) (*Plugin, *logged) {
	lines := &logged{}
	args := makeArgs(func(a *Args) { a.Ignorable = &ignorable })
	plugin := newPlugin(logTo(t.Context(), lines), api, args, &counters{})
	plugin.feed.latest.Store(snapshot)
	close(plugin.feed.polled)
	return plugin, lines
}

func (p *Plugin) counted(at checkpoint, ended outcome) int {
	return int(p.counters.verdicts[at][ended].Load())
}

// Pods that are not launchers are allowed without a request.
func TestOtherPods(t *testing.T) {
	api := &fakeAPI{ended: blocked, askErr: errDown}
	plugin, _ := pluginOver(t, api, nil, false)
	for _, pod := range []*v1.Pod{{}, func() *v1.Pod { p := launcher("db1"); p.Labels[appLabel] = "virt-handler"; return p }()} {
		expect(t, "Filter", plugin.Filter(pod), true)
		expect(t, "PreEvictionFilter", plugin.PreEvictionFilter(pod), true)
	}
	expect(t, "asked", len(api.asked), 0)
	expect(t, "counted", plugin.counters.verdicts[atFilter][unnamed].Load(), 0)
}

// A launcher that is being evicted is allowed without a request. If the plugin blocked it, the
// descheduler would evict another pod instead.
func TestLeavingLaunchers(t *testing.T) {
	api := &fakeAPI{ended: blocked}
	plugin, _ := pluginOver(t, api, blockedAt(atFilter, "db1"), false)
	pod := launcher("db1")
	pod.Annotations["descheduler.alpha.kubernetes.io/eviction-in-progress"] = "kubevirt"
	expect(t, "Filter", plugin.Filter(pod), true)
	expect(t, "PreEvictionFilter", plugin.PreEvictionFilter(pod), true)
	expect(t, "asked", len(api.asked), 0)
}

// A launcher without a VMI name, or with a name that is too long, is allowed and counted as
// unnamed.
func TestUnnamedLaunchers(t *testing.T) {
	api := &fakeAPI{ended: blocked}
	plugin, _ := pluginOver(t, api, nil, false)
	for _, name := range []string{"", strings.Repeat("x", 254)} {
		expect(t, "Filter", plugin.Filter(launcher(name)), true)
		expect(t, "PreEvictionFilter", plugin.PreEvictionFilter(launcher(name)), true)
	}
	expect(t, "asked", len(api.asked), 0)
	expect(t, "counted at filter", plugin.counted(atFilter, unnamed), 2)
	expect(t, "counted at preEviction", plugin.counted(atPreEviction, unnamed), 2)
}

// Filter asks only about a VMI that the snapshot blocks at filter. PreEvictionFilter always asks. The
// request has the VMI's UID, not the pod's.
func TestWhatIsAsked(t *testing.T) {
	api := &fakeAPI{ended: blocked, why: block{reason: "migration_in_progress"}}
	plugin, _ := pluginOver(t, api, blockedAt(atFilter, "db1"), true)
	expect(t, "not in the snapshot", plugin.Filter(launcher("db2")), true)
	expect(t, "asked", len(api.asked), 0)
	expect(t, "in the snapshot", plugin.Filter(launcher("db1")), false)
	expect(t, "asked", len(api.asked), 1)
	expect(t, "candidate", api.asked[0], candidate{
		Namespace: "shop", Name: "db1", VMIUID: "uid-db1", Node: "n1", Pod: "virt-launcher-db1-x"})
	expect(t, "before an eviction", plugin.PreEvictionFilter(launcher("db2")), false)
	expect(t, "asked", len(api.asked), 2)

	api.ended = allowed
	expect(t, "a verdict newer than the snapshot", plugin.Filter(launcher("db1")), true)
	otherUID := launcher("db1")
	otherUID.Labels[createdByLabel] = "a wrong one"
	plugin.Filter(otherUID)
	expect(t, "a wrong UID is sent to the exporter", api.asked[len(api.asked)-1].VMIUID, "a wrong one")
}

// Each outcome is counted, and each block is logged. The outcome and the setting `ignorable` decide
// whether the eviction may continue.
func TestOutcomes(t *testing.T) {
	const (
		answered   = `"Eviction blocked"`
		unanswered = `"Eviction blocked without a verdict"`
	)
	rejection := &statusError{status: http.StatusUnprocessableEntity}
	for name, test := range map[string]struct {
		answer    outcome
		err       error
		snapshot  bool
		ended     outcome
		ignorable bool // what PreEvictionFilter returns if ignorable
		strict    bool // and if not
	}{
		"allowed":                             {allowed, nil, false, allowed, true, true},
		"blocked":                             {blocked, nil, false, blocked, false, false},
		"unknown":                             {unknown, nil, false, unknown, true, true},
		"stale":                               {stale, nil, false, stale, true, false},
		"unavailable":                         {0, errDown, false, unavailable, true, false},
		"rejected":                            {0, rejection, false, unavailable, true, false},
		"blocked by the snapshot":             {0, errDown, true, blockedBySnapshot, false, false},
		"allowed, though the snapshot blocks": {allowed, nil, true, allowed, true, true},
	} {
		for _, ignorable := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/ignorable=%t", name, ignorable), func(t *testing.T) {
				latest := blockedAt(atPreEviction)
				if test.snapshot {
					latest = blockedAt(atPreEviction, "db1")
				}
				plugin, lines := pluginOver(t, &fakeAPI{ended: test.answer, askErr: test.err}, latest, ignorable)
				want := test.strict
				if ignorable {
					want = test.ignorable
				}
				expect(t, "PreEvictionFilter", plugin.PreEvictionFilter(launcher("db1")), want)
				expect(t, "counted", plugin.counted(atPreEviction, test.ended), 1)
				expect(t, "answered lines", lines.count(answered) == 1, test.ended == blocked)
				expect(t, "unanswered lines", lines.count(unanswered) == 1, !want && test.ended != blocked)
			})
		}
	}
}

// Without a verdict, a fresh snapshot blocks its VMIs, unless the pod's VMI has another UID. Filter
// uses only the blocks at filter. PreEvictionFilter uses the blocks at both checkpoints.
func TestHeldEvidence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		plugin, _ := pluginOver(t, &fakeAPI{askErr: errDown}, blockedAt(atPreEviction, "db1"), true)
		reborn := launcher("db1")
		reborn.Labels[createdByLabel] = "another"
		anonymous := launcher("db1")
		delete(anonymous.Labels, createdByLabel)
		expect(t, "the same VMI", plugin.PreEvictionFilter(launcher("db1")), false)
		expect(t, "one without a UID", plugin.PreEvictionFilter(anonymous), false)
		expect(t, "another UID", plugin.PreEvictionFilter(reborn), true)
		expect(t, "at filter", plugin.Filter(launcher("db1")), true)
		running := blockedAt(atFilter, "db1")
		_, found := running.find(atPreEviction, vmiKey{"shop", "db1"}, "uid-db1")
		expect(t, "what blocks at filter, before an eviction", found, true)
		time.Sleep(90*time.Second + 1)
		expect(t, "too old", plugin.PreEvictionFilter(launcher("db1")), true)
	})
}

// Without a fresh snapshot, Filter sends no request and decides by ignorable.
func TestFilterWithoutSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, ignorable := range []bool{true, false} {
			api := &fakeAPI{ended: blocked}
			plugin, _ := pluginOver(t, api, nil, ignorable)
			expect(t, "none", plugin.Filter(launcher("db1")), ignorable)
			plugin.feed.latest.Store(blockedAt(atFilter, "db1"))
			expect(t, "fresh", plugin.Filter(launcher("db1")), false)
			expect(t, "asked", len(api.asked), 1)
			time.Sleep(90*time.Second + 1)
			expect(t, "too old", plugin.Filter(launcher("db1")), ignorable)
			expect(t, "asked", len(api.asked), 1)
			expect(t, "counted", plugin.counted(atFilter, unavailable), 2)
		}
	})
}

// A stale snapshot still blocks its VMIs. It allows other VMIs only if ignorable is true.
func TestFilterOnStaleSnapshot(t *testing.T) {
	for _, ignorable := range []bool{true, false} {
		latest := blockedAt(atFilter, "db1")
		latest.stale = true
		plugin, _ := pluginOver(t, &fakeAPI{ended: blocked}, latest, ignorable)
		expect(t, "not blocked", plugin.Filter(launcher("db2")), ignorable)
		expect(t, "blocked", plugin.Filter(launcher("db1")), false)
		expect(t, "counted", plugin.counted(atFilter, stale), 1)
	}
}

// During an outage the plugin sends one request after each pause. It logs one line when the outage
// starts, and one line when it ends.
func TestOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := &fakeAPI{askErr: errDown}
		plugin, lines := pluginOver(t, api, blockedAt(atFilter), true)
		cycle := func() {
			for i := range 2000 {
				expect(t, "PreEvictionFilter", plugin.PreEvictionFilter(launcher(fmt.Sprint(i))), true)
			}
		}
		cycle()
		expect(t, "asked in the first cycle", len(api.asked), 1)
		time.Sleep(firstBreak)
		cycle()
		cycle()
		expect(t, "asked after the first pause", len(api.asked), 2)
		api.askErr = nil
		time.Sleep(2 * firstBreak)
		cycle()
		expect(t, "asked after the end", len(api.asked), 2+2000)
		expect(t, "lines at the start", lines.count(`"Verdicts are unavailable"`), 1)
		expect(t, "lines at the end", lines.count(`"Verdicts are available again"`), 1)
		expect(t, "unavailable", plugin.counted(atPreEviction, unavailable), 3*2000)
		expect(t, "allowed", plugin.counted(atPreEviction, allowed), 2000)
	})
}

// A rejected request is not an outage: later requests are still sent.
func TestRefusedQuestionIsNoOutage(t *testing.T) {
	api := &fakeAPI{askErr: &statusError{status: http.StatusUnprocessableEntity, detail: "name: too long"}}
	plugin, _ := pluginOver(t, api, blockedAt(atFilter), true)
	for range 3 {
		plugin.PreEvictionFilter(launcher("db1"))
	}
	expect(t, "asked", len(api.asked), 3)
}

// The log line about a block names the pod, the VMI, the checkpoint and the reason.
func TestBlockIsLogged(t *testing.T) {
	api := &fakeAPI{ended: blocked, why: block{reason: "cooldown", notBefore: "2026-01-01T00:00:00Z"}}
	plugin, lines := pluginOver(t, api, nil, true)
	plugin.PreEvictionFilter(launcher("db1"))
	want := `"Eviction blocked" plugin="KubeVirtVerdicts" pod="shop/virt-launcher-db1-x" vmi="shop/db1"` +
		` checkpoint="preEviction" reason="cooldown" notBefore="2026-01-01T00:00:00Z"`
	if lines.count(want) != 1 {
		t.Errorf("got %s, want %s", lines.lines.String(), want)
	}
}

// For an allowed pod Filter allocates no memory, even if many VMIs are blocked.
func TestFilterAllowedAllocatesNothing(t *testing.T) {
	plugin, pod := pluginForAllowed(t)
	expect(t, "allocations", testing.AllocsPerRun(1000, func() { plugin.Filter(pod) }), 0)
	expect(t, "other outcomes", plugin.counted(atFilter, allowed), 1001)
}

func BenchmarkFilterAllowed(b *testing.B) {
	plugin, pod := pluginForAllowed(b)
	b.ReportAllocs()
	for b.Loop() {
		plugin.Filter(pod)
	}
}

// pluginForAllowed returns a plugin with 5,000 blocked VMIs, and a pod of another VMI.
func pluginForAllowed(t testing.TB) (*Plugin, *v1.Pod) {
	names := make([]string, 5000)
	for i := range names {
		names[i] = fmt.Sprintf("vm-%04d", i)
	}
	latest := blockedAt(atFilter, names...)
	latest.maxAge = time.Hour
	plugin, _ := pluginOver(t, &fakeAPI{}, latest, true)
	return plugin, launcher("free")
}
