package verdicts

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// exporter is a simulated query API. It blocks the VMI shop/NAME for each name in `blocked`.
type exporter struct {
	mu       sync.Mutex
	blocked  [len(checkpoints)]map[string]bool
	version  int
	changed  chan struct{}
	requests map[string]int
	instead  http.HandlerFunc // if set, it answers every request
}

func newExporter() *exporter {
	return &exporter{changed: make(chan struct{}), requests: map[string]int{}}
}

func (e *exporter) block(at checkpoint, names ...string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.blocked[at] = map[string]bool{}
	for _, name := range names {
		e.blocked[at][name] = true
	}
	e.version++
	close(e.changed)
	e.changed = make(chan struct{})
}

func (e *exporter) answerInstead(with http.HandlerFunc) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.instead = with
}

func (e *exporter) requested(what string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.requests[what]
}

func (e *exporter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e.mu.Lock()
	instead := e.instead
	e.mu.Unlock()
	switch {
	case instead != nil:
		instead(w, r)
	case r.Method == http.MethodPost && r.URL.Path == "/v1/verdicts":
		e.answerVerdicts(w, r)
	case r.Method == http.MethodGet && r.URL.Path == "/v1/blocked":
		e.answerBlocked(w, r)
	default:
		http.NotFound(w, r)
	}
}

