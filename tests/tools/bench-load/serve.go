package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"path"
	"strconv"
	"sync"
	"time"
)

// chunk is how many bytes are rendered before they are written.
const chunk = 256 << 10

// The lock of a server protects the cluster and the watchers. So each event is either contained in
// a list or sent after it.
type server struct {
	mu       sync.Mutex
	cluster  *cluster
	watchers map[*watcher]string
}

// The handlers that cause events write them to the watchers. A watcher's own handler sends only the
// initial list and bookmarks.
type watcher struct {
	response http.ResponseWriter
	broken   chan struct{}
	once     sync.Once
}

func (w *watcher) write(lines []byte) {
	_, err := w.response.Write(lines)
	if err == nil {
		err = http.NewResponseController(w.response).Flush()
	}
	if err != nil {
		w.once.Do(func() { close(w.broken) })
	}
}

func serve(arguments []string) error {
	flags := flag.NewFlagSet("serve", flag.ExitOnError)
	count := flags.Int("vmis", 10_000, "VMIs")
	each := flags.Int("vmims-each", 3, "VMIMs of each VMI")
	cooling := flags.Int("cooling", 100, "how many of 1,000 VMIs have just migrated")
	managed := flags.Int("managed", 3, "one of how many VMIs and VMIMs has managedFields")
	nodes := flags.Int("nodes", 0, "nodes, of which one of a hundred is cordoned")
	heartbeat := flags.Duration("heartbeat", 10*time.Second, "how often each node is written")
	withPods := flags.Bool("pods", false, "a launcher pod for each VMI")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	s := &server{
		cluster:  newCluster(*count, *each, *cooling, *nodes, *managed, *withPods),
		watchers: map[*watcher]string{},
	}
	mux := http.NewServeMux()
	for _, resource := range []string{vmis, vmims, kubevirts} {
		mux.HandleFunc("GET /apis/kubevirt.io/v1/"+resource, s.get)
	}
	mux.HandleFunc("GET /api/v1/pods", s.get)
	mux.HandleFunc("GET /api/v1/nodes", s.get)
	mux.HandleFunc("POST /bench/events", s.sendEvents)
	mux.HandleFunc("POST /bench/failures", s.sendFailures)
	mux.HandleFunc("POST /bench/turn", s.turn)
	mux.HandleFunc("GET /bench/cpu", func(w http.ResponseWriter, _ *http.Request) { answer(w, cpuSeconds()) })
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	sizes := map[string]int{}
	for _, resource := range []string{vmis, vmims} {
		total, n := 0, min(3, s.cluster.count(resource))
		for i := range n {
			total += len(s.cluster.append(nil, resource, i))
		}
		sizes[resource] = total / max(n, 1)
	}
	if err := say(map[string]any{"url": "http://" + listener.Addr().String(), "bytes": sizes}); err != nil {
		return err
	}
	if *nodes > 0 {
		go s.sendHeartbeats(*heartbeat)
	}
	return http.Serve(listener, mux)
}

func (s *server) get(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	resource := path.Base(r.URL.Path)
	w.Header().Set("Content-Type", "application/json")
	switch {
	case query.Get("watch") == "":
		limit, _ := strconv.Atoi(query.Get("limit"))
		from, _ := strconv.Atoi(query.Get("continue"))
		s.list(w, resource, from, limit)
	default:
		s.watch(w, r, resource, query.Get("sendInitialEvents") == "true")
	}
}

func (s *server) list(w http.ResponseWriter, resource string, from, limit int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	count := s.cluster.count(resource)
	to, token := count, ""
	if limit > 0 && from+limit < count {
		to = from + limit
		token = strconv.Itoa(to)
	}
	body := fmt.Appendf(nil, `{"apiVersion":"v1","kind":"List","metadata":{"resourceVersion":"%d","continue":"%s"},"items":[`, s.cluster.version, token)
	for i := from; i < to; i++ {
		if i > from {
			body = append(body, ',')
		}
		body = s.cluster.append(body, resource, i)
		if len(body) > chunk {
			if _, err := w.Write(body); err != nil {
				return
			}
			body = body[:0]
		}
	}
	_, _ = w.Write(append(body, "]}"...))
}

func (s *server) watch(w http.ResponseWriter, r *http.Request, resource string, initial bool) {
	it := &watcher{response: w, broken: make(chan struct{})}
	s.mu.Lock()
	if initial {
		s.stream(it, resource)
	}
	it.write(nil)
	s.watchers[it] = resource
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.watchers, it)
		s.mu.Unlock()
	}()
	beat := time.NewTicker(50 * time.Second)
	defer beat.Stop()
	for {
		select {
		case <-r.Context().Done():
			return
		case <-it.broken:
			return
		case <-beat.C:
			s.mu.Lock()
			it.write(s.bookmark(resource, false))
			s.mu.Unlock()
		}
	}
}

