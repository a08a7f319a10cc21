package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"strconv"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb"
)

const mostCached = 20_000

// series is a series of a target, and the number of the last scrape that had it.
type series struct {
	ref    storage.SeriesRef
	labels labels.Labels
	seen   int
}

// target is something that is scraped; its series are known by their text in the exposition.
type target struct {
	job, namespace, name string

	up      series
	scraped int
	known   map[string]*series
	live    map[string]*series
}

func (t *target) labelled(given labels.Labels) labels.Labels {
	builder := labels.NewBuilder(given)
	own := map[string]string{
		"job": t.job, "instance": t.name, "namespace": t.namespace, "pod": t.name,
		"container": "exporter", "endpoint": "metrics",
	}
	for name, text := range own {
		if given.Get(name) == "" { // honorLabels
			builder.Set(name, text)
		}
	}
	return builder.Labels()
}

// scrapes writes samples as Prometheus does, with a stale marker where a series ends.
type scrapes struct {
	db      *tsdb.DB
	parser  parser.Parser
	targets map[string]*target
}

// take reads the body of a scrape. `words` are job, namespace, name, and the length of the body.
func (s *scrapes) take(isGone bool, at int64, words []string, in io.Reader) error {
	length, err := strconv.Atoi(words[3])
	if err != nil {
		return err
	}
	key := words[0] + " " + words[1] + " " + words[2]
	t := s.targets[key]
	if t == nil {
		t = &target{
			job: words[0], namespace: words[1], name: words[2],
			known: map[string]*series{}, live: map[string]*series{},
		}
		t.up.labels = t.labelled(labels.FromStrings("__name__", "up"))
		s.targets[key] = t
	}
	t.scraped++
	app := s.db.Appender(context.Background())
	up := 0.0
	if length >= 0 {
		body := make([]byte, length)
		if _, err := io.ReadFull(in, body); err != nil {
			return err
		}
		up = 1
		if err := s.appendBody(app, t, at, body); err != nil {
			return err
		}
	}
	for text, one := range t.live {
		if one.seen != t.scraped {
			if err := appendTo(app, one, at, math.Float64frombits(value.StaleNaN)); err != nil {
				return err
			}
			delete(t.live, text)
		}
	}
	if isGone {
		up = math.Float64frombits(value.StaleNaN)
		delete(s.targets, key)
	}
	if err := appendTo(app, &t.up, at, up); err != nil {
		return err
	}
	return app.Commit()
}

func (s *scrapes) appendBody(app storage.Appender, t *target, at int64, body []byte) error {
	if len(t.known) > mostCached {
		t.known = map[string]*series{}
	}
	for line := range bytes.SplitSeq(body, []byte("\n")) {
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		space := bytes.LastIndexByte(line, ' ')
		text := string(line[:space])
		one := t.known[text]
		if one == nil {
			parsed, err := s.parser.ParseMetric(text)
			if err != nil {
				return fmt.Errorf("%s: %w", line, err)
			}
			one = &series{labels: t.labelled(parsed)}
			t.known[text] = one
		}
		number, err := strconv.ParseFloat(string(line[space+1:]), 64)
		if err != nil {
			return fmt.Errorf("%s: %w", line, err)
		}
		if err := appendTo(app, one, at, number); err != nil {
			return err
		}
		one.seen = t.scraped
		t.live[text] = one
	}
	return nil
}

func appendTo(app storage.Appender, one *series, at int64, number float64) error {
	ref, err := app.Append(one.ref, one.labels, at, number)
	one.ref = ref
	return err
}