func (e *exporter) answerVerdicts(w http.ResponseWriter, r *http.Request) {
	var asked verdictsRequest
	if err := json.NewDecoder(r.Body).Decode(&asked); err != nil || len(asked.Candidates) != 1 {
		http.Error(w, "not one candidate", http.StatusUnprocessableEntity)
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.requests[asked.Checkpoint]++
	one, isBlocked := asked.Candidates[0], false
	for at, name := range checkpoints {
		if asked.Checkpoint == "" || asked.Checkpoint == name {
			isBlocked = isBlocked || e.blocked[at][one.Name]
		}
	}
	fmt.Fprintf(w, `{"stale": false, "verdicts": [{"namespace": %q, "name": %q, "known": true, "allowed": %t}]}`,
		one.Namespace, one.Name, !isBlocked)
}

func (e *exporter) answerBlocked(w http.ResponseWriter, r *http.Request) {
	e.mu.Lock()
	e.requests["poll"]++
	changed, known := e.changed, r.Header.Get("If-None-Match") == fmt.Sprintf(`"%d"`, e.version)
	e.mu.Unlock()
	if wait, err := time.ParseDuration(r.URL.Query().Get("wait") + "s"); known && err == nil {
		select {
		case <-changed:
			known = false
		case <-time.After(wait):
		case <-r.Context().Done():
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	w.Header().Set("ETag", fmt.Sprintf(`"%d"`, e.version))
	if known {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	entries := []map[string]string{}
	for at, names := range e.blocked {
		for name := range names {
			entries = append(entries, map[string]string{"namespace": "shop", "name": name,
				"vmiUid": "uid-" + name, "checkpoint": checkpoints[at], "reason": "migration_in_progress"})
		}
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"stale": false, "maxAgeSeconds": 90, "blocked": entries})
}

// start serves the handler on a loopback port.
func start(t testing.TB, handler http.Handler) *httptest.Server {
	server := httptest.NewServer(handler)
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return server
}

// build calls New. The plugin stops when the test ends.
func build(t testing.TB, args *Args) *Plugin {
	t.Helper()
	if err := Validate(args); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(logTo(t.Context(), &logged{}))
	t.Cleanup(cancel)
	plugin, err := New(ctx, args, nil)
	if err != nil {
		t.Fatal(err)
	}
	return plugin.(*Plugin)
}

func clientOf(t testing.TB, args *Args) *client {
	t.Helper()
	at, err := parseURLPrefix(args.URLPrefix)
	if err != nil {
		t.Fatal(err)
	}
	made := newClient(at, args)
	t.Cleanup(made.close)
	return made
}

// Over a Unix socket the plugin gets verdicts, and gets the set again when it changes.
func TestUnixSocket(t *testing.T) {
	// The path of a socket must be short, and t.TempDir may return a long one.
	folder, err := os.MkdirTemp("", "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	listener, err := net.Listen("unix", filepath.Join(folder, "q"))
	if err != nil {
		t.Fatal(err)
	}
	api := newExporter()
	api.block(atFilter, "db1")
	server := &http.Server{Handler: api}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { server.Close() })

	plugin := build(t, makeArgs(func(a *Args) { a.URLPrefix = "unix:" + listener.Addr().String() }))
	expect(t, "blocked", plugin.Filter(launcher("db1")), false)
	expect(t, "allowed", plugin.Filter(launcher("db2")), true)
	api.block(atFilter, "db2")
	eventually(t, "the change", func() bool { return !plugin.Filter(launcher("db2")) && plugin.Filter(launcher("db1")) })
}

// PreEvictionFilter blocks a migrating VMI, even if the snapshot does not contain it yet. If the
// exporter is down, a VMI in the snapshot is still blocked.
func TestMigrationSinceFilter(t *testing.T) {
	api := newExporter()
	server := start(t, api)
	plugin := build(t, makeArgs(func(a *Args) { a.URLPrefix = server.URL }))
	expect(t, "at filter", plugin.Filter(launcher("db1")), true)
	api.block(atFilter, "db1")
	expect(t, "before the eviction", plugin.PreEvictionFilter(launcher("db1")), false)
	expect(t, "another one", plugin.PreEvictionFilter(launcher("db2")), true)

	eventually(t, "the snapshot", func() bool { return plugin.feed.latest.Load().contains(atFilter, vmiKey{"shop", "db1"}) })
	server.Listener.Close()
	server.CloseClientConnections()
	expect(t, "without an exporter", plugin.PreEvictionFilter(launcher("db1")), false)
	expect(t, "blocked by the snapshot", plugin.counted(atPreEviction, blockedBySnapshot), 1)
	expect(t, "another one without an exporter", plugin.PreEvictionFilter(launcher("db2")), true)
}

// A cycle over 2,000 pods needs few requests: one for each blocked pod that Filter checks, one for
// each pod that PreEvictionFilter checks, and the long poll.
func TestRequestsOfACycle(t *testing.T) {
	api := newExporter()
	var running, cooling []string
	for i := range 50 {
		running = append(running, fmt.Sprintf("vm-%d", i))
		cooling = append(cooling, fmt.Sprintf("vm-%d", 1000+i))
	}
	api.block(atFilter, running...)
	api.block(atPreEviction, cooling...)
	plugin := build(t, makeArgs(func(a *Args) { a.URLPrefix = start(t, api).URL }))

	began := time.Now()
	candidates, evicted := 0, 0
	for i := range 2000 {
		if pod := launcher(fmt.Sprintf("vm-%d", i)); plugin.Filter(pod) {
			candidates++
			if candidates%10 == 0 && plugin.PreEvictionFilter(pod) {
				evicted++
			}
		}
	}
	expect(t, "candidates", candidates, 1950)
	expect(t, "evicted", evicted, 190)
	expect(t, "requests of Filter", api.requested("filter"), 50)
	expect(t, "requests of PreEvictionFilter", api.requested(""), 195)
	if polls := api.requested("poll"); polls < 1 || polls > 2 {
		t.Errorf("%d polls", polls)
	}
	t.Logf("proven: a cycle over 2000 launcher pods, 50 blocked at filter: %d requests by Filter, %d by 195 calls of PreEvictionFilter, %d polls, %s in all",
		api.requested("filter"), api.requested(""), api.requested("poll"), time.Since(began).Round(time.Millisecond))
}

// After their contexts have ended, plugins leave no goroutine running, whether an exporter answers
// or not.
func TestNewLeaksNothing(t *testing.T) {
	api := newExporter()
	server := start(t, api)
	before := runtime.NumGoroutine()
	for i := range 30 {
		ctx, cancel := context.WithCancel(logTo(t.Context(), &logged{}))
		url := server.URL
		if i%3 == 2 {
			url = "http://127.0.0.1:1"
		}
		for range 2 { // a dry run
			plugin, err := New(ctx, makeArgs(func(a *Args) { a.URLPrefix = url }), nil)
			if err != nil {
				t.Fatal(err)
			}
			plugin.(*Plugin).Filter(launcher("db1"))
			plugin.(*Plugin).PreEvictionFilter(launcher("db1"))
		}
		cancel()
	}
	eventually(t, "as many goroutines as before", func() bool { return runtime.NumGoroutine() <= before })
}

// New succeeds without an exporter. If a file cannot be read, the error of New names it.
func TestNew(t *testing.T) {
	began := time.Now()
	build(t, makeArgs(func(a *Args) { a.URLPrefix = "http://192.0.2.1:9810" }))
	if took := time.Since(began); took > 500*time.Millisecond {
		t.Errorf("it took %s", took)
	}
	_, err := New(t.Context(), makeArgs(func(a *Args) {
		a.URLPrefix, a.TLSConfig = "https://h", &TLSConfig{CACertFile: "/not/there"}
		a.BearerTokenFile = "/nor/there"
	}), nil)
	for _, says := range []string{Name, "tlsConfig.caCertFile", "/not/there", "bearerTokenFile", "/nor/there"} {
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("got %v, want it to say %s", err, says)
		}
	}
}

// For each kind of bad answer the client returns, within the timeout, an error that names the
// fault.
func TestBrokenAnswers(t *testing.T) {
	hang := func(w http.ResponseWriter, r *http.Request) {
		// The server notices that the client is gone only after it has read the body.
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	}
	kill := func(w http.ResponseWriter, _ *http.Request) {
		connection, _, err := w.(http.Hijacker).Hijack()
		if err == nil {
			connection.Close()
		}
	}
	for name, test := range map[string]struct {
		answer http.HandlerFunc
		says   string
	}{
		"slow": {hang, "deadline exceeded"},
		"hanging in the body": {func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("ETag", "tag")
			fmt.Fprint(w, `{"stale": fal`)
			w.(http.Flusher).Flush()
			hang(w, r)
		}, "deadline exceeded"},
		"not synced": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprint(w, `{"title": "Not synced yet", "status": 503, "detail": "waiting for vmis"}`)
		}, "answered 503: waiting for vmis"},
		"not there": {http.NotFound, "answered 404 Not Found"},
		"redirect": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://192.0.2.1/", http.StatusTemporaryRedirect)
		}, "answered 307"},
		"not asked for 304": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotModified) }, "answered 304"},
		"garbage":           {func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>") }, "the answer is not a"},
		"empty":             {func(http.ResponseWriter, *http.Request) {}, "the answer is not a"},
		"huge": {func(w http.ResponseWriter, r *http.Request) {
			for line := strings.Repeat(" ", 1<<16); r.Context().Err() == nil; {
				if _, err := io.WriteString(w, line); err != nil {
					return
				}
			}
		}, "the answer is too large"},
		"killed in the body": {func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "1000")
			fmt.Fprint(w, `{"stale"`)
			w.(http.Flusher).Flush()
			kill(w, r)
		}, "the answer ended early"},
		"killed": {kill, "EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			client := clientOf(t, makeArgs(func(a *Args) {
				a.URLPrefix = start(t, test.answer).URL
			}))
			began := time.Now()
			_, _, err := client.ask(t.Context(), atFilter, candidate{Namespace: "shop", Name: "db1"})
			if err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("ask: got %v, want it to say %q", err, test.says)
			}
			if took := time.Since(began); took > 3*time.Second {
				t.Errorf("ask took %s", took)
			}
			expect(t, "is a rejection", isRejection(err), false)

			within := time.Minute // a busy machine needs seconds to read an answer that is too large
			if test.says == "deadline exceeded" {
				within = 2 * time.Second
			}
			ctx, cancel := context.WithTimeout(t.Context(), within)
			defer cancel()
			_, err = client.poll(ctx, nil, 0)
			if err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("poll: got %v, want it to say %q", err, test.says)
			}
		})
	}
}

