package main

import (
	"maps"
	"slices"
	"time"

	"github.com/prometheus/alertmanager/config"
	"github.com/prometheus/alertmanager/config/common"
	"github.com/prometheus/alertmanager/dispatch"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/rules"
)

// alertmanager decides what is sent and when, as Alertmanager's dispatcher, inhibitor and
// deduplication do. These work with timers of the real time, so they cannot be used here; the
// routes and the matchers are Alertmanager's own.
type alertmanager struct {
	root          *dispatch.Route
	inhibitRules  []common.InhibitRule
	alerts        map[model.Fingerprint]*sentAlert
	groups        map[string]*alertGroup
	notifications []notification
}

// notification is one message to a receiver. Kind: "new" if an alert is in it that the message
// before did not have, "resolved" if none is left, "changed" if some were resolved, or "repeated".
// New has the texts of the new alerts.
type notification struct {
	At       int64    `json:"at"`
	Receiver string   `json:"receiver"`
	Kind     string   `json:"kind"`
	Alert    string   `json:"alert"`
	New      []string `json:"new"`
	Firing   int      `json:"firing"`
}

type sentAlert struct {
	labels model.LabelSet
	text   string
	ends   int64
}

type alertGroup struct {
	options  dispatch.RouteOpts
	alert    string
	alerts   map[model.Fingerprint]*sentAlert
	next     int64
	told     map[model.Fingerprint]bool // those that the last notification said are firing
	resolved map[model.Fingerprint]bool
	toldAt   int64
}

func loadAlertmanager(path string) (*alertmanager, error) {
	loaded, err := config.LoadFile(path)
	if err != nil {
		return nil, err
	}
	return &alertmanager{
		root:         dispatch.NewRoute(loaded.Route, nil),
		inhibitRules: loaded.InhibitRules,
		alerts:       map[model.Fingerprint]*sentAlert{},
		groups:       map[string]*alertGroup{},
	}, nil
}

// put receives an alert from Prometheus.
func (a *alertmanager) put(alert *rules.Alert, now int64) {
	set := model.LabelSet{}
	for name, text := range alert.Labels.Map() {
		set[model.LabelName(name)] = model.LabelValue(text)
	}
	one := &sentAlert{
		labels: set,
		text:   alert.Annotations.Get("description"),
		ends:   alert.ValidUntil.UnixMilli(),
	}
	if !alert.ResolvedAt.IsZero() {
		one.ends = alert.ResolvedAt.UnixMilli()
	}
	a.alerts[set.Fingerprint()] = one
	for _, route := range a.root.Match(set) {
		key := route.RouteOpts.Receiver
		for _, name := range slices.Sorted(maps.Keys(route.RouteOpts.GroupBy)) {
			key += "|" + string(set[name])
		}
		group := a.groups[key]
		if group == nil {
			if one.ends <= now {
				continue
			}
			group = &alertGroup{
				options: route.RouteOpts,
				alert:   string(set["alertname"]),
				alerts:  map[model.Fingerprint]*sentAlert{},
				next:    now + route.RouteOpts.GroupWait.Milliseconds(),
			}
			a.groups[key] = group
		}
		group.alerts[set.Fingerprint()] = one
	}
}

func (a *alertmanager) isInhibited(one *sentAlert, now int64) bool {
	return slices.ContainsFunc(a.inhibitRules, func(rule common.InhibitRule) bool {
		if !matches(rule.TargetMatchers, one.labels) {
			return false
		}
		isTargetASource := matches(rule.SourceMatchers, one.labels)
		for _, source := range a.alerts {
			if source.ends <= now || !matches(rule.SourceMatchers, source.labels) {
				continue
			}
			if isTargetASource && matches(rule.TargetMatchers, source.labels) {
				continue
			}
			differs := func(name string) bool {
				return source.labels[model.LabelName(name)] != one.labels[model.LabelName(name)]
			}
			if !slices.ContainsFunc(rule.Equal, differs) {
				return true
			}
		}
		return false
	})
}

func matches(all common.Matchers, set model.LabelSet) bool {
	for _, one := range all {
		if !one.Matches(string(set[model.LabelName(one.Name)])) {
			return false
		}
	}
	return true
}

// advance sends what is due by `now`.
func (a *alertmanager) advance(now int64) {
	for _, key := range slices.Sorted(maps.Keys(a.groups)) {
		group := a.groups[key]
		for group.next <= now {
			at := group.next
			group.next += group.options.GroupInterval.Milliseconds()
			a.flush(group, at)
		}
	}
	for print, one := range a.alerts {
		if one.ends < now-(15*time.Minute).Milliseconds() {
			delete(a.alerts, print)
		}
	}
}

func (a *alertmanager) flush(group *alertGroup, at int64) {
	firing, resolved := map[model.Fingerprint]bool{}, map[model.Fingerprint]bool{}
	var added []string
	for print, one := range group.alerts {
		hasEnded := one.ends <= at
		if hasEnded {
			delete(group.alerts, print)
		}
		switch {
		case a.isInhibited(one, at):
		case hasEnded:
			resolved[print] = true
		default:
			firing[print] = true
			if !group.told[print] {
				added = append(added, one.text)
			}
		}
	}
	kind := group.kindOf(firing, resolved, at)
	if kind == "" {
		return
	}
	group.told, group.resolved, group.toldAt = firing, resolved, at
	slices.Sort(added)
	a.notifications = append(a.notifications, notification{
		At: at, Receiver: group.options.Receiver, Kind: kind, Alert: group.alert,
		New: added, Firing: len(firing),
	})
}

// kindOf decides as `DedupStage.needsUpdate` does; empty: nothing is sent.
func (g *alertGroup) kindOf(firing, resolved map[model.Fingerprint]bool, at int64) string {
	isSubset := func(part, whole map[model.Fingerprint]bool) bool {
		for print := range part {
			if !whole[print] {
				return false
			}
		}
		return true
	}
	switch {
	case len(firing)+len(resolved) == 0:
		return ""
	case !isSubset(firing, g.told):
		return "new"
	case len(firing) == 0 && len(g.told) > 0:
		return "resolved"
	case len(firing) == 0:
		return ""
	case !isSubset(resolved, g.resolved):
		return "changed"
	case g.toldAt < at-g.options.RepeatInterval.Milliseconds():
		return "repeated"
	}
	return ""
}
