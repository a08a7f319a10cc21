// Program bench-load is the API server and the clients of the benchmark, each a mode of its own:
//
//	serve  a Kubernetes API server's lists and watches, rendered faster than any client reads them
//	sink   reads a streamed list and throws it away, to measure how fast serve can send
//	ask    sends one request repeatedly over open connections, and times each answer
//	wait   holds many long polls open
//
// Each prints JSON, one line per fact.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"syscall"
)

func main() {
	modes := map[string]func([]string) error{"serve": serve, "sink": sink, "ask": ask, "wait": wait}
	if len(os.Args) < 2 || modes[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "bench-load: serve, sink, ask or wait")
		os.Exit(2)
	}
	if err := modes[os.Args[1]](os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "bench-load:", err)
		os.Exit(1)
	}
}

func say(fact any) error {
	return json.NewEncoder(os.Stdout).Encode(fact)
}

// cpuSeconds is what this process has used so far, in user and in kernel mode.
func cpuSeconds() float64 {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		panic(err)
	}
	return seconds(usage.Utime) + seconds(usage.Stime)
}

func seconds(t syscall.Timeval) float64 {
	return float64(t.Sec) + float64(t.Usec)/1e6
}
