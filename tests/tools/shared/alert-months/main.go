// Alert-months evaluates alerting rules over simulated time.
//
// It reads from its standard input what happens, in the order of time. Each line begins with a word
// and with milliseconds since 1970:
//
//	scrape AT JOB NAMESPACE NAME LENGTH   a scrape, with a body of LENGTH bytes; -1: it failed
//	gone AT JOB NAMESPACE NAME -1         service discovery has dropped a target
//	evaluate AT                           the rules are evaluated
//	restart AT                            Prometheus has restarted
//
// Rules are evaluated by Prometheus's own rule groups over its own TSDB. What Alertmanager would
// send is decided in alertmanager.go. The report is written as JSON.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/rules"
	"github.com/prometheus/prometheus/tsdb"
)

const (
	retention    = 50 * time.Hour
	outage       = time.Hour
	grace        = 10 * time.Minute
	resend       = time.Minute
	lookback     = 5 * time.Minute
	queryTimeout = time.Minute
	maxSamples   = 50_000_000
)

// firing is one alert, from when it fires until it is resolved (0: it still fires).
type firing struct {
	Alert    string            `json:"alert"`
	Labels   map[string]string `json:"labels"`
	Fired    int64             `json:"fired"`
	Resolved int64             `json:"resolved"`
	Text     string            `json:"text"`
}

type report struct {
	Firings       []*firing         `json:"firings"`
	Notifications []notification    `json:"notifications"`
	Errors        map[string]string `json:"errors"`
}

type prometheus struct {
	rulesFile string
	interval  time.Duration
	db        *tsdb.DB
	parser    parser.Parser
	engine    *promql.Engine
	scrapes   *scrapes
	sent      *alertmanager

	groups  []*rules.Group
	restore bool // after a restart, the first evaluation restores for how long alerts are pending
	open    map[string]*firing
	report  report
}

func (p *prometheus) load(now func() int64) error {
	manager := rules.NewManager(&rules.ManagerOptions{
		AppendableV2: p.db, Queryable: p.db, QueryFunc: rules.EngineQueryFunc(p.engine, p.db),
		NotifyFunc: func(_ context.Context, _ string, alerts ...*rules.Alert) {
			for _, one := range alerts {
				p.sent.put(one, now())
			}
		},
		Context: context.Background(), Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
		OutageTolerance: outage, ForGracePeriod: grace, ResendDelay: resend, Parser: p.parser,
	})
	groups, errs := manager.LoadGroups(p.interval, labels.EmptyLabels(), "", nil, false, p.rulesFile)
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	p.groups = nil
	for _, group := range groups {
		p.groups = append(p.groups, group)
	}
	sort.Slice(p.groups, func(i, j int) bool { return p.groups[i].Name() < p.groups[j].Name() })
	return nil
}

func (p *prometheus) evaluate(at int64) {
	for _, group := range p.groups {
		if at%group.Interval().Milliseconds() != 0 && group.Interval() > p.interval {
			continue
		}
		group.Eval(context.Background(), time.UnixMilli(at))
		if p.restore {
			group.RestoreForState(time.UnixMilli(at))
		}
		for _, rule := range group.Rules() {
			if rule.LastError() != nil {
				p.report.Errors[rule.Name()] = rule.LastError().Error()
			}
		}
	}
	p.restore = false
	p.note(at)
	p.sent.advance(at)
}

// note updates the open firings with what fires now.
func (p *prometheus) note(at int64) {
	now := map[string]bool{}
	for _, group := range p.groups {
		for _, rule := range group.AlertingRules() {
			for _, alert := range rule.ActiveAlerts() {
				if alert.State != rules.StateFiring {
					continue
				}
				key := alert.Labels.String()
				now[key] = true
				if p.open[key] == nil {
					p.open[key] = &firing{
						Alert: rule.Name(), Labels: alert.Labels.Map(), Fired: at,
						Text: alert.Annotations.Get("description"),
					}
					p.report.Firings = append(p.report.Firings, p.open[key])
				}
			}
		}
	}
	for key, one := range p.open {
		if !now[key] {
			one.Resolved = at
			delete(p.open, key)
		}
	}
}

func (p *prometheus) run(in *bufio.Reader) error {
	var at int64
	if err := p.load(func() int64 { return at }); err != nil {
		return err
	}
	for {
		line, err := in.ReadString('\n')
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		words := strings.Fields(line)
		if at, err = strconv.ParseInt(words[1], 10, 64); err != nil {
			return err
		}
		switch words[0] {
		case "scrape", "gone":
			err = p.scrapes.take(words[0] == "gone", at, words[2:], in)
		case "evaluate":
			p.evaluate(at)
		case "restart":
			p.restore = true
			err = p.load(func() int64 { return at })
		default:
			err = fmt.Errorf("unknown line: %q", line)
		}
		if err != nil {
			return err
		}
	}
}

func start() error {
	rulesFile := flag.String("rules", "", "the file of the rules")
	config := flag.String("alertmanager", "", "the configuration of Alertmanager")
	folder := flag.String("tsdb", "", "a new folder for the samples")
	kept := flag.String("keep", "", "a new folder for all samples, which a Prometheus can serve")
	path := flag.String("report", "", "the file of the report")
	interval := flag.Duration("interval", 30*time.Second, "the interval of groups without their own")
	flag.Parse()

	options := tsdb.DefaultOptions()
	options.WALSegmentSize = -1
	if *kept == "" {
		options.RetentionDuration = retention.Milliseconds()
	}
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	db, err := tsdb.Open(*folder, quiet, nil, options, nil)
	if err != nil {
		return err
	}
	sent, err := loadAlertmanager(*config)
	if err != nil {
		return err
	}
	expressions := parser.NewParser(parser.Options{})
	p := &prometheus{
		rulesFile: *rulesFile, interval: *interval, db: db, parser: expressions, sent: sent,
		engine: promql.NewEngine(promql.EngineOpts{
			Logger: quiet, MaxSamples: maxSamples, Timeout: queryTimeout, LookbackDelta: lookback,
			EnableAtModifier: true, EnableNegativeOffset: true, Parser: expressions,
			NoStepSubqueryIntervalFn: func(int64) int64 { return interval.Milliseconds() },
		}),
		scrapes: &scrapes{db: db, parser: expressions, targets: map[string]*target{}},
		open:    map[string]*firing{},
		// Rules write ALERTS only when they have restored their state.
		restore: *kept != "",
		report:  report{Firings: []*firing{}, Errors: map[string]string{}},
	}
	if err := p.run(bufio.NewReaderSize(os.Stdin, 1<<20)); err != nil {
		return err
	}
	if *kept != "" {
		if err := db.Snapshot(*kept, true); err != nil {
			return err
		}
	}
	p.report.Notifications = sent.notifications
	out, err := json.Marshal(p.report)
	if err != nil {
		return err
	}
	return errors.Join(os.WriteFile(*path, out, 0o600), db.Close())
}

func main() {
	if err := start(); err != nil {
		fmt.Fprintln(os.Stderr, "alert-months:", err)
		os.Exit(1)
	}
}