// stream sends all objects of a resource as ADDED events, and the bookmark that ends them.
func (s *server) stream(it *watcher, resource string) {
	buffer := make([]byte, 0, chunk+(32<<10))
	for i := range s.cluster.count(resource) {
		buffer = append(buffer, `{"type":"ADDED","object":`...)
		buffer = s.cluster.append(buffer, resource, i)
		buffer = append(buffer, "}\n"...)
		if len(buffer) > chunk {
			if _, err := it.response.Write(buffer); err != nil {
				return
			}
			buffer = buffer[:0]
		}
	}
	it.write(append(buffer, s.bookmark(resource, true)...))
}

var kinds = map[string]string{
	vmis:      `"apiVersion":"kubevirt.io/v1","kind":"VirtualMachineInstance"`,
	vmims:     `"apiVersion":"kubevirt.io/v1","kind":"VirtualMachineInstanceMigration"`,
	kubevirts: `"apiVersion":"kubevirt.io/v1","kind":"KubeVirt"`,
	pods:      `"apiVersion":"v1","kind":"Pod"`,
	allNodes:  `"apiVersion":"v1","kind":"Node"`,
}

func (s *server) bookmark(resource string, listed bool) []byte {
	annotations := ""
	if listed {
		annotations = `,"annotations":{"k8s.io/initial-events-end":"true"}`
	}
	return fmt.Appendf(nil, `{"type":"BOOKMARK","object":{%s,"metadata":{"resourceVersion":"%d","creationTimestamp":null%s}}}`+"\n",
		kinds[resource], s.cluster.version, annotations)
}

// sendEvents modifies `count` VMIs, one after another, at `rate` events per second. If `rate` is 0,
// it sends as fast as the clients read. One event in ten begins or ends a migration. The others
// change nothing that the exporter reads.
func (s *server) sendEvents(w http.ResponseWriter, r *http.Request) {
	count, _ := strconv.Atoi(r.URL.Query().Get("count"))
	rate, _ := strconv.Atoi(r.URL.Query().Get("rate"))
	began, used := time.Now(), cpuSeconds()
	batch := 20
	sent := 0
	for sent < count {
		n := min(batch, count-sent)
		s.mu.Lock()
		var buffer []byte
		for range n {
			i := sent % s.cluster.vmis
			if sent%10 == 0 {
				s.cluster.turns[i]++
			}
			buffer = s.appendModified(buffer, i)
			sent++
		}
		s.broadcast(vmis, buffer)
		s.mu.Unlock()
		if rate > 0 {
			time.Sleep(time.Until(began.Add(time.Duration(sent) * time.Second / time.Duration(rate))))
		}
	}
	answer(w, map[string]any{"events": sent, "seconds": time.Since(began).Seconds(), "cpu": cpuSeconds() - used})
}

// sendFailures adds `count` VMIMs that failed in the phase Scheduling, `rate` per second.
func (s *server) sendFailures(w http.ResponseWriter, r *http.Request) {
	count, _ := strconv.Atoi(r.URL.Query().Get("count"))
	rate, _ := strconv.Atoi(r.URL.Query().Get("rate"))
	began := time.Now()
	for sent := range count {
		s.mu.Lock()
		s.cluster.version++
		s.broadcast(vmims, s.cluster.appendFailure(nil, sent))
		s.mu.Unlock()
		time.Sleep(time.Until(began.Add(time.Duration(sent+1) * time.Second / time.Duration(max(rate, 1)))))
	}
	answer(w, map[string]any{"events": count, "seconds": time.Since(began).Seconds()})
}

// sendHeartbeats modifies every node once in each period, one node after another.
func (s *server) sendHeartbeats(each time.Duration) {
	pause := each / time.Duration(s.cluster.nodes)
	began := time.Now()
	for sent := 0; ; sent++ {
		i := sent % s.cluster.nodes
		s.mu.Lock()
		s.cluster.version++
		line := append([]byte(`{"type":"MODIFIED","object":`), s.cluster.append(nil, allNodes, i)...)
		line = append(line, "}\n"...)
		s.broadcast(allNodes, line)
		s.mu.Unlock()
		time.Sleep(time.Until(began.Add(time.Duration(sent+1) * pause)))
	}
}

// turn begins or ends the migration of one VMI, and answers with the time of that event.
func (s *server) turn(w http.ResponseWriter, r *http.Request) {
	i, err := strconv.Atoi(r.URL.Query().Get("vmi"))
	if err != nil || i < 0 || i >= s.cluster.vmis {
		http.Error(w, "vmi: expected the number of a VMI", http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	s.cluster.turns[i]++
	runs := s.cluster.turns[i]%2 == 1
	line := s.appendModified(nil, i)
	at := time.Now()
	s.broadcast(vmis, line)
	s.mu.Unlock()
	answer(w, map[string]any{"at": float64(at.UnixNano()) / 1e9, "runs": runs})
}

func (s *server) appendModified(to []byte, i int) []byte {
	s.cluster.version++
	to = append(to, `{"type":"MODIFIED","object":`...)
	to = s.cluster.appendVMI(to, i)
	return append(to, "}\n"...)
}

func (s *server) broadcast(resource string, lines []byte) {
	for it, watched := range s.watchers {
		if watched == resource {
			it.write(lines)
		}
	}
}

func answer(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(value); err != nil && !errors.Is(err, net.ErrClosed) {
		fmt.Println(err)
	}
}
