package main

import (
	"bufio"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// A target is an address and the bytes of a request. The request is built only once, so that the
// client uses little CPU time.
type target struct {
	network, address string
	request          []byte
}

func targetFlags(flags *flag.FlagSet) func() (target, error) {
	address := flags.String("address", "", "host:port, or unix:PATH")
	path := flags.String("path", "/", "path and query")
	body := flags.String("body", "", "a file to POST; without a file the request is a GET")
	header := flags.String("header", "", "one more header line")
	return func() (target, error) {
		t := target{network: "tcp", address: *address}
		if socket, isSocket := strings.CutPrefix(*address, "unix:"); isSocket {
			t.network, t.address = "unix", socket
		}
		extra := ""
		if *header != "" {
			extra = *header + "\r\n"
		}
		if *body == "" {
			t.request = fmt.Appendf(nil, "GET %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n", *path, extra)
			return t, nil
		}
		content, err := os.ReadFile(*body)
		if err != nil {
			return t, err
		}
		t.request = fmt.Appendf(nil, "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n%s",
			*path, len(content), extra, content)
		return t, nil
	}
}

// A caller is one connection, used for many requests.
type caller struct {
	connection net.Conn
	reader     *bufio.Reader
}

func (t target) connect() (*caller, error) {
	connection, err := net.Dial(t.network, t.address)
	if err != nil {
		return nil, err
	}
	return &caller{connection, bufio.NewReaderSize(connection, 4<<10)}, nil
}

var (
	lengthHeader = []byte("content-length:")
	etagHeader   = []byte("etag:")
)

// ask sends the request, reads the whole answer, and returns its status, ETag and length.
func (c *caller) ask(request []byte) (status int, etag string, length int, err error) {
	if _, err = c.connection.Write(request); err != nil {
		return
	}
	line, err := c.reader.ReadSlice('\n')
	if err != nil {
		return
	}
	if len(line) < 12 {
		return 0, "", 0, errors.New("no HTTP answer")
	}
	status, err = strconv.Atoi(string(line[9:12]))
	for err == nil {
		if line, err = c.reader.ReadSlice('\n'); err != nil || len(line) <= 2 {
			break
		}
		if value, is := header(line, lengthHeader); is {
			length, err = strconv.Atoi(value)
		} else if value, is := header(line, etagHeader); is {
			etag = value
		}
	}
	if err == nil && status != 304 {
		_, err = c.reader.Discard(length)
	}
	return
}

func header(line, name []byte) (string, bool) {
	if len(line) < len(name) || !bytes.EqualFold(line[:len(name)], name) {
		return "", false
	}
	return string(bytes.TrimSpace(line[len(name):])), true
}

func ask(arguments []string) error {
	flags := flag.NewFlagSet("ask", flag.ExitOnError)
	read := targetFlags(flags)
	lasts := flags.Duration("lasts", time.Second, "how long to send requests, at least until the first answer")
	warm := flags.Duration("warm", 200*time.Millisecond, "how long to send requests before that, without timing them")
	connections := flags.Int("connections", 1, "how many connections to use at the same time")
	expected := flags.Int("status", 200, "the expected status of every answer")
	pause := flags.Duration("pause", 0, "the pause between an answer and the next request")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	where, err := read()
	if err != nil {
		return err
	}
	var group sync.WaitGroup
	times := make([][]time.Duration, *connections)
	failures := make([]error, *connections)
	var asked atomic.Int64
	began := time.Now().Add(*warm)
	for n := range *connections {
		group.Go(func() { times[n], failures[n] = where.repeat(began, began.Add(*lasts), *pause, *expected, &asked) })
	}
	group.Wait()
	if err := errors.Join(failures...); err != nil {
		return err
	}
	all := slices.Concat(times...)
	slices.Sort(all)
	at := func(share float64) float64 { return all[int(share*float64(len(all)-1))].Seconds() }
	return say(map[string]any{
		"asked": asked.Load(), "answers": len(all), "per_second": float64(len(all)) / lasts.Seconds(),
		"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "p999": at(0.999), "longest": at(1), "cpu": cpuSeconds(),
	})
}

func (t target) repeat(began, until time.Time, pause time.Duration, expected int, count *atomic.Int64) ([]time.Duration, error) {
	c, err := t.connect()
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.connection.Close() }()
	var times []time.Duration
	for {
		asked := time.Now()
		if asked.After(until) && len(times) > 0 {
			return times, nil
		}
		status, _, _, err := c.ask(t.request)
		if err != nil {
			return nil, err
		}
		if status != expected {
			return nil, fmt.Errorf("status %d, expected %d", status, expected)
		}
		count.Add(1)
		if asked.After(began) {
			times = append(times, time.Since(asked))
		}
		time.Sleep(pause)
	}
}