// If the socket does not exist, the error names it.
func TestConnectionRefused(t *testing.T) {
	client := clientOf(t, makeArgs(func(a *Args) { a.URLPrefix = "unix:/not/there" }))
	_, _, err := client.ask(t.Context(), atFilter, candidate{})
	if err == nil || !strings.Contains(err.Error(), "/not/there") {
		t.Errorf("got %v, want it to name the socket", err)
	}
}

// A rejected request is distinguished from an outage.
func TestRejection(t *testing.T) {
	for _, status := range []int{400, 413, 422} {
		expect(t, fmt.Sprint(status), isRejection(fmt.Errorf("so: %w", &statusError{status: status})), true)
	}
	for _, err := range []error{errDown, &statusError{status: 401}, &statusError{status: 404}, &statusError{status: 503}} {
		expect(t, err.Error(), isRejection(err), false)
	}
}

// If the exporter is killed or hangs during a cycle, the plugin waits for only one timeout. Then
// the fresh snapshot and the setting `ignorable` decide.
func TestKilledInTheMiddle(t *testing.T) {
	for _, ignorable := range []bool{true, false} {
		for _, way := range []string{"killed", "hanging"} {
			t.Run(fmt.Sprintf("%s/ignorable=%t", way, ignorable), func(t *testing.T) {
				api := newExporter()
				api.block(atPreEviction, "vm-7")
				server := start(t, api)
				plugin := build(t, makeArgs(func(a *Args) { a.URLPrefix, a.Ignorable = server.URL, &ignorable }))
				expect(t, "before", plugin.Filter(launcher("vm-1")) && plugin.PreEvictionFilter(launcher("vm-1")), true)

				if way == "killed" {
					server.Listener.Close()
					server.CloseClientConnections()
				} else {
					api.answerInstead(func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body); <-r.Context().Done() })
				}
				began := time.Now()
				for i := range 2000 {
					pod := launcher(fmt.Sprintf("vm-%d", i))
					expect(t, "Filter by a fresh snapshot", plugin.Filter(pod), true)
					expect(t, "PreEvictionFilter of "+pod.Name, plugin.PreEvictionFilter(pod), ignorable && i != 7)
				}
				if took := time.Since(began); took > 3*defaultHTTPTimeout {
					t.Errorf("the cycle took %s", took)
				}
			})
		}
	}
}

