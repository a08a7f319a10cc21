// Program bench-load has a mode for the API server and for each client of the benchmark:
//
//	serve  answers lists and watches like an API server, faster than any client can read them
//	sink   reads a streamed list and discards it, to measure how fast serve can send
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
		fmt.Fprintln(os.Stderr, "bench-load: expected serve, sink, ask or wait")
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

// cpuSeconds is the CPU time that this process has used so far, in user and in kernel mode.
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