// wait holds long polls open: each client asks repeatedly, with the ETag of its last answer.
func wait(arguments []string) error {
	flags := flag.NewFlagSet("wait", flag.ExitOnError)
	read := targetFlags(flags)
	lasts := flags.Duration("lasts", 10*time.Second, "how long to hold the polls, once all are open")
	clients := flags.Int("clients", 10_000, "how many clients")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	where, err := read()
	if err != nil {
		return err
	}
	var group, asked sync.WaitGroup
	var held, answers, failed atomic.Int64
	var over atomic.Bool
	var first atomic.Value
	fail := func(err error) {
		failed.Add(1)
		first.CompareAndSwap(nil, err.Error())
	}
	connecting := make(chan struct{}, 64)
	callers := make([]*caller, *clients)
	asked.Add(*clients)
	for n := range *clients {
		group.Go(func() {
			connecting <- struct{}{}
			c, err := where.connect()
			etag := ""
			if err == nil {
				callers[n] = c
				_, etag, _, err = c.ask(where.request)
			}
			<-connecting
			if err != nil {
				fail(err)
				asked.Done()
				return
			}
			held.Add(1)
			asked.Done()
			head := bytes.TrimSuffix(where.request, []byte("\r\n"))
			for {
				_, now, _, err := c.ask(fmt.Appendf(nil, "%sIf-None-Match: %s\r\n\r\n", head, etag))
				if over.Load() {
					return
				}
				if err != nil {
					fail(err)
					return
				}
				answers.Add(1)
				etag = now
			}
		})
	}
	asked.Wait()
	if err := say(map[string]any{"held": held.Load()}); err != nil {
		return err
	}
	time.Sleep(*lasts)
	over.Store(true)
	for _, c := range callers {
		if c != nil {
			_ = c.connection.Close()
		}
	}
	group.Wait()
	why, _ := first.Load().(string)
	return say(map[string]any{"held": held.Load(), "answers": answers.Load(), "failed": failed.Load(), "why": why})
}

// sink reads a streamed list of VMIs to its end and discards it.
func sink(arguments []string) error {
	flags := flag.NewFlagSet("sink", flag.ExitOnError)
	read := targetFlags(flags)
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	where, err := read()
	if err != nil {
		return err
	}
	c, err := where.connect()
	if err != nil {
		return err
	}
	began := time.Now()
	if _, err := c.connection.Write(where.request); err != nil {
		return err
	}
	end := []byte("initial-events-end")
	buffer := make([]byte, 1<<20)
	total, kept := 0, 0
	for {
		n, err := c.connection.Read(buffer[kept:])
		total += n
		if bytes.Contains(buffer[:kept+n], end) {
			break
		}
		if err != nil {
			return errors.Join(err, io.ErrUnexpectedEOF)
		}
		kept = copy(buffer, buffer[max(0, kept+n-len(end)):kept+n])
	}
	return say(map[string]any{"bytes": total, "seconds": time.Since(began).Seconds(), "cpu": cpuSeconds()})
}