// An idle connection that the exporter has closed causes no error.
func TestClosedKeptConnection(t *testing.T) {
	api := newExporter()
	server := start(t, api)
	client := clientOf(t, makeArgs(func(a *Args) { a.URLPrefix = server.URL }))
	for range 50 {
		if _, _, err := client.ask(t.Context(), atFilter, candidate{Namespace: "shop", Name: "db1"}); err != nil {
			t.Fatal(err)
		}
		server.CloseClientConnections()
	}
}

// Connections to a server that never completes the TLS handshake are closed.
func TestNoHandshake(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	closed := make(chan struct{})
	go func() {
		for {
			accepted, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(io.Discard, accepted)
				accepted.Close()
				closed <- struct{}{}
			}()
		}
	}()
	timeout := metav1.Duration{Duration: 50 * time.Millisecond}
	client := clientOf(t, makeArgs(func(a *Args) {
		a.URLPrefix, a.HTTPTimeout = "https://"+listener.Addr().String(), &timeout
	}))
	const asked = 5
	for range asked {
		if _, _, err := client.ask(t.Context(), atFilter, candidate{Namespace: "shop", Name: "db1"}); err == nil {
			t.Fatal("a verdict without a handshake")
		}
	}
	for range asked {
		select {
		case <-closed:
		case <-time.After(10 * dialTimeout):
			t.Fatal("a connection is still open")
		}
	}
}

// Each request has the token that is in the file at that time. An empty file is an error.
func TestBearerTokenRotation(t *testing.T) {
	var sent atomic.Value
	api := newExporter()
	server := start(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		sent.Store(r.Header.Get("Authorization"))
		api.ServeHTTP(w, r)
	}))
	file := filepath.Join(t.TempDir(), "token")
	client := clientOf(t, makeArgs(func(a *Args) { a.URLPrefix, a.BearerTokenFile = server.URL, file }))
	for _, token := range []string{"first", "second"} {
		write(t, file, []byte(token+"\n"))
		if _, _, err := client.ask(t.Context(), atFilter, candidate{Namespace: "shop", Name: "db1"}); err != nil {
			t.Fatal(err)
		}
		expect(t, "sent", sent.Load(), any("Bearer "+token))
	}
	write(t, file, []byte("\n"))
	if _, err := client.poll(t.Context(), nil, 0); err == nil || !strings.Contains(err.Error(), "is empty") {
		t.Errorf("got %v, want it to say that the file is empty", err)
	}
}

// The plugin gets verdicts over TLS, with a CA and a client certificate. Their files may change
// while the plugin runs.
func TestTLS(t *testing.T) {
	folder := t.TempDir()
	files := &TLSConfig{filepath.Join(folder, "ca"), filepath.Join(folder, "cert"), filepath.Join(folder, "key")}
	old, newer := newAuthority(t), newAuthority(t)
	api := newExporter()
	server := httptest.NewUnstartedServer(api)
	var trusted atomic.Pointer[authority]
	trusted.Store(old)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.TLS = &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		return &tls.Config{
			Certificates: []tls.Certificate{trusted.Load().pair(t, "exporter")},
			ClientAuth:   tls.RequireAndVerifyClientCert,
			ClientCAs:    trusted.Load().pool(),
		}, nil
	}}
	server.StartTLS()
	t.Cleanup(server.Close)
	client := clientOf(t, makeArgs(func(a *Args) { a.URLPrefix, a.TLSConfig = server.URL, files }))
	ask := func() error {
		_, _, err := client.ask(t.Context(), atFilter, candidate{Namespace: "shop", Name: "db1"})
		return err
	}

	old.write(t, files)
	if err := ask(); err != nil {
		t.Fatal(err)
	}
	server.CloseClientConnections()
	trusted.Store(newer)
	if err := ask(); err == nil || !strings.Contains(err.Error(), "unknown authority") {
		t.Errorf("with the old authority: got %v", err)
	}
	newer.write(t, files)
	if err := ask(); err != nil {
		t.Errorf("with the new files: %v", err)
	}

	anonymous := clientOf(t, makeArgs(func(a *Args) {
		a.URLPrefix, a.TLSConfig = server.URL, &TLSConfig{CACertFile: files.CACertFile}
	}))
	if _, err := anonymous.poll(t.Context(), nil, 0); err == nil || !strings.Contains(err.Error(), "certificate required") {
		t.Errorf("without a certificate: got %v", err)
	}
	write(t, files.CACertFile, []byte("no PEM"))
	server.CloseClientConnections()
	if err := ask(); err == nil || !strings.Contains(err.Error(), "contains no PEM certificate") {
		t.Errorf("with a broken file: got %v", err)
	}
}

func write(t testing.TB, file string, body []byte) {
	t.Helper()
	if err := os.WriteFile(file, body, 0o600); err != nil {
		t.Fatal(err)
	}
}

// authority is a CA that signs certificates for loopback addresses.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

func newAuthority(t testing.TB) *authority {
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "authority"},
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{certificate, key}
}

func (a *authority) pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.certificate)
	return pool
}

func (a *authority) pair(t testing.TB, name string) tls.Certificate {
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// write writes the CA, and a client's certificate and key.
func (a *authority) write(t testing.TB, files *TLSConfig) {
	pair := a.pair(t, "descheduler")
	key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{
		files.CACertFile: {Type: "CERTIFICATE", Bytes: a.certificate.Raw},
		files.CertFile:   {Type: "CERTIFICATE", Bytes: pair.Certificate[0]},
		files.KeyFile:    {Type: "PRIVATE KEY", Bytes: key},
	} {
		write(t, file, pem.EncodeToMemory(block))
	}
}
